"""The overview of the reference profiles, made only from their records: pictures and a page of tables.

``overview.png`` shows the scores of all rows, ``kinds.png`` those of one layer of each kind, ``ladders.png`` their
rungs, ``state.png`` capacity against the size of the state, and ``time.png`` profile scores against the time of a step.
``overview.md`` holds tiers, scores, capacities, the effective depth of RT, and the rungs of every ladder.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from runners.benchmarks import read_benchmarks, steps_of_layers
from runners.files import write_atomically
from runners.mad.points import Estimate
from runners.mad.profile import MARK, STAR, abilities, capacity, ladder_of, seed_scores, standings
from runners.mad.profile_charts import PROFILE, draw_against, draw_ladders, draw_profiles
from runners.mad.ranking import TIE
from runners.mad.reference.overview import DEPTHS, NOT_RUN, markdown, other_ties
from runners.mad.rows import AGAINST_STATE, LAYERS, PROFILED, load_rows
from runners.mad.tables import Row
from runners.progress import spell
from runners.style import write_small_png
from runners.tables import abbreviated
from tasks import TASKS

POSITIONS = "128"
"""Positions after which the state is counted."""
SIZES = {"width", "mlp_width"}
"""What rows of several widths differ in."""
RUNGS = {f"capacity on {task}: {ladder_of(task).axis}": [*ladder_of(task).rungs] for task in AGAINST_STATE}
"""Rungs of each panel of capacities against the state."""
KINDS = ("deltanet", "mamba2", "hyena", "rt", "lstm", "linear-attention", "transformer", "3*gated-deltanet+transformer")
"""One layer of each kind, and a stack, in the picture of the README."""
FRONT = ("transformer", "rt")
"""Layers in front of all others in the picture of ladders."""


def write_profiles(folder: Path) -> list[Path]:
    """Write the pictures and the page; return their paths, or an empty list if there are no profiles.

    Args:
        folder: folder of all reference results.
    """
    table = load_rows(folder, ["profile"], PROFILED.values(), TASKS)
    if table.empty:
        return []
    scores = seed_scores(table)
    found, standing = abilities(scores), standings(scores, {entry.name for entry in LAYERS})

    # Facts of each row: the state, the time of a step relative to the Transformer's, and seconds of all runs.
    facts = table.drop_duplicates("layer").set_index("layer")
    steps = steps_of_layers(read_benchmarks(folder.parent / "published"))
    facts = facts.assign(
        floats=facts["state"].str.get(POSITIONS).astype(float),
        step=pd.Series({layer: found.ratio for layer, found in steps.items()}, dtype=float),
        time=(table["seconds"] / table["together"]).groupby(table["layer"]).sum(),
    )

    # Rows of two abilities alone are in the picture of the state, and ladders are those of the layers.
    whole = standing[[not PROFILED[str(name)].tasks for name in standing.index]]
    shown = {"overview": whole, "kinds": whole[whole.index.isin(KINDS)]}
    figures = {name: draw_profiles(found, rows) for name, rows in shown.items() if len(rows)}
    figures["ladders"] = draw_ladders(found[found["layer"].isin([entry.name for entry in LAYERS])], FRONT)
    ranked = standing.dropna(subset="tier").join(facts).dropna(subset="step").reset_index()
    costs = {
        "state": (against_state(found, facts), f"largest state up to {POSITIONS} positions (floats)", "floats"),
        "time": (
            ranked.assign(panel=PROFILE, y=ranked["mean"]),
            "time of a step of 30 runs, × the Transformer’s",
            "step",
        ),
    }
    for name, (marks, label, column) in costs.items():
        if len(marks):
            figures[name] = draw_against(marks.assign(x=marks[column]), label, RUNGS if name == "state" else {})

    written = [folder / "profile" / f"{name}.png" for name in figures]
    for file, figure in zip(written, figures.values(), strict=True):
        write_small_png(figure, file)
    text, page = profiles_page(found, standing, facts), folder / "profile" / "overview.md"
    write_atomically(page, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return [*written, page]


def against_state(found: pd.DataFrame, facts: pd.DataFrame) -> pd.DataFrame:
    """Return the capacities of layers that have profiles of several widths, with the columns of ``draw_against``."""
    names = {"capacity": "y", "capacity.low": "low", "capacity.high": "high"}
    sized = [
        entry.name for entry in PROFILED.values() if entry.layers == 1 and not {*entry.options, *entry.sizes} - SIZES
    ]
    marks = found[found["layer"].isin(sized)].join(facts[["mixer", "floats"]], on="layer").rename(columns=names)
    marks = marks.assign(layer=marks["mixer"], panel="capacity on " + marks["task"] + ": " + marks["axis"])
    marks = marks[marks["panel"].isin([*RUNGS])].dropna(subset=["floats", "y"]).sort_values("width", kind="stable")
    return marks[marks.groupby(["task", "mixer"])["width"].transform("size") > 1]


def starred(row: Row, text: str) -> str:
    """Return the text about an ability with a star, if it is not empty and the rate is the largest of the grid."""
    return text + STAR * (row["edge"] and text != "")


def effective_depth(cells: Mapping[tuple[str, str], Row], task: str) -> str:
    """Return as an interval how many Transformer layers one RT layer is worth on a task, by capacities.

    It is worth more than n layers if the intervals of up to n layers lie below that of RT, and at most n if that of n
    layers does not begin below the end of RT's, which must be below the last rung.
    """
    if any((name, task) not in cells or np.isnan(cells[name, task]["capacity"]) for name in ("rt", *DEPTHS)):
        return NOT_RUN
    rt, *deeper = (cells[name, task] for name in ("rt", *DEPTHS))
    below = [row["capacity.high"] < rt["capacity.low"] for row in deeper]
    more = [*below, False].index(False)
    most = [n for n, row in enumerate(deeper, 1) if n > more and row["capacity.low"] >= rt["capacity.high"]]
    if rt["capacity.high"] == -np.inf:
        return "RT is below the first rung"
    last = [*ladder_of(task).rungs][-1] - 1e-9
    if most and rt["capacity.low"] >= last:
        return f"both are at the last rung from {most[0]}"
    if rt["capacity.high"] >= last:
        most = []
    return ", ".join([f"more than {more}"] * (more > 0) + [f"at most {n}" for n in most[:1]]) or "not told apart"


def profiles_page(found: pd.DataFrame, standing: pd.DataFrame, facts: pd.DataFrame) -> str:
    """Return the page as Markdown.

    Args:
        found: abilities of all rows.
        standing: their order.
        facts: their costs.
    """
    tasks, order = [*found["task"].unique()], [*standing.index]
    cells = {(row["layer"], row["task"]): row for row in found.to_dict("records")}
    headings = [f"`{task}`" for task in tasks]

    def score(name: str, task: str) -> str:
        row = cells.get((name, task))
        return "" if row is None or np.isnan(row["score"]) else starred(row, f"{row['score']:.2f}")

    def reach(name: str, task: str) -> str:
        return starred(cells[name, task], capacity(cells[name, task])) if (name, task) in cells else ""

    # Tiers and scores.
    state = {name: abbreviated(int(y)) if y == y else "?" for name, y in facts["floats"].items()}
    lines = []
    for name, row in standing.iterrows():
        places = [f"{y:g}".replace("nan", "") for y in row[["tier", "rank"]]]
        profile = Estimate(**row[["mean", "low", "high"]]).text(3)
        costs = [abbreviated(facts.loc[name, "parameters"]), state[name], spell(facts.loc[name, "time"])]
        lines.append([f"`{name}`", *places, profile, *costs, *(score(str(name), task) for task in tasks)])
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
        f"the largest up to {POSITIONS} positions, in floats. Time is the sum over trainings, of which several "
        "shared a card.",
    ]
    ranked = standing.dropna(subset="tier")
    if len(ranked) > 1:
        parts.append(f"Other rules of ties would change this: {other_ties(ranked[['mean']])}.")
        if facts["step"].notna().any():
            parts.append("![Profile score against the time of a step](time.png)")

    # Capacities, the effective depth of RT, and capacity against the state.
    axes = [f"{heading}: {ladder_of(task).axis}" for heading, task in zip(headings, tasks, strict=True)]
    transformers = [f"Transformer, {n} layer{'s' * (n > 1)}" for n in range(1, len(DEPTHS) + 1)]
    depths = [
        [f"`{task}`", *(reach(name, task) for name in ("rt", *DEPTHS)), effective_depth(cells, task)] for task in tasks
    ]
    parts += [
        "## Capacity",
        "The value on the axis up to which the score is 0.9 or more.",
        markdown(["layer", *axes], [[f"`{name}`", *(reach(name, task) for task in tasks)] for name in order]),
        "## Effective depth",
        "How many Transformer layers one RT layer is worth, by capacities. More than n: the intervals of up to n "
        "layers lie below that of RT. At most n: that of n layers does not begin below its end.",
        markdown(["ability", "RT, 1 layer", *transformers, "RT is worth"], depths),
    ]
    sized = against_state(found, facts).rename(
        columns={"y": "capacity", "low": "capacity.low", "high": "capacity.high"}
    )
    lines = [
        [
            f"`{row['layer']}`",
            str(row["width"]),
            abbreviated(int(row["floats"])),
            row["task"],
            starred(row, capacity(row)),
        ]
        for row in sized.sort_values(["task", "layer"], kind="stable").to_dict("records")
    ]
    if lines:
        picture = "![Capacity against the size of the state](state.png)"
        capacities = markdown(["layer", "width", "state", "ability", "capacity"], lines)
        parts += ["## Capacity against the state", picture, capacities]
    parts += ["## Ladders", "![Score of each rung](ladders.png)"]
    for task in tasks:
        ladder = ladder_of(task)
        lines = [
            [
                starred(cells[name, task], f"`{name}`"),
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
