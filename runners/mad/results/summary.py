"""Results of a study: its summary, and its table for people."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from mixers.costs import Costs, costs
from runners.files import write_json
from runners.mad.experiment import Experiment
from runners.mad.results.held_out import Reading
from runners.mad.search.search import run_of
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
"""Read of the chosen point alone, so that nobody chooses by them."""
COLUMNS = (
    *zip(("val seq", "token", "loss"), METRICS[:3], strict=True),
    *zip(("test seq", "token"), TEST_METRICS[:2], strict=True),
    ("steps/s", "steps_per_second"),
)
"""Headings of a study's table, and what stands under them."""
TestReader = Callable[[Sequence[Run]], Mapping[Run, Reading]]
"""Readings of a point's runs, all or none: ``runners.held_out.read_test`` of a study."""


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
    """A grid point over all its seeds; ``estimates`` is None where a seed diverged, of test if the point is chosen."""

    lr: float
    weight_decay: float
    seeds: list[int]
    estimates: dict[str, Estimate] | None
    diverged: dict[int, int]
    """Seed -> step at which it diverged."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished search: all points, and the index of the one chosen on validation (None if all diverged)."""

    experiment: Experiment
    points: list[Point]
    chosen: int | None
    chosen_trial: FrozenTrial | None
    ceiling: Accuracy
    chance: Accuracy

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "study": self.experiment.name,
            "config": self.experiment.to_dict(),
            "fingerprint": self.experiment.fingerprint,
            "family": self.experiment.layer.family,
            "points": [asdict(point) for point in self.points],
            "chosen": self.chosen,
            "ceiling": asdict(self.ceiling),
            "chance": asdict(self.chance),
            "costs": asdict(self.costs),
        }

    @property
    def costs(self) -> Costs:
        """What one layer costs."""
        return costs(self.experiment.layer, self.experiment.mixer_config, self.experiment.shape)

    @property
    def seeds(self) -> int:
        """How many runs a mean is over, at most."""
        return max((len(point.seeds) for point in self.points), default=0)


def summarise(
    experiment: Experiment,
    trials: Sequence[FrozenTrial],
    read: TestReader,
    chosen_among: Sequence[FrozenTrial] | None = None,
) -> Summary:
    """Group finished trials by grid point, choose the point with the best mean validation score, read its test split.

    The choice can be left to some of the trials, for others may have more seeds or fewer.
    """
    groups, contenders = _by_point(trials), _by_point(trials if chosen_among is None else chosen_among)
    scores = {
        at: fmean(trial.user_attrs["validation_score"] for trial in members)
        for at, members in contenders.items()
        if not _diverged(members)
    }
    best = max(scores, key=scores.__getitem__, default=None)
    task = experiment.instance
    return Summary(
        experiment=experiment,
        points=[_point(*at, members, read if at == best else None) for at, members in groups.items()],
        chosen=None if best is None else list(groups).index(best),
        chosen_trial=None if best is None else max(contenders[best], key=lambda t: t.user_attrs["validation_score"]),
        ceiling=task.ceiling("test"),
        chance=task.chance("test"),
    )


def _by_point(trials: Sequence[FrozenTrial]) -> dict[tuple[float, float], list[FrozenTrial]]:
    """By learning rate and weight decay."""
    groups: dict[tuple[float, float], list[FrozenTrial]] = {}
    for trial in trials:
        run = run_of(trial)
        groups.setdefault((run.lr, run.weight_decay), []).append(trial)
    return groups


def _diverged(trials: Sequence[FrozenTrial]) -> dict[int, int]:
    return {run_of(t).seed: t.user_attrs["diverged_step"] for t in trials if "diverged_step" in t.user_attrs}


def _point(lr: float, weight_decay: float, trials: Sequence[FrozenTrial], read: TestReader | None) -> Point:
    diverged, estimates = _diverged(trials), None
    if not diverged:
        estimates = {name: Estimate.of([trial.user_attrs[name] for trial in trials]) for name in METRICS}
        readings = [] if read is None else [asdict(reading) for reading in read([run_of(t) for t in trials]).values()]
        for name in TEST_METRICS:
            values = [reading[name.removeprefix("test_")] for reading in readings]
            if values and None not in values:
                estimates[name] = Estimate.of(values)
    return Point(
        lr=lr,
        weight_decay=weight_decay,
        seeds=[run_of(trial).seed for trial in trials],
        estimates=estimates,
        diverged=diverged,
    )


def print_summary(summary: Summary, console: Console) -> None:
    """One row a grid point, the chosen one marked and with its test metrics; then ceiling and chance.

    A narrow console gets test metrics and speed in a table of their own.
    """
    name, finite = summary.experiment.name, [point for point in summary.points if point.estimates is not None]
    figures = _points(name, summary, finite, COLUMNS)
    if Measurement.get(console, console.options.update(max_width=1000), figures).maximum <= console.width:
        console.print(_points(name, summary, summary.points, COLUMNS))
    else:
        console.print(_points(name, summary, summary.points, COLUMNS[:3]))
        if finite:
            console.print(_points("test of the chosen point, and speed", summary, finite, COLUMNS[3:]))
    print_intervals([summary.seeds], console)
    ceiling, chance = summary.ceiling, summary.chance
    if summary.chosen is None:
        console.print("chosen: none, every point diverged")
    else:
        best = summary.points[summary.chosen]
        console.print(f"chosen on validation: lr {best.lr:g}, weight decay {best.weight_decay:g}")
    console.print(
        f"sequence / token accuracy: ceiling {ceiling.sequence:.4f} / {ceiling.token:.4f}, "
        f"chance {chance.sequence:.2g} / {chance.token:.4f}"
    )


def _points(title: str, summary: Summary, points: Sequence[Point], columns: Sequence[tuple[str, str]]) -> Table:
    """One row for each of some points of a summary."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "lr", "wd", *(heading for heading, _ in columns)):
        table.add_column(heading, justify="right")
    for point in points:
        mark = "→" if summary.chosen is not None and point is summary.points[summary.chosen] else ""
        names = (mark, f"{point.lr:g}", f"{point.weight_decay:g}")
        if point.estimates is None:
            steps = ", ".join(f"seed {seed} at step {step}" for seed, step in point.diverged.items())
            table.add_row(*names, f"diverged: {steps}")
            continue
        found = [(name, point.estimates.get(name)) for _, name in columns]
        cells = [
            "" if estimate is None else f"{estimate.mean:.1f}" if name == "steps_per_second" else estimate.text()
            for name, estimate in found
        ]
        table.add_row(*names, *cells)
    return table


def print_intervals(seeds: Collection[int], console: Console) -> None:
    """What stands behind a ±, if there is any; means are over so many seeds."""
    if several := [count for count in seeds if count > 1]:
        console.print(f"±: half the 95% t-interval of the mean over {span(several)} seeds, not clipped to [0, 1]")


def span(counts: Collection[int]) -> str:
    """``3``, or ``2 to 3``."""
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def write_summary(summary: Summary, folder: Path) -> None:
    """Write ``summary.json`` of one study."""
    write_json(folder / "summary.json", summary.to_dict())
