"""Diagnostics: train single layers on small tasks. ``python -m runners.mad`` is the command, ``study`` the function."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.mad.api import study
    from runners.mad.result import Study

__all__ = ["Study", "study"]

_MODULES = {"Study": "runners.mad.result", "study": "runners.mad.api"}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, because its module is slow to import.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
