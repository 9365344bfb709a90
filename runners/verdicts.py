"""Verdicts that take long to find, kept in a file in the user's cache folder."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from platformdirs import user_cache_path

from runners.files import DamagedFileError, read_json, write_json

CACHE = user_cache_path("recurrent-transformer-diagnostics") / "reference-verdicts.json"
MOST = 20_000
"""Largest number of verdicts in the file; older ones are dropped. Checkouts of different code share the file."""


def remembered(keys: Sequence[str], find: Callable[[Sequence[int]], Sequence[bool]]) -> list[bool]:
    """Return the verdict of each key; find those that the file lacks, all of them if it is missing or damaged.

    Args:
        keys: a hash over all that decides each verdict.
        find: returns the verdicts of keys, given their places in ``keys``.
    """
    known = _read()
    unknown = {key: place for place, key in enumerate(keys) if key not in known}
    if unknown:
        known |= dict(zip(unknown, find([*unknown.values()]), strict=True))
        with suppress(OSError):  # without the file, the next command only takes longer
            write_json(CACHE, dict([*known.items()][-MOST:]))
    return [known[key] for key in keys]


def _read() -> dict[str, bool]:
    """Return the verdicts in the file; an empty dict if it is damaged."""
    try:
        found = read_json(CACHE)
    except (DamagedFileError, OSError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(value, bool) for value in found.values()) else {}
