"""The leaderboards: every layer on every task under one protocol, from the table of records.

There are two, the reference protocol and the quick preset. One's own studies stand on the board whose rows they are
comparable with, as ``runners.mad.ranking`` decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any, Literal

import pandas as pd

from mixers import MIXERS
from mixers.costs import LENGTHS
from runners.mad.points import chosen, estimate_of, points
from runners.mad.ranking import average_ranks, beside, place_of
from runners.mad.rows import RANKED
from runners.mad.tables import estimate
from runners.report.ranks import Ranks, Values, mean_ranks, places
from runners.tables import ordinal
from tasks import PUBLISHED

Kind = Literal["layer", "variant", "own", "again"]
"""A layer with its defaults, a variant or a stack, one's own layer, or one's own training of the others, not ranked."""
METRICS = ("sequence", "token")
TITLES = {"full": "reference protocol", "quick": "quick preset"}
"""Boards by the preset of their reference results."""
YOURS = " (yours)"
"""End of the label of a registered layer that the user has trained again."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layer on a task.

    Attributes:
        row: label of the layer.
        kind: what the layer is.
        point: the chosen grid point, a row of ``runners.mad.points.chosen``.
        runs: the records of its seeds, in their order; none if every grid point diverged.
        seconds: training time of all grid points.
        record: file or folder of the records.
        command: command that trains a reference result; None for one's own study.
        place: rank among the comparable layers and what the intervals say, for one's own layer; else None.
    """

    row: str
    kind: Kind
    point: Mapping[Any, Any]
    runs: Sequence[Mapping[str, Any]]
    seconds: float
    record: Path
    command: str | None = None
    place: str | None = None

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.point["task"])

    def values(self, metric: str) -> list[float]:
        """Return the test accuracy of each seed; none if every grid point diverged."""
        return [run[f"test.{metric}_accuracy"] for run in self.runs]

    def mean(self, metric: str, split: str = "test") -> float:
        """Return the mean accuracy over the seeds; NaN if every grid point diverged."""
        return float(self.point[f"{split}.{metric}_accuracy"])

    def ends(self, metric: str, split: str = "test") -> tuple[float, float]:
        """Return the 95% interval of an accuracy; both ends are the mean for a single seed."""
        found = estimate_of(self.point, f"{split}.{metric}_accuracy")
        return (found.mean, found.mean) if math.isnan(found.low) else (found.low, found.high)

    def text(self, metric: str) -> str:
        """Return an accuracy with its interval."""
        return estimate(self.point, f"test.{metric}_accuracy") or "diverged"

    def share(self, metric: str) -> float:
        """Return an accuracy rescaled so that chance is 0 and the ceiling is 1; 0 if there is none."""
        low, high = self.point["chance"][metric], self.point["ceiling"][metric]
        share = (self.mean(metric) - low) / (high - low)
        return 0.0 if math.isnan(share) else round(min(1.0, max(0.0, share)), 3)


@dataclass(frozen=True, kw_only=True)
class Board:
    """A leaderboard.

    Attributes:
        name: preset of its reference results.
        cells: cells by row and task.
        ranks: mean ranks by metric; None if fewer than two layers have all tasks.
        rows: labels of the rows, the best mean rank by tokens first, then the user's own, then others.
        tasks: tasks that have cells.
        places: rank of each ranked row on a task, by metric and task.
    """

    name: str
    cells: Mapping[tuple[str, str], Cell]
    ranks: Mapping[str, Ranks | None]
    rows: Sequence[str]
    tasks: Sequence[str]
    places: Mapping[tuple[str, str], Mapping[str, float]]

    @classmethod
    def of(cls, name: str, found: Sequence[Cell]) -> "Board":
        """Return the board of some cells."""
        cells = {(cell.row, cell.task): cell for cell in found}
        tasks = [task for task in PUBLISHED if any(task == other for _, other in cells)]
        values = {metric: values_of(cells, metric) for metric in METRICS}
        ranks = {metric: mean_ranks(values[metric], tasks) for metric in METRICS}
        on_tasks = {
            (metric, task): dict(zip(means, average_ranks([*means.values()]).tolist(), strict=True))
            for metric, of in values.items()
            for task in tasks
            if (means := {row: fmean(y) for (row, other), y in of.items() if other == task and y}) is not None
        }
        means = ranks["token"].means if ranks["token"] else {}
        own = {cell.row for cell in found if cell.kind in ("own", "again")}
        rows = sorted({row: None for row, _ in cells}, key=lambda row: (means.get(row, math.inf), row not in own))
        return cls(name=name, cells=cells, ranks=ranks, rows=rows, tasks=tasks, places=on_tasks)

    @property
    def title(self) -> str:
        """Title for readers."""
        return TITLES[self.name]

    def first(self, row: str | None = None, task: str | None = None) -> Cell:
        """Return the first cell of a row or task, reference results before others."""
        found = [cell for place, cell in self.cells.items() if row in (None, place[0]) and task in (None, place[1])]
        return min(found, key=lambda cell: cell.kind != "layer")

    def costs(self, row: str) -> dict[str, Any]:
        """Return the costs of a row: parameters, states at ``LENGTHS`` and FLOPs per token, None if unknown."""
        point = self.first(row=row).point
        state, flops = (y if isinstance(y, dict) else {} for y in (point["state"], point["flops_per_token"]))
        floats = [state.get(str(length)) for length in LENGTHS]
        return {"parameters": point["parameters"], "states": floats, "flops": flops.get(str(LENGTHS[0]))}

    def own_places(self) -> list[str]:
        """Return the place of each of the user's layers by mean rank over its tasks, in words."""
        found, values = [], values_of(self.cells, "token")
        for row in dict.fromkeys(cell.row for cell in self.cells.values() if cell.kind == "own"):
            tasks = [task for task in self.tasks if (row, task) in values]
            diverged = [task for task in tasks if not values[row, task]]
            if diverged:
                found.append(f"{row}: no rank: no point converged on {', '.join(diverged)}, {self.title}")
            elif ranks := mean_ranks(values, tasks):
                place = ordinal(places({other: -mean for other, mean in ranks.means.items()})[row])
                words = f"{row}: {place} of {len(ranks.means)}, mean rank {ranks.means[row]:.1f}"
                found.append(f"{words} over {len(tasks)} task{'s' * (len(tasks) > 1)}, {self.title}")
        return found


