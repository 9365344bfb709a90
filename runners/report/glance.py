"""The main questions and their answers at the top of the page, from the same results as the sections below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runners.mad.results.ranking import ordinal, places
from runners.report.language import LanguageModel
from runners.report.ranks import Ranks
from runners.report.speed import Anchor
from tasks import TASKS

LEADERS = 3
"""Number of layers that are named as the best."""
PAIR = ("rt", "transformer")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of one sentence.

    Attributes:
        section: anchor of the section that shows more.
        question: the question.
        text: the answer.
    """

    section: str
    question: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Own:
    """The user's own layers under a protocol.

    Attributes:
        title: title of the protocol.
        ranks: mean ranks by token accuracy; None without any.
        counts: number of tasks on which each of the user's layers is ranked.
        of_some: for layers that lack tasks, mean ranks over those that they have; None where nothing else has them.
    """

    title: str
    ranks: Ranks | None
    counts: Mapping[str, int]
    of_some: Mapping[str, Ranks | None] = field(default_factory=dict)


def glance(
    own: Sequence[Own],
    ranks: Ranks | None,
    models: Sequence[LanguageModel],
    prediction: str,
    anchors: Sequence[Anchor],
) -> list[Answer]:
    """Return the answers that the results allow.

    Args:
        own: the user's own layers, by protocol.
        ranks: mean ranks by token accuracy under the published protocol; None without any.
        models: the language models.
        prediction: whether diagnostics predict language modelling, in words.
        anchors: our speeds and the speeds of the authors' code.
    """
    found = [
        Answer(section="leaderboard", question="Where do your own layers stand?", text=_own_layers(own)),
        Answer(
            section="leaderboard",
            question="Which layer does best on the diagnostic tasks?",
            text=_best_layers(ranks),
        ),
        Answer(section="language", question="And as a small language model?", text=_best_models(models)),
        Answer(section="prediction", question="Do the diagnostic tasks predict language modelling?", text=prediction),
        Answer(section="speed", question="How fast is RT?", text=_speed(anchors)),
    ]
    return [answer for answer in found if answer.text]


def _own_layers(own: Sequence[Own]) -> str:
    """Return the place and the mean rank of each layer, over its tasks where it lacks some."""
    found = []
    for protocol in own:
        for row, count in protocol.counts.items():
            ranks = protocol.ranks if count == len(TASKS) else protocol.of_some.get(row)
            means = ranks.means if ranks else {}
            words = f"{count} of {len(TASKS)} tasks"
            if row in means:
                place = f"{ordinal(places(means)[row])} of {len(means)}, with a mean rank of {means[row]:.1f}"
                words = place if count == len(TASKS) else f"{place} over {words}"
            found += [f"{row}: {words} ({protocol.title})"] if count else []
    return f"{'; '.join(found)}." if found else ""


def _best_layers(ranks: Ranks | None) -> str:
    """Return the mean ranks of the best layers, of RT and of the Transformer, each with its place."""
    if ranks is None:
        return ""
    intervals = {row: f"({low:.1f}–{high:.1f})" for row, (low, high) in ranks.intervals.items()}
    texts = {row: f"{row} {mean:.1f} {intervals[row]}" for row, mean in ranks.means.items()}
    found = _leaders(ranks.means, texts)
    told = f"Mean ranks among {len(texts)} layers under the published protocol, with 95% intervals: {found}."
    return f"{told} {_ahead_of(ranks)}"


def _ahead_of(ranks: Ranks) -> str:
    """Say of which layers the first is clearly ahead in the same samples of tasks and seeds."""
    level = ranks.level_with_first()
    others = len(ranks.means) - 1
    whom = f"all but {' and '.join(level)}" if level else "all others"
    if len(level) > LEADERS:
        whom = f"{others - len(level)} of the {others} others" if len(level) < others else "none"
    return f"In the same samples of tasks and seeds, the first is clearly ahead of {whom}."


def _best_models(models: Sequence[LanguageModel]) -> str:
    """Return the losses of the best layers, of RT and of the Transformer, each with its place."""
    losses = {model.layer: model.loss("total") for model in models if not model.stale and model.lr is not None}
    texts = {layer: f"{layer} {loss:.3f}" for layer, loss in losses.items()}
    finished = {model.layer: losses[model.layer] for model in models if model.finished and model.layer in losses}
    if not finished:
        return ""
    best = min(finished.values())
    found = f"Validation losses in nats per token, by place among {len(finished)}: {_leaders(finished, texts)}."
    lower = ", ".join(texts[layer] for layer in losses if layer not in finished and losses[layer] < best)
    return f"{found} Lower, but not finished: {lower}." if lower else found


def _leaders(values: Mapping[str, float], texts: Mapping[str, str]) -> str:
    """Return the texts of the first rows, and of RT and the Transformer, with their places; the least value is first.

    Rows of equal values share the smaller place.
    """
    place_of = places(values)
    named = [row for row in sorted(place_of, key=place_of.__getitem__) if place_of[row] <= LEADERS or row in PAIR]
    return "; ".join(f"{place_of[row]}. {texts[row]}" for row in named)


def _speed(anchors: Sequence[Anchor]) -> str:
    """Return the range of gains over the authors' code."""
    gains = [float(row.gain.removesuffix("×")) for row in anchors if row.is_speed and row.gain.endswith("×")]
    if not gains:
        return ""
    return f"{min(gains):.1f} to {max(gains):.1f} times as fast as the authors’ code on one GPU, by measurement."
