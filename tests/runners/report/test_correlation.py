"""Rank correlations: what they measure, and that chance is seldom taken for a relation."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from mixers import MIXERS
from runners.report import correlation
from runners.report.correlation import LEAST, Rho, _found, between_families, within_families

FAMILIES = np.unique([layer.family for layer in MIXERS.values()], return_inverse=True)[1]
"""Family of each registered layer."""


def pooled(x_L: Any, *ys_L: Any) -> list[Rho | None]:
    """Return the correlations of one score over all layers."""
    return within_families(np.array([x_L]), np.array(ys_L), np.ones(len(x_L)), np.zeros(len(x_L), int))[0]


def related(rng: np.random.Generator, rows: int) -> Any:
    """Return figures of the registered layers that have an intraclass correlation of 0.5 within families."""
    of_families = rng.standard_normal((rows, FAMILIES.max() + 1))[:, FAMILIES]
    return (of_families + rng.standard_normal(of_families.shape)) / np.sqrt(2)


def test_a_correlation_is_that_of_scipy_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(1)
    for size in (6, 9, 21):
        x_L, y_L = rng.integers(5, size=size).astype(float), rng.standard_normal(size)
        rho, opposite = pooled(x_L, y_L, -y_L)
        assert opposite.value == pytest.approx(-rho.value)
        assert rho.value == pytest.approx(spearmanr(x_L, y_L).statistic)
        assert rho.low <= rho.value <= rho.high


def test_within_families_the_difference_between_families_does_not_count() -> None:
    """Two families apart in both figures, each ordered the other way inside."""
    x_L, y_L = np.array([1.0, 2, 3, 4, 11, 12, 13, 14]), np.array([4.0, 3, 2, 1, 14, 13, 12, 11])
    families_L = np.repeat([0, 1], 4)
    (among_all,), ((within,),) = pooled(x_L, y_L), within_families(x_L[None], y_L[None], np.ones(8), families_L)
    assert among_all.value > 0.5
    assert within.value == pytest.approx(-1)
    assert within.p == pytest.approx(2 / 24**2, abs=0.003)  # of all orders within families, two are as strong

    # A family of one layer orders nothing, and a layer without the score does not count.
    more = np.append(x_L, [99, np.nan]), np.append(y_L, [99, 0]), np.append(families_L, [2, 0])
    ((alone,),) = within_families(more[0][None], more[1][None], np.ones(10), more[2])
    assert alone.value == pytest.approx(-1)


def test_between_families_a_family_counts_once_with_the_mean_rank_of_its_members() -> None:
    x_L, y_L = related(np.random.default_rng(5), 2)
    x_L[3], y_L[4] = np.nan, -np.inf
    ((rho,),) = between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES)
    ranks = rankdata(x_L, nan_policy="omit"), np.where(np.isnan(x_L), np.nan, rankdata(y_L))
    means = [[np.nanmean(of_layers[n == FAMILIES]) for n in range(7)] for of_layers in ranks]
    assert rho.value == pytest.approx(spearmanr(*means).statistic)

    # Members without the score do not count in the losses either.
    alone_L, losses_L = np.full(len(FAMILIES), np.nan), np.arange(len(FAMILIES), dtype=float)
    firsts = [int(np.flatnonzero(n == FAMILIES)[0]) for n in range(7)]
    alone_L[firsts] = losses_L[firsts]
    ((ordered,),) = between_families(alone_L[None], losses_L[None], np.ones(len(FAMILIES)), FAMILIES)
    assert ordered.value == pytest.approx(1)

    # A family without the score is left out, and six families are the fewest.
    x_L[FAMILIES == 0] = np.nan
    assert between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES) != [[None]]
    x_L[FAMILIES == 1] = np.nan
    assert between_families(x_L[None], y_L[None], np.ones(len(x_L)), FAMILIES) == [[None]]


def test_without_a_relation_relatives_are_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests at 0.05 of scores and losses that families have in common, but that are independent of each other.

    Of 100,000 such tests between families, 0.048 are significant; the standard error of the share of 400 is 0.011.
    """
    monkeypatch.setattr(correlation, "RESAMPLES", 199)  # between families, p is exact; intervals are not looked at
    rng = np.random.default_rng(6)
    counts = {"families": 0, "layers": 0, "yes": 0}
    for _ in range(20):
        x_1L, y_KL = related(rng, 1), related(rng, 20)
        between = [rho for rho in between_families(x_1L, y_KL, np.ones(len(FAMILIES)), FAMILIES)[0] if rho]
        assert len(between) == 20
        counts["families"] += sum(rho.significant for rho in between)
        counts["yes"] += sum(rho.significant and rho.value > 0 for rho in between)
        counts["layers"] += sum(rho.significant for rho in pooled(x_1L[0], *y_KL) if rho)
    assert counts["yes"] <= 0.05 * 400
    assert counts["families"] <= 0.06 * 400
    assert counts["layers"] >= 0.08 * 400  # what the families' test avoids


