"""Reference rows beside one's own layers, the rank of a layer among them, and what is printed of it.

A reference row and a study are comparable if they share task and data, model (widths and number of layers), training
(steps, batch, evaluations, optimizer) and number of seeds, and if the study has the grid points that all rows of a task
have. Precision may differ, so that studies on a laptop have reference rows, too. A study with more seeds than the rows,
or with grid points that no row has, is shown as it would be without these.

Layers are ranked by mean test accuracy over tokens; equal means share the smaller rank. Two layers are tied if their
95% intervals overlap. A layer has no rank if no point of its grid converged. Mean ranks over several tasks are those of
``average_ranks``: accuracies that differ by less than ``TIE`` share the average rank.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from rich.console import Console

from mixers.costs import LENGTHS
from runners.mad.points import HIGH, LOW, chosen, points
from runners.mad.tables import FEW, KINDS, Row, estimate, in_order, intervals_of, labelled, printed_table
from runners.progress import spell
from runners.tables import COSTS, FOOTNOTE, abbreviated, cost_cells, fits, ordinal

SHARED = ("task_config", "width", "mlp_width", "layers", "steps", "batch_size", "evaluations", "optimizer")
"""Settings that comparable results share, beside task, grid and seeds."""
COUNTS = ("ahead", "tied", "behind")
"""Columns that count the other layers."""
TRANSFORMER = "transformer"
TOKENS = "test.token_accuracy"
"""What layers are ranked by."""
SEVERAL = 3
"""Number of settings from which on layers have a mean rank."""
TIE = 0.01
"""Scores and accuracies that differ by less tie."""
OTHER_TIES = (0.0, 0.005, 0.02, 0.05)
"""Other limits, whose places are shown beside those of ``TIE``."""
DIGITS = 12
"""Decimal digits of a mean that count. A sum of floats depends on its order, which would rank equal means apart."""


def beside(own: pd.DataFrame, reference: pd.DataFrame | None) -> tuple[pd.DataFrame, list[str]]:
    """Return one's own studies beside comparable reference rows, and lines about studies without such rows.

    Args:
        own: records of one's own studies.
        reference: records of reference results; None for none.

    Returns:
        Chosen points as ``labelled`` returns them, with more columns: ``own``; ``group``, a number that comparable
        results share, NaN for a study without reference rows; ``rank``, NA for a row without group or accuracy; and
        ``ahead``, ``tied`` and ``behind``, the numbers of other layers of the group.
    """
    studies = labelled(chosen(points(own))).assign(own=True, group=math.nan)
    if reference is None:
        return _ranked(studies), []
    rows = chosen(points(reference)).assign(own=False)
    terms = [json.dumps([row[name] for name in ("task", *SHARED)]) for row in rows.to_dict("records")]
    groups = [members for _, members in rows.groupby(terms, sort=False)]

    shown: list[Row] = []
    used: dict[int, str] = {}
    reasons: dict[str, list[str]] = {}
    for study in studies.to_dict("records"):
        records = own[own["study"] == study["study"]]
        at = pd.Series([*zip(records["lr"], records["weight_decay"], strict=True)], records.index)
        unlike: list[tuple[float, str]] = []
        for number, members in enumerate(groups):
            other = members.iloc[:1].to_dict("records")[0]
            if other["task"] != study["task"]:
                continue
            seeds = int(members["seeds"].map(len).max())
            least, most = (tuple(sorted(of(*map(set, members["grid"])))) for of in (set.intersection, set.union))
            alike = records[at.isin(most) & (records["seed"] < seeds)] if set(least) <= set(at) else records
            (narrow,) = chosen(points(alike)).to_dict("records")
            differences = _differences(narrow, other | {"grid": least}, seeds)
            if not differences:
                study = study | narrow | {"group": number}
                used.setdefault(number, study["setting"])
                break
            reason = f"{', '.join(differences)}: --preset {other['preset']} without these options has theirs"
            unlike.append((abs(math.log(other["steps"] / study["steps"])), reason))
        else:
            reason = min(unlike)[1] if unlike else "there are none on this task"
            reasons.setdefault(reason, []).append(f"{study['label']} on {study['setting']}")
        shown.append(study)

    labels = set(studies["label"])
    for number, setting in used.items():
        for row in groups[number].to_dict("records"):
            label = f"{row['layer']} (reference)" if row["layer"] in labels else row["layer"]
            shown.append(row | {"label": label, "setting": setting, "group": number})
    lines = []
    for reason, without in reasons.items():
        more = f" and {len(without) - FEW} more" if len(without) > FEW else ""
        lines.append(f"no reference rows for {', '.join(without[:FEW])}{more}: {reason}")
    return _ranked(in_order(pd.DataFrame(shown))), lines


def ranking(own: pd.DataFrame, reference: pd.DataFrame | None) -> pd.DataFrame:
    """Return one's own studies and the comparable reference rows, best first in each setting; see ``beside``.

    Studies without reference rows are left out.
    """
    found, _ = beside(own, reference)
    return best_first(found[found["group"].notna()])


def best_first(found: pd.DataFrame) -> pd.DataFrame:
    """Return rows in the order of their settings, in each by token accuracy; those without accuracy are last."""
    order = {setting: place for place, setting in enumerate(found["setting"].unique())}
    keys = pd.DataFrame({"setting": found["setting"].map(order), "mean": -_means(found)})
    return found.loc[keys.sort_values(["setting", "mean"], kind="stable").index].reset_index(drop=True)


def place_of(row: Row) -> str:
    """Return the place of a row in words: "10th of 22: 2 ahead, 18 tied, 1 behind"; or why it has no rank."""
    if not row["chosen"]:
        return "no rank: no point converged"
    if math.isnan(row[TOKENS]):
        return "no rank: no test accuracy"
    counts = [row[name] for name in COUNTS]
    return f"{ordinal(row['rank'])} of {1 + sum(counts)}: {counts[0]} ahead, {counts[1]} tied, {counts[2]} behind"


def print_results(found: pd.DataFrame, reasons: Sequence[str], console: Console, verbose: bool) -> None:
    """Print where one's own layers stand, and what they cost relative to the Transformer.

    In one setting: the place, and the row between its neighbours and the Transformer's. In several: a row with the
    place in each, then the place over all.

    Args:
        found: one's own studies beside reference rows, and ``reasons``, from ``beside``.
        reasons: why studies have no reference rows.
        console: where to print.
        verbose: print all rows with all costs before.
    """
    say = partial(console.print, soft_wrap=True)
    found = best_first(found.assign(run=found["seconds"] / found["seeds"].map(len)))
    mine, settings = found[found["own"]], [*found["setting"].unique()]
    labels = [*mine["label"].unique()]
    if verbose:
        for setting in settings:
            say("")
            _print_rows(found[found["setting"] == setting], setting, console, costs=True)
        console.print(FOOTNOTE)

    # The places.
    say("")
    if len(settings) == 1:
        for row in mine.to_dict("records") if len(labels) <= FEW else ():
            if not row["chosen"] or not math.isnan(row["group"]):
                say(f"{row['label']} on {row['setting']}: {place_of(row)}")
        near = found["own"] | found["own"].shift(1, fill_value=False) | found["own"].shift(-1, fill_value=False)
        shown = found[near | (found["layer"] == TRANSFORMER)]
        _print_rows(shown, settings[0], console)
        limits = [f"{name} {mine[name].iloc[0]['token']:.3g}" for name in ("ceiling", "chance")]
        say(f"test accuracy, {intervals_of(shown)}; by token: {', '.join(limits)}")
    else:
        _print_rows(mine, "task" if len(labels) == 1 else "task, layer", console)
        say(f"test accuracy, {intervals_of(mine)}")
    if len(settings) >= SEVERAL and found["group"].notna().any():
        for label in labels:
            say(f"{label} over {len(settings)} tasks: {_overall(label, found[found['group'].notna()])}")
    for reason in reasons:
        say(reason)
    for label in labels if len(labels) <= FEW else ():
        say(_costs(mine[mine["label"] == label], found[found["layer"] == TRANSFORMER]))


def _print_rows(rows: pd.DataFrame, heading: str, console: Console, costs: bool = False) -> None:
    """Print rows with their accuracies and ranks; on a narrow console without those of sequences, and with two digits.

    Args:
        rows: the rows.
        heading: ``task`` or ``task, layer``, which name a row; else a setting, all of whose rows have layers' names.
        console: where to print.
        costs: print their costs, too, in a table of their own.
    """
    ranked = rows["rank"].notna().any()
    lines, of_costs = [], []
    for row in rows.to_dict("records"):
        both = {"task": row["setting"], "task, layer": f"{row['setting']}, {row['label']}"}
        name = both.get(heading, row["label"])
        mark = "→ " if row["own"] and not rows["own"].all() else "  " if not rows["own"].all() else ""
        remark = f"\n{mark}  {row['remark']}" if isinstance(row["remark"], str) and (row["own"] or costs) else ""
        sequence = estimate(row, f"test.{KINDS[0]}_accuracy", 3)
        token, short = (estimate(row, TOKENS, n) or "diverged" * (not row["chosen"]) for n in (3, 2))
        counts = [row[count] for count in COUNTS]
        rank = "" if pd.isna(row["rank"]) else f"{row['rank']} of {1 + sum(counts)}"
        places = [rank, *(str(n) if rank and row["own"] else "" for n in counts)] if ranked else []
        lines.append(([f"{mark}{name}{remark}", token, sequence, short], places))
        state, flops = (row[figure] or None for figure in ("state", "flops_per_token"))
        of_costs.append([f"{mark}{name}{remark}", *cost_cells(row["parameters"], state, flops)])

    headings = ["rank", *COUNTS] if ranked else []
    wide = printed_table(
        [heading, "token", "sequence", *headings], [[*figures[:3], *places] for figures, places in lines]
    )
    narrow = printed_table(
        [heading, "token", *headings], [[figures[0], figures[3], *places] for figures, places in lines]
    )
    console.print(wide if fits(wide, console) else narrow)
    if costs:
        console.print(printed_table([heading, *COSTS], of_costs))


def _overall(label: str, found: pd.DataFrame) -> str:
    """Return the place of a layer by mean rank over all settings, and its neighbours, in words."""
    ranks = mean_ranks(found)
    if label not in ranks.index:
        placed = found["setting"][(found["label"] == label) & found["rank"].notna()]
        lacking = [setting for setting in found["setting"].unique() if setting not in set(placed)]
        return f"no mean rank, because it has no rank on {', '.join(lacking)}"
    place, at = f"{ordinal(ranks.loc[label, 'place'])} of {len(ranks)}", ranks.index.get_loc(label)
    near = [f"{ranks.index[i]} {ranks['mean'].iloc[i]:.1f}" for i in (at - 1, at + 1) if 0 <= i < len(ranks)]
    return f"{place} by mean rank, {ranks.loc[label, 'mean']:.1f}; beside it {', '.join(near) or 'nothing'}"


def _costs(rows: pd.DataFrame, transformers: pd.DataFrame) -> str:
    """Return what one layer costs, and in brackets how many times what one Transformer layer costs.

    Args:
        rows: the rows of a label, one for each setting.
        transformers: the rows of the Transformer in all settings; one's own come before reference rows.
    """
    transformers = transformers.sort_values("own", ascending=False, kind="stable").drop_duplicates("setting")
    row, other = rows.iloc[0], transformers.iloc[0] if len(transformers) else None

    def cell(name: str, figure: str, mine: float | None, theirs: float | None) -> str:
        if not mine or not theirs or row["layer"] == TRANSFORMER:
            return f"{name} {figure}"
        return f"{name} {figure} ({mine / theirs:.3g}×)"

    cells = []
    for column, name in (("parameters", "parameters"), ("flops_per_token", "FLOPs a token"), ("state", "state")):
        figures = [None if of is None else of[column] for of in (row, other)]
        mine, theirs = (of.get(str(LENGTHS[0])) if isinstance(of, dict) else of for of in figures)
        cells.append(cell(name, "unknown" if mine is None else abbreviated(mine), mine, theirs))

    # Times are compared if both were trained on one device, as many at once; the name of a CPU says too little.
    both = rows.merge(transformers, on=["setting", "device", "together"], suffixes=("", "_theirs"))
    both = both[both["own_theirs"].astype(bool) | ~both["device"].str.endswith("CPU")]
    times = [both["run"].mean(), both["run_theirs"].mean()] if len(both) == len(rows) else [None, None]
    cells.append(cell("time of a run", spell(rows["run"].mean()), *times))
    unknown = "" if times[0] or row["layer"] == TRANSFORMER else " (train transformer beside it to compare)"
    relative = " (× the Transformer's)" if any("×" in cell for cell in cells) else ""
    return f"cost of {row['label']}{relative}: {', '.join(cells)}{unknown}"


def mean_ranks(found: pd.DataFrame) -> pd.DataFrame:
    """Return the ranks of the layers that have an accuracy in all settings, among themselves, by ``label``.

    Columns are the settings; ``mean``, the mean rank, by which they are sorted; and ``place``, the rank of that. Equal
    ones share the smaller place and keep their order.

    Args:
        found: chosen points with ``label`` and ``setting``.
    """
    values = found.assign(value=_means(found)).pivot(index="label", columns="setting", values="value")
    values = values.loc[found["label"].unique(), found["setting"].unique()].dropna()
    ranks = pd.DataFrame(average_ranks(values.T).T, values.index, values.columns)
    means = ranks.mean(axis=1)
    places = means.round(DIGITS).rank(method="min").astype(int)
    return ranks.assign(mean=means, place=places).sort_values("mean", kind="stable")


def average_ranks(scores: ArrayLike, tie: float = TIE) -> NDArray[np.float64]:
    """Return the ranks along the last axis, from 1 for the best; scores that differ by less than ``tie`` share theirs.

    A rank is 1, and 1 more for each better score, and 0.5 more for each other one that ties.
    """
    scores_L = np.asarray(scores, dtype=float).round(DIGITS)
    difference_LL = scores_L[..., :, None] - scores_L[..., None, :]
    ties_LL = (np.abs(difference_LL) < tie - 1e-12) | (difference_LL == 0)
    ranks_L: NDArray[np.float64] = 0.5 + ((difference_LL < 0) & ~ties_LL).sum(-1) + ties_LL.sum(-1) / 2
    return ranks_L


def rule_of(tie: float) -> str:
    """Return a rule of ties in words."""
    return f"with ties below {tie:g}" if tie else "without ties"


def places_by_ties(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the places of layers by their mean rank, one column for each limit below which scores tie.

    Args:
        scores: a row for each layer, a column for each task; or one column, of profile scores.
    """
    means = {tie: average_ranks(scores.T, tie).mean(axis=0) for tie in (TIE, *OTHER_TIES)}
    return pd.DataFrame(means, scores.index).round(DIGITS).rank(method="min").astype(int)


