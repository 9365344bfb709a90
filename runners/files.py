"""Files that are either complete or absent: they are written under a temporary name, then renamed.

Tensors are stored as safetensors, never as pickle.

A file carries a checksum of its content, which is checked on reading. It is a CRC-32: it finds every flipped byte,
overlooks other damage once in four billion times, and takes half of the time of BLAKE2b, so that a checkpoint takes
hardly longer. It does not protect against forgery. Files of earlier versions without a checksum are accepted.
"""

import errno
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")

CHECKSUM = "checksum"
"""Last key of a JSON file, and of a line of JSON."""
UNFINISHED = ".unfinished-"
"""How the names of temporary files and folders begin."""
SECONDS_OF_A_WRITE = 86400.0
"""No process writes a file or a folder for so long; an older temporary one is that of a killed process."""
DIGITS = 5
"""Significant digits of stored curves and gradients."""
AGAIN = "delete it and run the same command again"
"""What to do with a damaged file, unless another command makes it."""
_INFO = "info"
_OF_TENSORS = "tensors_checksum"
_KIND = "crc32:"


adapter: Any = cache(TypeAdapter)
"""Returns what checks content of a class; to make it takes longer than to use it."""


class DamagedFileError(ValueError):
    """A file that this project wrote is damaged; the message says what to do."""


def damaged(path: Path, reason: object, remedy: str = AGAIN) -> DamagedFileError:
    """Return the error for a damaged file."""
    return DamagedFileError(f"{path} is damaged ({reason}): {remedy}")


def validated(path: Path, kind: type[T], content: Any, remedy: str = AGAIN) -> T:
    """Return content read from a file as an object of a class.

    Args:
        path: the file.
        kind: a dataclass, which names the entries and their types; other entries are dropped.
        content: what was read.
        remedy: what to do if the file is another's, or of another version.

    Raises:
        DamagedFileError: an entry is missing or of another type; the message names the first.
    """
    try:
        return typed(kind, content)
    except ValidationError as error:
        raise damaged(path, first_fault(error), remedy) from error


def typed(kind: type[T], content: Any) -> T:
    """Return content read from a JSON file as an object of a dataclass, without turning texts into numbers.

    Raises:
        ValidationError: an entry is missing or of another type; ``first_fault`` puts it in words.
    """
    return adapter(kind).validate_json(to_json(content), strict=True)


def first_fault(error: ValidationError) -> str:
    """Return the first entry that is missing or wrong, and what pydantic says of it."""
    first = error.errors()[0]
    return "".join(f"{part}: " for part in first["loc"]) + first["msg"].lower()


def rounded(figure: float) -> float:
    """Return a figure with the significant digits that stored curves and gradients have."""
    return float(f"{figure:.{DIGITS}g}")


def checksum(content: Any) -> str:
    """Return the checksum of bytes, or of another object with contiguous memory."""
    return f"{_KIND}{zlib.crc32(content):08x}"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path beside ``path`` and rename the result to ``path``.

    Temporary files that killed processes have left in the folder are deleted.

    Raises:
        OSError: the file cannot be written; names ``path``. The number is ``ENOSPC`` if the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path.parent, SECONDS_OF_A_WRITE)
    temporary = path.with_name(f"{UNFINISHED}{uuid4().hex}{path.suffix}")
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


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to make and to fill, which becomes ``folder``; after an error it is gone.

    Raises:
        ValueError: ``folder`` exists.
        OSError: it cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder.parent, SECONDS_OF_A_WRITE)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as temporary:
        made = Path(temporary) / folder.name
        yield made
        made.rename(folder)


