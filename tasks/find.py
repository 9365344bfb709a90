"""Find a task by its name."""

from typing import Any

from tasks import TASKS


def find_task(name: str) -> Any:
    """Task class of a registered name.

    Raises:
        ValueError: no such task.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: choose from {', '.join(TASKS)}")
    return TASKS[name]
