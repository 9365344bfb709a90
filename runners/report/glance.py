"""The main questions and their answers at the top of the page, from the same results as the sections below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runners.report.language import LanguageModel
from runners.report.ranks import Ranks
from runners.report.speed import Anchor

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


def glance(
    ranks: Ranks | None, models: Sequence[LanguageModel], prediction: str, anchors: Sequence[Anchor]
) -> list[Answer]:
    """Return the answers that the results allow.

    Args:
        ranks: mean ranks by token accuracy under the published protocol; None without any.
        models: the language models.
        prediction: whether diagnostics predict language modelling, in words.
        anchors: our speeds and the speeds of the authors' code.
    """
    found = [
        Answer(
            section="leaderboard",
            question="Which layer does best on the diagnostic tasks?",
            text=_best_layers(ranks),
        ),
        Answer(section="language", question="And as a small language model?", text=_best_models(models)),
        Answer(section="language", question="Do the diagnostic tasks predict language modelling?", text=prediction),
        Answer(section="speed", question="How fast is RT?", text=_speed(anchors)),
    ]
    return [answer for answer in found if answer.text]


def _best_layers(ranks: Ranks | None) -> str:
    """Return the mean ranks of the best layers, of RT and of the Transformer, each with its place."""
    if ranks is None:
        return ""
    texts = {}
    for row in sorted(ranks.means, key=ranks.means.__getitem__):
        low, high = ranks.intervals[row]
        texts[row] = f"{row} {ranks.means[row]:.1f} ({low:.1f}–{high:.1f})"
    return f"Mean ranks among {len(texts)} layers, with 95% intervals: {_leaders(texts)}."


def _best_models(models: Sequence[LanguageModel]) -> str:
    """Return the losses of the best layers, of RT and of the Transformer, each with its place."""
    counted = [model for model in models if model.counts]
    if not counted:
        return ""
    best = counted[0].loss("total")
    texts = {model.layer: f"{model.layer} {model.loss('total'):.3f}" for model in counted}
    found = f"Validation losses of {len(texts)} layers, in nats per token: {_leaders(texts)}."
    ahead = [model for model in models if not model.finished and not model.stale and model.loss("total") < best]
    lower = ", ".join(f"{model.layer} {model.loss('total'):.3f}" for model in ahead)
    return f"{found} Lower, but not finished: {lower}." if lower else found


def _leaders(texts: Mapping[str, str]) -> str:
    """Return the texts of the first rows, and of RT and the Transformer, with their places."""
    places = {row: f"{place}. {text}" for place, (row, text) in enumerate(texts.items(), 1)}
    return "; ".join(text for n, (row, text) in enumerate(places.items()) if n < LEADERS or row in PAIR)


def _speed(anchors: Sequence[Anchor]) -> str:
    """Return the range of gains over the authors' code."""
    gains = [float(row.gain.removesuffix("×")) for row in anchors if row.gain.endswith("×")]
    if not gains:
        return ""
    return f"{min(gains):.1f} to {max(gains):.1f} times as fast as the authors’ code on one GPU, by measurement."
