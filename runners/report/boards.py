"""The leaderboards: every layer on every task or ability, and where one layer stands, from the tables of records.

There are three: the profile, the reference protocol and the quick preset. One's own studies stand on the board whose
rows they are comparable with, as ``runners.mad.ranking`` and ``runners.mad.profile`` decide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import Any, Literal

import numpy as np
import pandas as pd
from markupsafe import Markup

from mixers import MIXERS
from mixers.costs import LENGTHS
from runners.mad import profile
from runners.mad.points import Estimate, chosen, estimate_of, points
from runners.mad.ranking import TRANSFORMER, average_ranks, beside
from runners.mad.rows import RANKED
from runners.mad.tables import estimate
from runners.progress import spell
from runners.report.ranks import Values, mean_ranks, places
from runners.report.svg import Chart
from runners.style import Style, style_of
from runners.tables import abbreviated, ordinal
from runners.task_names import ABILITIES
from tasks import PUBLISHED, TASKS

Kind = Literal["layer", "variant", "own", "again"]
"""A layer with its defaults, a variant or a stack, one's own layer, or one's own training of the others, not ranked."""
TITLES = {"profile": "profile", "full": "reference protocol", "quick": "quick preset"}
"""Boards by the preset of their reference results."""
YOURS = " (yours)"
"""End of the label of a registered layer that the user has trained again."""
METRICS = ("token", "sequence")
MOST = 3
"""Number of strengths, and of weaknesses."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layer on a task or ability.

    Attributes:
        row: label of the layer.
        task: name of the task.
        kind: what the layer is.
        value: mean token accuracy on the test split, or score; NaN if every grid point diverged.
        share: value, and the ends of its interval, from chance, 0, to the ceiling, 1.
        seeds: value of each seed.
        figures: texts of the columns of the task's table.
        seconds: training time of all grid points.
        device: where it was trained.
        record: file or folder of the records.
    """

    row: str
    task: str
    kind: Kind
    value: float
    share: tuple[float, float, float]
    seeds: Sequence[float]
    figures: Sequence[str]
    seconds: float
    device: str
    record: Path


@dataclass(frozen=True, kw_only=True)
class Board:
    """A leaderboard.

    Attributes:
        name: preset of its reference results.
        headings: columns of a task's table.
        cells: cells by row and task.
        points: a row of the table of points or records for each row, which has its costs.
        overall: place, and mean rank or profile score with its interval, of each layer that has all tasks, in order.
        tiers: tier of these layers; empty without profiles.
        words: place of one's own layers and of RT, in words.
    """

    name: str
    headings: Sequence[str]
    cells: Mapping[tuple[str, str], Cell]
    points: Mapping[str, Mapping[Any, Any]]
    overall: Mapping[str, tuple[float, str]]
    words: Mapping[str, str]
    tiers: Mapping[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Title for readers."""
        return TITLES[self.name]

    def named(self, task: str) -> str:
        """Return the name of a task, or that of an ability whose ladder is of other objects."""
        return ABILITIES.get(task, task) if self.name == "profile" else task

    @property
    def tasks(self) -> list[str]:
        """Tasks that have cells, in the order of the registry."""
        there = dict.fromkeys(task for _, task in self.cells)
        return [task for task in dict.fromkeys([*TASKS, *there]) if task in there]

    @property
    def rows(self) -> list[str]:
        """Labels: those with a place, the best first, then the user's own, then others."""
        kinds = {row: cell.kind for (row, _), cell in self.cells.items()}
        order = {row: n for n, row in enumerate(self.overall)}
        return sorted(kinds, key=lambda row: (order.get(row, math.inf), kinds[row] not in ("own", "again")))

    @property
    def own(self) -> list[str]:
        """Labels of the user's own layers, in the order of the rows."""
        return [row for row in self.rows if any(cell.kind == "own" for cell in self.of_row(row))]

    @property
    def device(self) -> str:
        """Device of most cells."""
        return mode(cell.device for cell in self.cells.values())

    def of_row(self, row: str) -> list[Cell]:
        """Return the cells of a row."""
        return [cell for (other, _), cell in self.cells.items() if other == row]

    def of_task(self, task: str) -> list[Cell]:
        """Return the cells of a task, the best first."""
        found = [cell for (_, other), cell in self.cells.items() if other == task]
        return sorted(found, key=lambda cell: -math.inf if math.isnan(cell.value) else cell.value, reverse=True)

    def ranks(self, task: str) -> dict[str, float]:
        """Return the rank of each layer on a task; those that tie share the average."""
        ranked = [cell for cell in self.of_task(task) if cell.kind in ("layer", "own") and not math.isnan(cell.value)]
        ranks = average_ranks([cell.value for cell in ranked]).tolist()
        return dict(zip([cell.row for cell in ranked], ranks, strict=True))

    def place_on(self, row: str, task: str) -> str:
        """Return the place of a row on a task in words, as "3rd of 21, tied with 5", whose intervals overlap."""
        ranks, mine = self.ranks(task), self.cells[row, task]
        cells = [cell for cell in self.of_task(task) if cell.row in ranks]
        place = 1 + sum(cell.value > mine.value for cell in cells)
        tied = sum(cell.share[1] <= mine.share[2] and mine.share[1] <= cell.share[2] for cell in cells) - 1
        return f"{ordinal(place)} of {len(cells)}" + f", tied with {tied}" * (tied > 0)

    def extremes(self, row: str) -> tuple[list[Cell], list[Cell]]:
        """Return the cells of a layer with its best places, and those with its worst; of equal ones by accuracy.

        No layer is bad at a task on which it ties with the best one, nor good at one where it is in the lower half.
        """
        found = []
        for cell in self.of_row(row):
            if row in (ranks := self.ranks(cell.task)):
                found.append((ranks[row], -cell.share[0], min(ranks.values()), (len(ranks) + 1) / 2, cell))
        found.sort(key=lambda one: one[:2])
        most = max(1, min(MOST, len(found) // 2))
        best = [cell for rank, *_, middle, cell in found[:most] if rank < middle]
        return best, [cell for rank, _, first, *_, cell in found[: most - 1 : -1] if rank > first][:MOST]

    def costs(self, row: str) -> list[tuple[str, str, float | None]]:
        """Return what a layer costs: name, figure, and ratio to the Transformer, None if that is unknown."""

        def figures(of: str) -> list[float | None]:
            point = self.points.get(of, {"state": None, "parameters": None})
            state = point["state"] if isinstance(point["state"], dict) else {}
            return [point["parameters"], *(state.get(str(length)) for length in LENGTHS)]

        names = ("parameters", *(f"state, {length:,} positions" for length in LENGTHS))
        return [
            (name, "?" if mine is None else abbreviated(int(mine)), mine / theirs if mine and theirs else None)
            for name, mine, theirs in zip(names, figures(row), figures(TRANSFORMER), strict=True)
        ]

    def training(self, row: str) -> tuple[str, float | None]:
        """Return the time of training on the tasks of a row; its ratio to the Transformer's on one machine."""
        mine = self.of_row(row)
        theirs = [self.cells[at] for cell in mine if (at := (TRANSFORMER, cell.task)) in self.cells]
        seconds, other = (sum(cell.seconds for cell in cells) for cells in (mine, theirs))
        machines = {(cell.device, cell.kind in ("own", "again")) for cell in (*mine, *theirs)}
        return spell(seconds), seconds / other if len(theirs) == len(mine) and len(machines) == 1 and other else None

    def picture(self, row: str) -> Markup:
        """Draw a row of the board: accuracy on each task with its interval, and small marks for the other layers."""
        tasks = [cell.task for cell in self.of_row(row)]
        tasks.sort(key=lambda task: self.cells[row, task].share[0])
        label = f"{'score' if self.tiers else 'token accuracy'}: 0 chance, 1 ceiling"
        chart = Chart(
            description=f"{row} among the other layers",
            labels={"x": label, "y": ""},
            limits={"x": (-0.01, 1.01), "y": (-0.6, len(tasks) - 0.4)},
            ticks={"y": dict(enumerate(map(self.named, tasks)))},
            size=(280, 34 + 15 * len(tasks)),
            left=100,
        )
        for y, task in enumerate(tasks):
            others = [cell for cell in self.of_task(task) if cell.kind in ("layer", "own") and cell.row != row]
            for cell in others:
                chart.line([cell.share[0]] * 2, [y - 0.22, y + 0.22], OTHERS, alpha=0.35)
            x, low, high = self.cells[row, task].share
            chart.line([low, high], [y, y], style_of(row), width=2.4)
            chart.mark(x, y, style_of(row))
        return chart.svg()


OTHERS = Style(color="var(--ink)", marker="o")


def values_of(cells: Mapping[tuple[str, str], Cell], kinds: Sequence[Kind] = ("layer", "own")) -> Values:
    """Return the test accuracies of the seeds of the cells that are ranked."""
    return {place: cell.seeds for place, cell in cells.items() if cell.kind in kinds}


def boards_of(reference: pd.DataFrame, own: pd.DataFrame) -> tuple[list[Board], list[str]]:
    """Return the boards of tasks, and a line for each of one's own studies that is comparable with none.

    Args:
        reference: records of the reference results.
        own: records of one's own studies.
    """
    table = pd.concat([frame for frame in (own, reference) if len(frame)])
    column = f"test.{METRICS[0]}_accuracy"
    runs_of: dict[Any, list[tuple[int, float]]] = {}
    for *at, seed, value in table[["study", "lr", "weight_decay", "seed", column]].itertuples(index=False):
        runs_of.setdefault(tuple(at), []).append((seed, value))
    seconds = (table["seconds"] / table["together"]).groupby(table["study"]).sum()
    files = table.drop_duplicates("study").set_index("study")["file"]

    def cell(point: Mapping[Any, Any], row: str, kind: Kind, record: Path) -> Cell:
        found = sorted(set(runs_of.get((point["study"], point["lr"], point["weight_decay"]), [])))
        low, high = point["chance"]["token"], point["ceiling"]["token"]
        reached = estimate_of(point, column)
        ends = (reached.mean if math.isnan(end) else end for end in (reached.low, reached.high))
        mean, *limits = (float(np.nan_to_num(np.clip((y - low) / (high - low), 0, 1))) for y in (reached.mean, *ends))
        rates = f"{point['lr']:g}" if point["chosen"] else ""
        return Cell(
            row=row,
            task=point["task"],
            kind=kind,
            value=reached.mean,
            share=(mean, limits[0], limits[1]),
            seeds=[value for seed, value in found if seed in point["seeds"] and value == value],
            figures=[*(estimate(point, f"test.{metric}_accuracy") or "diverged" for metric in METRICS), rates],
            seconds=seconds[point["study"]],
            device=point["device"],
            record=record,
        )

    # One's own, on the boards of the rows that they are compared with.
    found: dict[str, list[tuple[Mapping[Any, Any], Cell]]] = {preset: [] for preset in TITLES}
    layers, reasons = set(reference["layer"]), list[str]()
    if len(own):
        ranked = reference["layer"].isin([entry.name for entry in RANKED])
        rows, reasons = beside(own, reference[ranked])
        rows = rows[rows["group"].notna()]
        presets = rows[~rows["own"]].groupby("group")["preset"].first()
        for point in rows[rows["own"]].to_dict("records"):
            again = point["layer"] in layers
            kind: Kind = "again" if again or point["layers"] > 1 else "own"
            folder = files[point["study"]].parents[1]
            found[presets[point["group"]]].append((point, cell(point, point["label"] + YOURS * again, kind, folder)))

    # Reference results.
    for point in chosen(points(reference)).to_dict("records"):
        kind = "layer" if point["layer"] in MIXERS else "variant"
        found[point["preset"]].append((point, cell(point, point["layer"], kind, files[point["study"]])))
    return [board_of_tasks(preset, pairs) for preset, pairs in found.items() if pairs], reasons


def board_of_tasks(name: str, pairs: Sequence[tuple[Mapping[Any, Any], Cell]]) -> Board:
    """Return the board of a preset from its chosen points and cells."""
    cells = {(cell.row, cell.task): cell for _, cell in pairs}
    values, words = values_of(cells), {}
    ranks = mean_ranks(values, [task for task in PUBLISHED if any(task == other for _, other in cells)])
    overall: dict[str, tuple[float, str]] = {}
    if ranks is not None:
        placed = places({row: -mean for row, mean in ranks.means.items()})
        for row, at in sorted(placed.items(), key=lambda pair: pair[1]):
            overall[row] = at, "{:.1f} ({:.1f}–{:.1f})".format(ranks.means[row], *ranks.intervals[row])

    # Of RT and one's own layers, over the tasks that they have.
    for row in dict.fromkeys(cell.row for _, cell in pairs if cell.kind == "own" or cell.row == "rt"):
        tasks = [task for task in PUBLISHED if (row, task) in cells]
        diverged = [task for task in tasks if not values[row, task]]
        over = f"over {len(tasks)} task{'s' * (len(tasks) > 1)}, {TITLES[name]}"
        if diverged:
            words[row] = f"no rank: no point converged on {', '.join(diverged)}, {TITLES[name]}"
        elif of_row := mean_ranks(values, tasks):
            place = ordinal(places({other: -mean for other, mean in of_row.means.items()})[row])
            mean = "{:.1f} ({:.1f} to {:.1f})".format(of_row.means[row], *of_row.intervals[row])
            words[row] = f"{place} of {len(of_row.means)}: mean rank {mean} {over}"
    return Board(
        name=name,
        headings=("token accuracy", "sequence accuracy", "learning rate"),
        cells=cells,
        points={cell.row: point for point, cell in pairs},
        overall=overall,
        words=words,
    )


def board_of_profiles(reference: pd.DataFrame, scores: pd.DataFrame | None, own: pd.DataFrame) -> Board:
    """Return the board of profiles.

    Args:
        reference: records of the rungs of reference profiles.
        scores: their scores, as ``runners.mad.profile.seed_scores`` returns them; None without records.
        own: records of one's own rungs.
    """
    again = own["layer"].isin(set(reference["layer"]))
    own = own.assign(layer=own["layer"].where(~again, own["layer"] + YOURS))
    table, ours = pd.concat([frame for frame in (own, reference) if len(frame)]), set(own["layer"])
    scores = pd.concat([profile.seed_scores(own) if ours else None, scores])
    first = table.drop_duplicates("layer").set_index("layer").to_dict("index")
    seconds = (table["seconds"] / table["together"]).groupby([table["layer"], table["task"]]).sum()
    files = table.groupby(["layer", "task"])["file"].first()

    def kind_of(row: str) -> Kind:
        return ("again" if row.endswith(YOURS) else "own") if row in ours else "layer" if row in MIXERS else "variant"

    cells = {}
    for of in profile.abilities(scores).to_dict("records"):
        row, task = of["layer"], of["task"]
        score = Estimate(mean=of["score"], low=of["score.low"], high=of["score.high"])
        ends = (score.mean, score.mean) if math.isnan(score.low) else (score.low, score.high)
        cells[row, task] = Cell(
            row=row,
            task=task,
            kind=kind_of(row),
            value=score.mean,
            share=(score.mean, *ends),
            seeds=[],
            figures=[score.text(3) + profile.STAR * of["edge"], profile.capacity(of), of["axis"]],
            seconds=seconds[row, task],
            device=first[row]["device"],
            record=files[row, task].parents[1] if row in ours else files[row, task],
        )

    # Tiers of the layers of one size that have all abilities and seeds.
    rows = {row: of_row for row, of_row in scores.groupby("layer", sort=False) if kind_of(row) in ("layer", "own")}
    sizes = {row: tuple(first[row][name] for name in profile.SIZE) for row in rows}
    sized = [row for row in rows if sizes[row] == sizes.get(TRANSFORMER, sizes[row])]
    standing = profile.standings(pd.concat([scores[:0], *rows.values()]), sized).dropna(subset="tier")

    words = {}
    for row in rows:
        if row in ours or row == "rt":
            others = scores[scores["layer"].isin({*rows} - {row} - ours)]
            found = profile.place_of(rows[row], others) if len(others) else None
            words[row] = (found or "no place: no reference profiles of this size and training").partition(" (")[0]
    return Board(
        name="profile",
        headings=("score", "capacity", "axis"),
        cells=cells,
        points=first,
        overall={
            row: (rank, Estimate(**standing.loc[row, ["mean", "low", "high"]]).text(3))
            for row, rank in standing["rank"].items()
        },
        words=words,
        tiers=standing["tier"].astype(int).to_dict(),
    )
