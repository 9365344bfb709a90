"""Settings as dataclasses: values that a call in Python gives, checked as a command line would, and switches."""

import math
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

BETWEEN = "__"
"""Stands between a member of a stack and its option: ``transformer__heads``."""


def option_of(name: str) -> str:
    """Return the name of an option without the member of a stack that it belongs to."""
    return name.rpartition(BETWEEN)[2]


def switch(off: Any) -> Any:
    """Return a dataclass field with the default ``off``. With this value, it is not part of a result's identity.

    If a dataclass of settings gains such a field, earlier results keep their names.
    """
    return field(default=off, metadata={"switch": True})


def identity(settings: Any) -> dict[str, Any]:
    """Return the settings of a dataclass by name, without fields made by ``switch`` that have their defaults."""
    off = [f.name for f in fields(settings) if "switch" in f.metadata and getattr(settings, f.name) == f.default]
    return {name: value for name, value in asdict(settings).items() if name not in off}


def override(config_class: type, values: Mapping[str, Any]) -> Any:
    """Build a ``config_class`` from ``values``, and from defaults for its other fields.

    Raises:
        ValueError: a value is of another type than its field; it, or a default, is infinite or not a number.
    """
    made = replace(config_class(), **converted(config_class, values))
    for name in (f.name for f in fields(made)):
        value = getattr(made, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name.replace('_', '-')} {value} must be a finite number")
    return made


def converted(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields of ``config_class`` as a command line would give them, such as 1.0 in place of 1.

    Scalars of NumPy become Python's, and a list, as a file of JSON has it, becomes a tuple where one belongs.

    Raises:
        ValueError: a value is of another type than its field; a call in Python may give any.
    """
    hints, found = get_type_hints(config_class), {}
    for name, value in values.items():
        plain = value.item() if isinstance(value, np.generic) else value
        try:
            found[name] = _adapter(hints[name]).validate_python(plain, strict=not isinstance(plain, list))
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"{name}: {wrong['msg']}, not {wrong['input']!r}") from error
    return {name: _without_sign_of_zero(value) for name, value in found.items()}


def _without_sign_of_zero(value: Any) -> Any:
    """Return 0.0 in place of -0.0, also in a tuple; they are one setting."""
    if isinstance(value, tuple):
        return tuple(map(_without_sign_of_zero, value))
    return value + 0.0 if isinstance(value, float) else value


def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Return what checks values of a type; of classes that pydantic does not know, it takes the instances."""
    return TypeAdapter(hint, config=None if is_dataclass(hint) else ConfigDict(arbitrary_types_allowed=True))
