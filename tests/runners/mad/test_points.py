"""Means and intervals of grid points, and which of them validation chooses."""

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from runners.mad.points import choose, chosen, ends, points
from tests.runners.mad.made_up import Scores, interval_of, record, study, table

A, B, C = (1e-4, 0.0), (5e-4, 0.0), (5e-4, 0.1)


def seeds(at: tuple[float, float], *scores: float | None) -> dict[tuple[float, float, int], float | None]:
    return {(*at, seed): score for seed, score in enumerate(scores)}


def test_a_point_has_means_and_intervals_over_its_seeds() -> None:
    one, other = points(table(*study({**seeds(A, 0.2, 0.3, 0.7), **seeds(B, 0.1)}))).to_dict("records")
    found = [one[f"test.token_accuracy{end}"] for end in ("", ".low", ".high")]
    assert found == pytest.approx(interval_of([0.2, 0.3, 0.7]), abs=1e-15)
    mean = found[0]
    assert one["validation.sequence_accuracy"] == pytest.approx(mean / 2)
    assert (one["seeds"], other["seeds"], one["seconds"]) == ([0, 1, 2], [0], pytest.approx(30.0))
    assert other["test.token_accuracy"] == 0.1
    assert math.isnan(other["test.token_accuracy.low"])
    assert one["grid"] == other["grid"] == (A, B)


def test_a_point_has_no_mean_of_a_part_of_its_seeds() -> None:
    """A seed of the first diverged; the test split is read for one seed of the second."""
    runs = [*study(seeds(A, 0.9, None)), record(0.4, lr=B[0]), record(0.6, lr=B[0], seed=1, tested=False)]
    one, other = points(table(*runs)).to_dict("records")
    assert (one["diverged"], other["diverged"]) == (1, 0)
    assert math.isnan(one["validation.token_accuracy"])
    assert math.isnan(one["test.token_accuracy.high"])
    assert other["validation.token_accuracy"] == pytest.approx(0.5)
    assert math.isnan(other["test.token_accuracy"])


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({**seeds(A, 0.9, 0.1), **seeds(B, 0.6, 0.6)}, B),  # the best mean, not the best seed
        ({**seeds(A, 0.5, 0.0, 0.0), **seeds(B, 0.4)}, A),  # over the seeds that both have
        ({**seeds(A, 0.9, None), **seeds(B, 0.2)}, B),
        ({**seeds(C, 0.9), **seeds(B, 0.9), **seeds(A, 0.9)}, A),  # of equal ones the smallest rates
        ({**seeds(C, 0.9), **seeds(B, 0.9), **seeds(A, 0.1)}, B),
        ({**seeds(A, 0.9, 0.1, 0.1), **seeds(B, 0.5, 0.5, 0.5), **seeds(C, 0.4)}, B),  # over three seeds, not over one
        ({(*A, 0): 0.3, (*B, 1): 0.4}, B),  # where a killed command leaves no shared seed
        (seeds(A, None), None),
    ],
)
def test_the_best_mean_token_accuracy_is_chosen_in_any_order(scores: Scores, best: tuple[float, float]) -> None:
    for order in (list(scores), list(scores)[::-1]):
        runs = table(*study({run: scores[run] for run in order}))
        assert choose(runs) == best
        (row,) = chosen(points(runs)).to_dict("records")
        assert row["chosen"] == (best is not None)
        assert best is None or (row["lr"], row["weight_decay"]) == best


def test_points_that_are_ruled_out_are_not_chosen() -> None:
    runs = table(*study({**seeds(A, 0.1), **seeds(B, 0.9), **seeds(C, 0.5)}))
    assert choose(runs, without={B}) == C
    assert choose(runs, without={A, B, C}) is None


def test_each_study_has_a_row_with_what_is_the_same_in_all_its_runs() -> None:
    """Also one of which every point diverged, without rates and figures."""
    runs = [*study(seeds(A, None), layer="rt"), *study(seeds(A, 0.5, 0.7), layer="lstm", remark="slow")]
    diverged, whole = chosen(points(table(*runs))).to_dict("records")
    assert (diverged["layer"], whole["layer"], whole["remark"]) == ("rt", "lstm", "slow")
    assert whole["task_config"] == runs[0].task_config
    assert whole["test.token_accuracy"] == pytest.approx(fmean([0.5, 0.7]))
    assert math.isnan(diverged["lr"])
    assert math.isnan(diverged["test.token_accuracy"])


def test_a_run_that_is_read_twice_counts_once() -> None:
    runs = study(seeds(A, 0.2, 0.4))
    assert points(table(*runs, *runs)).loc[0, "seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("rates", "ceiling", "edge"),
    [
        ((1e-4, 5e-4, 1e-3), 0.9, "largest"),
        ((1e-3, 2e-3), 0.9, "smallest"),
        ((5e-4, 1e-3, 2e-3), 0.9, None),
        ((1e-4, 1e-3), 0.8005, None),  # at the ceiling there is nothing to gain
        ((1e-3,), 0.9, None),
    ],
)
def test_a_choice_at_an_end_of_the_grid_is_flagged(rates: tuple[float, ...], ceiling: float, edge: str | None) -> None:
    """The other points diverged, which count as tried."""
    scores = {(lr, 0.0, 0): 0.8 if lr == 1e-3 else None for lr in rates}
    runs = study(scores, ceiling={"sequence": 1.0, "token": ceiling})
    assert [row for row in points(table(*runs))["edge"] if row] == [edge] * (edge is not None)


def test_ends_of_accuracies_stay_within_the_scale_and_reach_its_ends_where_a_seed_does() -> None:
    seeds_PS = np.array([[0.0, 0.4, 0.9], [0.2, 0.4, 1.0], [1.0, 1.0, 1.0], [0.25, 0.25, 0.25], [0.97, 0.99, 0.999]])
    extremes = seeds_PS.min(1), seeds_PS.max(1)
    low, high = ends(seeds_PS.mean(1), stats.sem(seeds_PS, axis=1), np.full(5, 3), extremes)
    assert low[[0, 2, 3]].tolist() == [0.0, 1.0, 0.25]
    assert high[[1, 2, 3]].tolist() == [1.0, 1.0, 0.25]
    assert 0 < low[4] < seeds_PS[4].mean() < high[4] < 1
