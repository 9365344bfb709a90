"""Effective depth, and accuracy against the length of RT's blocks."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes

from runners.drawing import RT, style_of
from runners.mad.reference.overview import BLOCKS, DEPTHS, NOT_RUN, effective_depth
from runners.report.cells import Board, Cell
from runners.report.pictures import Picture, estimate_text, not_shown, panels_of_tasks
from runners.report.svg import MUTED, STYLE, accuracy_axis, limit_lines, mark, panel, to_svg
from tasks import TASKS

UNTRAINED = "not\ntrained"
HEIGHTS = (0.5, 0.3, 0.7)
"""Possible positions of words in place of a mark, in order of preference."""


def depth_picture(board: Board) -> Picture:
    """Return the accuracy of one RT layer beside one to four Transformer layers."""

    def draw(task: str, metric: str) -> Markup | None:
        rt = board.cells.get(("rt", task))
        found = [board.cells.get((name, task)) for name in DEPTHS]
        if rt is None or not any(found) or board.rows.keys().isdisjoint(DEPTHS[1:]):
            return None
        return _draw(found, [*range(1, len(DEPTHS) + 1)], "Transformer layers", metric, rt)

    panels = panels_of_tasks(draw)
    standings = {place: cell.standing for place, cell in board.cells.items()}
    known = {task: depth for task in TASKS if (depth := effective_depth(standings, task)) != NOT_RUN}
    worth = "; ".join(f"{task}: {depth}" for task, depth in known.items())
    return Picture(
        name="depth",
        title="Effective depth",
        question="How many Transformer layers is one RT layer worth? The line and band are one RT layer with its "
        "interval. RT is worth the smallest number of layers whose interval of token accuracy reaches that of RT; it "
        "may lie between that number and the one below. "
        + (f"Worth: {worth}." if worth else "No task has all the cells that this needs yet."),
        panels=panels,
        legend={"rt": style_of("rt"), "transformer": style_of("transformer")},
        missing=not_shown(panels, "RT, or Transformers of one to four layers, are not trained on it"),
    )


def block_picture(board: Board) -> Picture:
    """Return the accuracy of RT against the length of its blocks, the Transformer at the end."""
    lengths: Mapping[str, str] = {name: str(block) for block, name in BLOCKS.items()} | {"transformer": "all"}

    def draw(task: str, metric: str) -> Markup | None:
        found = [board.cells.get((name, task)) for name in lengths]
        if sum(cell is not None for cell in found) < 2 or board.rows.keys().isdisjoint([*BLOCKS.values()][1:]):
            return None
        return _draw(found, [*lengths.values()], "block (positions)", metric)

    panels = panels_of_tasks(draw)
    return Picture(
        name="blocks",
        title="Accuracy against block",
        question="How much recurrence does a task need? RT may recur over blocks of positions (paper, conclusion), "
        "which is faster. A block of 1 is the exact recurrence; a block of all positions is the Transformer layer.",
        panels=panels,
        legend={"rt": style_of("rt"), "transformer": style_of("transformer")},
        missing=not_shown(panels, "fewer than two of its cells are trained"),
    )


def _draw(
    found: Sequence[Cell | None], ticks: Sequence[object], axis: str, metric: str, line: Cell | None = None
) -> Markup:
    """Draw one mark per cell, words where there is no cell, and a line with a band for ``line``."""
    figure, axes = panel()
    tips = {}
    one = line or next(cell for cell in found if cell is not None)

    # Put the words where they are farthest from every line.
    known = one.standing.accuracy(metric)
    lines = [getattr(limit, metric) for limit in (one.standing.ceiling, one.standing.chance)]
    lines += [known.mean] if line is not None and known is not None else []
    height = max(HEIGHTS, key=lambda y: min(abs(y - at) for at in lines))

    with rc_context(STYLE):
        for x, cell in enumerate(found):
            if cell is None or cell.standing.accuracy(metric) is None:
                words = UNTRAINED if cell is None else "diverged"
                axes.text(x, height, words, ha="center", va="center", color=MUTED, fontsize=7.5)
                continue
            _draw_cell(axes, x, cell, metric)
            tips[f"point{x}"] = f"{cell.row}: {estimate_text(cell, metric)}"

        if line is not None:
            _draw_line(axes, line, metric, len(found))
        limit_lines(axes, getattr(one.standing.ceiling, metric), getattr(one.standing.chance, metric))
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(axis)
        accuracy_axis(axes, metric)
    return to_svg(figure, f"{one.task}: {metric} accuracy against {axis}", tips)


def _draw_cell(axes: Axes, x: float, cell: Cell, metric: str) -> None:
    """Draw a mark with its interval."""
    estimate, style = cell.standing.accuracy(metric), style_of(cell.row)
    assert estimate is not None
    if half := estimate.half_width:
        ends = max(0.0, estimate.mean - half), min(1.0, estimate.mean + half)
        axes.plot([x, x], ends, color=style.color, linewidth=1.2)
    mark(axes, x, estimate.mean, style, f"point{x}", ms=7)


def _draw_line(axes: Axes, cell: Cell, metric: str, width: int) -> None:
    """Draw a cell as a line with the band of its interval."""
    estimate = cell.standing.accuracy(metric)
    if estimate is None:
        return
    half = estimate.half_width or 0.0
    axes.axhspan(max(0.0, estimate.mean - half), min(1.0, estimate.mean + half), color=RT, alpha=0.22, linewidth=0)
    axes.axhline(estimate.mean, color=RT)
