"""The overview of the reference results, made only from their records: a picture and a page of tables.

``overview.png`` shows the accuracies. ``overview.md`` holds the ranking, the effective depth of RT and its
accuracy against the length of its blocks. Results without a file are "not run yet".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from runners.files import write_atomically
from runners.mad.charts import draw_dots
from runners.mad.points import chosen, points
from runners.mad.ranking import OTHER_TIES, TIE, TOKENS, intervals, mean_ranks, places_by_ties, rule_of
from runners.mad.rows import ENTRIES, LAYERS, STACKS, ReferencePreset, file_of, load_rows
from runners.mad.tables import Row, estimate, in_order
from runners.style import write_small_png
from tasks import PUBLISHED

NOT_RUN = "not run yet"
NOT_SOLVED = "neither solves it"
DEPTHS = ("transformer", "transformer-2-layers", "transformer-3-layers", "transformer-4-layers")
"""Rows with 1, 2, … Transformer layers."""
BLOCKS = {1: "rt", 4: "rt-block-4", 16: "rt-block-16"}
"""Rows of RT by the length of its blocks."""


def write_overview(folder: Path, preset: ReferencePreset) -> list[Path]:
    """Write the picture and the page of a preset; return their paths, or an empty list if there are no results.

    Args:
        folder: folder of all reference results.
        preset: name of the preset.
    """
    table = load_rows(folder, [preset], ENTRIES.values(), PUBLISHED)
    if table.empty:
        return []
    found = chosen(points(table))
    found = in_order(found.assign(label=found["layer"], setting=found["task"]))
    place = file_of(folder, preset, ENTRIES["rt"], "").parents[1]
    picture, page = place / "overview.png", place / "overview.md"
    figure = draw_dots(found)
    write_small_png(figure, picture)

    text = overview_page(found, preset)
    write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [picture, page]


def overview_page(found: pd.DataFrame, preset: ReferencePreset) -> str:
    """Return the page as Markdown. A star marks what was chosen at the largest learning rate, below the ceiling.

    Args:
        found: chosen points, with ``label`` and ``setting``.
        preset: name of the preset.
    """
    command = "python -m runners.mad.reference" + ("" if preset == "full" else f" --preset {preset}")
    low, high = intervals(found)
    of = {(row["layer"], row["task"]): row for row in found.assign(low=low, high=high).to_dict("records")}
    tasks = [f"`{task}`" for task in PUBLISHED]

    # Ranks of the layers that have all tasks; the others stand below.
    layers = found[found["layer"].isin([entry.name for entry in LAYERS])]
    counts = layers["layer"].value_counts().reindex([entry.name for entry in LAYERS], fill_value=0)
    ranks = mean_ranks(layers[layers["layer"].map(counts) == len(PUBLISHED)])
    stars = {(name, task): "*" * (row["edge"] == "largest") for (name, task), row in of.items()}
    ranking = [
        [f"`{name}`", f"{row['mean']:.1f}", *(f"{row[task]:g}{stars[name, task]}" for task in PUBLISHED)]
        for name, row in (ranks.iterrows() if len(ranks) > 1 else ())
    ]
    for name, count in counts.items():
        if count < len(PUBLISHED):
            cells = ("–" if (name, task) in of else NOT_RUN for task in PUBLISHED)
            ranking.append([f"`{name}`", f"{count} of {len(PUBLISHED)} tasks", *cells])

    # Places by other rules of ties.
    tasks_of = [task for task in PUBLISHED if task in ranks]
    values = layers.pivot(index="layer", columns="task", values=TOKENS).reindex(index=ranks.index, columns=tasks_of)

    # Accuracies of Transformers of growing depth, and of RT with growing blocks.
    def accuracy(name: str, task: str) -> str:
        return estimate(of[name, task], TOKENS) or "diverged" if (name, task) in of else NOT_RUN

    depths = [
        [f"`{task}`", *(accuracy(name, task) for name in ("rt", *DEPTHS)), effective_depth(of, task)]
        for task in PUBLISHED
    ]
    blocks = [[f"`{task}`", *(accuracy(name, task) for name in BLOCKS.values())] for task in PUBLISHED]
    transformers = [f"Transformer, {n} layer{'s' * (n > 1)}" for n in range(1, len(DEPTHS) + 1)]

    # Stacks beside others of their depth.
    deep = [entry for entry in ENTRIES.values() if entry.layers in {stack.layers for stack in STACKS}]
    stacks = [
        [f"`{entry.name}`", str(entry.layers), *(accuracy(entry.name, task) for task in PUBLISHED)]
        for entry in sorted(deep, key=lambda entry: entry.layers)
        if any((entry.name, task) in of for task in PUBLISHED)
    ]

    parts = [
        "# Reference results",
        f"Made by `{command}` from the files in this folder. Accuracies are token accuracies on the test split: means "
        "and 95% intervals over seeds. A star says that the chosen learning rate is the largest of its grid, and the "
        "accuracy below the ceiling: a larger rate may be better.",
        "![Accuracies of all rows on all tasks](overview.png)",
        "## Ranking",
        markdown(["layer", "mean rank", *tasks], ranking),
        f"Layers that have been run on all {len(PUBLISHED)} tasks are ranked among themselves, on each task by mean "
        f"accuracy; means that differ by less than {TIE} share the average rank: if 19 tie for "
        "the first place, each has rank 10. The mean rank is over all tasks.",
        *([f"Other rules of ties would change this: {other_ties(values)}."] if len(values) > 1 else []),
        "## Effective depth",
        "How many Transformer layers one RT layer is worth: the smallest number of layers whose interval overlaps the "
        "interval of RT, or between two numbers if the smaller is below RT and the larger above. Where neither RT nor "
        "a Transformer with up to that number of layers answers a single whole test sequence, the table says so "
        "instead.",
        markdown(["task", "RT, 1 layer", *transformers, "RT is worth"], depths),
        "On parity no number of Transformer layers reaches RT, because softmax attention with relative positions alone "
        "cannot tell `1` from `1 1` at the start of a sequence.",
        "## Blocks",
        "Accuracy of RT against the length of its blocks. A block of 1 is the exact recurrence.",
        markdown(["task", *(f"block {block}" for block in BLOCKS)], blocks),
    ]
    if any(entry.name in {name for name, _ in of} for entry in STACKS):
        parts += [
            "## Stacks",
            "Stacks of different layers, beside layers of one kind of equal depth.",
            markdown(["stack", "layers", *tasks], stacks),
        ]
    return "\n\n".join(parts) + "\n"


def other_ties(scores: pd.DataFrame) -> str:
    """Return in words what other rules of ties would change: the first layers, and how many layers change places.

    Args:
        scores: a row for each layer, a column for each task; or one column, of profile scores.
    """
    places, found = places_by_ties(scores), []
    for tie in OTHER_TIES:
        first = ", ".join(f"`{name}`" for name in places[tie].sort_values(kind="stable").index[:3])
        found.append(
            f"{rule_of(tie)} {first} lead, and {(places[tie] != places[TIE]).sum()} of {len(places)} places differ"
        )
    return "; ".join(found)


def effective_depth(found: Mapping[tuple[str, str], Row], task: str) -> str:
    """Return in words how many Transformer layers one RT layer is worth on a task.

    That is the smallest number whose interval overlaps that of RT; between two where the smaller is below, and the
    larger above.

    Args:
        found: chosen points by row and task, with the ends ``low`` and ``high`` of their intervals.
        task: name of the task.
    """
    if any((name, task) not in found for name in ("rt", *DEPTHS)):
        return NOT_RUN
    rt, *deeper = (found[name, task] for name in ("rt", *DEPTHS))
    reached = [n for n, row in enumerate(deeper, 1) if row["high"] >= rt["low"]]
    seen = [rt, *deeper[: reached[0] if reached else None]]
    if not any(row["test.sequence_accuracy"] > 0 for row in seen):
        return NOT_SOLVED
    if not reached:
        return f"more than {len(DEPTHS)}"
    n = reached[0]
    exceeds = deeper[n - 1]["low"] > rt["high"]
    return (f"between {n - 1} and {n}" if n > 1 else "less than 1") if exceeds else str(n)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns except the first are aligned to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
