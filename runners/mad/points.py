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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit, stdtrit

CRITERION = "validation.token_accuracy"
"""What a point is chosen by."""
SATURATED = 1e-3
"""Distance from the ceiling of token accuracy at which another learning rate cannot help."""
FULL, LOST = 0.995, 0.02
"""Scores from which a rung is at its ceiling, and below which it is lost. Those beyond are not trained in a profile."""
LEARNED = 0.1
"""Score from which a rung says which learning rate easier ones need."""
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
RunOfPoint = tuple[GridPoint, int, float]
"""A run's point, seed and token accuracy on validation."""


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
    scores = np.where(columns.get("candidate", True), of_runs[figures.index(CRITERION)], math.nan)
    studies: dict[str, list[RunOfPoint]] = {}
    for (study, *at), of_seeds in runs.items():
        studies.setdefault(study, []).extend(((at[0], at[1]), seed, float(scores[i])) for seed, i in of_seeds.items())
    choices = {study: _best(of_study) for study, of_study in studies.items()}

    # A row for each point.
    bounded = np.array([name.endswith("accuracy") for name in figures])
    found, edges = [], []
    for (study, lr, weight_decay), of_seeds in runs.items():
        members, count = [*of_seeds.values()], len(of_seeds)
        grid = tuple(sorted({point for point, _, _ in studies[study]}))
        of_point = of_runs[:, members]
        means = of_point.mean(axis=1)  # NaN if a seed lacks the figure
        low, high = np.full((2, len(figures)), math.nan)
        if count > 1:
            errors, extremes = of_point.std(axis=1, ddof=1) / count**0.5, (of_point.min(axis=1), of_point.max(axis=1))
            free, within = ends(means, errors, count, None), ends(means, errors, count, extremes)
            low, high = (np.where(bounded, *pair) for pair in zip(within, free, strict=True))

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
        limits = {name + LOW: float(y) for name, y in zip(figures, low, strict=True)}
        limits |= {name + HIGH: float(y) for name, y in zip(figures, high, strict=True)}
        of_means = dict(zip(figures, means.tolist(), strict=True))
        choice = {"grid": grid, "chosen": is_chosen}
        found.append({**rates, **same, "seeds": sorted(of_seeds), **sums, **of_means, **limits, **choice})
    limits_of = [name + end for name in figures for end in (LOW, HIGH)]
    order = [*POINT, *constant, "seeds", "diverged", "seconds", *figures, *limits_of]
    made = pd.DataFrame(found, columns=[*order, "grid", "chosen"])
    return made.assign(edge=pd.Series(edges, dtype=object))


def rescaled(table: pd.DataFrame, split: str) -> pd.Series:
    """Return the score of each record: token accuracy from chance, 0, to the ceiling, 1; 0 if the run diverged."""
    chance, ceiling = (table[limit].map(itemgetter("token")).astype(float) for limit in ("chance", "ceiling"))
    accuracy = table.get(f"{split}.token_accuracy", pd.Series(math.nan, table.index)).astype(float)
    score = ((accuracy - chance) / (ceiling - chance)).clip(0, 1)
    return score.where(table["diverged_step"].isna(), 0.0)


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
    return _best(runs_of_points(table), without)


def point_of(runs: Sequence[RunOfPoint]) -> GridPoint | None:
    """Return the only point of runs, also if it diverged; of several the one that ``choose`` returns."""
    only = {point for point, _, _ in runs}
    return only.pop() if len(only) == 1 else _best(runs)


def runs_of_points(table: pd.DataFrame) -> list[RunOfPoint]:
    """Return point, seed and validation accuracy of each record; NaN for one whose point is not chosen."""
    values = table.get(CRITERION, pd.Series(math.nan, table.index)).astype(float)
    candidates = table.get("candidate", pd.Series(True, table.index)) & table["diverged_step"].isna()
    columns = table["lr"], table["weight_decay"], table["seed"], values.where(candidates)
    return [((lr, decay), seed, y) for lr, decay, seed, y in zip(*(each.tolist() for each in columns), strict=True)]


def _best(runs: Iterable[RunOfPoint], without: Collection[GridPoint] = ()) -> GridPoint | None:
    """Return the point with the best mean score over its seeds; see ``choose``. A point with NaN is not chosen."""
    scores: dict[GridPoint, dict[int, float]] = {}
    for point, seed, score in runs:
        scores.setdefault(point, {})[seed] = score
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
