"""The mean over seeds, and its interval by Student's t."""

import math
from collections.abc import Sequence

from scipy.special import stdtrit


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
