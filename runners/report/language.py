"""Rank correlations of the diagnostics' scores with the losses of small language models.

The language models are those of ``runners.c4.reference``: every layer in one setting. A score is the accuracy on a task
or the mean rank over tasks. A correlation is Spearman's ρ over layers between a score and a loss. Its sign is chosen so
that 1 means "layers with better scores have lower losses". The correlation *within families* is computed from ranks
after the mean rank of each family is subtracted; it shows whether scores order the members of a family. Intervals are
percentile bootstrap intervals over layers (Efron and Tibshirani 1993, chapter 13).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runners.c4.reference.cells import cell_files, chosen_rate, next_place, read_cell
from runners.report.cells import Board
from runners.report.ranks import RESAMPLES, SEED, mean_ranks
from tasks import TASKS

LOSSES = {
    "total": ("validation_loss", "validation loss"),
    "recall": ("recall_loss", "loss of recall tokens"),
    "rest": ("rest_loss", "loss of the other tokens"),
}
"""Losses by short name: key in a run, and name in the page."""
MEAN_RANK = "mean rank"
LEAST = 6
"""Least number of layers of a correlation: with five layers, one random order in twelve has |ρ| of 0.9 or more."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A layer as a language model, at its best learning rate.

    Attributes:
        layer: name of the layer.
        family: family of the layer.
        parameters: number of parameters without the embeddings.
        tokens: number of tokens that a run reads.
        lr: the learning rate.
        values: the loss of each seed in nats per token, by short name of the loss.
        bits_per_byte: mean over the seeds; None if unknown.
        finished: whether every run of the layer is trained.
    """

    layer: str
    family: str
    parameters: int
    tokens: int
    lr: float
    values: Mapping[str, Sequence[float]]
    bits_per_byte: float | None
    finished: bool

    def loss(self, name: str) -> float:
        """Return the mean of a loss over the seeds."""
        return fmean(self.values[name])


@dataclass(frozen=True, kw_only=True)
class Rho:
    """A rank correlation with its 95% interval.

    Attributes:
        value: the correlation.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """The correlations of a score with the losses of language models.

    Attributes:
        score: a task, or the mean rank.
        layers: number of layers with both the score and a language model.
        pooled: correlation over all layers by loss; None with too few layers, or if all scores are equal.
        within: correlation within families by loss; None likewise.
    """

    score: str
    layers: int
    pooled: Mapping[str, Rho | None]
    within: Mapping[str, Rho | None]


def read_language_models(folder: Path) -> list[LanguageModel]:
    """Read the language models in a folder, sorted by loss; layers whose runs all diverged are left out."""
    cells = [cell for file in cell_files(folder) if (cell := read_cell(file)) is not None]
    found = [model for cell in cells if (model := _language_model(cell)) is not None]
    return sorted(found, key=lambda model: model.loss("total"))


def _language_model(cell: Mapping[str, Any]) -> LanguageModel | None:
    if (rate := chosen_rate(cell["runs"])) is None:
        return None
    runs = [run for run in cell["runs"] if run["lr"] == rate and run["validation_loss"] is not None]
    bits = [run["bits_per_byte"] for run in runs if run["bits_per_byte"] is not None]
    return LanguageModel(
        layer=cell["layer"],
        family=cell["family"],
        parameters=cell["parameters_without_embeddings"],
        tokens=cell["tokens"],
        lr=rate,
        values={name: [run[key] for run in runs] for name, (key, _) in LOSSES.items()},
        bits_per_byte=fmean(bits) if bits else None,
        finished=next_place(cell["runs"]) is None,
    )


def scores_of(board: Board, score: str, metric: str) -> dict[str, float]:
    """Return the score of each registered layer: its mean accuracy on a task, or its negative mean rank."""
    if score == MEAN_RANK:
        ranks = mean_ranks(board, metric)
        means = {} if ranks is None else ranks.means
        return {row: -mean for row, mean in means.items() if board.rows[row][0] == "layer"}
    cells = [cell for (_, task), cell in board.cells.items() if task == score and cell.kind == "layer"]
    return {cell.row: fmean(cell.values(metric)) for cell in cells if cell.values(metric)}


