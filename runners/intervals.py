"""The mean over seeds, and its interval by Student's t."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import stdtrit


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95% Student-t interval (NaN for a single value)."""
    n = len(values)
    if n == 1:
        return values[0], math.nan
    return fmean(values), float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n)
