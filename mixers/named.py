"""Classes by name: registered ones, and those of any other module by their import path ``package.module:Class``."""

import importlib
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from mixers.origin import advice_on_gpus, where

_MEMBER = re.compile(r"(?:([1-9]\d{0,2})\*)?([^*]+)")
"""A part of a stack's name: how often a layer follows itself, and its name."""


@dataclass(frozen=True)
class Kind:
    """What is named, in the words of messages.

    Attributes:
        option: name of the option that takes such names.
        noun: what a class of this kind is.
        base: class from which it is derived.
        path: import path of that class, as users write it.
    """

    option: str
    noun: str
    base: type
    path: str


def name_of(given: str | type, registry: Mapping[str, type]) -> str:
    """Return the name of a class that is given by name or as itself.

    Raises:
        ValueError: no module has the class under its own name, for example because it was defined in a function.
    """
    if not isinstance(given, type):
        return given
    if (registered := next((name for name, known in registry.items() if known is given), None)) is not None:
        return registered
    if getattr(sys.modules.get(given.__module__), given.__qualname__, None) is not given:
        raise ValueError(
            f"{given.__module__} has no {given.__qualname__}, or another one by now: give the class that has this name "
            "at the top level of its module"
        )
    return f"{given.__module__}:{given.__qualname__}"


def is_path(name: str) -> bool:
    """Return whether a name is an import path ``package.module:Class``, or a stack with one; not a registered name."""
    return ":" in name


def members_of(name: str) -> list[str]:
    """Return the names of the layers in a name, in order: of ``2*a+b`` a, a and b; of the name of a layer itself.

    Raises:
        ValueError: it is no such name.
    """
    parts = [_MEMBER.fullmatch(part) for part in name.split("+")]
    if not all(parts):
        raise ValueError(f"no mixer {name!r}: a stack is written as in 3*gated-deltanet+transformer")
    return [part[2] for part in parts if part for _ in range(int(part[1] or 1))]


def text_of(name: str) -> str:
    """Return the text that a result of a user's classes depends on, as it was when they were first used.

    It is that of the module that defines a class; of a class of a notebook or a program, its own.

    Args:
        name: import path of a class, which can be imported; or a stack with such classes among its layers.
    """
    paths = [path.partition(":") for path in dict.fromkeys(members_of(name)) if is_path(path)]
    return "".join(_text_of(getattr(importlib.import_module(module), class_name)) for module, _, class_name in paths)


@cache
def _text_of(kind: type) -> str:
    try:
        return inspect.getsource(kind if kind.__module__ == "__main__" else sys.modules[kind.__module__])
    except (OSError, TypeError):  # a notebook has no file, but its functions have texts
        return "".join(inspect.getsource(entry) for entry in vars(kind).values() if inspect.isfunction(entry))


def find_class(name: str, kind: Kind, registered: Collection[str]) -> Any:
    """Return the class of an import path, which is derived from ``kind.base``.

    Args:
        name: a name that is not registered.
        kind: what it should name.
        registered: the names that are, for messages.

    Raises:
        ValueError: it is no import path, there is no such class, or it is of another kind.
    """
    if not is_path(name) or "," in name:
        raise ValueError(f"no {kind.option} {name!r}: {_advice(name, kind, registered)}")
    module, _, class_name = name.partition(":")
    if not module or not class_name:
        raise ValueError(f"no {kind.option} {name!r}: write package.module:Class")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except (Exception, SystemExit) as error:  # importing runs a user's code, which may raise anything
        said = (
            f"{where(error)}{type(error).__name__}: {error}{_import_advice(name, kind, error)}{advice_on_gpus(error)}"
        )
        raise ValueError(f"cannot import {kind.option} {name!r}: {said}") from error

    if not (inspect.isclass(found) and issubclass(found, kind.base)):
        raise ValueError(f"{name!r} is no {kind.option}: it must be a class derived from {kind.path}")
    return found


def _advice(name: str, kind: Kind, registered: Collection[str]) -> str:
    """Return how to write a name that is no registered one and no import path."""
    if "," in name:
        return "separate names by spaces"
    if "/" in name or name.endswith(".py"):
        return f"give module and class, not the file: {_path_of(name, 'Class')}"
    module, dot, class_name = name.rpartition(".")
    if dot:
        return f"write {module}:{class_name}, with a colon before the class"
    if Path(f"{name}.py").is_file():
        return f"write {name}:Class, with the class of your {kind.noun}"
    containing = [known for known in registered if name.lower() in known]
    similar = get_close_matches(name.lower(), registered, n=1) or containing
    meant = f"did you mean {' or '.join(similar)}? The {kind.noun}s are" if similar and name else "choose from"
    return f"{meant} {', '.join(registered)}, or give package.module:Class"


def _path_of(file: str, class_name: str) -> str:
    """Return the import path of a class in a file, and for a file elsewhere the folder that Python must search."""
    path = Path(file.removesuffix(".py"))
    if path.is_absolute() or ".." in path.parts:
        return f"{path.name}:{class_name}, with PYTHONPATH={path.parent}"
    return f"{'.'.join(path.parts)}:{class_name}"


def _import_advice(name: str, kind: Kind, error: BaseException) -> str:
    """Return advice for a module that cannot be imported; empty if the error arose in its own code."""
    module, _, class_name = name.partition(":")
    if module == "__main__":
        return f"; a class of a notebook or a script is known there alone: save your {kind.noun} in a module"
    if "/" in module or module.endswith(".py"):
        return f"; give the module, not its file: {_path_of(module, class_name)}"
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return "; modules are found in the current folder, for others set PYTHONPATH"
    if "relative import" in str(error):
        return f"; give its package, too: package.{name}, from the folder that holds the package"
    if isinstance(error, AttributeError) and (found := sys.modules.get(module)) is not None and error.obj is found:
        own = [name for name, value in vars(found).items() if _is_defined_there(value, kind, module)]
        return f"; its {kind.noun}s are {', '.join(own)}" if own else f"; it has no {kind.path}: name another module"
    return ""


def _is_defined_there(value: object, kind: Kind, module: str) -> bool:
    """Return whether a value is a class of this kind that a module defines, or exports from its package."""
    if not (inspect.isclass(value) and issubclass(value, kind.base)):
        return False
    return value.__module__.partition(".")[0] == module.partition(".")[0]
