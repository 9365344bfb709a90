"""Diagnostics: train single layers on small tasks. ``python -m runners.mad`` is the command, ``study`` the function."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.mad.api import Study, study
    from runners.mad.profile import Profile

__all__ = ["Profile", "Study", "study"]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, because its module is slow to import.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runners.mad import api

    return getattr(api, name)
