"""The results of a study: grid points over their seeds, test figures of the chosen point, ceiling and chance."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optuna.trial import FrozenTrial
from pydantic import ValidationError

from mixers.costs import Costs, costs
from mixers.short_convolution import mixer_label
from runners.files import first_fault, read_json, typed, write_json
from runners.intervals import mean_and_interval
from runners.mad.experiment import Described, Experiment
from runners.mad.results.choice import Edge, GridPoint, by_point, diverged_seeds, edge_of, near_best
from runners.mad.results.held_out import Reading
from runners.mad.search.study import run_of
from runners.mad.training.protocol import Run
from tasks.base import Accuracy

METRICS = (
    "validation_sequence_accuracy",
    "validation_token_accuracy",
    "validation_loss",
    "validation_score",
    "steps_per_second",
)
TEST_METRICS = ("test_sequence_accuracy", "test_token_accuracy", "test_loss")
"""Figures that are read only for the chosen point, so that no choice depends on them."""
REMEDY = "run the study's command of runners.mad again, or name the other studies"
"""What to do if a summary cannot be read; the command writes it again."""


class IncomparableError(ValueError):
    """A file is not a summary of a study, or it is the summary of an earlier version."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds, and half the width of its 95% Student-t interval; None for a single seed."""

    mean: float
    half_width: float | None

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        mean, half_width = mean_and_interval(values)
        return Estimate(mean=mean, half_width=None if math.isnan(half_width) else half_width)

    def text(self, digits: int = 4) -> str:
        """``mean`` or ``mean ± half width``."""
        interval = "" if self.half_width is None else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:.{digits}f}{interval}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A grid point over all its seeds.

    Attributes:
        lr: peak learning rate.
        weight_decay: weight decay.
        seeds: seeds of its runs.
        values: figures by name, one value per seed, None where a seed diverged; figures of the test split only for
            points that a grid has chosen.
        estimates: means and intervals of ``values``.
        extrapolation: accuracies on each of the task's extrapolation sets, one per seed, only for those points.
        diverged: step at which a seed diverged, by seed.
    """

    lr: float
    weight_decay: float
    seeds: list[int]
    values: dict[str, list[float]] | None = None
    estimates: dict[str, Estimate] | None
    extrapolation: dict[str, list[Accuracy]] = field(default_factory=dict)
    diverged: dict[int, int]

    @property
    def runs(self) -> list[Run]:
        """Its runs, one per seed."""
        return [Run(lr=self.lr, weight_decay=self.weight_decay, seed=seed) for seed in self.seeds]


def means_beyond_training(accuracies: Mapping[str, Sequence[Accuracy]]) -> dict[str, dict[str, Estimate]]:
    """Return the means over seeds of the ``sequence`` and ``token`` accuracy on each extrapolation set, by its name."""
    return {
        name: {metric: Estimate.of([getattr(seed, metric) for seed in seeds]) for metric in ("sequence", "token")}
        for name, seeds in accuracies.items()
    }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished search.

    Attributes:
        study: name of the study.
        config: settings of the experiment.
        fingerprint: fingerprint of settings and data.
        family: kind of layer.
        remark: remark in tables, for example that the layer has no recurrence on sequences this short.
        points: the grid points.
        chosen: index of the point with the best mean validation score; None if all diverged.
        best_seed: the chosen point's seed with the best validation score.
        edge: end of the grid's learning rates at which the chosen point lies, unless it reaches the ceiling.
        near_best: share of the points with at least 0.9 of the best validation token accuracy; None if that is no
            better than chance.
        other_choices: by grid, the index of the point that it would choose (``runners.mad.results.choice``).
        ceiling: accuracies that a perfect solver reaches on the test split.
        chance: accuracies of guessing.
        costs: costs of one layer.
        seconds: total training time of all runs, evaluations included; runs trained together share their time.
        versions: versions of libraries with which the last run was trained.
        device: device on which the last run was trained.
        label: name of the layer in tables; None in summaries of earlier versions.
    """

    study: str
    config: Described
    fingerprint: str
    family: str
    remark: str | None
    points: list[Point]
    chosen: int | None
    best_seed: int | None
    edge: Edge | None
    near_best: float | None
    other_choices: dict[str, int]
    ceiling: Accuracy
    chance: Accuracy
    costs: Costs
    seconds: float
    versions: dict[str, str | None]
    device: str
    label: str | None = None

    @property
    def heading(self) -> str:
        """Name of the study above tables, with the label of the layer."""
        plain = mixer_label(self.config.mixer, self.config.short_convolution)
        return (self.label or plain) + self.study.removeprefix(plain)

    @property
    def chosen_point(self) -> Point | None:
        """The chosen point, None if all diverged."""
        return None if self.chosen is None else self.points[self.chosen]

    @property
    def is_tested(self) -> bool:
        """Whether the chosen point has test figures, which need the models of all its runs."""
        point = self.chosen_point
        return point is not None and TEST_METRICS[0] in (point.estimates or {})

    @property
    def runs(self) -> list[Run]:
        """All runs of the grid."""
        return [run for point in self.points for run in point.runs]

    @property
    def best_run(self) -> Run | None:
        """The chosen point's run with the best validation score."""
        point = self.chosen_point
        if point is None or self.best_seed is None:
            return None
        return Run(lr=point.lr, weight_decay=point.weight_decay, seed=self.best_seed)

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.config.protocol.total_steps(self.config.task_config["train_examples"])

    @property
    def seeds(self) -> int:
        """The largest number of runs in a mean."""
        return max((len(point.seeds) for point in self.points), default=0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def summarise(
    experiment: Experiment,
    trials: Sequence[FrozenTrial],
    chosen: GridPoint | None,
    readings: Mapping[Run, Reading],
    other_choices: Mapping[str, GridPoint] = MappingProxyType({}),
    chosen_before: Collection[GridPoint] = (),
) -> Summary:
    """Group finished trials by grid point.

    Args:
        experiment: the experiment that was trained.
        trials: finished trials of its study.
        chosen: the point that was chosen among these trials, or among some of them.
        readings: test figures of the selected points' runs, by run; other runs have no test figures.
        other_choices: points that other grids would choose.
        chosen_before: points that earlier, smaller grids have chosen.
    """
    groups, task = by_point(trials), experiment.instance
    ceiling = task.ceiling("test")
    selected, index = {chosen, *other_choices.values(), *chosen_before}, list(groups).index
    points = [_point(at, members, readings if at in selected else {}) for at, members in groups.items()]

    best = None
    if chosen is not None:
        converged = [trial for trial in groups[chosen] if "validation_score" in trial.user_attrs]
        best = run_of(max(converged, key=lambda trial: trial.user_attrs["validation_score"])).seed

    accuracies = {
        (point.lr, point.weight_decay): point.estimates["validation_token_accuracy"].mean
        for point in points
        if point.estimates is not None
    }
    latest = trials[-1].user_attrs if trials else {}

    return Summary(
        study=experiment.name,
        config=experiment.described,
        fingerprint=experiment.fingerprint,
        family=experiment.layer.family,
        remark=experiment.remark,
        points=points,
        chosen=None if chosen is None else index(chosen),
        best_seed=best,
        edge=edge_of(chosen, [lr for lr, _ in groups], accuracies, ceiling),
        near_best=near_best(accuracies, len(points), task.chance("validation")),
        other_choices={name: index(point) for name, point in other_choices.items()},
        ceiling=ceiling,
        chance=task.chance("test"),
        costs=costs(experiment.layer, experiment.mixer_config, experiment.shape),
        seconds=sum(
            trial.user_attrs.get("seconds", 0.0) / trial.user_attrs.get("trained_together", 1) for trial in trials
        ),
        versions=latest.get("versions", {}),
        device=latest.get("device", ""),
        label=experiment.label,
    )


def under_grid(summary: Summary, points: Collection[GridPoint], seeds: int) -> Summary | None:
    """Return what a study would show if it had been trained on a part of its grid, with fewer seeds.

    The choice is made again, by seed 0 alone, as with ``seeds_of`` chosen.

    Args:
        summary: the study.
        points: the points of that grid.
        seeds: number of seeds of the chosen point, from 0 on.

    Returns:
        The summary; None if the study lacks a point, if the choice lacks a seed or test figures, or if a point has no
        figures because a further seed diverged.
    """
    kept = {(point.lr, point.weight_decay): point for point in summary.points}
    kept = {at: _with_seeds(point, range(seeds)) for at, point in kept.items() if at in points}
    converged = {at: point.values for at, point in kept.items() if point.values and 0 in point.seeds}
    scores = {at: values["validation_score"][0] for at, values in converged.items()}
    beyond = [point for point in kept.values() if point.diverged and min(point.diverged) >= seeds]
    if len(kept) < len(set(points)) or not scores or beyond:
        return None

    chosen = max(scores, key=scores.__getitem__)
    winner = kept[chosen]
    if winner.seeds != [*range(seeds)] or winner.values is None or TEST_METRICS[0] not in winner.values:
        return None

    found = {at: point if at == chosen else _with_seeds(point, range(1)) for at, point in kept.items()}
    accuracies = {at: y.estimates["validation_token_accuracy"].mean for at, y in found.items() if y.estimates}
    of_seeds = winner.values["validation_score"]
    return replace(
        summary,
        points=[*found.values()],
        chosen=[*found].index(chosen),
        best_seed=of_seeds.index(max(of_seeds)),
        edge=edge_of(chosen, [lr for lr, _ in found], accuracies, summary.ceiling),
        near_best=near_best(accuracies, len(found), summary.chance),
        other_choices={},
    )


def _with_seeds(point: Point, seeds: Sequence[int]) -> Point:
    """Return a point with some of its seeds; one of which any seed diverged has no figures."""
    places = [point.seeds.index(seed) for seed in seeds if seed in point.seeds]
    values = None if point.values is None else {name: [y[i] for i in places] for name, y in point.values.items()}
    return replace(
        point,
        seeds=[point.seeds[i] for i in places],
        values=values,
        estimates=None if values is None else {name: Estimate.of(found) for name, found in values.items() if found},
        extrapolation={name: [found[i] for i in places] for name, found in point.extrapolation.items()},
    )


def write_summary(summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` of a study."""
    write_json(folder / "summary.json", summary.to_dict())


def read_summary(path: Path) -> Summary:
    """Return the summary of a study, given its folder or its file.

    Raises:
        IncomparableError: the file is not a summary of this version.
        ValueError: there is no summary, or it is damaged.
    """
    file = path / "summary.json" if path.is_dir() else path
    if path.is_dir() and (path / "run.json").is_file():
        raise ValueError(
            f"{path} is a pretraining run, not a study: python -m runners.c4 compare shows such runs, and the report "
            "those of python -m runners.c4.reference --rows LAYER"
        )
    if not file.is_file():
        inner = [folder for folder in (path / "studies", path) if [*folder.glob("*/summary.json")]]
        example = f", such as {inner[0]}/*" if inner else ""
        raise ValueError(f"{file} is not there: name folders of studies that are finished{example}")
    if file.name != "summary.json":
        raise ValueError(f"{file} is no summary.json: name folders of studies that are finished")
    try:
        return typed(Summary, read_json(file, REMEDY))
    except ValidationError as error:
        raise incomparable(path, first_fault(error)) from error


def incomparable(path: Path, reason: str) -> IncomparableError:
    """Return the error for a summary that cannot be compared.

    Args:
        path: folder of the study, or the file.
        reason: the first entry that is missing or wrong, in words.
    """
    file = path / "summary.json" if path.is_dir() else path
    return IncomparableError(f"{file} is no summary of a study, or of an earlier version ({reason}): {REMEDY}")


def _point(at: GridPoint, trials: Sequence[FrozenTrial], readings: Mapping[Run, Reading]) -> Point:
    (lr, weight_decay), runs, diverged = at, [run_of(trial) for trial in trials], diverged_seeds(trials)
    values: dict[str, list[float]] = {}
    extrapolation: dict[str, list[Accuracy]] = {}

    if not diverged:
        values = {name: [trial.user_attrs[name] for trial in trials] for name in METRICS}

        # A mean over only some of the seeds would not be an estimate of the point.
        known = [readings[run] for run in runs if run in readings]
        if len(known) == len(runs):
            for name in TEST_METRICS:
                read = [getattr(reading, name.removeprefix("test_")) for reading in known]
                if None not in read:
                    values[name] = read
            names = [name for name in known[0].extrapolation if all(name in reading.extrapolation for reading in known)]
            extrapolation = {name: [reading.extrapolation[name] for reading in known] for name in names}

    return Point(
        lr=lr,
        weight_decay=weight_decay,
        seeds=[run.seed for run in runs],
        values=None if diverged else values,
        estimates=None if diverged else {name: Estimate.of(found) for name, found in values.items()},
        extrapolation=extrapolation,
        diverged=diverged,
    )
