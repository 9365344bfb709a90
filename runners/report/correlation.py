"""Rank correlations of layers: Spearman's ρ, its interval, and whether it is stronger than chance explains.

Layers of one family resemble each other, in their scores and in their losses. A test that assigns the losses to any
other layers therefore finds relations where there are none. Two correlations avoid this:

- *between families*, a family counts once, with the mean rank of its members that have the score. The test permutes
  families.
- *within families*, the mean rank of each family is subtracted from the ranks of its members, which shows whether
  scores order the members of a family. The test permutes the members of each family.

Intervals are percentile bootstrap intervals over families or layers (Efron and Tibshirani 1993, chapter 13). The best
of many scores correlates by chance alone. Whether a score predicts a figure is therefore decided by a permutation test
of all scores together (Westfall and Young 1993, single-step minP): it compares p-values, not correlations, because
scores of few layers correlate strongly by chance. A partial correlation is that of the ranks' residuals after a linear
regression on the ranks of a third figure, such as the number of parameters or, of equal ranks, its logarithm.
"""

import math
from dataclasses import dataclass
from itertools import chain, permutations, product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from runners.report.ranks import RESAMPLES, SEED

LEAST = 6
"""Least number of families, or of layers within families, of a correlation.

Of the random orders of five, one in twelve has |ρ| of 0.9 or more.
"""
SIGNIFICANT = 0.05
"""A score predicts a figure if its p-value is below this."""

MOST_ORDERS = math.factorial(7)
"""Largest number of orders of which the test takes all, not a random sample: those of the seven families of layers.

At seven families, ρ = 0.786 has p = 0.048. In random samples of 2,000 orders, p is 0.040 to 0.066.
"""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rho:
    """A rank correlation with its 95% interval.

    Attributes:
        value: the correlation.
        low: lower end of the interval.
        high: upper end of the interval.
        p: probability that some score of the same table stands out as much from chance, in either direction, if the
            losses are assigned at random to the families, or to the members of each family.
        partial: the partial correlation given the third figure; None if that is the same for all, or determines the
            ranks of the score or the figure.
    """

    value: float
    low: float
    high: float
    p: float
    partial: float | None

    @property
    def significant(self) -> bool:
        """Whether the correlation is stronger than chance explains."""
        return self.p < SIGNIFICANT


def between_families(scores_SL: Floats, gains_KL: Floats, given_L: Floats, families_L: Ints) -> list[list[Rho | None]]:
    """Return S x K rank correlations over families; None for an undefined correlation, or with too few families.

    Args:
        scores_SL: S scores of each layer, NaN for a layer without the score.
        gains_KL: K figures of each layer, of which more is better.
        given_L: the figure of each layer that partial correlations hold fixed.
        families_L: family of each layer, from 0.
    """
    scores_SF = _mean_by_family(_ranks(scores_SL), families_L)
    given_F, all_KF = (_mean_by_family(_ranks(np.atleast_2d(x)), families_L) for x in (given_L, gains_KL))

    # A family's gain is that of the members with the score; families without the score take part in permutations alone.
    gains_SKL = np.where(np.isnan(scores_SL)[:, None], np.nan, _ranks(gains_KL))
    gains_SKF = np.array([_mean_by_family(of_score_KL, families_L) for of_score_KL in gains_SKL])
    gains_SKF = np.where(np.isnan(gains_SKF), all_KF, gains_SKF)
    return within_families(scores_SF, gains_SKF, given_F[0], np.zeros(given_F.shape[1], int))


