"""Rank correlations of the diagnostics' scores with the losses of small language models.

The language models are those of ``runners.c4.reference``: every layer in one setting. A score is the accuracy on a task
or the mean rank over tasks. A correlation is Spearman's ρ between a score and a loss. Its sign is chosen so that 1
means "better scores, lower losses". Stale scores and stale language models do not count.

One analysis answers whether diagnostics predict language modelling. It was fixed before two layers had a language
model:

- score: the mean rank by token accuracy over all tasks, under the published protocol;
- loss: the validation loss;
- statistic: Spearman's ρ between the families of layers (``family`` of the classes in ``mixers``), where a family
  counts once, with the mean rank of its members;
- test: permutation of the families, two-sided. The answer is "Yes" if ρ is positive and p is below 0.05.

It is the answer once every registered layer has all tasks and a finished language model. Until then its value over the
finished layers stands among the exploratory ones, but nobody can stop when it suits: the runs that are still missing
are trained whatever it is. All other correlations are exploratory: they suggest what to test on other models. Those
over all layers alike are not tested, because relatives are no independent evidence; their intervals are too narrow,
too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from mixers import MIXERS
from runners.c4.reference.cells import Cell as ModelCell
from runners.c4.reference.order import RATES
from runners.report.cells import Board, Cell
from runners.report.correlation import (
    Floats,
    Ints,
    Rho,
    between_families,
    compared,
    least_significant,
    within_families,
)
from runners.report.ranks import Ranks, mean_ranks
from runners.report.trained import is_stale_model, read_models
from runners.tables import abbreviated
from tasks import TASKS

LOSSES = {
    "total": ("validation_loss", "validation loss"),
    "recall": ("recall_loss", "loss of recall tokens"),
    "rest": ("rest_loss", "loss of the other tokens"),
}
"""Losses by short name: attribute of a run, and name in the page."""
MEAN_RANK = "mean rank"
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A layer as a language model, at its best learning rate.

    Attributes:
        layer: name of the layer.
        family: family of the layer.
        parameters: number of parameters without the embeddings.
        flops_per_token: FLOPs of training, divided by its tokens.
        setting: size of the model and its text, in words.
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
    flops_per_token: int
    setting: str
    lr: float | None
    edge: str | None
    values: Mapping[str, Sequence[float]]
    bits_per_byte: float | None
    finished: bool
    stale: bool

    @property
    def counts(self) -> bool:
        """Whether the model takes part in correlations: it is finished and not stale, and its layer is registered."""
        return self.finished and not self.stale and self.layer in MIXERS

    def loss(self, name: str) -> float:
        """Return the mean of a loss over the seeds."""
        return fmean(self.values[name])


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """The correlations of a score with the losses of language models.

    Attributes:
        score: a task, or the mean rank.
        layers: number of layers with both the score and a language model.
        layers_within: number of those that have a relative among them.
        families: number of their families.
        pooled: correlation over all layers by loss; None with too few layers, or if all scores are equal.
        between: correlation between families by loss; None likewise.
        within: correlation within families by loss; None likewise.
    """

    score: str
    layers: int
    layers_within: int
    families: int
    pooled: Mapping[str, Rho | None]
    between: Mapping[str, Rho | None]
    within: Mapping[str, Rho | None]

    @property
    def known(self) -> bool:
        """Whether any correlation is known."""
        return any(rho is not None for part in (self.pooled, self.between, self.within) for rho in part.values())


def read_language_models(folder: Path) -> list[LanguageModel]:
    """Read the language models in a folder, sorted by loss, those that are not finished at the end.

    A layer without a converged run is left out until it is finished.

    Raises:
        DamagedFileError: a file is damaged, or no model's.
        ValueError: the models are not comparable.
    """
    models = [_language_model(name, cell) for name, cell in read_models(folder, alike=True).items()]
    known = [model for model in models if model is not None]
    return sorted(known, key=lambda model: (not model.finished, model.loss("total")))


def _language_model(name: str, cell: ModelCell) -> LanguageModel | None:
    rate, runs = cell.chosen, cell.best
    if rate is None and not cell.complete:
        return None
    bits = [run.bits_per_byte for run in runs if run.bits_per_byte is not None]
    return LanguageModel(
        layer=cell.layer,
        family=cell.family,
        parameters=cell.parameters_without_embeddings,
        flops_per_token=cell.flops_per_token,
        setting=_setting(cell),
        lr=rate,
        edge={RATES[0]: "smallest", RATES[-1]: "largest"}.get(rate) if rate else None,
        values={loss: [getattr(run, name) for run in runs] or [math.inf] for loss, (name, _) in LOSSES.items()},
        bits_per_byte=fmean(bits) if bits else None,
        finished=cell.complete,
        stale=is_stale_model(name, cell),
    )


def scores_of(board: Board, score: str, metric: str) -> dict[str, float]:
    """Return the score of each registered layer: its mean accuracy on a task, or its negative mean rank.

    Stale cells are left out. The score of a layer whose grid points all diverged on the task is minus infinity.
    """
    if score == MEAN_RANK:
        ranks = _ranks(board, metric)
        return {} if ranks is None else {row: -mean for row, mean in ranks.means.items()}
    cells = [cell for (_, task), cell in _counted_cells(board).items() if task == score]
    return {cell.row: fmean(cell.values(metric) or [-math.inf]) for cell in cells}


def _ranks(board: Board, metric: str) -> Ranks | None:
    """Return the mean ranks among the cells that count, so that a user's own study does not change them."""
    return mean_ranks(replace(board, cells=_counted_cells(board)), metric)


