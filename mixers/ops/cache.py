"""Compiled code in the user's cache folder: a machine compiles it at its first use."""

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from platformdirs import user_cache_path

T = TypeVar("T")


def from_cache(name: str, suffix: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Load a file from the cache folder; if it is not there, build it and store it there, if the folder is writable.

    Several processes and threads may build the same file at the same time.

    Args:
        name: name of the file, which must depend on everything that determines its content.
        suffix: ending of its name.
        build: writes the file to a path.
        load: what is done with the file; its result is returned.
    """
    folder = user_cache_path("recurrent-transformer-diagnostics")
    for path in folder.glob(f"{name}-*{suffix}"):
        if path.name == _with_checksum(name, suffix, path):
            return load(path)

    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / f"{name}{suffix}"
        build(built)
        path = folder / _with_checksum(name, suffix, built)
        try:
            _store(built, path)
        except OSError:
            return load(built)
    return load(path)


def _store(built: Path, path: Path) -> None:
    """Copy a file to its place in the cache, under a name of its own until the copy is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, beside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(number)
    try:
        shutil.copyfile(built, beside)
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


def _with_checksum(name: str, suffix: str, path: Path) -> str:
    """Return the name of a file in the cache, with a checksum that reveals damage."""
    return f"{name}-{zlib.crc32(path.read_bytes()):08x}{suffix}"
