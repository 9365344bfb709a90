"""Extrapolation against length, and accuracy along the sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context

from runners.drawing import Style, label_ends, styles
from runners.mad.results.summary import Estimate
from runners.report.cells import METRICS, Board, Cell, task_of
from runners.report.pictures import Picture, cells_of, end_label, legend_of, panels_of_tasks
from runners.report.svg import MUTED, STYLE, accuracy_axis, panel, to_svg
from tasks import TASKS
from tasks.base import LENGTH_PREFIX

FEW = 6
"""Most lines that are labelled at their ends."""


def length_picture(board: Board) -> Picture:
    """Return the accuracy on sequences longer than those of training."""
    legend = legend_of(board)
    panels = panels_of_tasks(lambda task, metric: _draw_lengths(cells_of(board, task), legend, metric))
    rows = {cell.row for task in panels for cell in cells_of(board, task) if _lengths(cell)}
    return Picture(
        name="lengths",
        title="Extrapolation against length",
        question="Does what is learned hold for longer sequences? Test accuracy by length, mean and 95% interval over "
        "seeds. The grey line is the longest length in training.",
        panels=panels,
        legend={row: style for row, style in legend.items() if row in rows},
        missing="" if panels else "Nothing to draw yet: no cell holds accuracies by length.",
    )


def position_picture(board: Board) -> Picture:
    """Return the accuracy along the sequence, of the cells that have a diagnosis."""
    known = [cell for cell in board.cells.values() if cell.diagnosis is not None]
    legend = styles([cell.row for cell in known])
    panels: dict[str, dict[str, Markup]] = {}
    for task in TASKS:
        if members := [cell for cell in known if cell.task == task]:
            panels[task] = {"both": _draw_positions(members, legend)}
    return Picture(
        name="positions",
        title="Accuracy along the sequence",
        question="Where in the sequence are the errors? Token accuracy at each scored position of the test split, of "
        "the chosen model of each of your studies; by the order of the answers where their positions differ.",
        panels=panels,
        legend=legend,
        missing=""
        if panels
        else "Nothing to draw: reference cells keep no predictions. python -m runners.mad writes a diagnosis beside "
        "every study; python -m runners.report results/studies/* shows it here.",
    )


def _lengths(cell: Cell) -> dict[int, list[dict[str, float]]]:
    """Return the accuracies of the seeds by length, with the test split at the length of training."""
    numbers = {
        name: name.removeprefix(LENGTH_PREFIX) for name in cell.content["probes"] if name.startswith(LENGTH_PREFIX)
    }
    found = {int(number): cell.content["probes"][name] for name, number in numbers.items() if number.isdecimal()}
    if found and (trained := _trained_length(cell)) is not None:
        values = [cell.values(metric) for metric in METRICS]
        found[trained] = [dict(zip(METRICS, pair, strict=True)) for pair in zip(*values, strict=True)]
    return dict(sorted(found.items()))


def _trained_length(cell: Cell) -> int | None:
    """Return the longest length in training."""
    return task_of(cell.task, cell.content["task_config"]).trained_length


def _draw_lengths(cells: Sequence[Cell], legend: Mapping[str, Style], metric: str) -> Markup | None:
    """Draw a line with a band for each layer."""
    known = [(cell, found) for cell in cells if len(found := _lengths(cell)) > 1]
    if not known:
        return None
    figure, axes = panel(labels=len(known) <= FEW)
    tips, ends = {}, []

    with rc_context(STYLE):
        for n, (cell, found) in enumerate(known):
            style = legend[cell.row]
            estimates = [Estimate.of([at[metric] for at in seeds]) for seeds in found.values()]
            means = [estimate.mean for estimate in estimates]
            lows = [max(0.0, e.mean - (e.half_width or 0.0)) for e in estimates]
            highs = [min(1.0, e.mean + (e.half_width or 0.0)) for e in estimates]
            axes.fill_between([*found], lows, highs, color=style.color, alpha=0.15, linewidth=0)
            axes.plot([*found], means, style.line, marker=style.marker, ms=3.5, color=style.color, gid=f"line{n}")
            tips[f"line{n}"] = f"{cell.row}: " + ", ".join(
                f"{estimate.mean:.3f} at {length}" for length, estimate in zip(found, estimates, strict=True)
            )
            ends.append((end_label(cell), means[-1], style.color))

        if (trained := _trained_length(known[0][0])) is not None:
            axes.axvline(trained, color=MUTED, linewidth=0.8)
        lengths = sorted({length for _, found in known for length in found})
        axes.set_xticks(lengths if len(lengths) <= 4 else lengths[1::2])
        axes.set_xlabel("length (tokens)")
        accuracy_axis(axes, metric)
        if len(ends) <= FEW:
            label_ends(axes, ends)
    return to_svg(figure, f"{known[0][0].task}: {metric} accuracy against length", tips)


def _draw_positions(cells: Sequence[Cell], legend: Mapping[str, Style]) -> Markup:
    """Draw a line for each study."""
    figure, axes = panel(labels=len(cells) <= FEW)
    ends, tips = [], {}
    profiles: list[dict[str, Any]] = [_profile(cell.diagnosis or {}) for cell in cells]

    with rc_context(STYLE):
        for n, (cell, profile) in enumerate(zip(cells, profiles, strict=True)):
            style = legend[cell.row]
            axes.plot(profile["index"], profile["accuracy"], style.line, color=style.color, gid=f"line{n}")
            tips[f"line{n}"] = f"{cell.row}: {(cell.diagnosis or {}).get('title', '')}"
            ends.append((end_label(cell), profile["accuracy"][-1], style.color))
        axes.axhline(cells[0].standing.chance.token, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlabel(profiles[0]["axis"])
        accuracy_axis(axes, "token")
        if len(ends) <= FEW:
            label_ends(axes, ends)
    return to_svg(figure, f"{cells[0].task}: token accuracy along the sequence", tips)


def _profile(diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accuracy by position, or by answer where the answers stand at many different positions."""
    positions, answers = diagnosis["by_position"], diagnosis["by_answer"]
    if len(positions["index"]) > 2 * len(answers["index"]):
        return {**answers, "axis": "answer within its sequence"}
    return {**positions, "axis": "position in the sequence"}
