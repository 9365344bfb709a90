"""A training from its first step to its last."""

from typing import Any

from runners.interrupt import asked_to_stop
from runners.mad.training import loop


def train(*given: Any, **settings: Any) -> list[loop.Result]:
    """Return the results of ``runners.mad.training.loop.train``, whose arguments these are; signals stop it."""
    with asked_to_stop() as asked:
        steps = loop.train(*given, **settings, asked=asked)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                results: list[loop.Result] = end.value
                return results
