"""From records to grid points, and from grid points to the one that validation chooses.

    table = records.load("results/studies")      # one row for each training
    found = points(table)                        # one row for each grid point of a study
    best = chosen(found)                         # one row for each study

Everything that is printed, drawn or ranked comes from these tables. What a study would show with fewer grid points or
seeds is the same with some rows of ``table``.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from runners.intervals import Estimate, ends

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
LOW, HIGH = ".low", ".high"
"""Ends of the names of columns with the ends of a 95% interval."""
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
        ``X`` such as ``test.token_accuracy``: the mean over the seeds, with the ends of its 95% interval
        (``runners.intervals``) in ``X.low`` and ``X.high``; all are NaN if a seed lacks the figure, as one that
        diverged does, and the ends are NaN for a single seed. ``seconds``: training time, of which runs that are
        trained together have equal parts. ``grid``: all points of the study, ascending, a tuple. ``chosen``: whether
        validation chooses the point. ``edge``: ``smallest`` or ``largest`` for a chosen point with the smallest or
        largest learning rate of its study, unless it reaches the ceiling; else None.
    """
    table = table.drop_duplicates([*POINT, "seed"], ignore_index=True)
    names = [*dict.fromkeys([*FIGURES, *(name for name in table if "." in str(name))])]
    keys = [table[name] for name in POINT]
    converged = table["diverged_step"].isna()

    # Means and intervals, where no seed lacks a figure.
    seeds = table["seed"].groupby(keys, sort=False).agg(sorted)
    count = seeds.map(len).astype(float)
    figures = table.reindex(columns=names).astype(float).where(converged, axis=0).groupby(keys, sort=False)
    whole = figures.count().eq(count, axis=0)
    means = figures.mean().where(whole)
    errors = figures.std().div(count**0.5, axis=0).where(whole)
    extremes = [of.where(whole) for of in (figures.min(), figures.max())]
    limits = {}
    for name in names:
        seeds_of = (extremes[0][name], extremes[1][name]) if name.endswith("accuracy") else None
        limits[name + LOW], limits[name + HIGH] = ends(means[name], errors[name], count, seeds_of)

    # A row for each point.
    others = pd.DataFrame({"diverged": ~converged, "seconds": table["seconds"] / table["together"]})
    constant = table.drop_duplicates(POINT).drop(columns=[*OF_A_RUN, *names], errors="ignore").set_index(POINT)
    sums = others.groupby(keys, sort=False).sum()
    found = pd.concat(
        [constant, seeds.rename("seeds"), sums, means, pd.DataFrame(limits, means.index)], axis=1
    ).reset_index()

    # The choice of each study.
    grids, choices = {}, {}
    for study, of_study in table.groupby("study", sort=False):
        grids[study] = tuple(sorted({*zip(of_study["lr"], of_study["weight_decay"], strict=True)}))
        choices[study] = study, *(choose(of_study) or ())
    found["grid"] = found["study"].map(grids)
    found["chosen"] = [choices[point[0]] == point for point in zip(*(found[name] for name in POINT), strict=True)]

    # Whether it is at an end of the grid.
    rates = found.groupby("study")["lr"]
    least, most = rates.transform("min"), rates.transform("max")
    ceiling = found["ceiling"].map(lambda ceiling: ceiling["token"])
    is_open = found["chosen"] & (found["validation.token_accuracy"] < ceiling - SATURATED) & (least < most)
    found["edge"] = pd.Series([None] * len(found), dtype=object)
    found.loc[is_open & (found["lr"] == least), "edge"] = "smallest"
    found.loc[is_open & (found["lr"] == most), "edge"] = "largest"
    return found


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
    any seed diverged is not chosen, nor one that the column ``candidate`` leaves out, where there is one.

    Args:
        table: records of one study.
        without: points that are not chosen, either.

    Returns:
        None if a seed of each point diverged.
    """
    scores: dict[GridPoint, dict[int, float]] = {}
    values = table.get(CRITERION, pd.Series(math.nan, table.index)).astype(float)
    candidates = table.get("candidate", pd.Series(True, table.index)) & table["diverged_step"].isna()
    runs = (table["lr"], table["weight_decay"], table["seed"], values.where(candidates))
    for lr, weight_decay, seed, score in zip(*runs, strict=True):
        scores.setdefault((lr, weight_decay), {})[seed] = score
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


def estimate_of(row: Mapping[Any, Any], column: str) -> Estimate:
    """Return the figure of a column of ``points`` with its interval, from a row."""
    mean, low, high = (float(row[f"{column}{end}"]) for end in ("", LOW, HIGH))
    return Estimate(mean=mean, low=low, high=high)
