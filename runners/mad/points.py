"""From records to grid points, and from grid points to the one that validation chooses.

    table = records.load("results/studies")      # one row for each training
    found = points(table)                        # one row for each grid point of a study
    best = chosen(found)                         # one row for each study

Everything that is printed, drawn or ranked comes from these tables. What a study would show with fewer grid points or
seeds is the same with some rows of ``table``.

The 95% interval of an accuracy is Student's t on the logit of the mean m: the standard error of the mean is divided by
m (1 - m), the slope of the logistic function, and the ends are mapped back. So it stays within [0, 1], and is longer on
the side of one half. As a logit reaches neither 0 nor 1, an end is 0 or 1 where a seed is; seeds that all are have an
interval without length. Of five seeds of skewed distributions these intervals contain the true mean in 90 to 95% of
cases, Student's t cut at 0 and 1 in 84 to 95%, and a percentile bootstrap in 74 to 84% (results/notes/2026-11-28.md).
Losses and other figures have Student's t itself.

An interval contains what seeds change: initial parameters and the order of the data. It does not contain the draw of
the training set, which all seeds share, nor that of the evaluated sequences.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit, stdtrit

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


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds, and the ends of its 95% interval; NaN for a single seed."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 4) -> str:
        """``mean`` or ``mean (low–high)``; an empty text for NaN."""
        mean, low, high = (f"{y:.{digits}f}" for y in (self.mean, self.low, self.high))
        return "" if math.isnan(self.mean) else mean + ("" if math.isnan(self.low) else f" ({low}–{high})")


def points(table: pd.DataFrame) -> pd.DataFrame:
    """Return the grid points of studies.

    Args:
        table: records of diagnostic runs, as ``runners.records.load`` returns them.

    Returns:
        A row for each study and point, in the order of the table. Columns: those of the table that are constant in a
        study; ``seeds``, a list; ``diverged``, the number of seeds that diverged; ``steps_per_second`` and each figure
        ``X`` such as ``test.token_accuracy``: the mean over the seeds, with the ends of its 95% interval
        in ``X.low`` and ``X.high``; all are NaN if a seed lacks the figure, as one that
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


def ends(mean: Any, error: Any, n: Any, seeds: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Return the ends of 95% intervals of means over seeds, NaN for a single seed; arguments are arrays or numbers.

    Args:
        mean: the means.
        error: their standard errors.
        n: numbers of seeds.
        seeds: of accuracies, the smallest and the largest among the seeds; None for figures without bounds.
    """
    width = stdtrit(n - 1, 0.975) * error
    if seeds is None:
        return mean - width, mean + width

    with np.errstate(divide="ignore", invalid="ignore"):
        step = width / (mean * (1 - mean))
        low, high = expit(logit(mean) - step), expit(logit(mean) + step)
    of_equal = error == 0
    low = np.where((seeds[0] == 0) & (n > 1), 0.0, np.where(of_equal, mean, low))
    high = np.where((seeds[1] == 1) & (n > 1), 1.0, np.where(of_equal, mean, high))
    return low, high


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
