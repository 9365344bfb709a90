"""Facts that take long to find, kept in files in the user's cache folder."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from platformdirs import user_cache_path

from runners.files import DamagedFileError, read_json, write_json

FOLDER = user_cache_path("recurrent-transformer-diagnostics")
MOST = 20_000
"""Largest number of facts in a file; older ones are dropped. Checkouts of different code share the file."""

Fact = TypeVar("Fact", bool, str)


def remembered(
    file: Path, kind: type[Fact], keys: Sequence[str], find: Callable[[Sequence[int]], Sequence[Fact]]
) -> list[Fact]:
    """Return the fact of each key; find those that the file lacks, all of them if it is missing or damaged.

    Args:
        file: file of the facts.
        kind: type of the facts.
        keys: a hash over all that decides each fact.
        find: returns the facts of keys, given their places in ``keys``.
    """
    known: dict[str, Fact] = _read(file, kind)
    unknown: dict[str, int] = {key: place for place, key in enumerate(keys) if key not in known}
    if unknown:
        found: dict[str, Fact] = dict(zip(unknown, find([*unknown.values()]), strict=True))
        known |= found
        with suppress(OSError):  # without the file, the next command only takes longer
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):
                # Other processes may have found facts meanwhile.
                write_json(file, dict([*(_read(file, kind) | found).items()][-MOST:]))
    return [known[key] for key in keys]


def _read(file: Path, kind: type[Fact]) -> dict[str, Fact]:
    """Return the facts in the file; an empty dict if it is damaged."""
    try:
        found = read_json(file)
    except (DamagedFileError, OSError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(fact, kind) for fact in found.values()) else {}
