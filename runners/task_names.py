"""Tasks by name: the project's, and those of any other module."""

from inspect import isabstract
from typing import Any, get_args

from mixers.named import Kind, find_class
from tasks import TASKS
from tasks.base import BackboneName, Task

KIND = Kind("task", "task", Task, "tasks.base.Task")
"""What ``find_task`` finds."""
ABILITIES = {"s5-permutations": "permutations of 3"}
"""Names of abilities whose ladder is of other objects than the task's name says."""


def find_task(name: str) -> Any:
    """Return the task class of a registered name or of an import path ``package.module:Class``.

    Raises:
        ValueError: there is no such task, or it cannot be used. The message lists the choices, or says why.
    """
    if name in TASKS:
        return TASKS[name]

    found = find_class(name, KIND, TASKS)
    if isabstract(found) or not hasattr(found, "name"):
        lacking = sorted(found.__abstractmethods__) or ["name"]
        raise ValueError(f"{name!r} is no whole task: it lacks {', '.join(lacking)}")
    try:
        default = found.Config()
    except TypeError as error:
        raise ValueError(f"{name!r} needs a Config whose settings all have defaults: {error}") from error
    if found.backbone not in get_args(BackboneName):
        choices = ", ".join(get_args(BackboneName))
        raise ValueError(f"{name!r} has the backbone {found.backbone!r}: choose from {choices}")
    if unknown := [setting for setting in found.sweeps if setting not in vars(default)]:
        raise ValueError(f"the sweeps of {name!r} name {unknown[0]!r}, which its Config lacks")
    try:
        default.train_length  # noqa: B018  (which is computed)
    except KeyError as error:
        raise ValueError(f"the Config of {name!r} lacks length: call the setting so, or state train_length") from error
    return found
