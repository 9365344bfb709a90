"""Language models, and rank correlations of the diagnostics' scores with their losses.

The language models are those of ``runners.c4.reference``: every layer in one setting. A score is the token accuracy on
a task or the mean rank over tasks. A correlation is Spearman's ρ between a score and a loss, its sign chosen so that 1
means "better scores, lower losses".

One analysis answers whether diagnostics predict language modelling. It was fixed when at most one layer had a language
model:

- score: the mean rank by token accuracy over all tasks, under the reference protocol;
- loss: the validation loss;
- statistic: Spearman's ρ between the families of layers (``family`` of the classes in ``mixers``), where a family
  counts once, with the mean rank of its members;
- test: permutation of the families, two-sided. The answer is "Yes" if ρ is positive and p is below 0.05.

It is the answer once every registered layer has all tasks and a finished language model. All other correlations are
exploratory: they suggest what to test on other models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from mixers import MIXERS
from runners import records
from runners.c4.reference.rows import SEEDS, chosen_rate, open_places
from runners.records import Record
from runners.report.boards import Board, values_of
from runners.report.correlation import SIGNIFICANT, Floats, Ints, Rho, between_families, within_families
from runners.report.ranks import mean_ranks
from runners.tables import abbreviated
from tasks import PUBLISHED, TASKS

PLANNED = (
    *("rt", "transformer", "sliding-attention", "transformer-xl", "feedback-transformer", "staircase"),
    *("transformer-fam", "rmt", "linear-attention", "retnet", "gla", "rwkv6", "deltanet", "gated-deltanet", "rwkv7"),
    *("s5", "mamba", "mamba2", "lstm", "lru", "hyena"),
)
"""Layers of both analyses that were fixed beforehand: those with a language model on 2026-11-29."""
LOSSES = {"loss": "validation loss", "recall_loss": "loss of recall tokens", "rest_loss": "loss of the other tokens"}
"""Losses of a record, and their names in the page."""
MEAN_RANK = "mean rank"
PARTS = {"between": "between families", "within": "within families"}
"""Kinds of correlations, and their names in the page."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A language model.

    Attributes:
        file: its records.
        runs: those of its learning rates and seeds.
    """

    file: Path
    runs: Sequence[Record]

    @cached_property
    def lr(self) -> float | None:
        """The learning rate with the lowest loss of the first seed; None before a run has converged."""
        return chosen_rate(self.runs)

    @cached_property
    def best(self) -> list[Record]:
        """The runs of all seeds at that learning rate."""
        return sorted((run for run in self.runs if run.lr == self.lr), key=lambda run: run.seed)

    @property
    def finished(self) -> bool:
        """Whether every run is trained."""
        return not open_places(self.runs)

    @property
    def layer(self) -> str:
        """Name of its layer."""
        return self.runs[0].mixer

    @property
    def counts(self) -> bool:
        """Whether it takes part in correlations: it is finished, and its layer is registered."""
        return self.finished and self.layer in MIXERS

    @property
    def parameters(self) -> int:
        """Parameters without embeddings."""
        return int(self.runs[0].settings["parameters_without_embeddings"])

    @property
    def tokens(self) -> int:
        """Tokens of training."""
        return self.runs[0].steps * self.runs[0].batch_size * int(self.runs[0].settings["seq_len"])

    @property
    def seconds(self) -> float:
        """Time of training, all rates and seeds."""
        return sum(run.seconds / run.together for run in self.runs)

    def values(self, name: str) -> list[float]:
        """Return a figure of each seed; of a loss infinity if training diverged at every rate."""
        found = [run.metrics["validation"][name] for run in self.best]
        return [math.inf if y is None else y for y in found] or [math.inf]

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the seeds."""
        return fmean(self.values(name))


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """The correlations of a score with the losses of language models.

    Attributes:
        score: a task, or the mean rank.
        layers: number of layers with both the score and a language model.
        families: number of their families.
        rhos: by kind and loss; None with too few layers or families, or if all scores are equal.
    """

    score: str
    layers: int
    families: int
    rhos: Mapping[str, Mapping[str, Rho | None]]


def read_models(folder: Path, alike: bool) -> dict[str, Model]:
    """Return the models in a folder by name, sorted by loss, those that are not finished at the end.

    Args:
        folder: folder of the models' files.
        alike: whether all models must have the same settings, apart from the layer.

    Raises:
        DamagedFileError: a file is damaged.
        ValueError: the models read different texts, or have different settings.
    """
    models = [
        Model(file=file, runs=runs)
        for file in sorted(folder.glob("[!.]*.jsonl"))
        if (runs := [run for _, run in records.read_all(file)])
    ]
    for one, other in pairwise(models):
        if _shared(one.runs[0], alike) != _shared(other.runs[0], alike):
            where = f"{folder}: {one.file.name} and {other.file.name}"
            raise ValueError(f"{where} are of different texts or settings: move one of them elsewhere")
    models.sort(key=lambda model: (not model.finished, model.mean("loss")))
    return {model.file.stem: model for model in models}


def scores_of(board: Board, models: Sequence[Model]) -> dict[str, dict[str, float]]:
    """Return the scores of the layers with a language model: mean accuracy by task, and the negative mean rank.

    Ranks are among these layers, so that a layer without a language model changes none of them. The score of a layer
    whose grid points all diverged on the task is minus infinity.
    """
    layers = {model.layer for model in models if model.counts}
    values = {key: seeds for key, seeds in values_of(board.cells, kinds=["layer"]).items() if key[0] in layers}
    found = {
        task: {row: fmean(seeds or [-math.inf]) for (row, other), seeds in values.items() if other == task}
        for task in PUBLISHED
    }
    ranks = mean_ranks(values, list(PUBLISHED), tie=None)
    return found | {MEAN_RANK: {row: -mean for row, mean in ranks.means.items()} if ranks else {}}