def test_a_partial_correlation_is_that_of_the_residuals() -> None:
    """Score and loss both follow the size, and have nothing else in common."""
    rng = np.random.default_rng(9)
    size_L = np.exp(rng.standard_normal(21))
    x_L, y_L = (np.log(size_L) + 0.3 * rng.standard_normal(21) for _ in range(2))
    ((rho,),) = within_families(x_L[None], y_L[None], size_L, np.zeros(21, int))
    assert rho.value > 0.7
    line = np.stack([np.ones(21), rankdata(np.log(size_L))], axis=1)
    rests = [rankdata(v) - line @ np.linalg.lstsq(line, rankdata(v))[0] for v in (x_L, y_L)]
    assert rho.partial == pytest.approx(np.corrcoef(*rests)[0, 1])
    assert abs(rho.partial) < 0.5

    # Layers of equal size, and scores that the size determines, have none.
    for size, score in ((np.ones(21), x_L), (size_L, size_L)):
        ((rho,),) = within_families(score[None], y_L[None], size, np.zeros(21, int))
        assert rho.partial is None


@pytest.mark.parametrize("x_L", [np.arange(LEAST - 1.0), np.ones(9)], ids=["too few layers", "all the same"])
def test_where_there_is_no_correlation_there_is_none(x_L: Any) -> None:
    assert pooled(x_L, np.arange(float(len(x_L)))) == [None]


@pytest.mark.parametrize("ties", [0, 11, 18, 19])
def test_the_interval_covers_what_it_should(ties: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples of 20 layers without a relation, one in twenty has an interval without zero, also with ties."""
    monkeypatch.setattr(correlation, "RESAMPLES", 999)
    rng = np.random.default_rng(2)
    x_L = np.append(np.zeros(ties), rng.random(20 - ties))
    found = [rho for rho in pooled(x_L, *rng.standard_normal((100, 20))) if rho is not None]
    assert len(found) == 100
    assert sum(rho.low > 0 or rho.high < 0 for rho in found) <= 10


def test_the_interval_holds_95_percent_of_the_samples() -> None:
    """The cosines of 101 directions with one of them are 0, 0.01, ..., 1."""
    cosines = np.linspace(0, 1, 101)
    x_BL = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)[[50, *range(101)]]
    found = _found(x_BL, np.repeat([[1.0, 0.0]], 102, axis=0), np.array([[0.0, 1.0]]))
    assert found[:3] == pytest.approx((0.5, 0.025, 0.975))


def test_a_family_without_the_score_takes_part_in_permutations() -> None:
    """Of all orders of seven families, in which six have the score, the share that is as strong."""
    x_F, y_F = np.array([np.nan, 1.0, 2, 3, 4, 5, 6]), np.array([3.0, 1, 2, 4, 7, 5, 6])
    ((rho,),) = between_families(x_F[None], y_F[None], np.ones(7), np.arange(7))
    ranks_PF = rankdata([order[1:] for order in permutations(y_F)], axis=1)
    strengths_P = abs((ranks_PF - 3.5) @ (x_F[1:] - 3.5)) / 17.5
    assert rho.value == pytest.approx(spearmanr(x_F[1:], y_F[1:]).statistic)
    assert rho.p == pytest.approx(np.mean(strengths_P >= abs(rho.value) - 1e-9))


def test_a_score_has_the_same_interval_alone_and_among_others() -> None:
    rng = np.random.default_rng(5)
    x_SL, y_KL = rng.standard_normal((3, 12)), rng.standard_normal((1, 12))
    together, alone = (within_families(x, y_KL, np.ones(12), np.zeros(12, int))[-1][0] for x in (x_SL, x_SL[-1:]))
    assert (together.low, together.high) == (alone.low, alone.high)


def test_the_best_of_many_scores_is_seldom_found_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random losses: in about one of twenty tables is some score significant. One by one, each score would be."""
    monkeypatch.setattr(correlation, "RESAMPLES", 499)
    rng = np.random.default_rng(3)
    x_SL, y_KL = rng.standard_normal((8, 12)), rng.standard_normal((40, 12))
    found = within_families(x_SL, y_KL, np.ones(12), np.zeros(12, int))
    least = [min(rho.p for rho in of_loss if rho is not None) for of_loss in zip(*found, strict=True)]
    assert sum(p < 0.05 for p in least) <= 5
    assert 0.3 < np.mean(least) < 0.7  # p of the best is uniform


def test_scores_of_few_layers_do_not_hide_a_relation_of_many() -> None:
    """With six layers, chance reaches correlations that twenty layers with a relation do not."""
    rng = np.random.default_rng(4)
    x_L = rng.standard_normal(20)
    gains_KL = x_L + 0.8 * rng.standard_normal((20, 20))
    few_SL = np.where(np.arange(20) < 6, rng.standard_normal((4, 20)), np.nan)
    found = within_families(np.array([x_L, *few_SL]), gains_KL, np.ones(20), np.zeros(20, int))
    assert all(rho is not None for of_score in found for rho in of_score)
    assert sum(rho.significant for rho in found[0] if rho is not None) >= 16
    assert sum(rho.significant for of_score in found[1:] for rho in of_score if rho is not None) <= 8