def values_of(cells: Mapping[tuple[str, str], Cell], metric: str, kinds: Sequence[Kind] = ("layer", "own")) -> Values:
    """Return the test accuracies of the seeds of the cells that are ranked."""
    return {place: cell.values(metric) for place, cell in cells.items() if cell.kind in kinds}


def boards_of(reference: pd.DataFrame, own: pd.DataFrame) -> tuple[list[Board], list[str]]:
    """Return the boards, and a line for each of one's own studies that is comparable with none.

    Args:
        reference: records of the reference results.
        own: records of one's own studies.
    """
    table = pd.concat([frame for frame in (own, reference) if len(frame)])
    runs_of: dict[Any, list[dict[str, Any]]] = {}
    columns = ["study", "lr", "weight_decay", "seed", "curve", "profile"]
    for run in table.reindex(columns=[*columns, *(f"test.{metric}_accuracy" for metric in METRICS)]).to_dict("records"):
        runs_of.setdefault((run["study"], run["lr"], run["weight_decay"]), []).append(run)
    seconds = (table["seconds"] / table["together"]).groupby(table["study"]).sum()
    files = table.drop_duplicates("study").set_index("study")["file"]

    def cell(point: Mapping[Any, Any], row: str, kind: Kind, **others: Any) -> Cell:
        found = runs_of.get((point["study"], point["lr"], point["weight_decay"]), [])
        runs = sorted((run for run in found if run["seed"] in point["seeds"]), key=lambda run: run["seed"])
        known = {"record": files[point["study"]], "seconds": seconds[point["study"]], **others}
        return Cell(row=row, kind=kind, point=point, runs=runs, **known)

    # One's own, on the boards of the rows that they are compared with.
    found: dict[str, list[Cell]] = {preset: [] for preset in TITLES}
    layers, reasons = set(reference["layer"]), list[str]()
    if len(own):
        ranked = reference["layer"].isin([entry.name for entry in RANKED])
        rows, reasons = beside(own, reference[ranked])
        rows = rows[rows["group"].notna()]
        presets = rows[~rows["own"]].groupby("group")["preset"].first()
        for point in rows[rows["own"]].to_dict("records"):
            again = point["layer"] in layers
            found[presets[point["group"]]].append(
                cell(
                    point,
                    point["label"] + YOURS * again,
                    "again" if again or point["layers"] > 1 else "own",
                    record=files[point["study"]].parents[1],
                    place=place_of(point),
                )
            )

    # Reference results.
    for point in chosen(points(reference)).to_dict("records"):
        name, preset = point["layer"], point["preset"]
        small = "" if preset == "full" else f" --preset {preset}"
        command = f"python -m runners.mad.reference{small} --layers {quote(name)} --tasks {point['task']}"
        found[preset].append(cell(point, name, "layer" if name in MIXERS else "variant", command=command))
    return [Board.of(preset, cells) for preset, cells in found.items() if cells], reasons
