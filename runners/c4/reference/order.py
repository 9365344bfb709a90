"""The order of a reference language model's runs: which can be trained after which, and how many are left.

A model is trained at three learning rates with the first seed. While the best rate is the lowest or highest one tried,
its next neighbour is tried as well. The best rate is then trained with the other seeds. If one of them diverges, the
next best rate takes its place.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Learning rates that may be tried, in ascending order."""
FIRST = RATES[3:6]
"""Learning rates at which every model is trained. At 1e-3, every loss measured with RT or the Transformer is at least
0.3 nats above that at 3e-3 (results/notes/2026-11-25.md). One whose best rate is 3e-3 is trained at 1e-3 as well."""
SEEDS = (0, 1)

Place = tuple[float, int]
"""Learning rate and seed of a run."""


class Outcome(Protocol):
    """What decides which runs of a model follow: where a run was trained, and its loss, None if it diverged."""

    @property
    def lr(self) -> float: ...

    @property
    def seed(self) -> int: ...

    @property
    def validation_loss(self) -> float | None: ...


def open_places(runs: Sequence[Outcome]) -> list[Place]:
    """Return learning rate and seed of each run that can be trained after ``runs``; none if the model is finished.

    None of them depends on the loss of another, so several processes may train them at the same time.
    """
    losses = losses_by_rate(runs)
    if rates := [rate for rate in FIRST if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Neighbours of the best rate.
    best = min(losses, key=lambda rate: (losses[rate], rate))
    at = RATES.index(best)
    if rates := [rate for rate in RATES[max(0, at - 1) : at + 2] if rate not in losses]:
        return [(rate, SEEDS[0]) for rate in rates]

    # Other seeds, unless every run diverged.
    done = {run.seed for run in runs if run.lr == best}
    return [(best, seed) for seed in SEEDS if seed not in done] if math.isfinite(losses[best]) else []


def chosen_rate(runs: Sequence[Outcome]) -> float | None:
    """Return the learning rate with the lowest validation loss of the first seed; None before a run has converged.

    A rate at which any seed diverged is not chosen.
    """
    losses = {rate: loss for rate, loss in losses_by_rate(runs).items() if math.isfinite(loss)}
    return min(losses, key=lambda rate: (losses[rate], rate), default=None)


def losses_by_rate(runs: Sequence[Outcome]) -> dict[float, float]:
    """Return the validation loss of the first seed at each learning rate; infinity if any seed diverged there."""
    losses = {run.lr: run.validation_loss for run in runs if run.seed == SEEDS[0]}
    diverged = {run.lr for run in runs if run.validation_loss is None}
    return {rate: math.inf if loss is None or rate in diverged else loss for rate, loss in losses.items()}


def runs_left(runs: Sequence[Outcome]) -> int:
    """Return the least number of runs that a model still needs, whatever their losses turn out to be."""
    return min(_runs_if_best(rate, runs) for rate in RATES)


class _Imagined(NamedTuple):
    """The outcome of a run that is not trained."""

    lr: float
    seed: int
    validation_loss: float | None


def _runs_if_best(best: float, runs: Sequence[Outcome]) -> int:
    """Return how many runs are left if ``best``, not yet tried, is the best rate and the others to try diverge.

    If ``best`` is tried already, all rates to try diverge. The other seeds of the chosen rate converge.
    """
    imagined = [*runs]
    while places := open_places(imagined):
        rate, seed = places[0]
        imagined.append(_Imagined(rate, seed, None if seed == SEEDS[0] and rate != best else 0.0))
    return len(imagined) - len(runs)
