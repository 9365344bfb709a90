"""How the latency grows with the sequence length."""

from collections.abc import Sequence
from statistics import median

import numpy as np

Points = list[tuple[int, list[float]]]
"""Sequence lengths, and the milliseconds of the repeats at each of them."""


def latency_exponent(points: Points) -> float | None:
    """Return the exponent of the median latency in N; None for fewer than three lengths, which any power fits."""
    if len(points) < 3:
        return None
    return fit_exponent([length for length, _ in points], [median(repeats) for _, repeats in points])


def fit_exponent(lengths: Sequence[int], times: Sequence[float]) -> float:
    """Return the least-squares exponent p of ``time ~ length^p``."""
    return float(np.polyfit(np.log(lengths), np.log(times), 1)[0])
