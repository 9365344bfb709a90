"""Reference rows beside one's own layers, and the rank of a layer among them.

A reference row and a study are comparable if they share task and data, model (widths and number of layers), training
(steps, batch, evaluations, optimizer), grid and number of seeds. Precision may differ, so that studies on a laptop have
reference rows, too. A study with more grid points or seeds is shown as it would be without these.

Layers are ranked by mean test accuracy over tokens; equal means share the smaller rank. Two layers are tied if their
95% intervals overlap. A layer whose grid points all diverged is last.
"""

import json
import math
from typing import Any

import pandas as pd
from rich.console import Console

from runners.mad.points import HALF, GridPoint, choose, chosen, points
from runners.mad.tables import KINDS, Row, accuracies, costs_of, in_order, labelled, print_notes, printed_table
from runners.tables import COSTS, FOOTNOTE, fits

SHARED = ("task_config", "width", "mlp_width", "layers", "steps", "batch_size", "evaluations", "optimizer")
"""Settings that comparable results share, beside task, grid and seeds."""
TOKENS = "test.token_accuracy"
"""What layers are ranked by."""
DIGITS = 12
"""Decimal digits of a mean that count. A sum of floats depends on its order, which would rank equal means apart."""
SEVERAL = 3
"""Number of settings from which on layers have a mean rank."""


def beside(own: pd.DataFrame, reference: pd.DataFrame | None) -> tuple[pd.DataFrame, list[str]]:
    """Return one's own studies beside comparable reference rows, and a line for each study without such rows.

    Args:
        own: records of one's own studies.
        reference: records of reference results; None for none.

    Returns:
        Chosen points as ``labelled`` returns them, with two more columns: ``own``, and ``group``, a
        number that comparable results share, NaN for a study without reference rows.
    """
    studies = labelled(chosen(points(own))).assign(own=True, group=math.nan)
    if reference is None:
        return studies, []
    rows = chosen(points(reference)).assign(own=False)
    terms = [json.dumps([row[name] for name in ("task", *SHARED, "grid")]) for row in rows.to_dict("records")]
    groups = [members for _, members in rows.groupby(terms, sort=False)]

    shown: list[Row] = []
    used: dict[int, str] = {}
    reasons = []
    for study in studies.to_dict("records"):
        records = own[own["study"] == study["study"]]
        unlike: list[tuple[int, str]] = []
        for number, members in enumerate(groups):
            other = members.iloc[:1].to_dict("records")[0]
            if other["task"] != study["task"]:
                continue
            seeds = int(members["seeds"].map(len).max())
            (narrow,) = chosen(points(_narrowed(records, other["grid"], seeds))).to_dict("records")
            differences = _differences(narrow, other, seeds)
            if not differences:
                study = study | narrow | {"group": number}
                used.setdefault(number, study["setting"])
                break
            unlike.append((len(differences), f"{differences[0]}: --preset {other['preset']} has theirs"))
        else:
            reason = min(unlike)[1] if unlike else "there are none on this task"
            reasons.append(f"no reference rows for {study['label']} on {study['setting']}: {reason}")
        shown.append(study)

    labels = set(studies["label"])
    for number, setting in used.items():
        for row in groups[number].to_dict("records"):
            label = f"{row['layer']} (reference)" if row["layer"] in labels else row["layer"]
            shown.append(row | {"label": label, "setting": setting, "group": number})
    return in_order(pd.DataFrame(shown)), reasons


def ranking(own: pd.DataFrame, reference: pd.DataFrame | None) -> pd.DataFrame:
    """Return one's own studies and the comparable reference rows by rank; arguments as for ``beside``.

    Columns as there, and: ``rank``; ``better``, ``tied`` and ``worse``, the numbers of other layers in the setting.
    Studies without reference rows are left out.
    """
    return _ranked(beside(own, reference)[0])


def mean_ranks(found: pd.DataFrame) -> pd.DataFrame:
    """Return the ranks of the layers that have all settings, among themselves, by ``label``.

    Columns are the settings, and ``mean``, the mean rank, by which they are sorted; equal ones keep their order.

    Args:
        found: chosen points with ``label`` and ``setting``.
    """
    values = found.assign(value=_means(found)).pivot(index="label", columns="setting", values="value")
    values = values.loc[found["label"].unique(), found["setting"].unique()].dropna()
    ranks = values.rank(ascending=False, method="min").astype(int)
    return ranks.assign(mean=ranks.mean(axis=1)).sort_values("mean", kind="stable")


