"""The mean over seeds and its interval, against SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from runners.intervals import ends, mean_and_interval


@pytest.mark.parametrize("n", [2, 3, 10])
def test_mean_and_interval_agree_with_scipy(n: int) -> None:
    values = np.random.default_rng(n).random(n).tolist()
    mean, half_width = mean_and_interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high), rel=1e-12)


def test_interval_of_one_value_and_of_none() -> None:
    mean, half_width = mean_and_interval([0.25])
    assert mean == 0.25
    assert math.isnan(half_width)
    with pytest.raises(ValueError, match="no values to average: give at least one"):
        mean_and_interval([])


def test_ends_of_accuracies_stay_within_the_scale_and_reach_its_ends_where_a_seed_does() -> None:
    seeds_PS = np.array([[0.0, 0.4, 0.9], [0.2, 0.4, 1.0], [1.0, 1.0, 1.0], [0.25, 0.25, 0.25], [0.97, 0.99, 0.999]])
    extremes = seeds_PS.min(1), seeds_PS.max(1)
    low, high = ends(seeds_PS.mean(1), stats.sem(seeds_PS, axis=1), np.full(5, 3), extremes)
    assert low[[0, 2, 3]].tolist() == [0.0, 1.0, 0.25]
    assert high[[1, 2, 3]].tolist() == [1.0, 1.0, 0.25]
    assert 0 < low[4] < seeds_PS[4].mean() < high[4] < 1