def _counted_cells(board: Board) -> dict[tuple[str, str], Cell]:
    """Return the cells of registered layers that are not stale."""
    return {place: cell for place, cell in board.cells.items() if cell.kind == "layer" and not cell.stale}


def correlations(board: Board, models: Sequence[LanguageModel], metric: str) -> list[Correlations]:
    """Return the correlations of each task and of the mean rank; scores without any language model are left out.

    Args:
        board: accuracies of the layers.
        models: language models of the layers; those that do not count are left out.
        metric: ``sequence`` or ``token``.
    """
    counted = [model for model in models if model.counts]
    found = {score: scores_of(board, score, metric) for score in (*TASKS, MEAN_RANK)}
    scores = [score for score in found if any(model.layer in found[score] for model in counted)]
    if not scores:
        return []

    scores_SL = np.array([[found[score].get(model.layer, np.nan) for model in counted] for score in scores])
    gains_KL = -np.array([[model.loss(loss) for model in counted] for loss in LOSSES])
    parameters_L, families_L = _parameters(counted), _families(counted)
    pooled = within_families(scores_SL, gains_KL, parameters_L, np.zeros_like(families_L))
    between = between_families(scores_SL, gains_KL, parameters_L, families_L)
    within = within_families(scores_SL, gains_KL, parameters_L, families_L)
    return [
        Correlations(
            score=score,
            layers=int((~np.isnan(scores_SL[s])).sum()),
            layers_within=int(compared(scores_SL[s], families_L).sum()),
            families=len(set(families_L[~np.isnan(scores_SL[s])].tolist())),
            pooled=dict(zip(LOSSES, pooled[s], strict=True)),
            between=dict(zip(LOSSES, between[s], strict=True)),
            within=dict(zip(LOSSES, within[s], strict=True)),
        )
        for s, score in enumerate(scores)
    ]


def what_goes_with_the_loss(found: Sequence[Correlations]) -> str:
    """Return in words which scores go with the validation loss more clearly than by chance, and which task most."""
    between, within = ({row.score: getattr(row, part)["total"] for row in found} for part in ("between", "within"))
    if not any(between.values()) and not any(within.values()):
        return ""
    text = (
        "These scores go with the validation loss more clearly than by chance, with all scores tested together: "
        f"between families {_clear(between)}; within families {_clear(within)}."
    )
    by_size = sorted((rho.value, title) for title, rho in within.items() if rho and title != MEAN_RANK)
    if len(by_size) < 2:
        return text
    (smallest, least), *_, (largest, most) = by_size
    return (
        f"{text} Of the tasks, whether clear or not, {most} goes most with it within families (ρ = {largest:.2f}), and "
        f"{least} least (ρ = {smallest:.2f})."
    )


