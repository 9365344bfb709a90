"""From records to grid points, and from grid points to the one that validation chooses.

    table = records.load("results/studies")      # one row for each training
    found = points(table)                        # one row for each grid point of a study
    best = chosen(found)                         # one row for each study

Everything that is printed, drawn or ranked comes from these tables. What a study would show with fewer grid points or
seeds is the same with some rows of ``table``.
"""

import math
from collections.abc import Collection, Iterable
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.special import stdtrit

CRITERION = "validation.token_accuracy"
"""What a point is chosen by."""
SATURATED = 1e-3
"""Distance from the ceiling of token accuracy at which another learning rate cannot help."""
FIGURES = (
    *(
        f"{split}.{name}"
        for split in ("validation", "test")
        for name in ("sequence_accuracy", "token_accuracy", "loss")
    ),
    *("validation.score", "steps_per_second"),
)
"""Columns of figures that there always are."""
HALF = ".half_width"
"""End of the names of columns with half of a 95% interval."""
POINT = ["study", "lr", "weight_decay"]
"""Columns that name a grid point."""
OF_A_RUN = (
    *("file", "seed", "diverged_step", "best_step", "metrics", "curve", "profile", "gradient", "seconds"),
    *("steps_per_second", "commit"),
)
"""Columns of the table of records that differ between the seeds of a point."""

GridPoint = tuple[float, float]
"""Learning rate and weight decay."""


def points(table: pd.DataFrame) -> pd.DataFrame:
    """Return the grid points of studies.

    Args:
        table: records of diagnostic runs, as ``runners.records.load`` returns them.

    Returns:
        A row for each study and point, in the order of the table. Columns: those of the table that are constant in a
        study; ``seeds``, a list; ``diverged``, the number of seeds that diverged; ``steps_per_second`` and each figure
        ``X`` such as ``test.token_accuracy``: the mean over the seeds, with half of its 95% Student-t interval in
        ``X.half_width``; both are NaN if a seed lacks the figure, as one that diverged does, and the interval is NaN
        for a single seed. ``seconds``: training time, of which runs that are trained together have equal parts.
        ``grid``: all points of the study, ascending, a tuple. ``chosen``: whether validation chooses the point.
        ``edge``: ``smallest`` or ``largest`` for a chosen point with the smallest or largest learning rate of its
        study, unless it reaches the ceiling; else None.
    """
    figures = [*dict.fromkeys([*FIGURES, *(name for name in table if "." in str(name))])]
    constant = [name for name in table if name not in {*POINT, *OF_A_RUN, *figures}]
    columns = {name: table[name].tolist() for name in table}  # of small groups, lists take a tenth of pandas' time

    # Figures of each run, and the runs of each point by their seeds; a run that is read twice counts once.
    diverged = table["diverged_step"].notna().to_numpy()
    of_runs = np.array([columns.get(name, [math.nan] * len(table)) for name in figures], dtype=float)
    of_runs[:, diverged] = math.nan
    runs: dict[tuple[str, float, float], dict[int, int]] = {}
    for i, (*point, seed) in enumerate(zip(*(columns[name] for name in (*POINT, "seed")), strict=True)):
        runs.setdefault(tuple(point), {}).setdefault(seed, i)

    # The choice of each study.
    scores = of_runs[figures.index(CRITERION)]
    if "stored_choice" in columns:
        scores = np.where(columns["stored_choice"], scores, math.nan)
    studies: dict[str, dict[GridPoint, dict[int, float]]] = {}
    for (study, lr, weight_decay), of_seeds in runs.items():
        studies.setdefault(study, {})[lr, weight_decay] = {seed: float(scores[i]) for seed, i in of_seeds.items()}
    choices = {study: _best(of_study) for study, of_study in studies.items()}

    # A row for each point.
    found, edges = [], []
    for (study, lr, weight_decay), of_seeds in runs.items():
        members, count, grid = [*of_seeds.values()], len(of_seeds), tuple(sorted(studies[study]))
        of_point, half = of_runs[:, members], np.full(len(figures), math.nan)
        means = of_point.mean(axis=1)  # NaN if a seed lacks the figure
        if count > 1:
            half = of_point.std(axis=1, ddof=1) * stdtrit(count - 1, 0.975) / count**0.5

        # Whether it is at an end of the grid.
        is_chosen, edge = choices[study] == (lr, weight_decay), None
        least, most = grid[0][0], grid[-1][0]
        ceiling = columns["ceiling"][members[0]]["token"]
        if is_chosen and means[figures.index(CRITERION)] < ceiling - SATURATED and least < most:
            edge = {least: "smallest", most: "largest"}.get(lr)

        rates = {"study": study, "lr": lr, "weight_decay": weight_decay}
        same = {name: columns[name][members[0]] for name in constant}
        sums = {
            "diverged": int(diverged[members].sum()),
            "seconds": sum(columns["seconds"][i] / columns["together"][i] for i in members),
        }
        edges.append(edge)
        widths = {f"{name}{HALF}": float(width) for name, width in zip(figures, half, strict=True)}
        of_means = dict(zip(figures, means.tolist(), strict=True))
        choice = {"grid": grid, "chosen": is_chosen}
        found.append({**rates, **same, "seeds": sorted(of_seeds), **sums, **of_means, **widths, **choice})
    order = [*POINT, *constant, "seeds", "diverged", "seconds", *figures, *(f"{name}{HALF}" for name in figures)]
    made = pd.DataFrame(found, columns=[*order, "grid", "chosen"])
    return made.assign(edge=pd.Series(edges, dtype=object))


