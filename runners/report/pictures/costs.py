"""Accuracy against the costs of a layer: its state while decoding, and the FLOPs of its training."""

from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes

from mixers.costs import LENGTHS
from runners.drawing import Style
from runners.report.cells import Board, Cell, training_flops
from runners.report.pictures import Picture, cells_of, estimate_text, legend_of, not_shown, panels_of_tasks
from runners.report.svg import MUTED, STYLE, accuracy_axis, limit_lines, mark, panel, to_svg
from runners.tables import abbreviated

Cost = Callable[[Cell], float | None]
POSITIONS = LENGTHS[0]


def state_picture(board: Board) -> Picture:
    """Return accuracy against the state."""
    return _picture(
        board,
        _state,
        name="state",
        title="Accuracy against state size",
        question=f"How accurate is a layer for the size of its state? The state is the largest one up to {POSITIONS} "
        "positions, in floats, on a logarithmic axis. The line joins the layers that no layer with a state of the same "
        "size or smaller beats (the Pareto front).",
        axis=f"state at {POSITIONS} positions (floats)",
    )


def flops_picture(board: Board) -> Picture:
    """Return accuracy against the FLOPs of training."""
    return _picture(
        board,
        training_flops,
        name="flops",
        title="Accuracy against training FLOPs",
        question="What does accuracy cost in training? FLOPs of one run: forward pass times three, times the tokens "
        "of all steps. Only matrix products and convolutions are counted. Recurrences without them count as zero, "
        "which favours state-space layers and recurrent networks. The line is the Pareto front.",
        axis="FLOPs of one training run",
    )


def _state(cell: Cell) -> float | None:
    found = cell.standing.costs.state_floats
    return None if found is None else float(found[POSITIONS])


def _picture(board: Board, cost: Cost, *, name: str, title: str, question: str, axis: str) -> Picture:
    legend = legend_of(board)

    def draw(task: str, metric: str) -> Markup | None:
        return _draw(cells_of(board, task), cost, legend, metric, axis)

    panels = panels_of_tasks(draw)
    drawn = {cell.row for cell in board.cells.values() if cost(cell) is not None}
    unknown = [row for row in legend if row not in drawn]
    without = f"In no panel, because the figure is not known of them: {', '.join(unknown)}." if unknown else ""
    return Picture(
        name=name,
        title=title,
        question=question,
        panels=panels,
        legend={row: style for row, style in legend.items() if row in drawn},
        missing=" ".join(filter(None, [not_shown(panels, "two layers must be trained on a task"), without])),
    )


def _draw(cells: Sequence[Cell], cost: Cost, legend: dict[str, Style], metric: str, axis: str) -> Markup | None:
    """Draw one mark with an interval per layer, and the Pareto front."""
    known = [(x, cell) for cell in cells if (x := cost(cell)) is not None]
    if len(known) < 2:
        return None
    figure, axes = panel()
    tips = {}

    with rc_context(STYLE):
        for n, (x, cell) in enumerate(known):
            estimate = cell.standing.accuracy(metric)
            assert estimate is not None
            if half := estimate.half_width:
                ends = max(0.0, estimate.mean - half), min(1.0, estimate.mean + half)
                axes.plot([x, x], ends, color=legend[cell.row].color, linewidth=1, alpha=0.6)
            mark(axes, x, estimate.mean, legend[cell.row], f"point{n}")
            tips[f"point{n}"] = f"{cell.row}: {estimate_text(cell, metric)}, {axis} {abbreviated(round(x))}"

        _draw_front(axes, [(x, cell.standing.accuracy(metric).mean) for x, cell in known])  # type: ignore[union-attr]
        limit_lines(axes, *(getattr(limit, metric) for limit in (cells[0].standing.ceiling, cells[0].standing.chance)))
        axes.set_xscale("log")
        low, high = min(x for x, _ in known), max(x for x, _ in known)
        axes.set_xlim(low / 1.5, high * 1.5)
        axes.set_xticks(np.geomspace(low, high, 3 if high > 8 * low else 2 if high > 1.6 * low else 1))
        axes.xaxis.set_major_formatter(lambda x, _: _tick(x))
        axes.minorticks_off()
        axes.set_xlabel(axis)
        accuracy_axis(axes, metric)
    return to_svg(figure, f"{cells[0].task}: {metric} accuracy against {axis}, {len(known)} layers", tips)


def _tick(value: float) -> str:
    """Return a cost with two digits and a unit: 33k."""
    text = abbreviated(round(float(f"{value:.2g}")))
    figures = text.rstrip("kMGTP")
    return f"{float(figures):g}{text[len(figures) :]}"


def _draw_front(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw the Pareto front as steps: the best accuracy at a cost of at most x."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    front.append((max(x for x, _ in points), front[-1][1]))
    xs, ys = zip(*front, strict=True)
    axes.step(xs, ys, where="post", color=MUTED, linewidth=1, zorder=1)
