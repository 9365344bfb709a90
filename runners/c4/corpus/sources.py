"""Sources of text: local C4-format files, or ``allenai/c4`` on the Hugging Face hub, read by ``datasets``."""

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from runners.remembered import FOLDER, remembered

Split = Literal["validation", "train"]
SPLITS: tuple[Split, ...] = ("validation", "train")

PATTERNS = ("*.json.gz", "*.jsonl.gz", "*.json", "*.jsonl")
ADVICE = (
    f'give --data C4-format files ({", ".join(PATTERNS)}: one {{"text": ...}} a line) or folders of them, which '
    "python -m runners.c4 convert makes of other texts"
)
HUB = "hf://datasets/allenai/c4/en/"
HUB_FILES: dict[Split, list[str]] = {
    "validation": [f"{HUB}c4-validation.{i:05}-of-00008.json.gz" for i in range(8)],
    "train": [f"{HUB}c4-train.{i:05}-of-01024.json.gz" for i in range(1024)],
}
DIGESTS = FOLDER / "text-digests.json"
"""File that remembers the fingerprints of source files."""


class DataError(ValueError):
    """The data are invalid. Corrected data make another corpus, so this corpus is of no further use."""


def find_files(data: Sequence[str]) -> dict[Split, list[str]]:
    """Return the files of each split; the files of a folder are sorted.

    Args:
        data: files, and folders of files; if empty, the files on the hub are returned.

    Raises:
        ValueError: a file or folder does not exist, or a split has no file.
    """
    if not data:
        return HUB_FILES

    found = list(dict.fromkeys(file.resolve() for name in data for file in _expand(Path(name))))
    files: dict[Split, list[str]] = {
        split: [str(file) for file in found if ("validation" in file.name) == (split == "validation")]
        for split in SPLITS
    }

    for split in SPLITS:
        if not files[split]:
            raise ValueError(
                f"no {split} file among the {len(found)} of --data: files named *validation* "
                "(c4-validation.json.gz, say) are the validation split, all others are training; add the missing one"
            )
    return files


def _expand(path: Path) -> list[Path]:
    """Return the files in a folder, or the path itself if it is a file."""
    if not path.exists():
        raise ValueError(f"no file or folder {path}: {ADVICE}")
    if not path.is_dir():
        return [path]

    files = sorted({file for pattern in PATTERNS for file in path.glob(pattern)})
    if not files:
        raise ValueError(f"no {', '.join(PATTERNS)} in the folder {path}: {ADVICE}")
    return files


def describe(files: Sequence[str]) -> list[dict[str, str]]:
    """Return name and fingerprint of each source file; neither depends on its folder, or on the program that packed it.

    The fingerprint is the SHA-256 of the decompressed text. It is remembered until the file changes, because hashing
    takes a second for each 100 MB of text. A file on the hub has only a name, which identifies it.

    Raises:
        DataError: a file cannot be read or decompressed.
    """
    local = [file for file in files if not file.startswith(HUB)]

    def find(places: Sequence[int]) -> list[str]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(_digest, [local[place] for place in places]))

    digests = dict(zip(local, remembered(DIGESTS, str, [_state(file) for file in local], find), strict=True))
    return [
        {"name": Path(file).name, "sha256": digests[file]} if file in digests else {"name": file, "sha256": ""}
        for file in files
    ]


def _state(file: str) -> str:
    """Return a hash that changes when a file changes."""
    with _explained(file):
        state = Path(file).stat()
    facts = [file, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    return sha256(json.dumps(facts).encode()).hexdigest()


def _digest(file: str) -> str:
    """Return the SHA-256 of the decompressed text of a file."""
    with _explained(file), _opener(file)(file, "rb") as content:
        return file_digest(content, "sha256").hexdigest()


def _opener(file: str) -> Callable[..., Any]:
    """Return the function that opens a file and decompresses it if it is packed."""
    return gzip.open if file.endswith(".gz") else open


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """Turn errors of reading a file into a DataError that says what to do."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file} ({first_line(error)}): {ADVICE}") from error


def read(files: Sequence[str], lines: list[int], start: int) -> Iterator[tuple[int, str]]:
    """Yield index and text of each document; the index counts the lines of all files together.

    Args:
        files: source files in order.
        lines: number of lines of each file that is known to have ended; numbers are appended when further files end.
        start: index of the first line to read.

    Raises:
        ValueError: a file cannot be read.
    """
    first = 0
    for i, file in enumerate(files):
        # Skip files that end before the first line to read.
        if i < len(lines) and first + lines[i] <= start:
            first += lines[i]
            continue

        number = max(first, start)
        for line in _lines(file, number - first):
            if line and not line.isspace():
                yield number, _text(line, file, number - first)
            number += 1

        # The file was read to its end, so its number of lines is known.
        if i == len(lines):
            lines.append(number - first)
        first = number


def _lines(file: str, skip: int) -> Iterator[str]:
    """Yield the lines of a file after the first ``skip``."""
    if file.startswith(HUB):
        yield from _hub_lines(file, skip)
        return

    with _explained(file), _opener(file)(file, "rt", encoding="utf-8-sig") as lines:
        for line in islice(lines, skip, None):
            yield line.rstrip("\n")


def _hub_lines(file: str, skip: int) -> Iterator[str]:
    """Yield the lines of a file on the hub after the first ``skip``."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"reading C4 needs the package datasets: pip install -e '.[pretraining]', or {ADVICE}"
        ) from error

    try:
        # Read plain lines, because the JSON reader infers types from the first lines, and casts or fails at others.
        with quiet():
            rows = iter(datasets.load_dataset("text", data_files=[file], split="train", streaming=True).skip(skip))
        while (row := next(rows, None)) is not None:
            yield row["text"]
    except Exception as error:  # errors of network, decompression and decoding have no common base
        raise ValueError(
            f"cannot read allenai/c4 from the hub ({first_line(error)}): without a network, {ADVICE}"
        ) from error


def _text(line: str, file: str, number: int) -> str:
    """Return the text of a JSON line; ``number`` is its index in the file."""
    try:
        text = json.loads(line)["text"]
        # JSON can spell lone surrogates, which UTF-8 cannot.
        return text.encode(errors="replace").decode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f'line {number + 1} of {file} is no JSON object with a "text": {ADVICE}') from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return next(iter(str(error).splitlines()), "").rstrip(":. ") or type(error).__name__


@contextmanager
def hub() -> Iterator[None]:
    """Make the libraries of the Hugging Face hub read only from their cache if the hub does not answer.

    Otherwise they would ask six times for each file that is not in the cache, which takes half a minute.

    Raises:
        Exception: reading inside the context failed. If the hub did not answer, this is the error of the connection.
    """
    from huggingface_hub import constants, get_session

    # Ask the hub once.
    unreachable = None
    was_offline = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the type depends on the library that makes the requests
        unreachable = error
        constants.HF_HUB_OFFLINE = True

    # If the hub does not answer, the error of the connection explains more than the error of the cache.
    try:
        with quiet():
            yield
    except Exception as error:
        if unreachable is None:
            raise
        raise unreachable from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the hub's warnings at every retry; the error after the last retry says enough."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