def print_rankings(own: pd.DataFrame, reference: pd.DataFrame | None, console: Console) -> None:
    """Print the layers of each setting by rank, then a sentence about each own layer; arguments as for ``beside``.

    On a narrow console, the costs are in a separate table.
    """
    shown, reasons = beside(own, reference)
    found = _ranked(shown)
    found["name"] = found["own"].map({True: "→ ", False: "  "}) + found["label"]
    mine = found[found["own"]].to_dict("records")
    wide, narrow = [], []
    for _, members in found.groupby("group", sort=False):
        rows = [(y["name"], [str(y["rank"]), *accuracies(y)], costs_of(y)) for y in members.to_dict("records")]
        title = f"{members['setting'].iloc[0]}: yours (→) among the reference rows, by token accuracy"
        wide.append(printed_table(title, ("layer", "", *KINDS, *COSTS), [(name, y + costs) for name, y, costs in rows]))
        narrow.append(printed_table(title, ("layer", "", *KINDS), [(name, y) for name, y, _ in rows]))

    is_wide = all(fits(table, console) for table in wide)
    for table in wide if is_wide else narrow:
        console.print(table)
    if not is_wide:
        each = found.drop_duplicates("label").sort_values("own", ascending=False, kind="stable").to_dict("records")
        console.print(printed_table("costs", ("layer", *COSTS), [(row["name"], costs_of(row)) for row in each]))
    if mine:
        print_notes(found, console)
        console.print(FOOTNOTE)

    for row in mine:
        others = f"{row['better']} better, {row['tied']} tied, {row['worse']} worse"
        place = f"{ordinal(row['rank'])} of {1 + row['better'] + row['tied'] + row['worse']}"
        console.print(f"{row['label']} on {row['setting']}: {place}: {others}", soft_wrap=True)
    if found["setting"].nunique() >= SEVERAL:
        ranks = mean_ranks(found)
        places = ranks["mean"].round(DIGITS).rank(method="min").astype(int)
        for label in ranks.index.intersection([row["label"] for row in mine]) if len(ranks) > 1 else ():
            place = f"{ordinal(places[label])} of {len(ranks)} by mean rank, {ranks.loc[label, 'mean']:.1f}"
            console.print(f"{label} over {found['setting'].nunique()} settings: {place}", soft_wrap=True)
    for reason in reasons:
        console.print(reason, soft_wrap=True)


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, …, ``11th``, …, ``21st``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 11 <= number % 100 <= 13 else ending}"


def intervals(found: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the ends of the 95% intervals of token accuracy: equal for one seed, minus infinity for divergence."""
    means, halves = _means(found), found[TOKENS + HALF].fillna(0.0)
    return means - halves, means + halves


def _ranked(found: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a group, in the order of their ranks."""
    found = found[found["group"].notna()]
    means, groups = _means(found), found["group"]
    (low, high), counts = intervals(found), []
    for i in found.index:
        others = (groups == groups[i]) & (found.index != i)
        better, worse = (others & (low > high[i])).sum(), (others & (high < low[i])).sum()
        counts.append((int(better), int(others.sum() - better - worse), int(worse)))
    ranks = means.groupby(groups).rank(ascending=False, method="min").astype(int)
    numbers = pd.DataFrame(counts, found.index, columns=["better", "tied", "worse"])
    order = found["setting"].map({setting: i for i, setting in enumerate(found["setting"].unique())})
    ranked = pd.concat([found, ranks.rename("rank"), numbers, order.rename("order")], axis=1)
    return ranked.sort_values(["order", "rank"], kind="stable").drop(columns="order").reset_index(drop=True)


def _means(found: pd.DataFrame) -> pd.Series:
    return found[TOKENS].fillna(-math.inf).round(DIGITS)


def _narrowed(table: pd.DataFrame, grid: tuple[GridPoint, ...], seeds: int) -> pd.DataFrame:
    """Return the records of a study that a command with another grid and number of seeds would have left.

    It chooses by seed 0 alone, then repeats the chosen point. All records, if the study lacks a point.
    """
    at = pd.Series([*zip(table["lr"], table["weight_decay"], strict=True)], table.index)
    if not set(grid) <= set(at):
        return table
    inside = at.isin(grid) & (table["seed"] < seeds)
    diverged = set(at[inside & table["diverged_step"].notna()])
    repeated = {choose(table[inside & (table["seed"] == 0)], diverged), *diverged}
    return table[inside & ((table["seed"] == 0) | at.isin(repeated))]


def _differences(row: Row, other: Row, seeds: int) -> list[str]:
    """Return in words the settings in which a study differs from a reference row with this number of seeds."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in SHARED:
        mine, theirs = row[name], other[name]
        parts = (mine | theirs) if isinstance(theirs, dict) else {}
        pairs |= {key: (mine.get(key), theirs.get(key)) for key in parts} or {name: (mine, theirs)}
    for i, name in enumerate(("lr", "weight_decay")):
        mine, theirs = (sorted({point[i] for point in of["grid"]}) for of in (row, other))
        pairs[name] = " ".join(f"{x:g}" for x in mine), " ".join(f"{x:g}" for x in theirs)
    if row["chosen"]:  # else none was chosen to be repeated, and the number of seeds says nothing
        pairs["seeds"] = len(row["seeds"]), seeds

    def words(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else str(value)

    return [
        f"{name.replace('_', '-')} {words(mine)}, theirs {words(theirs)}"
        for name, (mine, theirs) in pairs.items()
        if json.dumps(mine) != json.dumps(theirs)
    ]
