"""The pictures of a board. Each answers one question, with one SVG panel for each task and metric."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from markupsafe import Markup

from mixers.costs import LENGTHS
from mixers.options import override
from runners.report.boards import METRICS, Board, Cell
from runners.report.svg import Chart
from runners.style import RT, Style, styles
from runners.tables import abbreviated
from tasks import TASKS
from tasks.base import LENGTH_PREFIX

DEPTHS = {"1": "transformer", "2": "transformer-2-layers", "3": "transformer-3-layers", "4": "transformer-4-layers"}
"""Rows of the Transformer by the number of layers."""
BLOCKS = {"1": "rt", "4": "rt-block-4", "16": "rt-block-16", "all": "transformer"}
"""Rows of RT by the length of its blocks; a block of all positions is the Transformer layer."""
FOCUS = ("rt", "transformer")
"""Layers whose learning curves are always drawn."""
BEST = 2
"""Number of other layers whose learning curves are drawn: the best ones on the task."""
FEW = 6
"""Largest number of lines that are labelled at their ends."""
LONGEST = 15
"""Characters of a name at the end of a line."""
OF_LENGTH = re.compile(rf"{LENGTH_PREFIX}(\d+)\.token_accuracy")
Looks = Mapping[str, Style]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture.

    Attributes:
        name: anchor in the page.
        title: title.
        question: the question that it answers, and how to read it.
        panels: SVG by title and metric; a panel that does not depend on the metric has the key ``both``.
        legend: mark and colour of each layer.
        lines: whether layers are drawn as lines, which the legend then shows.
        wide: whether a panel takes the whole width.
    """

    name: str
    title: str
    question: str
    panels: Mapping[str, Mapping[str, Markup]]
    legend: Looks = field(default_factory=dict)
    lines: bool = False
    wide: bool = False


def picture_of(board: Board, name: str) -> Picture:
    """Draw the picture of a board with this name, one of ``PICTURES``."""
    title, question, draw, metrics, lines = PICTURES[name]
    looks = styles([row for row in board.rows if board.first(row=row).kind != "variant"])
    panels: dict[str, dict[str, Markup]] = {}
    rows: set[str] = set()
    for task in board.tasks:
        limits = board.first(task=task).point
        for metric in metrics:
            chart = Chart(description=f"{task}: {title}, {metric} accuracy", labels={}, limits={"y": (-0.03, 1.05)})
            chart.ticks["y"] = {0: "0", 0.25: "", 0.5: "0.5", 0.75: "", 1: "1"}
            chart.rule("y", limits["ceiling"][metric])
            chart.rule("y", limits["chance"][metric], "stroke-dasharray:1 2")
            if drawn := draw(chart, board, task, metric, looks):
                panels.setdefault(task, {})[metric if len(metrics) > 1 else "both"] = chart.svg()
                rows |= drawn
    legend = {row: look for row, look in looks.items() if row in rows}
    return Picture(name=name, title=title, question=question, panels=panels, legend=legend, lines=lines)


def cells_of(board: Board, task: str) -> list[Cell]:
    """Return a task's cells with test accuracies, without variants; RT and the user's own are last, on top."""
    found = [cell for (_, other), cell in board.cells.items() if other == task and cell.kind != "variant"]
    return sorted((cell for cell in found if cell.runs), key=lambda cell: (cell.kind == "own", cell.row == "rt"))


def end_label(row: str) -> str:
    """Return a name that fits beside the end of a line; a user's own layer is named by its class, with a star.

    A long name keeps its end, which tells variants of a layer from each other.
    """
    if ":" not in row:
        return row
    name = row.rpartition(":")[2].partition(" ")[0]
    half = LONGEST // 2
    return f"{name if len(name) <= LONGEST else f'{name[:half]}…{name[half + 1 - LONGEST :]}'} ★"


