"""Made-up results of several layers on two tasks."""

from collections.abc import Sequence
from itertools import product

from mixers import MIXERS
from mixers.costs import Costs
from runners.mad.results.standings import Standing
from runners.mad.results.summary import TEST_METRICS, Estimate
from tasks.base import Accuracy

MANY = ("lstm", "rt", "s5", "lru", "staircase")
SORTED = [("recurrent net", "lstm"), ("recurrent net", "lru"), ("recurrent attention", "rt")]
SORTED += [("recurrent attention", "staircase"), ("state space", "s5")]


def standings_of(
    mixers: Sequence[str], diverged: Sequence[tuple[str, str]] = (), half_width: float | None = None
) -> list[Standing]:
    """The n-th has a test sequence accuracy of n percent, the token accuracy is half a unit higher.

    A mean with a ``half_width`` is over 3 seeds.
    """
    standings = []
    for n, (task, mixer) in enumerate(product(("parity", "mqar"), mixers)):
        estimates = {m: Estimate(mean=n / 100 + 0.5 * ("token" in m), half_width=half_width) for m in TEST_METRICS}
        standings.append(
            Standing(
                mixer=mixer,
                family=MIXERS[mixer].family,
                remark=None,
                task=task,
                difficulty="baseline",
                test=None if (mixer, task) in diverged else estimates,
                seeds=1 if half_width is None else 3,
                ceiling=Accuracy(sequence=0.98, token=0.9912),  # two digits would put a perfect run above it
                chance=Accuracy(sequence=0.2, token=0.3 if task == "mqar" else 0.5),
                costs=Costs(parameters=1, state_floats=None, flops_per_token=None),
            )
        )
    return standings
