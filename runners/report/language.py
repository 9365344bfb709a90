"""Rank correlations of the diagnostics' scores with the losses of small language models.

The language models are those of ``runners.c4.reference``: every layer in one setting. A score is the accuracy on a task
or the mean rank over tasks. A correlation is Spearman's ρ over layers between a score and a loss. Its sign is chosen so
that 1 means "layers with better scores have lower losses". The correlation *within families* is computed from ranks
after the mean rank of each family is subtracted; it shows whether scores order the members of a family.

Intervals are percentile bootstrap intervals over layers (Efron and Tibshirani 1993, chapter 13). The best of many
scores correlates by chance alone. Whether a score predicts a loss is therefore decided by a permutation test of all
scores together (Westfall and Young 1993, single-step maxT).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from runners.c4.reference.cells import RATES, Cell, chosen_rate, next_place
from runners.report.cells import Board
from runners.report.ranks import RESAMPLES, SEED, mean_ranks
from runners.report.trained import is_stale_model, read_models
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

SIGNIFICANT = 0.05
"""A score predicts a loss if its p-value is below this."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
class Rho:
    """A rank correlation with its 95% interval.

    Attributes:
        value: the correlation.
        low: lower end of the interval.
        high: upper end of the interval.
        p: probability that some score of the same table correlates as strongly, in either direction, if the losses are
            assigned to the layers at random.
    """

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the correlation is stronger than chance explains."""
        return self.p < SIGNIFICANT


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
            layers_within=int(_compared(scores_SL[s], families_L).sum()),
            pooled=dict(zip(LOSSES, pooled[s], strict=True)),
            within=dict(zip(LOSSES, within[s], strict=True)),
        )
        for s, score in enumerate(scores)
    ]


def spearman(scores_SL: Floats, gains_KL: Floats, families_L: Ints) -> list[list[Rho | None]]:
    """Return S x K rank correlations over L layers; None for an undefined correlation, or with too few layers.

    Args:
        scores_SL: S scores of each layer, NaN for a layer without the score.
        gains_KL: K figures of each layer, of which more is better.
        families_L: family of each layer. Ranks are compared within families, and families of a single layer are left
            out; if all layers are of one family, all are compared.
    """
    rng = np.random.default_rng(SEED)
    shuffled_PL = _shuffles(families_L, rng)
    found_SK: list[list[tuple[float, float, float] | None]] = []
    strongest_KP = np.zeros((len(gains_KL), RESAMPLES))

    for scores_L in scores_SL:
        at = np.flatnonzero(_compared(scores_L, families_L))
        if len(at) < LEAST:
            found_SK.append([None] * len(gains_KL))
            continue

        # Bootstrap samples of the layers. The first row holds the layers themselves.
        chosen_BL = at[rng.integers(len(at), size=(1 + RESAMPLES, len(at)))]
        chosen_BL[0] = at
        average_BLL = _averages(families_L[chosen_BL])
        x_BL = _centred_ranks(scores_L[chosen_BL], average_BLL)
        found_SK.append([_interval(x_BL, _centred_ranks(y_L[chosen_BL], average_BLL)) for y_L in gains_KL])

        # What chance achieves: the strongest correlation of any score, with the gains assigned to other layers.
        for k, y_L in enumerate(gains_KL):
            y_PL = _centred_ranks(y_L[shuffled_PL[:, at]], average_BLL[:1])
            strongest_KP[k] = np.maximum(strongest_KP[k], abs(np.nan_to_num(_cosines(x_BL[:1], y_PL))))

    return [[_rho(found, strongest_KP[k]) for k, found in enumerate(found_K)] for found_K in found_SK]


def _compared(scores_L: Floats, families_L: Ints) -> NDArray[np.bool_]:
    """Return which layers have the score and are not the only one of their family that has it."""
    has_L = ~np.isnan(scores_L)
    return has_L & (np.bincount(families_L, has_L)[families_L] > 1)


def _shuffles(families_L: Ints, rng: np.random.Generator) -> Ints:
    """Return P random orders of the layers, in which each place keeps its family."""
    orders_PL = np.argsort(families_L + rng.random((RESAMPLES, len(families_L))), axis=1)
    shuffled_PL = np.empty_like(orders_PL)
    shuffled_PL[:, np.argsort(families_L, kind="stable")] = orders_PL
    return shuffled_PL


def _averages(families_BL: Ints) -> Floats:
    """Return the matrices that average over the family of each layer."""
    same_BLL = families_BL[:, :, None] == families_BL[:, None, :]
    averages_BLL: Floats = same_BLL / same_BLL.sum(2, keepdims=True)
    return averages_BLL


def _centred_ranks(values_BL: Floats, average_BLL: Floats) -> Floats:
    """Return the ranks in each row less the mean rank of the family."""
    from scipy.stats import rankdata  # takes a second to import

    ranks_BL = rankdata(values_BL, axis=1)
    centred_BL: Floats = ranks_BL - (average_BLL @ ranks_BL[:, :, None])[:, :, 0]
    return centred_BL


def _cosines(x_BL: Floats, y_BL: Floats) -> Floats:
    """Return the cosines of the angles between the rows, which are the correlations of centred rows; NaN for zeros."""
    lengths_B = np.sqrt((x_BL**2).sum(1) * (y_BL**2).sum(1))
    return np.where(lengths_B > 1e-9, (x_BL * y_BL).sum(1) / np.maximum(lengths_B, 1e-9), np.nan)


def _interval(x_BL: Floats, y_BL: Floats) -> tuple[float, float, float] | None:
    """Return the correlation of the first rows and its interval from all other rows; None if it is undefined.

    A sample in which all scores are equal shows no correlation and counts as 0. To leave such samples out would keep
    those with the layers that differ, and all of those have the sign of the correlation.
    """
    value, *drawn = _cosines(x_BL, y_BL).tolist()
    if math.isnan(value):
        return None
    low, high = np.percentile(np.nan_to_num(drawn), [2.5, 97.5])
    return value, float(low), float(high)


def _rho(interval: tuple[float, float, float] | None, strongest_P: Floats) -> Rho | None:
    """Return a correlation with its p-value: the share of chance's P correlations that are as strong, with itself."""
    if interval is None:
        return None
    value, low, high = interval
    p = (1 + (strongest_P > abs(value) - 1e-9).sum()) / (1 + len(strongest_P))
    return Rho(value=value, low=low, high=high, p=float(p))