def what_orders_families(found: Sequence[Correlations]) -> str:
    """Return in words which scores go with the validation loss within families, if any does, and over all layers."""
    clear = _clear({row.score: row.within["total"] for row in found})
    over_all = {row.score: row.pooled["total"] for row in found}.get(MEAN_RANK)
    if clear == NONE or over_all is None:
        return ""
    return (
        f"Exploratory: within families, these scores go with the loss: {clear}; over all layers the mean rank has "
        f"ρ = {over_all.value:.2f}."
    )


def _clear(rhos: Mapping[str, Rho | None]) -> str:
    """Return in words which scores are clearer than chance."""
    return ", ".join(f"{name} ({rho.value:.2f})" for name, rho in rhos.items() if rho and rho.significant) or NONE


def _setting(cell: ModelCell) -> str:
    """Return the size of a model and its text, in words."""
    config, corpus = cell.settings, cell.corpus
    return (
        f"{config['layers']} layers of width {config['width']}, sequences of {config['seq_len']} tokens, a vocabulary "
        f"of {corpus.vocab_size:,}, and {abbreviated(cell.tokens)} tokens of training, "
        f"{abbreviated(corpus.train_tokens)} of them different"
    )


def _parameters(models: Sequence[LanguageModel]) -> Floats:
    return np.array([float(model.parameters) for model in models])


def _families(models: Sequence[LanguageModel]) -> Ints:
    """Return a number for the family of each model's layer."""
    families: Ints = np.unique([MIXERS[model.layer].family for model in models], return_inverse=True)[1]
    return families


def answer(board: Board, models: Sequence[LanguageModel]) -> str:
    """Return in words the result of the primary analysis, or what it lacks.

    Args:
        board: accuracies of the layers under the published protocol.
        models: language models of the layers.
    """
    cells = _counted_cells(board)
    tested = {layer for layer in MIXERS if all((layer, task) in cells for task in TASKS)}
    counted = [model for model in models if model.counts and model.layer in tested]
    if len(counted) < len(MIXERS):
        trained = sum(model.counts for model in models)
        return (
            f"No answer yet: {trained} of {len(MIXERS)} layers have a finished language model, {len(tested)} have all "
            f"{len(TASKS)} tasks, and {len(counted)} have both."
        )

    scores = scores_of(board, MEAN_RANK, "token")
    scores_1L = np.array([[scores[model.layer] for model in counted]])
    gains_1L = -np.array([[model.loss("total") for model in counted]])
    families_L = _families(counted)
    ((rho,),) = between_families(scores_1L, gains_1L, _parameters(counted), families_L)
    return "Nothing to tell: all families are alike." if rho is None else _in_words(rho, len(set(families_L.tolist())))


def _in_words(rho: Rho, families: int) -> str:
    """Return what a correlation of the mean rank between families says."""
    p = "p < 0.001" if rho.p < 0.001 else f"p = {rho.p:.2g}"
    partial = "" if rho.partial is None else f"; given the number of parameters, ρ = {rho.partial:.2f}"
    found = f"ρ = {rho.value:.2f} over {families} families, 95% interval {rho.low:.2f} to {rho.high:.2f}, {p}{partial}"
    if not rho.significant:
        return (
            "It is not shown that the mean rank predicts the validation loss across families of layers "
            f"({found}); only a ρ of {least_significant(families):.2f} or more would show it."
        )
    if rho.value < 0:
        return f"No: families with better mean ranks have higher validation losses ({found})."
    return f"Yes: families with better mean ranks have lower validation losses ({found})."
