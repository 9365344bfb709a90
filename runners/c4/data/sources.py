"""Sources of text: local C4-format files, or ``allenai/c4`` on the Hugging Face hub, read by ``datasets``."""

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from gzip import GzipFile
from hashlib import file_digest
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path

from runners.files import read_json, write_json

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
DIGESTS = user_cache_path("recurrent-transformer-diagnostics") / "digests-of-texts.json"
"""File with the fingerprints of source files, each by what shows that a file has not changed since."""


def find_files(data: Sequence[str]) -> dict[Split, list[str]]:
    """Return the files of each split; the files of a folder are sorted.

    Args:
        data: files, and folders of files; if empty, the files on the hub are returned.

    Raises:
        ValueError: a file or folder does not exist, or a split has no file.
    """
    if not data:
        return HUB_FILES

    found: dict[Path, None] = {}
    for path in map(Path, data):
        files = sorted({file for pattern in PATTERNS for file in path.glob(pattern)}) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise ValueError(f"no file or folder {path} with texts: {ADVICE}")
        found |= dict.fromkeys(file.resolve() for file in files)

    of_split: dict[Split, list[str]] = {
        split: [str(file) for file in found if ("validation" in file.name) == (split == "validation")]
        for split in SPLITS
    }
    if lacking := [split for split in SPLITS if not of_split[split]]:
        raise ValueError(
            f"no {lacking[0]} file among the {len(found)} of --data: files named *validation* (c4-validation.json.gz, "
            "say) are the validation split, all others are training; add the missing one"
        )
    return of_split


def describe(files: Sequence[str]) -> list[dict[str, str]]:
    """Return name and fingerprint of each source file; neither depends on its folder, or on the program that packed it.

    The fingerprint is the SHA-256 of the decompressed text. It is remembered until the file changes, because hashing
    takes a second for each 100 MB of text. A file on the hub has only a name, which identifies it.

    Raises:
        ValueError: a file cannot be read or decompressed.
    """
    known: dict[str, str] = {}
    with suppress(ValueError, OSError):  # without the file, or if it is damaged, all are hashed
        known = read_json(DIGESTS) or {}

    def described(file: str) -> dict[str, str]:
        if file.startswith(HUB):
            return {"name": file, "sha256": ""}
        with _explained(file):
            now = Path(file).stat()
            state = f"{file} {now.st_ino} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"
            if state not in known:
                with _open(file) as content:
                    known[state] = file_digest(content, "sha256").hexdigest()
        return {"name": Path(file).name, "sha256": known[state]}

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(described, files))
    with suppress(OSError):
        write_json(DIGESTS, known)
    return found


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
            if line.strip():
                try:
                    # JSON can spell lone surrogates, which UTF-8 cannot.
                    text = json.loads(line)["text"].encode(errors="replace").decode()
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    place = f"line {number - first + 1} of {file}"
                    raise ValueError(f'{place} is no JSON object with a "text": {ADVICE}') from error
                yield number, text
            number += 1

        # The file was read to its end, so its number of lines is known.
        if i == len(lines):
            lines.append(number - first)
        first = number


def _lines(file: str, skip: int) -> Iterator[str]:
    """Yield the lines of a file after the first ``skip``."""
    if not file.startswith(HUB):
        with _explained(file), _open(file) as content:
            for line in islice(content, skip, None):
                yield line.decode("utf-8-sig")
        return

    try:
        import datasets  # takes seconds

        # Read plain lines, because the JSON reader infers types from the first lines, and casts or fails at others.
        rows = datasets.load_dataset("text", data_files=[file], split="train", streaming=True)
        for row in rows.skip(skip):
            yield row["text"]
    except Exception as error:  # errors of network, decompression and decoding have no common base
        raise ValueError(
            f"cannot read allenai/c4 from the hub ({error}): it needs a network and "
            f"pip install -e '.[pretraining]'; without them, {ADVICE}"
        ) from error


def _open(file: str) -> GzipFile | BufferedReader:
    """Open a file; decompress it if it is packed."""
    return GzipFile(file) if file.endswith(".gz") else open(file, "rb")


@contextmanager
def _explained(file: str) -> Iterator[None]:
    """Turn errors of reading a file into a ValueError that says what to do."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} ({error}): {ADVICE}") from error
