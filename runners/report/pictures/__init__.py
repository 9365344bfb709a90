"""The pictures of the report. Each answers one question, with one SVG panel per task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from runners.drawing import Style, styles
from runners.report.cells import METRICS, Board, Cell
from tasks import TASKS

Draw = Callable[[str, str], Markup | None]
"""Draws the panel of a task and a metric; returns None if there is nothing to draw."""
LONGEST = 15
"""Characters of a name at the end of a line."""
CIRCLES = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "*": "★"}
"""Characters for matplotlib's marks."""
DASHES = {"-": "none", "--": "5 2", ":": "1.5 2", "-.": "6 2 1.5 2"}
"""Dash patterns in a legend for matplotlib's lines."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture.

    Attributes:
        name: anchor in the page.
        title: title.
        question: the question that it answers, and how to read it.
        panels: SVG by task and metric; a panel that does not depend on the metric has the key ``both``.
        legend: mark and colour of each layer.
        missing: which panels are missing, and why.
        wide: whether a panel takes the whole width.
        lines: whether layers are drawn as lines, which the legend then shows.
    """

    name: str
    title: str
    question: str
    panels: Mapping[str, Mapping[str, Markup]]
    legend: Mapping[str, Style] = field(default_factory=dict)
    missing: str = ""
    wide: bool = False
    lines: bool = False


def panels_of_tasks(draw: Draw) -> dict[str, dict[str, Markup]]:
    """Draw the panels of all tasks that have something to draw, in both metrics."""
    found: dict[str, dict[str, Markup]] = {}
    for task in TASKS:
        for metric in METRICS:
            if (svg := draw(task, metric)) is not None:
                found.setdefault(task, {})[metric] = svg
    return found


def not_shown(panels: Mapping[str, object], reason: str) -> str:
    """Return a sentence that names the tasks without a panel; empty if there are none."""
    absent = [task for task in TASKS if task not in panels]
    if len(absent) == len(TASKS):
        return f"Nothing to draw yet: {reason}."
    return f"No panel for {', '.join(absent)}: {reason}." if absent else ""


def cells_of(board: Board, task: str) -> list[Cell]:
    """Return a task's cells with test accuracies, without variants; the Recurrent Transformer is last."""
    found = [board.cells[row, task] for row in board.rows if (row, task) in board.cells]
    shown = [cell for cell in found if cell.kind != "variant" and cell.values("token")]
    return sorted(shown, key=lambda cell: (cell.kind == "own", cell.row == "rt"))


def legend_of(board: Board) -> dict[str, Style]:
    """Return the styles of a board's rows that have cells, without variants."""
    rows = [row for row, (kind, _) in board.rows.items() if kind != "variant"]
    return styles([row for row in rows if any(row == other for other, _ in board.cells)])


def estimate_text(cell: Cell, metric: str) -> str:
    """Return a cell's accuracy in words."""
    estimate = cell.standing.accuracy(metric)
    return "diverged" if estimate is None else f"{metric} accuracy {estimate.text()}"


def end_label(cell: Cell) -> str:
    """Return a name that fits beside the end of a line; a user's own layer is named by its class, with a star.

    A long name keeps its end, which tells variants of a layer from each other.
    """
    if cell.kind != "own":
        return cell.row
    name = cell.row.rpartition(":")[2].partition(" ")[0]
    if len(name) > LONGEST:
        half = LONGEST // 2
        name = f"{name[:half]}…{name[half + 1 - LONGEST :]}"
    return f"{name} ★"
