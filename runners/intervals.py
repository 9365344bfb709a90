"""The mean over seeds, and its interval.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, logit, stdtrit


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


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95% Student-t interval (NaN for a single value).

    Raises:
        ValueError: if there are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("no values to average: give at least one")

    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)