def within_families(scores_SL: Floats, gains_KL: Floats, given_L: Floats, families_L: Ints) -> list[list[Rho | None]]:
    """Return S x K rank correlations within families; None for an undefined correlation, or with too few layers.

    Families of a single layer are left out. If all layers are of one family, this is Spearman's ρ over all layers.

    Args:
        scores_SL: S scores of each layer, NaN for a layer without the score.
        gains_KL: K figures of each layer, of which more is better; or (S, K, L), if they differ between scores.
        given_L: the figure of each layer that partial correlations hold fixed.
        families_L: family of each layer, from 0.
    """
    gains_SKL = np.broadcast_to(gains_KL, (len(scores_SL), *gains_KL.shape[-2:]))
    shuffled_PL = _shuffles(families_L, np.random.default_rng(SEED))
    found_SK: list[list[tuple[float, float, float, float | None] | None]] = []
    p_SKP = np.ones((*gains_SKL.shape[:2], len(shuffled_PL)))

    for s, scores_L in enumerate(scores_SL):
        # Layers that have the score, and are not the only one of their family that has it.
        has_L = ~np.isnan(scores_L)
        at = np.flatnonzero(has_L & (np.bincount(families_L, has_L)[families_L] > 1))
        if len(at) < LEAST:
            found_SK.append([None] * gains_SKL.shape[1])
            continue

        # Bootstrap samples of the layers, the same for every score. The first row holds the layers themselves.
        rng = np.random.default_rng(SEED)
        chosen_BL = at[rng.integers(len(at), size=(1 + RESAMPLES, len(at)))]
        chosen_BL[0] = at
        same_BLL = families_L[chosen_BL][:, :, None] == families_L[chosen_BL][:, None, :]
        average_BLL = same_BLL / same_BLL.sum(2, keepdims=True)  # over the family of each layer
        x_BL, z_1L = (
            _centred_ranks(scores_L[chosen_BL], average_BLL),
            _centred_ranks(given_L[at][None], average_BLL[:1]),
        )
        found_SK.append([_found(x_BL, _centred_ranks(y_L[chosen_BL], average_BLL), z_1L) for y_L in gains_SKL[s]])

        # The p-value of this score alone, for the layers' own gains and for each assignment to other layers.
        for k, y_L in enumerate(gains_SKL[s]):
            y_PL = _centred_ranks(y_L[shuffled_PL[:, at]], average_BLL[:1])
            strengths_P = abs(np.nan_to_num(_cosines(x_BL[:1], y_PL)))
            p_SKP[s, k] = 1 - np.searchsorted(np.sort(strengths_P), strengths_P - 1e-9) / len(strengths_P)

    # How often chance lets some score stand out as much.
    least_KP = p_SKP.min(axis=0)
    p_SK = (least_KP <= p_SKP[:, :, :1] + 1e-9).mean(axis=2)
    return [
        [
            found and Rho(value=found[0], low=found[1], high=found[2], p=p, partial=found[3])
            for found, p in zip(*pair, strict=True)
        ]
        for pair in zip(found_SK, p_SK.tolist(), strict=True)
    ]


def _ranks(values_NL: Floats) -> Floats:
    """Return the ranks in each row; NaN stays NaN."""
    from scipy.stats import rankdata  # takes a second to import

    ranks_NL: Floats = rankdata(values_NL, axis=1, nan_policy="omit")
    return ranks_NL


def _mean_by_family(values_NL: Floats, families_L: Ints) -> Floats:
    """Return the mean of each family's members in each row, shape (N, F); NaN where every member's value is."""
    return pd.DataFrame(values_NL.T).groupby(families_L).mean().to_numpy().T


def _shuffles(families_L: Ints, rng: np.random.Generator) -> Ints:
    """Return the order of the layers, then others in which each place keeps its family; P in all.

    These are all such orders if there are at most ``MOST_ORDERS``, else random ones.
    """
    places = [np.flatnonzero(families_L == family) for family in np.unique(families_L)]
    if math.prod(math.factorial(len(at)) for at in places) <= MOST_ORDERS:
        orders = product(*map(permutations, places))
        orders_PL = np.array([list(chain.from_iterable(order)) for order in orders], int)
    else:
        orders_PL = np.argsort(families_L + rng.random((1 + RESAMPLES, len(families_L))), axis=1)
        orders_PL[0] = np.concatenate(places)

    shuffled_PL = np.empty_like(orders_PL)
    shuffled_PL[:, np.argsort(families_L, kind="stable")] = orders_PL
    return shuffled_PL


def _centred_ranks(values_BL: Floats, average_BLL: Floats) -> Floats:
    """Return the ranks in each row less the mean rank of the family."""
    ranks_BL = _ranks(values_BL)
    centred_BL: Floats = ranks_BL - (average_BLL @ ranks_BL[:, :, None])[:, :, 0]
    return centred_BL


def _cosines(x_BL: Floats, y_BL: Floats) -> Floats:
    """Return the cosines of the angles between the rows, which are the correlations of centred rows; NaN for zeros."""
    lengths_B = np.sqrt((x_BL**2).sum(1) * (y_BL**2).sum(1))
    return np.where(lengths_B > 1e-9, (x_BL * y_BL).sum(1) / np.maximum(lengths_B, 1e-9), np.nan)


def _found(x_BL: Floats, y_BL: Floats, z_1L: Floats) -> tuple[float, float, float, float | None] | None:
    """Return the correlation of the first rows, its interval from all other rows, and the partial correlation.

    None stands for a correlation that is undefined.

    A sample in which all scores are equal shows no correlation and counts as 0. To leave such samples out would keep
    those with the layers that differ, and all of those have the sign of the correlation.
    """
    value, *drawn = _cosines(x_BL, y_BL).tolist()
    if math.isnan(value):
        return None
    low, high = np.percentile(np.nan_to_num(drawn), [2.5, 97.5])

    # Given z, unless z is constant, or determines x or y.
    (xz,), (yz,) = _cosines(x_BL[:1], z_1L), _cosines(y_BL[:1], z_1L)
    rest = (1 - xz**2) * (1 - yz**2)
    partial = float((value - xz * yz) / math.sqrt(rest)) if rest > 1e-9 else None
    return value, float(low), float(high), partial
