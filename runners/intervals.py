"""The mean over seeds, and its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds, and half the width of its 95% Student-t interval; NaN for a single seed."""

    mean: float
    half_width: float

    def text(self, digits: int = 4) -> str:
        """``mean`` or ``mean ± half width``."""
        interval = "" if math.isnan(self.half_width) else f" ± {self.half_width:.{digits}f}"
        return f"{self.mean:.{digits}f}{interval}"


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
