"""Sensitivity to the learning rate, and learning curves."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from markupsafe import Markup
from matplotlib import rc_context

from runners.drawing import Style
from runners.report.cells import Board, Cell
from runners.report.pictures import Picture, cells_of, end_label, legend_of, not_shown, panels_of_tasks
from runners.report.svg import STYLE, accuracy_axis, limit_lines, mark, name_lines, panel, to_svg

FOCUS = ("rt", "transformer")
"""Layers that are always drawn in full."""
FEW = 6
"""Largest number of lines that are labelled at their ends."""
BEST = 2
"""Number of other layers whose learning curves are drawn: the best ones on the task."""
COLUMN = {"sequence": 3, "token": 4}
"""Index of an accuracy in a row of a curve."""


def rate_picture(board: Board) -> Picture:
    """Return the validation accuracy against the peak learning rate."""
    legend = legend_of(board)
    panels = panels_of_tasks(lambda task, metric: _draw_rates(cells_of(board, task), legend, metric))
    return Picture(
        name="learning-rate",
        title="Sensitivity to the learning rate",
        question="Must the learning rate be tuned? Validation accuracy of seed 0 at each peak learning rate, with the "
        "better weight decay. The large mark is the chosen rate. A line that still rises at the right edge shows that "
        "the grid ends too early.",
        panels=panels,
        legend=legend,
        missing=not_shown(panels, "no cell holds several learning rates"),
        lines=True,
    )


def curve_picture(board: Board) -> Picture:
    """Return the validation accuracy over training."""
    legend = legend_of(board)
    panels = panels_of_tasks(lambda task, metric: _draw_curves(_in_focus(cells_of(board, task)), legend, metric))
    shown = {row: style for row, style in legend.items() if any(row in _rows_drawn(board, task) for task in panels)}
    return Picture(
        name="curves",
        title="Learning curves",
        question="When is a task learned, and do the seeds agree? Validation accuracy against steps at the chosen "
        f"point, one line per seed, of RT, the Transformer, the {BEST} best other layers of the task and yours. The "
        "leaderboard shows the parameters of the best evaluation of a run, so that it can be above the end of a line.",
        panels=panels,
        legend=shown,
        missing=not_shown(panels, "no cell holds curves"),
        lines=True,
    )


def _rows_drawn(board: Board, task: str) -> list[str]:
    return [cell.row for cell in _in_focus(cells_of(board, task))]


def _in_focus(cells: Sequence[Cell]) -> list[Cell]:
    """Return RT, the Transformer, the best other layers, and the user's own layers."""
    others = [cell for cell in cells if cell.kind == "layer" and cell.row not in FOCUS]
    others.sort(key=lambda cell: fmean(cell.values("token")), reverse=True)
    rest = {cell.row for cell in others[BEST:]}
    return [cell for cell in cells if cell.row not in rest]


def _draw_rates(cells: Sequence[Cell], legend: Mapping[str, Style], metric: str) -> Markup | None:
    """Draw one line per layer; layers out of focus have thin lines."""
    lines = {cell.row: _by_rate(cell, metric) for cell in cells}
    cells = [cell for cell in cells if len(lines[cell.row]) > 1]
    if not cells:
        return None
    tips, few = {}, len(cells) <= FEW
    figure, axes = panel()

    with rc_context(STYLE):
        for n, cell in enumerate(cells):
            style, line = legend[cell.row], lines[cell.row]
            strong = few or cell.kind == "own" or cell.row in FOCUS
            (drawn,) = axes.plot([*line], [*line.values()], style.line, color=style.color, gid=f"line{n}", zorder=3)
            drawn.set(linewidth=1.8 if strong else 1.0, alpha=1.0 if strong else 0.55)
            tips[f"line{n}"] = cell.row

            chosen = cell.content.chosen_point
            if chosen is not None and chosen.lr in line:
                mark(axes, chosen.lr, line[chosen.lr], style, f"point{n}", ms=7 if strong else 4)
                tips[f"point{n}"] = f"{cell.row}: chosen learning rate {chosen.lr:g}"

        limit_lines(axes, *(getattr(limit, metric) for limit in (cells[0].standing.ceiling, cells[0].standing.chance)))
        rates = sorted({rate for line in lines.values() for rate in line})
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in rates], fontsize=6.5)
        axes.minorticks_off()
        axes.set_xlabel("peak learning rate")
        accuracy_axis(axes, metric)
        axes.set_ylabel(f"validation, {metric}s")
        if few:
            last = [[*lines[cell.row].values()][-1] for cell in cells]
            name_lines(
                axes, [(end_label(cell), y, legend[cell.row].color) for cell, y in zip(cells, last, strict=True)]
            )
    return to_svg(figure, f"{cells[0].task}: validation {metric} accuracy against the learning rate", tips)


def _by_rate(cell: Cell, metric: str) -> dict[float, float]:
    """Return the best accuracy of seed 0 over weight decays, by learning rate; rates that diverged are left out."""
    found: dict[float, float] = {}
    for point in cell.content.points:
        if values := getattr(point, f"validation_{metric}_accuracy"):
            found[point.lr] = max(values[0], found.get(point.lr, 0.0))
    return dict(sorted(found.items()))


def _draw_curves(cells: Sequence[Cell], legend: Mapping[str, Style], metric: str) -> Markup | None:
    """Draw one line per seed."""
    cells = [cell for cell in cells if cell.content.curves]
    if not cells:
        return None
    figure, axes = panel()
    tips, ends = {}, []

    with rc_context(STYLE):
        for n, cell in enumerate(cells):
            style = legend[cell.row]
            for seed, rows in enumerate(cell.content.curves):
                known = [(row[0], row[COLUMN[metric]]) for row in rows if row[COLUMN[metric]] is not None]
                if not known:
                    continue
                gid = f"line{n}-{seed}"
                xs, ys = zip(*known, strict=True)
                axes.plot(xs, ys, style.line, color=style.color, linewidth=1.0, alpha=0.8, gid=gid)
                tips[gid] = f"{cell.row}, seed {seed}: {ys[-1]:.3f} after {xs[-1]:,} steps"
            last = [rows[-1][COLUMN[metric]] for rows in cell.content.curves if rows]
            ends.append((end_label(cell), fmean(y for y in last if y is not None), style.color))

        limit_lines(axes, *(getattr(limit, metric) for limit in (cells[0].standing.ceiling, cells[0].standing.chance)))
        axes.set_xlim(0, max(row[0] for cell in cells for rows in cell.content.curves for row in rows))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")
        axes.set_xlabel("steps")
        accuracy_axis(axes, metric)
        axes.set_ylabel(f"validation, {metric}s")
        name_lines(axes, ends)
    return to_svg(figure, f"{cells[0].task}: validation {metric} accuracy over training, one line per seed", tips)