def answers(found: Sequence[Correlations]) -> list[str]:
    """Return the answers for the total loss and for that of recall tokens, once if they are the same."""
    return list(dict.fromkeys(answer(found, loss) for loss in ("total", "recall")))


def answer(found: Sequence[Correlations], loss: str) -> str:
    """Return in words which score predicts a loss best, and which scores do not predict it."""
    known = {row.title: rho for row in found if (rho := row.pooled[loss]) is not None}
    most = max((row.layers for row in found), default=0)
    if not known:
        return f"Too few layers to tell: {most} of {LEAST} have a finished language model and a score on one task."

    best = max(known, key=lambda title: known[title].value)
    rho, layers = known[best], next(row.layers for row in found if row.title == best)
    of_best = f"ρ = {rho.value:.2f}, 95% interval {rho.low:.2f} to {rho.high:.2f}, {layers} layers, {p_in_words(rho.p)}"
    by_chance = [title for title in known if not known[title].significant]
    against = [title for title in known if known[title].significant and known[title].value < 0]

    # The answer, then the scores that do not predict the loss or predict the opposite.
    words = LOSSES[loss][1]
    if rho.significant and rho.value > 0:
        chosen = f" As the best of {len(known)} scores it looks better than it is." if len(known) > 1 else ""
        text = f"Yes: the best predictor of the {words} is {best} ({of_best}).{chosen}"
        text += f" No stronger than chance: {', '.join(by_chance)}." if by_chance else ""
    else:
        text = f"No: no score predicts the {words} better than chance (the best is {best}, {of_best})."
    return text + (f" Correlated the other way: {', '.join(against)}." if against else "")


def p_in_words(p: float) -> str:
    """Return a p-value in words."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
