"""The overview of the reference results, made only from their files: a picture and a page of tables.

``overview.png`` is the heat map of accuracies. ``overview.md`` holds the ranking, the effective depth of RT and its
accuracy against the length of its blocks. Cells without a file are "not run yet".
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from runners.files import write_atomically
from runners.mad.reference.cells import read_cells
from runners.mad.reference.entries import ENTRIES, LAYERS
from runners.mad.reference.rows import STALE, to_standings
from runners.mad.results.charts import draw_heat_map
from runners.mad.results.ranking import MARK, interval, ranked
from runners.mad.results.standings import Standing
from tasks import TASKS

NOT_RUN = "not run yet"
NOT_SOLVED = "neither solves it"
DEPTHS = ("transformer", "transformer-2-layers", "transformer-3-layers", "transformer-4-layers")
"""Rows with 1, 2, … Transformer layers."""
BLOCKS = {1: "rt", 4: "rt-block-4", 16: "rt-block-16"}
"""Rows of RT by the length of its blocks."""

Found = Mapping[tuple[str, str], Standing]
"""Standings of the existing cells, by row and task."""


def write_overview(folder: Path, command: str) -> list[Path]:
    """Write the picture and the page of a folder of cells; return their paths, or an empty list if there are no cells.

    Args:
        folder: folder of one protocol's cells.
        command: command that makes the page, which the page names.
    """
    rows = ENTRIES.values()
    cells = [cell for task in TASKS for cell in read_cells(folder, rows, task)]
    if not cells:
        return []
    standings = to_standings(cells)
    found = {(cell.layer, cell.task): s for cell, s in zip(cells, standings, strict=True)}

    # Stale cells have a separate row in the picture, because their labels are marked.
    picture, page = folder / "overview.png", folder / "overview.md"
    figure = draw_heat_map(list(found.values()))
    write_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=100))
    text = overview_page(found, command)
    write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [picture, page]


def overview_page(found: Found, command: str) -> str:
    """Return the page as Markdown."""
    parts = [
        "# Reference results",
        f"Made by `{command}` from the files in this folder. Accuracies are token accuracies on the test split: means "
        "over seeds ± half the 95% interval.",
        "![Accuracies of all rows on all tasks](overview.png)",
        "## Ranking",
        ranking_table(found),
        f"If at least two layers have been run on all {len(TASKS)} tasks, they are ranked among themselves, on each "
        "task by mean accuracy; equal means share a rank. The mean rank is over all tasks. Layers that lack tasks "
        "stand below, without a mean rank; their rank on a task is the place that they would take among the complete "
        "layers.",
        "## Effective depth",
        "How many Transformer layers one RT layer is worth: the smallest number of layers whose interval reaches or "
        "exceeds the interval of RT. Where neither RT nor a Transformer with up to that number of layers answers a "
        "single whole test sequence, the table says so instead.",
        depth_table(found),
        "On parity no number of Transformer layers reaches RT, because softmax attention with relative positions alone "
        "cannot tell `1` from `1 1` at the start of a sequence.",
        "## Blocks",
        "Accuracy of RT against the length of its blocks. A block of 1 is the exact recurrence.",
        block_table(found),
    ]
    if any(map(_mark, found.values())):
        parts.insert(2, STALE.capitalize() + ".")
    return "\n\n".join(parts) + "\n"


def ranking_table(found: Found) -> str:
    """Return the ranks of the registered layers on each task: complete layers by mean rank, then incomplete ones.

    A single complete layer has no rank.
    """
    names = [entry.name for entry in LAYERS if any((entry.name, task) in found for task in TASKS)]
    known = {name: [task for task in TASKS if (name, task) in found] for name in names}
    complete = [name for name in names if len(known[name]) == len(TASKS)]
    if len(complete) == 1:
        complete = []

    # The place of each layer among the complete ones.
    ranks: dict[tuple[str, str], int] = {}
    for name in names if complete else ():
        for task in known[name]:
            own = found[name, task]
            others = [found[other, task] for other in complete if other != name]
            ranks[name, task] = next(rank for rank, standing in ranked([own, *others]) if standing is own)

    means = {name: fmean(ranks[name, task] for task in TASKS) for name in complete}
    rows = []
    for name in sorted(names, key=lambda name: (means.get(name, math.inf), -len(known[name]))):
        cells = {task: f"{ranks.get((name, task), '–')}{_mark(found[name, task])}" for task in known[name]}
        mean = f"{means[name]:.1f}" if name in means else f"{len(known[name])} of {len(TASKS)} tasks"
        rows.append([f"`{name}`", mean, *(cells.get(task, NOT_RUN) for task in TASKS)])
    table = markdown(["layer", "mean rank", *(f"`{task}`" for task in TASKS)], rows)

    absent = [f"`{entry.name}`" for entry in LAYERS if entry.name not in names]
    return f"{table}\n\n{NOT_RUN.capitalize()} on any task: {', '.join(absent)}." if absent else table


def depth_table(found: Found) -> str:
    """Return the accuracies of RT and of Transformers of growing depth on each task, and the effective depth."""
    rows = [
        [f"`{task}`", *(_accuracy(found, name, task) for name in ("rt", *DEPTHS)), effective_depth(found, task)]
        for task in TASKS
    ]
    layers = [f"Transformer, {n} layer{'s' if n > 1 else ''}" for n in range(1, len(DEPTHS) + 1)]
    return markdown(["task", "RT, 1 layer", *layers, "RT is worth"], rows)


def effective_depth(found: Found, task: str) -> str:
    """Return in words how many Transformer layers one RT layer is worth on a task."""
    if ("rt", task) not in found:
        return NOT_RUN
    layers = [found["rt", task]]
    least, _ = interval(layers[0])
    worth = f"more than {len(DEPTHS)}"
    for n, name in enumerate(DEPTHS, 1):
        if (name, task) not in found:
            return NOT_RUN
        layers.append(found[name, task])
        if interval(layers[-1])[1] >= least:
            worth = str(n)
            break
    return worth if any(map(solves_some, layers)) else NOT_SOLVED


def solves_some(standing: Standing) -> bool:
    """Return whether a layer answers at least one test sequence without an error, with any seed."""
    estimate = standing.accuracy("sequence")
    return estimate is not None and estimate.mean > 0


def block_table(found: Found) -> str:
    """Return the accuracy of RT on each task at each length of its blocks."""
    rows = [[f"`{task}`", *(_accuracy(found, name, task) for name in BLOCKS.values())] for task in TASKS]
    return markdown(["task", *(f"block {block}" for block in BLOCKS)], rows)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns except the first are aligned to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _accuracy(found: Found, name: str, task: str) -> str:
    """Return the token accuracy of a cell with its interval."""
    if (name, task) not in found:
        return NOT_RUN
    standing = found[name, task]
    estimate = standing.accuracy("token")
    return (standing.failure if estimate is None else estimate.text()) + _mark(standing)


def _mark(standing: Standing) -> str:
    """Return the mark of a stale cell."""
    return MARK if standing.mixer.endswith(MARK) else ""