def correlations(board: Board, models: Sequence[LanguageModel], metric: str) -> list[Correlations]:
    """Return the correlations of each task and of the mean rank; scores without any language model are left out.

    Args:
        board: accuracies of the layers.
        models: language models of the layers; unfinished models are left out.
        metric: ``sequence`` or ``token``.
    """
    finished = [model for model in models if model.finished]
    found = []
    for score in (*TASKS, MEAN_RANK):
        scores = scores_of(board, score, metric)
        both = [model for model in finished if model.layer in scores]
        if not both:
            continue

        scores_L = np.array([scores[model.layer] for model in both])
        families = [model.family for model in both]
        gains_KL = -np.array([[model.loss(name) for model in both] for name in LOSSES])
        pooled, within = (
            dict(zip(LOSSES, spearman(scores_L, gains_KL, of_whom), strict=True)) for of_whom in (None, families)
        )
        found.append(Correlations(score=score, layers=len(both), pooled=pooled, within=within))
    return found


def spearman(x_L: Floats, ys_KL: Floats, families: Sequence[str] | None = None) -> list[Rho | None]:
    """Return K rank correlations over L layers and their intervals; None for an undefined correlation.

    Args:
        x_L: one figure per layer.
        ys_KL: K further figures per layer.
        families: family of each layer; if given, ranks are compared within families, and families of a single layer are
            left out.
    """
    from scipy.stats import rankdata  # takes a second to import

    groups_L = np.zeros(len(x_L), np.int64) if families is None else np.unique(families, return_inverse=True)[1]
    counted_L = np.bincount(groups_L)[groups_L] > 1
    x_L, ys_KL, groups_L = x_L[counted_L], ys_KL[:, counted_L], groups_L[counted_L]
    if len(x_L) < LEAST:
        return [None] * len(ys_KL)

    # The first row holds the layers themselves, each further row a bootstrap sample.
    chosen_BL = np.random.default_rng(SEED).integers(len(x_L), size=(1 + RESAMPLES, len(x_L)))
    chosen_BL[0] = np.arange(len(x_L))
    same_BLL = groups_L[chosen_BL][:, :, None] == groups_L[chosen_BL][:, None, :]
    average_BLL = same_BLL / same_BLL.sum(2, keepdims=True)

    def centred_ranks(values_L: Floats) -> Floats:
        ranks_BL = rankdata(values_L[chosen_BL], axis=1)
        centred_BL: Floats = ranks_BL - (average_BLL @ ranks_BL[:, :, None])[:, :, 0]
        return centred_BL

    x_BL = centred_ranks(x_L)
    return [_rho(x_BL, centred_ranks(y_L)) for y_L in ys_KL]


def _rho(x_BL: Floats, y_BL: Floats) -> Rho | None:
    """Return the correlation of the first rows, with the interval from all other rows; None if ranks do not vary."""
    lengths_B = np.sqrt((x_BL**2).sum(1) * (y_BL**2).sum(1))
    varies_B = lengths_B > 1e-9
    if not varies_B[0]:
        return None

    value, *drawn = ((x_BL * y_BL).sum(1)[varies_B] / lengths_B[varies_B]).tolist()
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Rho(value=value, low=float(low), high=float(high))


def answers(found: Sequence[Correlations]) -> list[str]:
    """Return the answers for the total loss and for that of recall tokens, once if they are the same."""
    return list(dict.fromkeys(answer(found, loss) for loss in ("total", "recall")))


def answer(found: Sequence[Correlations], loss: str) -> str:
    """Return in words which score predicts a loss best, and which scores do not predict it."""
    known = {row.score: rho for row in found if (rho := row.pooled[loss]) is not None}
    most = max((row.layers for row in found), default=0)
    if not known:
        return f"Too few layers to tell: {most} of {LEAST} have a finished language model and a score on one task."

    best = max(known, key=lambda score: known[score].value)
    layers = next(row.layers for row in found if row.score == best)
    of_best = (
        f"ρ = {known[best].value:.2f}, 95% interval {known[best].low:.2f} to {known[best].high:.2f}, {layers} layers"
    )
    uncertain = [score for score, rho in known.items() if not rho.excludes_zero]
    against = [score for score, rho in known.items() if rho.high < 0]

    # The answer, then the scores that do not predict the loss or predict the opposite.
    words = LOSSES[loss][1]
    if known[best].low > 0:
        chosen = f" As the best of {len(known)} scores it looks better than it is." if len(known) > 1 else ""
        text = f"Yes: the best predictor of the {words} is {best} ({of_best}).{chosen}"
        text += f" Intervals that include zero: {', '.join(uncertain)}." if uncertain else ""
    else:
        text = f"No: no score predicts the {words} (the best is {best}, {of_best})."
    return text + (f" Correlated the other way: {', '.join(against)}." if against else "")
