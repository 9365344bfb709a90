"""The tasks by name."""

from difflib import get_close_matches
from importlib import import_module
from inspect import isabstract, isclass
from pathlib import Path
from typing import Any, get_args

from tasks.base import BackboneName, Task
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
    """Return the task class of a registered name or of an import path ``package.module:Class``.

    Raises:
        ValueError: there is no such task, or it cannot be used. The message lists the choices, or says why.
    """
    if name in TASKS:
        return TASKS[name]
    if ":" in name and "," not in name:
        return _imported(name)

    raise ValueError(f"no task {name!r}: {_advice(name)}")


def _advice(name: str) -> str:
    """Return how to write a name that is no registered one."""
    if "," in name:
        return "separate names by spaces"
    if "/" in name or name.endswith(".py"):
        return f"give module and class, not the file: {Path(name).stem}:Class"
    module, dot, class_name = name.rpartition(".")
    if dot:
        return f"write {module}:{class_name}, with a colon before the class"

    similar = get_close_matches(name.lower(), TASKS, n=1) or [task for task in TASKS if name.lower() in task]
    meant = f"did you mean {' or '.join(similar)}? The tasks are" if similar and name else "choose from"
    return f"{meant} {', '.join(TASKS)}, or give package.module:Class"


def _imported(name: str) -> type[Task]:
    """Return the task of an import path.

    Raises:
        ValueError: it cannot be imported, or is no task.
    """
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # importing runs a user's code, which may raise anything
        raise ValueError(f"cannot import task {name!r}: {type(error).__name__}: {error}") from error

    if not (isclass(found) and issubclass(found, Task)):
        raise ValueError(f"{name!r} is no task: it must be a class derived from tasks.base.Task")
    if isabstract(found) or not hasattr(found, "name"):
        lacking = sorted(found.__abstractmethods__) or ["name"]
        raise ValueError(f"{name!r} is no whole task: it lacks {', '.join(lacking)}")
    try:
        default = found.Config()
    except TypeError as error:
        raise ValueError(f"{name!r} needs a Config whose settings all have defaults: {error}") from error
    if found.backbone not in get_args(BackboneName):
        raise ValueError(
            f"{name!r} has the backbone {found.backbone!r}: choose from {', '.join(get_args(BackboneName))}"
        )
    if unknown := [setting for setting in found.sweeps if setting not in vars(default)]:
        raise ValueError(f"the sweeps of {name!r} name {unknown[0]!r}, which its Config lacks")
    try:
        default.train_length  # noqa: B018  (which is computed)
    except KeyError as error:
        raise ValueError(f"the Config of {name!r} lacks length: call the setting so, or state train_length") from error
    return found