def clear_leftovers(folder: Path, seconds: float = 0.0) -> None:
    """Delete the temporary files of killed processes from a folder.

    Args:
        folder: the folder.
        seconds: age from which a file is deleted; 0 if no other process may be writing there.
    """
    # The second are those of safetensors.
    for leftover in (*folder.glob(f"{UNFINISHED}*"), *folder.glob(".tmp*")):
        with suppress(OSError):  # another process deletes it, or renames it
            if time.time() - leftover.stat().st_mtime < seconds:
                continue
            if leftover.is_file():
                leftover.unlink()
            elif leftover.name.startswith(UNFINISHED):
                shutil.rmtree(leftover)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON; a mapping gets its checksum as the last entry.

    Raises:
        ValueError: it holds NaN or an infinity, which JSON does not have.
        OSError: as ``write_atomically``.
    """
    sealed = _seal(content) if isinstance(content, Mapping) else content
    text = json.dumps(sealed, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_json(path: Path, remedy: str = AGAIN) -> Any:
    """Return the content of a JSON file without its checksum; None if there is no file.

    Args:
        path: the file.
        remedy: what to do if it is damaged.

    Raises:
        DamagedFileError: the file is not JSON, or its checksum is another.
    """
    if not path.exists():
        return None

    try:
        content = json.loads(path.read_text())
        return _unseal(content) if isinstance(content, dict) else content
    except ValueError as error:  # includes bytes that are not UTF-8
        raise damaged(path, error, remedy) from error


def write_lines(path: Path, contents: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with a JSON object in each line, each with its checksum; errors as ``write_json``."""
    text = "".join(json.dumps(_seal(content), allow_nan=False) + "\n" for content in contents)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the lines of a file without their checksums.

    Raises:
        DamagedFileError: a line is no JSON object, or its checksum is another; the message names the line.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(_unseal(json.loads(line.decode())))
        except (ValueError, AttributeError) as error:
            raise damaged(path, f"line {number}: {error}") from error
    return found


def _seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-able ``content`` with its checksum, which white space in the file does not change."""
    return {**content, CHECKSUM: checksum(json.dumps(content, allow_nan=False).encode())}


def _unseal(content: dict[str, Any]) -> dict[str, Any]:
    """Return what was given to ``_seal``; content without a checksum is returned as it is.

    Raises:
        ValueError: the checksum is another.
    """
    # Either the key or the value of a checksum shows that there was one, even if a byte of the other is flipped.
    values = [value for value in content.values() if isinstance(value, str)]
    if CHECKSUM not in content and not any(value.startswith(_KIND) for value in values):
        return content

    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    if _seal(rest) != content:
        raise ValueError("its checksum does not fit its content")
    return rest


def save_tensors(path: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-able ``info`` into one safetensors file, with a checksum of each of the two.

    Raises:
        ValueError: ``info`` holds NaN or an infinity.
        OSError: as ``write_atomically``.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sealed = _seal({**info, _OF_TENSORS: _checksum_of(contiguous)})
    metadata = {_INFO: json.dumps(sealed, allow_nan=False)}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the ``info`` that ``save_tensors`` wrote.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        info = _unseal(json.loads(file.metadata()[_INFO]))
        if info.pop(_OF_TENSORS, None) not in (None, _checksum_of(tensors)):
            raise ValueError("the checksum does not fit the tensors")
        return tensors, info


def load_info(path: Path) -> dict[str, Any]:
    """Return the ``info`` that ``save_tensors`` wrote, without reading the tensors.

    Raises:
        DamagedFileError: the file is damaged.
    """
    with _reading(path) as file:
        info = _unseal(json.loads(file.metadata()[_INFO]))
        info.pop(_OF_TENSORS, None)
        return info


def _checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of the names, types, shapes and values of contiguous tensors on the CPU."""
    names = sorted(tensors)

    def of_values(name: str) -> str:
        return checksum(tensors[name].reshape(-1).view(torch.uint8).numpy())

    with ThreadPoolExecutor() as pool:  # threads share the work, because zlib releases Python's lock
        values = [*pool.map(of_values, names)]

    described = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    return checksum(json.dumps([described, values]).encode())


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a safetensors file; turn errors of its format into DamagedFileError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file

    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
