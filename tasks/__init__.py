"""The tasks by name."""

from difflib import get_close_matches
from typing import Any

from tasks.base import Task
from tasks.compression import Compression
from tasks.copying import Copying
from tasks.fuzzy_recall import FuzzyInContextRecall
from tasks.memorization import Memorization
from tasks.mqar import MultiQueryRecall
from tasks.parity import Parity
from tasks.permutations import Permutations
from tasks.recall import InContextRecall, NoisyInContextRecall
from tasks.selective_copying import SelectiveCopying

TASKS: dict[str, type[Task]] = {
    "in-context-recall": InContextRecall,
    "noisy-in-context-recall": NoisyInContextRecall,
    "fuzzy-in-context-recall": FuzzyInContextRecall,
    "selective-copying": SelectiveCopying,
    "compression": Compression,
    "memorization": Memorization,
    "copying": Copying,
    "mqar": MultiQueryRecall,
    "parity": Parity,
    "s5-permutations": Permutations,
}


def find_task(name: str) -> Any:
    """Return the task class of a registered name.

    Raises:
        ValueError: there is no such task.
    """
    if name not in TASKS:
        similar = get_close_matches(name.lower(), TASKS, n=1) or [task for task in TASKS if name.lower() in task]
        meant = f"did you mean {' or '.join(similar)}? The tasks are" if similar and name else "choose from"
        advice = "separate names by spaces" if "," in name else f"{meant} {', '.join(TASKS)}"
        raise ValueError(f"no task {name!r}: {advice}")
    return TASKS[name]
