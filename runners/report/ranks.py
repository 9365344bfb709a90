"""Mean ranks of layers with bootstrap intervals.

Mean ranks are comparable only among layers with the same tasks. Layers that are trained on all tasks are therefore
ranked among themselves, over all tasks. A layer that lacks tasks has no mean rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from runners.mad.ranking import DIGITS, TIE, average_ranks

RESAMPLES = 2000
"""Number of bootstrap samples."""
SEED = 0

Values = Mapping[tuple[str, str], Sequence[float]]
"""Accuracies of the seeds by row and task; none if every grid point diverged."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Mean ranks of the complete layers.

    Attributes:
        means: mean rank by row; 1 is the best.
        intervals: 95% interval by row: percentiles of the mean rank over resampled tasks and seeds.
    """

    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def mean_ranks(found: Values, tasks: Sequence[str], tie: float | None = TIE) -> Ranks | None:
    """Rank the layers that have all tasks; return None if fewer than two have.

    Layers whose means differ by less than ``tie`` share the average rank. A layer that diverged on a task has no rank.

    Args:
        found: accuracies of the layers that are ranked.
        tasks: the tasks over which ranks are averaged.
        tie: limit of ties; None for the rule of the analysis of language models that was fixed beforehand, by which
            equal means share the smaller rank.
    """
    rows = [row for row in dict.fromkeys(row for row, _ in found) if all(found.get((row, task)) for task in tasks)]
    if len(rows) < 2:
        return None
    values = [[found[row, task] for task in tasks] for row in rows]

    # Mean ranks of the layers (L) over the tasks (T).
    means_LT = np.array([[round(fmean(seeds), DIGITS) for seeds in of_row] for of_row in values])
    observed = _ranks(means_LT[None], tie)[0].mean(axis=1)

    # B bootstrap samples of the seeds, then of the tasks.
    rng = np.random.default_rng(SEED)
    drawn_BLT = np.empty((RESAMPLES, len(rows), len(tasks)))
    for layer, task in np.ndindex(len(rows), len(tasks)):
        seeds = values[layer][task]
        drawn_BLT[:, layer, task] = rng.choice(seeds, (RESAMPLES, len(seeds))).mean(axis=1).round(DIGITS)
    chosen_BT = rng.integers(len(tasks), size=(RESAMPLES, len(tasks)))
    resampled_BL = np.take_along_axis(_ranks(drawn_BLT, tie), chosen_BT[:, None, :], axis=2).mean(axis=2)

    lows, highs = np.percentile(resampled_BL, [2.5, 97.5], axis=0).tolist()
    return Ranks(
        means=dict(zip(rows, observed.tolist(), strict=True)),
        intervals=dict(zip(rows, zip(lows, highs, strict=True), strict=True)),
    )


def places(values: Mapping[str, float]) -> dict[str, int]:
    """Return the place of each row, the largest value first; equal values share the smaller place."""
    rounded = [-round(value, DIGITS) for value in values.values()]
    return dict(zip(values, rankdata(rounded, method="min").astype(int).tolist(), strict=True))


def _ranks(means_BLT: NDArray[np.float64], tie: float | None) -> NDArray[np.float64]:
    """Return the ranks among the layers, shape (B, L, T)."""
    if tie is None:
        smallest_BLT: NDArray[np.float64] = rankdata(-means_BLT, method="min", axis=1)
        return smallest_BLT

    # All samples at once may need a GiB.
    return np.concatenate([average_ranks(part_BTL, tie).mT for part_BTL in np.array_split(means_BLT.mT, 50)])
