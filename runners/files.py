"""Files that are whole or absent: written to a temporary name, then renamed. Tensors as safetensors, never pickle."""

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
    """A file of ours cannot be read."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path beside ``path`` and rename the result to ``path``.

    Raises:
        OSError: it cannot be written, with ``ENOSPC`` where the disk is full; names ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # the latter has what the system said in words alone
        words = getattr(error, "strerror", None) or str(error)
        number = getattr(error, "errno", None) or (errno.ENOSPC if "No space left" in words else errno.EIO)
        raise OSError(number, words, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Delete files that a killed process left half-written in a folder; no other process may be writing there."""
    for leftover in folder.glob(".*"):
        leftover.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write ``content``; NaN and infinities are an error, since they are no JSON."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_json(path: Path) -> Any:
    """Content of a JSON file; None where there is none.

    Raises:
        DamagedFileError: it is no JSON.
    """
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise DamagedFileError(f"{path} is damaged ({error}): delete it and run the same command again") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able ``info`` into one safetensors file."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {_INFO: json.dumps(info, allow_nan=False)}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``save_tensors`` wrote.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[_INFO])  # noqa: SIM118


def load_info(path: Path) -> dict[str, Any]:
    """The ``info`` alone of what ``save_tensors`` wrote.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        info: dict[str, Any] = json.loads(file.metadata()[_INFO])
        return info


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): delete it and run the same command again") from error
