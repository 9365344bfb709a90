"""Which point is chosen, what other grids would choose, and what the choice says of the grid."""

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from runners.mad.results.choice import choose_among, choose_in_other_grids, choose_point, edge_of, near_best
from runners.mad.search.study import DISTRIBUTIONS

from tasks.base import Accuracy

CEILING = Accuracy(sequence=1.0, token=0.9)
LRS = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3)


def trial(lr: float, score: float | None, seed: int = 0) -> FrozenTrial:
    """A finished trial with a validation score, None for one that diverged."""
    return create_trial(
        state=TrialState.FAIL if score is None else TrialState.COMPLETE,
        params={"lr": lr, "weight_decay": 0.0},
        distributions=DISTRIBUTIONS,
        value=score,
        user_attrs={"diverged_step": 3} if score is None else {"validation_score": score},
        system_attrs={"fixed_params": {"lr": lr, "weight_decay": 0.0, "seed": seed}},
    )


def test_the_best_mean_over_seeds_is_chosen_and_not_the_best_seed() -> None:
    """The first point has the best seed, the second the best mean; the maximum would choose the first."""
    trials = [trial(1e-4, 0.9), trial(1e-4, 0.1, seed=1), trial(5e-4, 0.6), trial(5e-4, 0.6, seed=1)]
    assert choose_point(trials) == (5e-4, 0.0)


def test_a_point_of_which_a_seed_diverged_is_not_chosen() -> None:
    assert choose_point([trial(1e-4, 0.9), trial(1e-4, None, seed=1), trial(5e-4, 0.2)]) == (5e-4, 0.0)
    assert choose_point([trial(1e-4, None)]) is None


def test_of_equal_points_the_smallest_rate_is_chosen_in_any_order() -> None:
    trials = [trial(1e-3, 0.9), trial(1e-4, 0.9), trial(5e-4, 0.9), trial(5e-5, 0.8)]
    points = {(1e-3, 0.0), (1e-4, 0.0), (5e-4, 0.0)}
    for order in (trials, trials[::-1]):
        assert choose_point(order) == (1e-4, 0.0)
        assert choose_among(order, points) == (1e-4, 0.0)


def test_choices_of_several_commands_are_compared_by_the_seeds_that_they_share() -> None:
    """The first has the better mean over its three seeds, the second the better one over the two of both."""
    first = [trial(1e-4, 0.5), trial(1e-4, 0.5, seed=1), trial(1e-4, 0.9, seed=2)]
    second = [trial(5e-4, 0.6), trial(5e-4, 0.6, seed=1)]
    better, diverged = [trial(1e-3, 0.8), trial(1e-3, 0.8, seed=1)], [trial(2e-3, 0.9), trial(2e-3, None, seed=1)]
    trials = [*first, *second, *better, *diverged]
    points = {(1e-4, 0.0), (5e-4, 0.0), (2e-3, 0.0)}
    assert choose_among(trials, points) == (5e-4, 0.0)
    assert choose_among(trials, {(2e-3, 0.0)}) is None

    # A third point with fewer seeds does not change which of two is better.
    other = [trial(1e-2, 0.1)]
    one, two = [trial(1e-4, 0.9), trial(1e-4, 0.1, seed=1)], [trial(5e-4, 0.8), trial(5e-4, 0.8, seed=1)]
    assert choose_among([*one, *two, *other], {(1e-4, 0.0), (5e-4, 0.0), (1e-2, 0.0)}) == (5e-4, 0.0)
    assert choose_among([trial(1e-4, 0.9, seed=1), trial(5e-4, 0.95)], {(1e-4, 0.0), (5e-4, 0.0)}) == (1e-4, 0.0)


def test_other_grids_choose_among_their_own_learning_rates() -> None:
    scores = dict(zip(LRS, (0.1, 0.3, 0.2, 0.9, 0.5), strict=True))
    trials = [trial(lr, score) for lr, score in scores.items()]
    assert choose_point(trials) == (2e-3, 0.0)
    assert choose_in_other_grids(trials) == {"paper": (5e-4, 0.0), "paper with 5e-3": (5e-3, 0.0)}


def test_points_that_are_ruled_out_are_chosen_by_no_grid() -> None:
    scores = dict(zip(LRS, (0.1, 0.3, 0.2, 0.9, 0.5), strict=True))
    trials = [trial(lr, score) for lr, score in scores.items()]
    ruled_out = {(2e-3, 0.0), (5e-4, 0.0)}
    assert choose_point(trials, without=ruled_out) == (5e-3, 0.0)
    assert choose_in_other_grids(trials, without=ruled_out) == {"paper": (1e-3, 0.0), "paper with 5e-3": (5e-3, 0.0)}
    assert choose_point(trials, without={(lr, 0.0) for lr in LRS}) is None


def test_of_the_papers_grid_itself_no_other_choice_is_stated() -> None:
    assert choose_in_other_grids([trial(lr, 0.1) for lr in LRS[:3]]) == {}


@pytest.mark.parametrize(
    ("chosen", "accuracy", "edge"),
    [
        (5e-3, 0.8, "largest"),
        (1e-4, 0.8, "smallest"),
        (1e-3, 0.8, None),
        (5e-3, 0.8995, None),  # at the ceiling there is nothing to gain
    ],
)
def test_a_choice_at_an_end_of_the_grid_is_flagged_unless_it_reaches_the_ceiling(
    chosen: float, accuracy: float, edge: str | None
) -> None:
    accuracies = {(lr, 0.0): 0.5 for lr in LRS} | {(chosen, 0.0): accuracy}
    assert edge_of((chosen, 0.0), LRS, accuracies, CEILING) == edge


def test_the_last_learning_rate_before_one_that_diverged_is_no_end_of_the_grid() -> None:
    accuracies = {(lr, 0.0): 0.5 for lr in LRS[:4]}
    assert edge_of((2e-3, 0.0), LRS, accuracies, CEILING) is None


def test_a_grid_of_one_learning_rate_has_no_ends() -> None:
    assert edge_of((1e-3, 0.1), [1e-3, 1e-3], {(1e-3, 0.0): 0.1, (1e-3, 0.1): 0.2}, CEILING) is None


def test_sensitivity_counts_the_points_near_the_best_and_those_that_diverged() -> None:
    accuracies = {(1e-4, 0.0): 0.5, (5e-4, 0.0): 0.91, (1e-3, 0.0): 1.0}
    chance = Accuracy(sequence=0.0, token=0.25)
    assert near_best(accuracies, 4, chance) == 2 / 4
    assert near_best({}, 4, chance) is None


def test_points_at_chance_say_nothing_about_sensitivity() -> None:
    """All of them are near the best one, which has learned nothing, either."""
    accuracies = {(1e-4, 0.0): 0.24, (5e-4, 0.0): 0.25}
    assert near_best(accuracies, 2, Accuracy(sequence=0.0, token=0.25)) is None
