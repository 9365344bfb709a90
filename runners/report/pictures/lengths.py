"""Extrapolation against length, and accuracy along the sequence."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup
from matplotlib import rc_context

from runners.drawing import Style
from runners.mad.diagnosis.profile import Profile, along_the_sequence
from runners.mad.reference.cells import Positions
from runners.mad.results.summary import Estimate
from runners.report.cells import Board, Cell, task_of
from runners.report.pictures import Picture, cells_of, end_label, legend_of, panels_of_tasks
from runners.report.svg import MUTED, STYLE, accuracy_axis, name_lines, panel, to_svg
from tasks import TASKS
from tasks.base import LENGTH_PREFIX, Accuracy

AXES = {"position": "position in the sequence", "answer": "answer within its sequence"}
FEW = 6
"""Largest number of lines that are labelled at their ends."""


def length_picture(board: Board) -> Picture:
    """Return the accuracy on sequences longer than in training."""
    legend = legend_of(board)
    panels = panels_of_tasks(lambda task, metric: _draw_lengths(cells_of(board, task), legend, metric))
    rows = {cell.row for task in panels for cell in cells_of(board, task) if _lengths(cell)}
    return Picture(
        name="lengths",
        title="Extrapolation against length",
        question="Do layers generalise to longer sequences? Test accuracy by length, mean and 95% interval over seeds. "
        "The grey line is the longest length in training.",
        panels=panels,
        legend={row: style for row, style in legend.items() if row in rows},
        missing="" if panels else "Nothing to draw yet: no cell holds accuracies by length.",
        lines=True,
    )


def position_picture(board: Board) -> Picture:
    """Return the accuracy along the sequence, for cells that hold it and for studies with a diagnosis."""
    legend = legend_of(board)
    panels: dict[str, dict[str, Markup]] = {}
    rows = set()
    for task in TASKS:
        if members := [cell for cell in cells_of(board, task) if _profile(cell) is not None]:
            panels[task] = {"both": _draw_positions(members, legend)}
            rows |= {cell.row for cell in members}
    return Picture(
        name="positions",
        title="Accuracy along the sequence",
        question="Where in the sequence are the errors? Token accuracy at each scored position of the test split, "
        "or at each answer in order if the positions of answers differ. Reference cells show the mean over their "
        "seeds, and your own studies their chosen model. The dotted line is chance.",
        panels=panels,
        legend={row: style for row, style in legend.items() if row in rows},
        missing=_without_positions([row for row in legend if row not in rows], panels),
        lines=True,
    )


def _without_positions(absent: Sequence[str], panels: Mapping[str, object]) -> str:
    """Return which layers are missing in the picture along the sequence, and what draws them."""
    first = "the first reference cells were stored without it"
    remedy = (
        "python -m runners.mad writes a diagnosis beside every study, and python -m runners.report results/studies/* "
        "shows it here."
    )
    if not panels:
        return f"Nothing to draw yet: {first}. {remedy}"
    names = f"In no panel: {', '.join(absent)}. " if absent else ""
    return f"{names}Layers are missing where {first}; {remedy}"


def _lengths(cell: Cell) -> dict[int, list[Accuracy]]:
    """Return the accuracies of the seeds by length; the test split counts as the longest length in training."""
    probes = cell.content.probes
    numbers = {name: name.removeprefix(LENGTH_PREFIX) for name in probes if name.startswith(LENGTH_PREFIX)}
    found = {int(number): probes[name] for name, number in numbers.items() if number.isdecimal()}
    if found and (trained := _trained_length(cell)) is not None:
        pairs = zip(cell.values("sequence"), cell.values("token"), strict=True)
        found[trained] = [Accuracy(sequence=sequence, token=token) for sequence, token in pairs]
    return dict(sorted(found.items()))


def _trained_length(cell: Cell) -> int | None:
    """Return the longest length in training."""
    return task_of(cell.task, cell.content.task_config).trained_length


def _draw_lengths(cells: Sequence[Cell], legend: Mapping[str, Style], metric: str) -> Markup | None:
    """Draw one line with a band per layer."""
    known = [(cell, found) for cell in cells if len(found := _lengths(cell)) > 1]
    if not known:
        return None
    figure, axes = panel()
    tips, ends = {}, []

    with rc_context(STYLE):
        for n, (cell, found) in enumerate(known):
            style = legend[cell.row]
            estimates = [Estimate.of([getattr(at, metric) for at in seeds]) for seeds in found.values()]
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
            name_lines(axes, ends)
    return to_svg(figure, f"{known[0][0].task}: {metric} accuracy against length", tips)


def _draw_positions(cells: Sequence[Cell], legend: Mapping[str, Style]) -> Markup:
    """Draw one line per cell."""
    figure, axes = panel()
    ends, tips, axis = [], {}, ""

    with rc_context(STYLE):
        for n, cell in enumerate(cells):
            profile, style = _profile(cell), legend[cell.row]
            assert profile is not None
            axis, ys = profile.axis, profile.accuracy
            axes.plot(profile.index, ys, style.line, color=style.color, gid=f"line{n}")
            tips[f"line{n}"] = f"{cell.row}: {ys[0]:.3f} at the first, {ys[-1]:.3f} at the last"
            ends.append((end_label(cell), ys[-1], style.color))
        axes.axhline(cells[0].standing.chance.token, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlabel(AXES[axis])
        axes.locator_params(axis="x", nbins=5, integer=True)
        accuracy_axis(axes, "token")
        if len(ends) <= FEW:
            name_lines(axes, ends)
    return to_svg(figure, f"{cells[0].task}: token accuracy along the sequence", tips)


def _profile(cell: Cell) -> Positions | None:
    """Return the accuracy along the sequence of a cell, or of a study's diagnosis; None if there is neither."""
    if cell.diagnosis is None:
        return cell.content.positions
    by_position, by_answer = (Profile(**cell.diagnosis[name]) for name in ("by_position", "by_answer"))
    axis, profile = along_the_sequence(by_position, by_answer)
    return Positions(axis=axis, index=profile.index, accuracy=profile.accuracy)
