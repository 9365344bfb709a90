"""Rank correlations of the diagnostics' scores with the losses of small language models.

The language models are those of ``runners.c4.reference``: every layer in one setting. A score is the accuracy on a task
or the mean rank over tasks. A correlation is Spearman's ρ over layers between a score and a loss. Its sign is chosen so
that 1 means "layers with better scores have lower losses".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from runners.c4.reference.cells import RATES, Cell, chosen_rate, next_place
from runners.report.cells import Board
from runners.report.correlation import LEAST, Rho, compared, spearman
from runners.report.ranks import mean_ranks
from runners.report.trained import is_stale_model, read_models
from tasks import TASKS

LOSSES = {
    "total": ("validation_loss", "validation loss"),
    "recall": ("recall_loss", "loss of recall tokens"),
    "rest": ("rest_loss", "loss of the other tokens"),
}
"""Losses by short name: key in a run, and name in the page."""
MEAN_RANK = "mean rank"


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A layer as a language model, at its best learning rate.

    Attributes:
        layer: name of the layer.
        family: family of the layer.
        parameters: number of parameters without the embeddings.
        tokens: number of tokens that a run reads.
        lr: the learning rate; None if training diverged at every rate.
        edge: ``smallest`` or ``largest`` if the learning rate is the end of all that may be tried; else None.
        values: the loss of each seed in nats per token, by short name of the loss; infinite if training diverged at
            every rate.
        bits_per_byte: mean over the seeds; None if unknown.
        finished: whether every run of the layer is trained.
        stale: whether the code of today trains it differently.
    """

    layer: str
    family: str
    parameters: int
    tokens: int
    lr: float | None
    edge: str | None
    values: Mapping[str, Sequence[float]]
    bits_per_byte: float | None
    finished: bool
    stale: bool

    @property
    def counts(self) -> bool:
        """Whether the model takes part in correlations."""
        return self.finished and not self.stale

    def loss(self, name: str) -> float:
        """Return the mean of a loss over the seeds."""
        return fmean(self.values[name])


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """The correlations of a score with the losses of language models.

    Attributes:
        score: a task, or the mean rank.
        title: the score in words.
        layers: number of layers with both the score and a language model.
        layers_within: number of those that have a relative among them.
        pooled: correlation over all layers by loss; None with too few layers, or if all scores are equal.
        within: correlation within families by loss; None likewise.
    """

    score: str
    title: str
    layers: int
    layers_within: int
    pooled: Mapping[str, Rho | None]
    within: Mapping[str, Rho | None]


def read_language_models(folder: Path) -> list[LanguageModel]:
    """Read the language models in a folder, sorted by loss; layers without a converged run are left out until finished.

    Raises:
        DamagedFileError: a file is damaged, or no model's.
        ValueError: the models are not comparable.
    """
    models = [_language_model(name, cell) for name, cell in read_models(folder, alike=True).items()]
    return sorted((model for model in models if model is not None), key=lambda model: model.loss("total"))


def _language_model(name: str, cell: Cell) -> LanguageModel | None:
    rate, finished = chosen_rate(cell["runs"]), next_place(cell["runs"]) is None
    if rate is None and not finished:
        return None
    runs = [run for run in cell["runs"] if run["lr"] == rate]
    bits = [run["bits_per_byte"] for run in runs if run["bits_per_byte"] is not None]
    return LanguageModel(
        layer=cell["layer"],
        family=cell["family"],
        parameters=cell["parameters_without_embeddings"],
        tokens=cell["tokens"],
        lr=rate,
        edge={RATES[0]: "smallest", RATES[-1]: "largest"}.get(rate) if rate else None,
        values={loss: [run[key] for run in runs] or [math.inf] for loss, (key, _) in LOSSES.items()},
        bits_per_byte=fmean(bits) if bits else None,
        finished=finished,
        stale=is_stale_model(name, cell),
    )


