"""Files that are either complete or absent: they are written under a temporary name, then renamed.

Tensors are stored as safetensors, never as pickle.
"""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_INFO = "info"


class DamagedFileError(ValueError):
    """A file that this project wrote cannot be read."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path beside ``path`` and rename the result to ``path``.

    Raises:
        OSError: the file cannot be written; names ``path``. The number is ``ENOSPC`` if the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)

    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)

    except (OSError, SafetensorError) as error:
        # SafetensorError has the system's message, but not its number.
        words = getattr(error, "strerror", None) or str(error)
        number = getattr(error, "errno", None) or (errno.ENOSPC if "No space left" in words else errno.EIO)
        raise OSError(number, words, str(path)) from error

    finally:
        temporary.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Delete unfinished files of a killed process from a folder; no other process may be writing there."""
    for leftover in folder.glob(".*"):
        leftover.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON does not have.
        OSError: as ``write_atomically``.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is no file.

    Raises:
        DamagedFileError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise DamagedFileError(f"{path} is damaged ({error}): delete it and run the same command again") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able ``info`` into one safetensors file.

    Raises:
        ValueError: ``info`` holds NaN or an infinity.
        OSError: as ``write_atomically``.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {_INFO: json.dumps(info, allow_nan=False)}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the ``info`` that ``save_tensors`` wrote.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[_INFO])  # noqa: SIM118


def load_info(path: Path) -> dict[str, Any]:
    """Return the ``info`` that ``save_tensors`` wrote, without reading the tensors.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        info: dict[str, Any] = json.loads(file.metadata()[_INFO])
        return info


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a safetensors file; turn errors of its format into DamagedFileError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file

    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): delete it and run the same command again") from error
