"""Find a layer by its name or import path."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass

from mixers import MIXERS
from mixers.base import Layer


def find_mixer(name: str) -> type[Layer]:
    """Layer class of a registered name or an import path ``package.module:Class``.

    Raises:
        ValueError: no such layer; the message says what there is.
    """
    if name in MIXERS:
        return MIXERS[name]
    if ":" not in name:
        raise ValueError(f"no mixer {name!r}: choose from {', '.join(MIXERS)}, or give package.module:Class")
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs a user's code, which may fail in any way
        raise ValueError(f"cannot import mixer {name!r}: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Layer)):
        raise ValueError(f"{name!r} is no mixer: it must be a subclass of mixers.base.Layer")
    try:
        usable = is_dataclass(found.Config())
    except TypeError:
        usable = False
    if not usable:
        raise ValueError(f"mixer {name!r}: its Config must be a dataclass whose fields all have defaults")
    return found


@contextmanager
def building(mixer: str) -> Iterator[None]:
    """Name the mixer in what goes wrong while its layer is built.

    Raises:
        ValueError: it cannot be built; one line. Other errors are faults of its code, and stay with a note.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"cannot build mixer {mixer!r}: {error}") from error
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was built")
        raise