def scores_of(board: Board, score: str, metric: str) -> dict[str, float]:
    """Return the score of each registered layer: its mean accuracy on a task, or its negative mean rank.

    The score of a layer whose grid points all diverged on the task is minus infinity.
    """
    if score == MEAN_RANK:
        ranks = mean_ranks(board, metric)
        means = {} if ranks is None else ranks.means
        return {row: -mean for row, mean in means.items() if board.rows[row][0] == "layer"}
    cells = [cell for (_, task), cell in board.cells.items() if task == score and cell.kind == "layer"]
    return {cell.row: fmean(cell.values(metric) or [-math.inf]) for cell in cells}


def title_of(board: Board, score: str, metric: str) -> str:
    """Return a score in words: the mean rank is over the tasks that the layers have in common."""
    ranks = mean_ranks(board, metric) if score == MEAN_RANK else None
    return score if ranks is None else f"{MEAN_RANK} over {len(ranks.tasks)} task{'s' * (len(ranks.tasks) > 1)}"


def correlations(board: Board, models: Sequence[LanguageModel], metric: str) -> list[Correlations]:
    """Return the correlations of each task and of the mean rank; scores without any language model are left out.

    Args:
        board: accuracies of the layers.
        models: language models of the layers; unfinished and stale models are left out.
        metric: ``sequence`` or ``token``.
    """
    counted = [model for model in models if model.counts]
    found = {score: scores_of(board, score, metric) for score in (*TASKS, MEAN_RANK)}
    scores = [score for score in found if any(model.layer in found[score] for model in counted)]
    if not scores:
        return []

    scores_SL = np.array([[found[score].get(model.layer, np.nan) for model in counted] for score in scores])
    gains_KL = -np.array([[model.loss(loss) for model in counted] for loss in LOSSES])
    families_L = np.unique([model.family for model in counted], return_inverse=True)[1]
    pooled = spearman(scores_SL, gains_KL, np.zeros_like(families_L))
    within = spearman(scores_SL, gains_KL, families_L)
    return [
        Correlations(
            score=score,
            title=title_of(board, score, metric),
            layers=int((~np.isnan(scores_SL[s])).sum()),
            layers_within=int(compared(scores_SL[s], families_L).sum()),
            pooled=dict(zip(LOSSES, pooled[s], strict=True)),
            within=dict(zip(LOSSES, within[s], strict=True)),
        )
        for s, score in enumerate(scores)
    ]


def answers(found: Sequence[Correlations]) -> list[str]:
    """Return the answers for the total loss and for that of recall tokens, once if they are the same."""
    return list(dict.fromkeys(answer(found, loss) for loss in ("total", "recall")))


def answer(found: Sequence[Correlations], loss: str) -> str:
    """Return in words which score predicts a loss best, and which scores do not predict it."""
    known = {row.title: rho for row in found if (rho := row.pooled[loss]) is not None}
    most = max((row.layers for row in found), default=0)
    if not known and most >= LEAST:
        return f"Nothing to tell: the {LOSSES[loss][1]}, or every score, is the same for all layers."
    if not known:
        return f"Too few layers to tell: {most} of {LEAST} have a finished language model and a score on one task."

    # The best score stands out most from chance; with few layers, a high correlation need not.
    best = min(known, key=lambda title: (known[title].value <= 0, known[title].p, -known[title].value))
    rho, layers = known[best], next(row.layers for row in found if row.title == best)
    of_best = f"ρ = {rho.value:.2f}, 95% interval {rho.low:.2f} to {rho.high:.2f}, {layers} layers, {p_in_words(rho.p)}"
    by_chance = [title for title in known if not known[title].significant]
    against = [title for title in known if known[title].significant and known[title].value < 0]

    # The answer, then the scores that do not predict the loss or predict the opposite.
    words = LOSSES[loss][1]
    if rho.significant and rho.value > 0:
        chosen = f" As the best of {len(known)} scores it looks better than it is." if len(known) > 1 else ""
        text = f"Yes: the best predictor of the {words} is {best} ({of_best}).{chosen}"
        text += f" Not shown to be stronger than chance: {', '.join(by_chance)}." if by_chance else ""
    else:
        text = f"Not shown: no score predicts the {words} clearly better than chance (the best is {best}, {of_best})."
    return text + (f" Correlated the other way: {', '.join(against)}." if against else "")


def p_in_words(p: float) -> str:
    """Return a p-value in words."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
