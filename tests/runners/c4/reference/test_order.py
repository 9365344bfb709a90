"""Which runs of a reference language model follow which, and how many are left."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest

from runners.c4.reference.order import chosen_rate, open_places, runs_left


class Done(NamedTuple):
    lr: float
    seed: int
    validation_loss: float | None


def run(rate: float, loss: float | None, seed: int = 0) -> Done:
    return Done(rate, seed, loss)


def order_of(losses: dict[float, float | None]) -> list[tuple[float, int]]:
    """The runs of a layer whose losses depend on the learning rate as given."""
    runs: list[Done] = []
    while places := open_places(runs):
        rate, seed = places[0]
        runs.append(run(rate, losses[rate], seed))
    return [(done.lr, done.seed) for done in runs]


FIRST = [(3e-3, 0), (1e-2, 0), (3e-2, 0)]


@pytest.mark.parametrize(
    ("losses", "more"),
    [
        ({3e-3: 3.0, 1e-2: 2.0, 3e-2: 2.5}, [(1e-2, 1)]),
        ({3e-3: 3.0, 1e-2: 2.0, 3e-2: 1.5, 1e-1: 1.6}, [(1e-1, 0), (3e-2, 1)]),
        (
            {3e-3: 1.0, 1e-2: 2.0, 3e-2: None, 1e-3: 0.9, 3e-4: 0.8, 1e-4: 0.7},
            [(1e-3, 0), (3e-4, 0), (1e-4, 0), (1e-4, 1)],
        ),
        (dict.fromkeys((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)), [(1e-3, 0), (3e-4, 0), (1e-4, 0)]),
    ],
    ids=["inside", "upper edge", "lower edge", "all diverge"],
)
def test_the_grid_grows_until_the_best_rate_is_inside(
    losses: dict[float, float | None], more: list[tuple[float, int]]
) -> None:
    assert order_of(losses) == [*FIRST, *more]
    assert runs_left([]) == 4
    assert runs_left([run(3e-3, 2.0), run(1e-2, None)]) == 3  # 3e-2 and 1e-3, and a second seed


def test_runs_are_open_together_if_none_depends_on_the_loss_of_another() -> None:
    assert open_places([]) == FIRST
    assert open_places([run(1e-2, 2.0)]) == [(3e-3, 0), (3e-2, 0)]
    assert open_places([run(1e-2, 2.0), run(3e-2, 1.5)]) == [(3e-3, 0)]
    for length in range(7):
        for runs in histories(length):
            for (rate, seed), loss in product(open_places(runs), (0.5, 9.0, None)):
                others = {place for place in open_places(runs) if place != (rate, seed)}
                assert others <= set(open_places([*runs, run(rate, loss, seed)]))


def test_the_second_seed_chooses_nothing() -> None:
    runs = [run(3e-3, 2.0), run(1e-2, 1.9), run(3e-2, 2.1), run(1e-2, 9.0, seed=1)]
    assert chosen_rate(runs) == 1e-2
    assert open_places(runs) == []
    assert runs_left(runs) == 0


def test_a_rate_at_which_the_second_seed_diverges_is_not_chosen() -> None:
    runs = [run(3e-3, 1.8), run(1e-2, 1.9), run(3e-2, 1.7), run(1e-1, 2.1), run(3e-2, None, seed=1)]
    assert chosen_rate(runs) == 3e-3
    assert runs_left(runs) == 2

    # The next best rate is searched on its other side, and gets a second seed.
    runs.append(run(1e-3, 1.85))
    assert open_places(runs[:-1]) == [(1e-3, 0)]
    assert open_places(runs) == [(3e-3, 1)]
    assert runs_left(runs) == 1

    # Where its second seed diverges as well, the third best one follows.
    runs.append(run(3e-3, None, seed=1))
    assert chosen_rate(runs) == 1e-3
    assert open_places(runs) == [(3e-4, 0)]


def fewest(runs: list[Done]) -> int:
    """The least number of runs left, over all ways in which each of them can end."""
    if not (places := open_places(runs)):
        return 0
    rate, seed = places[0]
    best = min((done.validation_loss for done in runs if done.validation_loss is not None), default=1.0)
    ends = (best / 2, 9.0, None)
    return 1 + min(fewest([*runs, run(rate, loss, seed)]) for loss in ends)


def histories(length: int) -> Iterator[list[Done]]:
    """Runs in their order, with all combinations of low, high and infinite losses."""
    for losses in product((1.0, 2.0, None), repeat=length):
        runs: list[Done] = []
        for loss in losses:
            if places := open_places(runs):
                rate, seed = places[0]
                runs.append(run(rate, loss, seed))
        yield runs


def test_the_runs_left_are_the_least_that_are_possible() -> None:
    assert runs_left([run(3e-3, 2.0)]) == 3  # 1e-2, the best of all, with a second seed, and 3e-2
    for length in range(6):
        for runs in histories(length):
            assert runs_left(runs) == fewest(runs)
