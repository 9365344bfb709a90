"""What every task must do, checked on a task from outside before anything is trained on it."""

from numbers import Integral
from typing import get_args

import numpy as np

from tasks.base import Batch, Split, Task, require

DRAWN = 4
"""Number of sequences that are drawn twice."""


def check_task(task: Task) -> None:
    """Draw all sequences of a task, and check what its training and evaluation rely on.

    Raises:
        ValueError: the task breaks a rule; the message says which.
        Exception: the task's own error.
    """
    require(
        isinstance(task.answer_count, Integral) and task.answer_count >= 1,
        f"answer_count is {task.answer_count!r}: a whole number, at least 1",
    )

    require(
        isinstance(task.vocab_size, Integral) and task.vocab_size >= 1,
        f"vocab_size is {task.vocab_size!r}: a whole number, at least 1",
    )

    names = (*get_args(Split), *task.extrapolation_names)
    for name in names:
        _check_draws(task, name)

    longest = 0
    for name in names:
        batch, ceiling = task.batch(name), task.ceiling(name)
        check_arrays(batch)
        longest = max(longest, batch.inputs_ST.shape[1])
        require(
            bool(batch.scored_ST.any(axis=1).all()), f"{name} has sequences without a scored position: correct sample"
        )
        require(
            0 < ceiling.sequence <= 1 and 0 < ceiling.token <= 1,
            f"the ceiling of {name} is {ceiling}: both are shares, above 0 and at most 1",
        )

    stated, found = task.config.train_length, task.batch("train").inputs_ST.shape[1]
    require(stated == found, f"training sequences have {found} positions, where Config says {stated}: correct one")
    stated = task.config.longest_length
    require(
        stated == longest,
        f"the longest sequences have {longest} positions, where longest_length of Config says {stated}: correct one",
    )


def _check_draws(task: Task, name: str) -> None:
    """Draw sequences of a split or extrapolation set twice: else a second process would train on other data."""
    first, again = (one.sample(one.stream(name), DRAWN, name) for one in (task, type(task)(task.config)))
    check_arrays(first)
    require(len(first) == DRAWN, f"sample returned {len(first)} of {DRAWN} sequences")
    for part, array in vars(first).items():
        require(
            np.array_equal(array, vars(again)[part]),
            f"sample draws other {part} of {name} from the same rng: take all random numbers from rng alone, or from "
            "self.stream",
        )


def check_arrays(batch: Batch) -> None:
    """Check the arrays that ``sample`` returns.

    Raises:
        ValueError: their shapes or dtypes are others than those of ``Batch``.
    """
    shapes = [array.shape for array in (batch.inputs_ST, batch.targets_ST, batch.scored_ST)]
    require(
        len(set(shapes)) == 1 and len(shapes[0]) == 2,
        f"sample returned arrays of shapes {', '.join(map(str, shapes))}: all three are (sequences, positions)",
    )
    for name, array in (("inputs_ST", batch.inputs_ST), ("targets_ST", batch.targets_ST)):
        require(array.dtype == np.int64, f"sample returned {name} of {array.dtype}: it holds numbers of int64")
    require(batch.scored_ST.dtype == np.bool_, f"sample returned scored_ST of {batch.scored_ST.dtype}: it is bool")
