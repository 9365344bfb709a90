"""What a study reached: its grid points over their seeds, the chosen one with its test figures, ceiling and chance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from optuna.trial import FrozenTrial
from pydantic import TypeAdapter, ValidationError

from mixers.costs import Costs, costs
from runners.files import read_json, write_json
from runners.mad.experiment import Experiment
from runners.mad.results.held_out import Reading
from runners.mad.search.study import run_of
from runners.mad.training.protocol import Run
from tasks.base import Accuracy
from tasks.metrics import mean_and_interval

METRICS = (
    "validation_sequence_accuracy",
    "validation_token_accuracy",
    "validation_loss",
    "validation_score",
    "steps_per_second",
)
TEST_METRICS = ("test_sequence_accuracy", "test_token_accuracy", "test_loss")
"""Read for the chosen point alone, so that nobody chooses by them."""

GridPoint = tuple[float, float]
"""Learning rate and weight decay."""


class IncomparableError(ValueError):
    """A file is no summary of a study, or one of an earlier version."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds and half the width of its 95% Student-t interval, None for a single seed."""

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
        estimates: figures by name, those of the test split for the chosen point alone; None where a seed diverged.
        diverged: step at which a seed diverged, by seed.
    """

    lr: float
    weight_decay: float
    seeds: list[int]
    estimates: dict[str, Estimate] | None
    diverged: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished search.

    Attributes:
        study: name of the study.
        config: settings of the experiment (``Experiment.to_dict``).
        fingerprint: of settings and data.
        family: kind of layer.
        points: the grid points.
        chosen: index of the point with the best mean validation score; None if all diverged.
        best_seed: the chosen point's seed with the best validation score.
        ceiling: accuracies that a perfect solver reaches on the test split.
        chance: accuracies of guessing.
        costs: of one layer.
    """

    study: str
    config: dict[str, Any]
    fingerprint: str
    family: str
    points: list[Point]
    chosen: int | None
    best_seed: int | None
    ceiling: Accuracy
    chance: Accuracy
    costs: Costs

    @property
    def chosen_point(self) -> Point | None:
        """The chosen point, None if all diverged."""
        return None if self.chosen is None else self.points[self.chosen]

    @property
    def best_run(self) -> Run | None:
        """The chosen point's run with the best validation score."""
        point = self.chosen_point
        if point is None or self.best_seed is None:
            return None
        return Run(lr=point.lr, weight_decay=point.weight_decay, seed=self.best_seed)

    @property
    def seeds(self) -> int:
        """The largest number of runs that a mean is over."""
        return max((len(point.seeds) for point in self.points), default=0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def choose_point(trials: Sequence[FrozenTrial]) -> GridPoint | None:
    """The grid point with the best mean validation score over its seeds, None if a seed of each diverged."""
    scores = {
        point: fmean(trial.user_attrs["validation_score"] for trial in members)
        for point, members in by_point(trials).items()
        if not _diverged(members)
    }
    return max(scores, key=scores.__getitem__, default=None)


def by_point(trials: Sequence[FrozenTrial]) -> dict[GridPoint, list[FrozenTrial]]:
    """Trials by grid point."""
    groups: dict[GridPoint, list[FrozenTrial]] = {}
    for trial in trials:
        run = run_of(trial)
        groups.setdefault((run.lr, run.weight_decay), []).append(trial)
    return groups


def summarise(
    experiment: Experiment,
    trials: Sequence[FrozenTrial],
    chosen: GridPoint | None,
    readings: Mapping[Run, Reading],
) -> Summary:
    """Group finished trials by grid point.

    Args:
        experiment: what was trained.
        trials: finished trials of its study.
        chosen: the point that ``choose_point`` chose, among these trials or some of them.
        readings: test figures of the chosen point's runs, by run; runs without one have no test figures.
    """
    groups, task = by_point(trials), experiment.instance
    points = [_point(at, members, readings if at == chosen else {}) for at, members in groups.items()]
    best = None
    if chosen is not None:
        best = run_of(max(groups[chosen], key=lambda trial: trial.user_attrs["validation_score"])).seed

    return Summary(
        study=experiment.name,
        config=experiment.to_dict(),
        fingerprint=experiment.fingerprint,
        family=experiment.layer.family,
        points=points,
        chosen=None if chosen is None else list(groups).index(chosen),
        best_seed=best,
        ceiling=task.ceiling("test"),
        chance=task.chance("test"),
        costs=costs(experiment.layer, experiment.mixer_config, experiment.shape),
    )


def write_summary(summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` of a study."""
    write_json(folder / "summary.json", summary.to_dict())


def read_summary(path: Path) -> Summary:
    """Summary of a study, from its folder or its file.

    Raises:
        IncomparableError: the file is no summary of this version.
        ValueError: there is none, or it is damaged.
    """
    file = path / "summary.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is not there: name folders of studies that are finished")
    if file.name != "summary.json":
        raise ValueError(f"{file} is no summary.json: name folders of studies that are finished")
    try:
        return TypeAdapter(Summary).validate_python(read_json(file))
    except ValidationError as error:
        raise IncomparableError(refusal(path)) from error


def refusal(path: Path) -> str:
    """Why a summary cannot be compared, and what to do."""
    file = path / "summary.json" if path.is_dir() else path
    return f"{file} is no summary of a study, or of an earlier version: run its command again, or name the others"


def _point(at: GridPoint, trials: Sequence[FrozenTrial], readings: Mapping[Run, Reading]) -> Point:
    lr, weight_decay = at
    runs, diverged = [run_of(trial) for trial in trials], _diverged(trials)

    estimates = None
    if not diverged:
        estimates = {name: Estimate.of([trial.user_attrs[name] for trial in trials]) for name in METRICS}

        # A mean over some of the seeds would be no estimate of the point.
        known = [asdict(readings[run]) for run in runs if run in readings]
        for name in TEST_METRICS:
            values = [reading[name.removeprefix("test_")] for reading in known]
            if len(values) == len(runs) and None not in values:
                estimates[name] = Estimate.of(values)

    seeds = [run.seed for run in runs]
    return Point(lr=lr, weight_decay=weight_decay, seeds=seeds, estimates=estimates, diverged=diverged)


def _diverged(trials: Sequence[FrozenTrial]) -> dict[int, int]:
    """Step at which each diverged seed did, by seed."""
    return {run_of(t).seed: t.user_attrs["diverged_step"] for t in trials if "diverged_step" in t.user_attrs}