def correlations(scores: Mapping[str, Mapping[str, float]], models: Sequence[Model]) -> list[Correlations]:
    """Return the correlations of each score; scores without any language model are left out.

    Args:
        scores: by name a figure of each layer, of which more is better.
        models: language models of the layers; those that do not count are left out.
    """
    counted = [model for model in models if model.counts]
    found = {score: y for score, y in scores.items() if any(m.layer in y for m in counted)}
    if not found:
        return []

    scores_SL = np.array([[of_score.get(model.layer, np.nan) for model in counted] for of_score in found.values()])
    gains_KL = -np.array([[model.mean(loss) for model in counted] for loss in LOSSES])
    parameters_L, families_L = _facts(counted)
    parts = {
        "between": between_families(scores_SL, gains_KL, parameters_L, families_L),
        "within": within_families(scores_SL, gains_KL, parameters_L, families_L),
    }
    return [
        Correlations(
            score=score,
            layers=int((~np.isnan(scores_L)).sum()),
            families=len(set(families_L[~np.isnan(scores_L)].tolist())),
            rhos={part: dict(zip(LOSSES, rhos[s], strict=True)) for part, rhos in parts.items()},
        )
        for s, (score, scores_L) in enumerate(zip(found, scores_SL, strict=True))
    ]


def answer(board: Board, models: Sequence[Model]) -> Rho | None:
    """Return the result of the primary analysis; None if fewer layers than planned have all tasks and a language model.

    Args:
        board: accuracies of the layers under the reference protocol.
        models: language models of the layers.
    """
    scores = scores_of(board, models)[MEAN_RANK]
    counted = [model for model in models if model.counts and model.layer in scores]
    if len(counted) < len(PLANNED):
        return None
    scores_1L = np.array([[scores[model.layer] for model in counted]])
    gains_1L = -np.array([[model.mean("loss") for model in counted]])
    ((rho,),) = between_families(scores_1L, gains_1L, *_facts(counted))
    return rho


def profile_answer(scores: pd.DataFrame, models: Sequence[Model]) -> dict[str, Any] | None:
    """Return whether profiles predict the losses, by the analysis that ``results/notes/2026-11-29.md`` fixed.

    Args:
        scores: of the rungs of reference profiles at equal width, as ``runners.mad.profile.seed_scores`` returns them.
        models: language models of the layers.

    Returns:
        ``rows``, the correlations of the profile score, then of each ability; ``adjusted``, the four p-values of the
        profile score by kind and loss, adjusted together by Holm's method; and ``shown``, the kinds in which it
        predicts the validation loss. None while one of the planned layers lacks a rung or a language model.
    """
    planned = [model for model in models if model.counts and model.layer in PLANNED]
    values = scores.groupby(["layer", "task"])["score"].agg(lambda of_rungs: of_rungs.mean(skipna=False)).unstack()
    values = values.reindex(index=[model.layer for model in planned], columns=[*TASKS])
    if len(planned) < len(PLANNED) or values.isna().any(axis=None):
        return None

    rows = correlations({"profile score": values.mean(axis=1).to_dict()}, planned)
    rhos = {(part, loss): rows[0].rhos[part][loss] for part in PARTS for loss in ("loss", "recall_loss")}
    p = pd.Series({place: 1.0 if rho is None else rho.p for place, rho in rhos.items()}).sort_values()
    adjusted = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    found = {part: rhos[part, "loss"] for part in PARTS if adjusted[part, "loss"] < SIGNIFICANT}
    return {
        "rows": rows + correlations(values.to_dict(), planned),
        "adjusted": {place: adjusted[place] for place in rhos},
        "shown": [part for part, rho in found.items() if rho is not None and rho.value > 0],
    }


def table_of_runs(models: Mapping[str, Model]) -> list[list[str]]:
    """Return the headings and a row for each model: its losses at every learning rate, and of its other seeds.

    The loss at the chosen rate has a star, once the model is finished.
    """

    def loss(run: Record) -> str:
        return "diverged" if run.diverged_step is not None else f"{run.metrics['validation']['loss']:.3f}"

    losses = {
        name: {(run.lr, run.seed): loss(run) for run in sorted(model.runs, key=lambda run: run.lr)}
        for name, model in sorted(models.items())
    }
    rates = sorted({rate for of_model in losses.values() for rate, _ in of_model})
    rows = [["model", "parameters", *(f"lr {rate:g}" for rate in rates), "second seed"]]
    for name, found in losses.items():
        chosen = models[name].lr if models[name].finished else None
        first = [found.get((rate, SEEDS[0]), "–") + "*" * (rate == chosen) for rate in rates]
        others = [f"{text} (lr {rate:g})" for (rate, seed), text in found.items() if seed != SEEDS[0]]
        rows.append([name, abbreviated(models[name].parameters), *first, ", ".join(others) or "–"])
    return rows


def _shared(run: Record, alike: bool) -> list[Any]:
    """Return what the models of a folder share: the text, and where they are alike their sizes."""
    sizes = [run.width, run.layers, run.steps, run.batch_size, run.settings["seq_len"], run.settings["parametrisation"]]
    return [run.task_config["name"], *(sizes if alike else [])]


def _facts(models: Sequence[Model]) -> tuple[Floats, Ints]:
    """Return the parameters of each model, and a number for the family of its layer."""
    families = [MIXERS[model.layer].family for model in models]
    return np.array([float(model.parameters) for model in models]), np.unique(families, return_inverse=True)[1]