def draw_state(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw one mark with an interval per layer, and the Pareto front: accuracy against the state."""
    known = [(x, cell) for cell in cells_of(board, task) if (x := board.costs(cell.row)["states"][0])]
    if len(known) < 2:
        return set()

    # The best accuracy at a state of at most x, as steps.
    pairs = sorted((x, cell.mean(metric)) for x, cell in known)
    xs, best = np.repeat([x for x, _ in pairs], 2), np.maximum.accumulate(np.repeat([y for _, y in pairs], 2))
    chart.line(xs[1:], best[:-1], Style(color="var(--muted)", marker="o"), width=0.8)

    for x, cell in known:
        look = looks[cell.row]
        chart.line([x, x], cell.ends(metric), replace(look, line="-"), width=1, alpha=0.6)
        text = f"{cell.row}: {metric} accuracy {cell.text(metric)}, state {abbreviated(x)} floats"
        chart.mark(x, cell.mean(metric), look, text)
    chart.logs, chart.text = "x", lambda x: abbreviated(round(x)).replace(".00", "").replace(".0", "")
    chart.labels = {"x": f"state at {LENGTHS[0]} positions (floats)", "y": f"{metric} accuracy"}
    return {cell.row for _, cell in known}


def draw_depth(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw one RT layer as a line with the band of its interval, and one to four Transformer layers as marks."""
    rt = board.cells.get(("rt", task))
    if rt is None or not rt.runs:
        return set()
    ends, (low, high) = (-0.5, len(DEPTHS) - 0.5), rt.ends(metric)
    chart.band(ends, [low, low], [high, high], RT)
    chart.line(ends, [rt.mean(metric)] * 2, looks["rt"], f"rt: {metric} accuracy {rt.text(metric)}")
    return _draw_rows(chart, board, task, metric, looks, DEPTHS, "Transformer layers") | {"rt"}


def draw_blocks(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw RT against the length of its blocks, the Transformer at the end."""
    return _draw_rows(chart, board, task, metric, looks, BLOCKS, "block (positions)")


def _draw_rows(
    chart: Chart, board: Board, task: str, metric: str, looks: Looks, rows: Mapping[str, str], label: str
) -> set[str]:
    """Draw one mark with its interval for each of some rows, by their names on the axis."""
    for x, row in enumerate(rows.values()):
        cell = board.cells.get((row, task))
        if cell is not None and cell.runs:
            look = looks[str(cell.point["mixer"])]
            chart.line([x, x], cell.ends(metric), look, width=1.2)
            chart.mark(x, cell.mean(metric), look, f"{row}: {metric} accuracy {cell.text(metric)}")
    chart.ticks["x"], chart.limits["x"] = dict(enumerate(rows)), (-0.5, len(rows) - 0.5)
    chart.labels = {"x": label, "y": f"{metric} accuracy"}
    return {*looks} & {*rows.values()} if any((row, task) in board.cells for row in rows.values()) else set()


def draw_curves(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw validation accuracy over training, one line per seed, of a few layers."""
    cells = cells_of(board, task)
    others = [cell for cell in cells if cell.kind == "layer" and cell.row not in FOCUS]
    others.sort(key=lambda cell: cell.mean("token"), reverse=True)
    rest = {cell.row for cell in others[BEST:]}
    drawn = set()
    for cell in (cell for cell in cells if cell.row not in rest):
        look, last = looks[cell.row], []
        for run in cell.runs:
            pairs = zip(run["curve"].get("step", []), run["curve"].get(f"{metric}_accuracy", []), strict=True)
            if known := [(x, y) for x, y in pairs if y is not None]:
                xs, ys = zip(*known, strict=True)
                tip = f"{cell.row}, seed {run['seed']}: {ys[-1]:.3f} after {xs[-1]:,} steps"
                chart.line(xs, ys, look, tip, width=1, alpha=0.8)
                last.append(ys[-1])
        if last:
            chart.end(end_label(cell.row), fmean(last), look.color)
            drawn.add(cell.row)
    chart.text = lambda x: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"
    chart.labels = {"x": "steps", "y": f"validation, {metric}s"}
    return drawn


def draw_lengths(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw accuracy by length, one line with a band per layer."""
    drawn, every, trained = [], set[int](), None
    for cell in cells_of(board, task):
        found = {OF_LENGTH.fullmatch(str(name)): y for name, y in cell.point.items()}
        splits = {int(match[1]): f"{LENGTH_PREFIX}{match[1]}" for match, y in found.items() if match and y == y}
        if not splits:
            continue
        kind = TASKS[task]
        plain = {name: tuple(y) if isinstance(y, list) else y for name, y in cell.point["task_config"].items()}
        if (trained := kind(override(kind.Config, plain)).trained_length) is not None:
            splits[trained] = "test"
        xs, look = sorted(splits), looks[cell.row]
        ys = [cell.mean(metric, splits[x]) for x in xs]
        lows, highs = zip(*(cell.ends(metric, splits[x]) for x in xs), strict=True)
        figures = ", ".join(f"{y:.3f} at {x}" for x, y in zip(xs, ys, strict=True))
        chart.band(xs, lows, highs, look.color)
        chart.line(xs, ys, look, f"{cell.row}: {figures}")
        drawn.append((cell.row, ys[-1]))
        every |= {*xs}
    lengths = sorted(every)
    chart.ticks["x"] = {x: str(x) for x in (lengths if len(lengths) <= 4 else lengths[1::2])}
    chart.labels = {"x": "length (tokens)", "y": f"{metric} accuracy"}
    if trained is not None:
        chart.rule("x", trained)
    return _named(chart, drawn, looks)


def draw_positions(chart: Chart, board: Board, task: str, metric: str, looks: Looks) -> set[str]:
    """Draw token accuracy along the sequence, one line per layer whose records hold it."""
    drawn = []
    for cell in cells_of(board, task):
        for profile in [run["profile"] for run in cell.runs if isinstance(run["profile"], dict)][:1]:
            ys = profile["accuracy"]
            tip = f"{cell.row}: {ys[0]:.3f} at the first, {ys[-1]:.3f} at the last"
            chart.line(profile["index"], ys, looks[cell.row], tip)
            chart.labels = {"x": f"{profile['axis']} in the sequence", "y": f"{metric} accuracy"}
            drawn.append((cell.row, ys[-1]))
    return _named(chart, drawn, looks)


def _named(chart: Chart, drawn: Sequence[tuple[str, float]], looks: Looks) -> set[str]:
    """Write the names of a few lines at their ends, and return the rows; more lines have the legend alone."""
    for row, y in drawn if len(drawn) <= FEW else ():
        chart.end(end_label(row), y, looks[row].color)
    return {row for row, _ in drawn}


PICTURES: Mapping[str, tuple[str, str, Callable[[Chart, Board, str, str, Looks], set[str]], Sequence[str], bool]] = {
    "state": (
        "Accuracy against state size",
        f"How accurate is a layer for the size of its state? The state is the largest one up to {LENGTHS[0]} "
        "positions, in floats, on a logarithmic axis. The line joins the layers that no layer with a state of the same "
        "size or smaller beats (the Pareto front).",
        draw_state,
        METRICS,
        False,
    ),
    "depth": (
        "Effective depth",
        "How many Transformer layers is one RT layer worth? The line and band are one RT layer with its interval.",
        draw_depth,
        METRICS,
        False,
    ),
    "blocks": (
        "Accuracy against block",
        "How much recurrence does a task need? RT may recur over blocks of positions (paper, conclusion), which is "
        "faster. A block of 1 is the exact recurrence; a block of all positions is the Transformer layer.",
        draw_blocks,
        METRICS,
        False,
    ),
    "curves": (
        "Learning curves",
        "When is a task learned, and do the seeds agree? Validation accuracy against steps at the chosen point, one "
        f"line per seed, of RT, the Transformer, the {BEST} best other layers of the task and yours. The leaderboard "
        "shows the parameters of the best evaluation of a run, so that it can be above the end of a line.",
        draw_curves,
        METRICS,
        True,
    ),
    "lengths": (
        "Extrapolation against length",
        "Do layers generalise to longer sequences? Test accuracy by length, mean and 95% interval over seeds. The grey "
        "line is the longest length in training.",
        draw_lengths,
        METRICS,
        True,
    ),
    "positions": (
        "Accuracy along the sequence",
        "Where in the sequence are the errors? Token accuracy at each scored position of the test split, or at each "
        "answer in order if the positions of answers differ. The dotted line is chance.",
        draw_positions,
        METRICS[1:],
        True,
    ),
}
"""By name: title; question; what draws the chart of a task and a metric, and returns its rows, none if there is nothing
to draw; metrics; and whether layers are lines."""
