"""The choice of a grid point on validation, the choices of other grids, and what the choice shows about the grid."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Literal

from optuna.trial import FrozenTrial

from runners.mad.search.study import run_of
from runners.mad.training.protocol import Run
from tasks.base import Accuracy

PAPER_LRS = (1e-4, 5e-4, 1e-3)
"""Oncescu et al. 2026, appendix "Synthetic experiments", which prints 5e-4 a second time."""
WIDE_LRS = (*PAPER_LRS, 2e-3, 5e-3)
OTHER_GRIDS: Mapping[str, tuple[float, ...]] = {"paper": PAPER_LRS, "paper with 5e-3": (*PAPER_LRS, 5e-3)}
"""Learning rates of smaller grids whose choice is computed from the runs of a larger grid."""
NEAR = 0.9
"""Share of the best point's token accuracy from which a point counts as near the best."""
SATURATED = 1e-3
"""Distance from the ceiling of token accuracy at which a larger learning rate cannot help."""

GridPoint = tuple[float, float]
"""Learning rate and weight decay."""
Edge = Literal["smallest", "largest"]


def choose_point(
    trials: Sequence[FrozenTrial], lrs: Sequence[float] | None = None, without: Collection[GridPoint] = ()
) -> GridPoint | None:
    """Return the grid point with the best mean validation score over its seeds; of equal ones the smallest rates.

    Args:
        trials: finished trials.
        lrs: learning rates to choose from; all by default.
        without: points that are not chosen, because a seed that repeats them diverged.

    Returns:
        None if a seed of each point diverged.
    """
    scores = {
        point: fmean(trial.user_attrs["validation_score"] for trial in members)
        for point, members in by_point(trials).items()
        if not diverged_seeds(members) and (lrs is None or point[0] in lrs) and point not in without
    }
    return max(scores, key=lambda point: (scores[point], -point[0], -point[1]), default=None)


def choose_among(trials: Sequence[FrozenTrial], points: Collection[GridPoint]) -> GridPoint | None:
    """Return the best of points that commands with different grids have chosen, perhaps with other numbers of seeds.

    A point with fewer seeds takes the place of one with more if its mean validation score over the seeds that both have
    is higher.

    Args:
        trials: finished trials, of these and of other points.
        points: the points.

    Returns:
        None if a seed of each point diverged.
    """
    scores = {
        point: {run_of(trial).seed: trial.user_attrs["validation_score"] for trial in members}
        for point, members in by_point(trials).items()
        if point in points and not diverged_seeds(members)
    }
    best = None
    for point in sorted(scores, key=lambda point: (-len(scores[point]), point)):
        shared = scores[point].keys() & scores[best].keys() if best else set[int]()
        if best is None or sum(scores[point][seed] - scores[best][seed] for seed in shared) > 0:
            best = point
    return best


def choose_in_other_grids(trials: Sequence[FrozenTrial], without: Collection[GridPoint] = ()) -> dict[str, GridPoint]:
    """Return the choice of each of ``OTHER_GRIDS`` for which the trials hold its learning rates and further ones.

    Args:
        trials: finished trials of the grid alone: a mean that also contains seeds which repeat the chosen point is not
            comparable with the other points.
        without: as in ``choose_point``.
    """
    tried = {run_of(trial).lr for trial in trials}
    choices = {name: choose_point(trials, lrs, without) for name, lrs in OTHER_GRIDS.items() if tried > set(lrs)}
    return {name: point for name, point in choices.items() if point is not None}


def by_point(trials: Sequence[FrozenTrial]) -> dict[GridPoint, list[FrozenTrial]]:
    """Return trials by grid point."""
    groups: dict[GridPoint, list[FrozenTrial]] = {}
    for trial in trials:
        run = run_of(trial)
        groups.setdefault((run.lr, run.weight_decay), []).append(trial)
    return groups


def repeats_of(chosen: GridPoint, seeds: Sequence[int]) -> list[Run]:
    """Return the runs that repeat a point with more seeds."""
    return [Run(lr=chosen[0], weight_decay=chosen[1], seed=seed) for seed in seeds]


def diverged_seeds(trials: Sequence[FrozenTrial]) -> dict[int, int]:
    """Return the step of divergence by seed, for seeds that diverged."""
    return {run_of(t).seed: t.user_attrs["diverged_step"] for t in trials if "diverged_step" in t.user_attrs}


def edge_of(
    chosen: GridPoint | None, tried: Sequence[float], accuracies: Mapping[GridPoint, float], ceiling: Accuracy
) -> Edge | None:
    """Return which end of the grid's learning rates was chosen; None inside the grid, and if the ceiling is reached.

    Args:
        chosen: the chosen point; without an accuracy if a seed of it diverged that did not take part in the choice.
        tried: learning rates of the grid, including those that diverged.
        accuracies: mean validation token accuracy of each point that did not diverge.
        ceiling: ceiling of the task.
    """
    if chosen is None or chosen not in accuracies or len(set(tried)) < 2:
        return None
    if accuracies[chosen] >= ceiling.token - SATURATED:
        return None
    ends: dict[float, Edge] = {min(tried): "smallest", max(tried): "largest"}
    return ends.get(chosen[0])


def near_best(accuracies: Mapping[GridPoint, float], points: int, chance: Accuracy) -> float | None:
    """Return the share of the grid's points whose validation token accuracy is at least ``NEAR`` times the best one.

    It shows how sensitive a layer is to learning rate and weight decay: 1 means not at all. None if no point is above
    chance.

    Args:
        accuracies: as in ``edge_of``.
        points: number of points, including those that diverged.
        chance: chance level of the task.
    """
    best = max(accuracies.values(), default=0.0)
    if best <= chance.token:
        return None
    return sum(accuracy >= NEAR * best for accuracy in accuracies.values()) / points
