"""The overview of the reference profiles, made only from their records: a picture and a page of tables.

``overview.png`` is the heat map of scores. ``overview.md`` holds tiers, scores, capacities, capacity against the size
of the state, and the rungs of every ladder.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from runners.files import write_atomically
from runners.mad.charts import COLORS, DARK, LIGHT
from runners.mad.profile import MARK, STAR, abilities, by_seed, capacity, ladder_of, profile_score, seed_scores, tiers
from runners.mad.ranking import TIE, average_ranks
from runners.mad.reference.overview import markdown, other_ties
from runners.mad.rows import AGAINST_STATE, LAYERS, PROFILED, load_rows
from runners.progress import spell
from runners.style import PLAIN_TEXT
from runners.tables import abbreviated
from tasks import TASKS

POSITIONS = "128"
"""Positions after which the state is counted."""


def write_profiles(folder: Path) -> list[Path]:
    """Write the picture and the page; return their paths, or an empty list if there are no profiles.

    Args:
        folder: folder of all reference results.
    """
    table = load_rows(folder, ["profile"], PROFILED.values(), TASKS)
    if table.empty:
        return []
    picture, page = (folder / "profile" / f"overview.{ending}" for ending in ("png", "md"))
    figure = draw_scores(abilities(seed_scores(table)))
    write_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=100))
    text = profiles_page(table)
    write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [picture, page]


def profiles_page(table: pd.DataFrame) -> str:
    """Return the page as Markdown, from the records of the rungs."""
    scores = seed_scores(table)
    tasks = [task for task in TASKS if task in set(table["task"])]
    names = [name for name in PROFILED if name in set(table["layer"])]
    cells = {(row["layer"], row["task"]): row for row in abilities(scores).to_dict("records")}
    rows = dict(iter(scores.groupby("layer", sort=False)))
    first = table.drop_duplicates("layer").set_index("layer")
    seconds = (table["seconds"] / table["together"]).groupby(table["layer"]).sum()
    headings = [f"`{task}`" for task in tasks]

    # Tiers of the layers that have all abilities; then other rows.
    seeds = {name: by_seed(rows[name]).unstack() for name in names}
    whole = [name for name in names if len(seeds[name]) == len(tasks) and seeds[name].notna().all(axis=None)]
    ranked = [entry.name for entry in LAYERS if entry.name in whole]
    scores_LAS = np.stack([seeds[name].to_numpy() for name in ranked]) if ranked else np.zeros((0, len(tasks), 1))
    means = dict(zip(ranked, scores_LAS.mean(axis=(1, 2)).tolist(), strict=True))
    tier_of = dict(zip(ranked, tiers(scores_LAS) if len(ranked) > 1 else [1] * len(ranked), strict=True))
    rank_of = dict(zip(ranked, average_ranks([*means.values()]), strict=True))
    order = [*sorted(ranked, key=lambda name: -means[name]), *(name for name in names if name not in ranked)]

    def score(name: str, task: str) -> str:
        row = cells.get((name, task))
        return "" if row is None or np.isnan(row["score"]) else f"{row['score']:.2f}{STAR * row['edge']}"

    def state(name: str) -> str:
        floats = first.loc[name, "state"]
        return abbreviated(floats[POSITIONS]) if floats else "?"

    lines = []
    for name in order:
        place = [str(tier_of[name]), f"{rank_of[name]:g}"] if name in ranked else ["", ""]
        profile = profile_score(rows[name]).text(3) if name in whole else ""
        costs = [abbreviated(first.loc[name, "parameters"]), state(name), spell(seconds[name])]
        lines.append([f"`{name}`", *place, profile, *costs, *(score(name, task) for task in tasks)])
    parts = [
        "# Reference profiles",
        "Made by `python -m runners.mad.reference --preset profile` from the files in this folder. The score of an "
        "ability is the mean over the six rungs of its ladder, 0 for chance and 1 for the ceiling, on the test split. "
        f"{STAR} says that the chosen learning rate is the largest of the grid. Intervals are 95% over seeds.",
        "![Scores of all rows](overview.png)",
        "## Tiers and scores",
        markdown(["layer", "tier", "rank", "profile score", "parameters", "state", "time", *headings], lines),
        "Layers in one tier are not told apart from its first by a paired bootstrap over abilities and seeds, adjusted "
        f"for the number of pairs. Profile scores that differ by less than {TIE} share the average rank. The state is "
        f"in floats after {POSITIONS} positions.",
    ]
    if len(ranked) > 1:
        frame = pd.DataFrame({"score": means})
        parts.append(f"Other rules of ties would change this: {other_ties(frame)}.")

    # Capacities.
    axes = [f"{heading}: {ladder_of(task).axis}" for heading, task in zip(headings, tasks, strict=True)]
    reach = [
        [f"`{name}`", *(capacity(cells[at]) if (at := (name, task)) in cells else "" for task in tasks)]
        for name in order
    ]
    parts += [
        "## Capacity",
        "The hardest value on the axis with a score of at least 0.9.",
        markdown(["layer", *axes], reach),
    ]

    # Capacity against the state.
    sized = sorted(
        {
            (first.loc[name, "mixer"], first.loc[name, "width"], name)
            for name in names
            if not PROFILED[name].options and first.loc[name, "layers"] == 1
        }
    )
    known = [task for task in AGAINST_STATE if task in tasks]
    lines = [
        [f"`{mixer}`", str(width), state(name), *(capacity(cells[name, task]) for task in known)]
        for mixer, width, name in sized
        if all((name, task) in cells for task in known)
    ]
    parts += ["## Capacity against the state", markdown(["layer", "width", "state", *known], lines)]

    # Ladders.
    for task in tasks:
        ladder = ladder_of(task)
        lines = [
            [
                f"`{name}`",
                *(
                    "" if np.isnan(y) else f"{y:.2f}{MARK * (not own)}"
                    for y, own in zip(cells[name, task]["rungs"], cells[name, task]["trained"], strict=True)
                ),
            ]
            for name in order
            if (name, task) in cells
        ]
        parts += [f"## {task}", markdown([ladder.axis, *(f"{value:g}" for value in ladder.rungs)], lines)]
    return (
        "\n\n".join([*parts, f"{MARK} not trained: 0 beyond a rung that is lost, 1 below one at its ceiling."]) + "\n"
    )


@PLAIN_TEXT
def draw_scores(found: pd.DataFrame) -> Figure:
    """Draw the heat map of scores: a row for each layer, a column for each ability; the best mean is on top."""
    values = found.pivot(index="layer", columns="task", values="score")
    values = values.loc[values.mean(axis=1).sort_values(ascending=False).index, [t for t in TASKS if t in values]]
    stars = found.assign(star=np.where(found["edge"], STAR, "")).pivot(index="layer", columns="task", values="star")
    stars = stars.reindex_like(values)
    figure = Figure(figsize=(4 + 0.6 * values.shape[1], 2 + 0.25 * len(values)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, cmap=COLORS, vmin=0, vmax=1, aspect="auto")
    for at, score in np.ndenumerate(values.to_numpy()):
        if not np.isnan(score):
            text, ink = f"{score:.2f}{stars.iat[at]}", DARK if score > 0.6 else LIGHT
            axes.text(at[1], at[0], text, ha="center", va="center", color=ink, fontsize=8)
    axes.set_yticks(range(len(values)), [*values.index], fontsize=8)
    axes.set_xticks(
        range(values.shape[1]), [*values.columns], rotation=40, ha="right", rotation_mode="anchor", fontsize=8
    )
    axes.tick_params(length=0)
    axes.set_title(f"score of each ability: 0 chance, 1 ceiling, mean over six rungs; {STAR} largest rate", fontsize=10)
    return figure