def intervals(found: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the ends of the 95% intervals of token accuracy: equal for one seed, NaN without accuracy."""
    means = _means(found)
    low, high = (found[TOKENS + end].astype(float).round(DIGITS).fillna(means) for end in (LOW, HIGH))
    return low, high


def _ranked(found: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the columns ``rank``, ``ahead``, ``tied`` and ``behind``."""
    means, (low, high) = _means(found), intervals(found)
    groups, counts = found["group"].where(means.notna()), []
    for i in found.index:
        others = (groups == groups[i]) & (found.index != i)
        ahead, behind = (others & (low > high[i])).sum(), (others & (high < low[i])).sum()
        counts.append((int(ahead), int(others.sum() - ahead - behind), int(behind)))
    ranks = means.groupby(groups).rank(ascending=False, method="min").astype("Int64")
    numbers = pd.DataFrame(counts, found.index, columns=COUNTS)
    return pd.concat([found, ranks.rename("rank"), numbers], axis=1)


def _means(found: pd.DataFrame) -> pd.Series:
    return found[TOKENS].astype(float).round(DIGITS)


def _differences(row: Row, other: Row, seeds: int) -> list[str]:
    """Return in words the settings in which a study differs from a reference row with this number of seeds."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in SHARED:
        mine, theirs = row[name], other[name]
        parts = (mine | theirs) if isinstance(theirs, dict) else {}
        pairs |= {key: (mine.get(key), theirs.get(key)) for key in parts} or {name: (mine, theirs)}
    lacks = not set(other["grid"]) <= set(row["grid"])
    for i, name in enumerate(("lr", "weight_decay") if lacks else ()):
        mine, theirs = (sorted({point[i] for point in of["grid"]}) for of in (row, other))
        pairs[name] = " ".join(f"{x:g}" for x in mine), " ".join(f"{x:g}" for x in theirs)
    if row["chosen"]:  # else none was chosen to be repeated, and the number of seeds says nothing
        pairs["seeds"] = len(row["seeds"]), seeds

    return [
        f"{name.replace('_', '-')} {mine} (theirs {theirs})"
        for name, (mine, theirs) in pairs.items()
        if json.dumps(mine) != json.dumps(theirs)
    ]