def chosen(grid: pd.DataFrame) -> pd.DataFrame:
    """Return the chosen point of each study, a row of ``grid``, the result of ``points``.

    A study of which every point diverged has a row without learning rate, weight decay and figures.
    """
    found = grid.sort_values("chosen", ascending=False, kind="stable").drop_duplicates("study").sort_index()
    rates = found[["lr", "weight_decay"]].where(found["chosen"], math.nan)
    return found.assign(lr=rates["lr"], weight_decay=rates["weight_decay"]).reset_index(drop=True)


def choose(table: pd.DataFrame, without: Collection[GridPoint] = ()) -> GridPoint | None:
    """Return the point of a study with the best mean token accuracy on validation; of equal ones the smallest rates.

    Two points are compared by their means over the seeds that both have, those with more seeds first. A point of which
    any seed diverged is not chosen. A stored result keeps the choice that its column ``stored_choice`` marks.

    Args:
        table: records of one study.
        without: points that are not chosen, either.

    Returns:
        None if a seed of each point diverged.
    """
    scores: dict[GridPoint, dict[int, float]] = {}
    values = table.get(CRITERION, pd.Series(math.nan, table.index)).astype(float)
    candidates = table.get("stored_choice", pd.Series(True, table.index)) & table["diverged_step"].isna()
    runs = (table["lr"], table["weight_decay"], table["seed"], values.where(candidates))
    for lr, weight_decay, seed, score in zip(*runs, strict=True):
        scores.setdefault((lr, weight_decay), {})[seed] = score
    return _best(scores, without)


def _best(scores: dict[GridPoint, dict[int, float]], without: Collection[GridPoint] = ()) -> GridPoint | None:
    """Return the point with the best mean score over its seeds; see ``choose``. A point with NaN is not chosen."""
    stable = {at: of for at, of in scores.items() if at not in without and not any(map(math.isnan, of.values()))}

    best: GridPoint | None = None
    for at in sorted(stable, key=lambda at: (-len(stable[at]), at)):
        seeds = shared_seeds([stable[best], stable[at]]) if best else []
        means = [fmean(of[seed] for seed in seeds or of) for of in (stable[at], stable[best or at])]
        if best is None or means[0] > means[1]:
            best = at
    return best


def shared_seeds(points: Iterable[Iterable[int]]) -> list[int]:
    """Return the seeds that all points have, ascending."""
    return sorted(set.intersection(*map(set, points)))
