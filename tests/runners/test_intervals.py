"""The mean over seeds and its interval, against SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from runners.intervals import mean_and_interval


@pytest.mark.parametrize("n", [2, 3, 10])
def test_mean_and_interval_agree_with_scipy(n: int) -> None:
    values = np.random.default_rng(n).random(n).tolist()
    mean, half_width = mean_and_interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high), rel=1e-12)


def test_one_value_has_no_interval() -> None:
    mean, half_width = mean_and_interval([0.25])
    assert mean == 0.25
    assert math.isnan(half_width)
