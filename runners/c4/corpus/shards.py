"""A corpus on disk: a manifest and checksummed shards.

The folder of a corpus has a ``manifest.json`` and two arrays for each shard:

- ``<split>-<number>.tokens.npy`` holds the documents one after the other, each followed by end-of-text.
- ``<split>-<number>.documents.npy`` has one row per document with tokens in the shard: the position of its first token
  in the split, its index in the sources, and the digest of its text.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from runners.c4.corpus.sources import Split, first_line
from runners.files import read_json, write_atomically, write_json

MANIFEST = "manifest.json"
OF_A_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers of a full disk. NumPy's errors have no number of their own and are raised with EIO."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a split: a file of tokens and a file of documents.

    Attributes:
        name: beginning of the names of both files.
        tokens: number of tokens in the shard.
        documents: number of documents that begin in the shard.
        tokens_sha256: checksum of the file of tokens.
        documents_sha256: checksum of the file of documents.
    """

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str

    def files(self, folder: Path) -> dict[Path, str]:
        """Return the checksum of each of the two files, tokens first."""
        return {
            folder / f"{self.name}.tokens.npy": self.tokens_sha256,
            folder / f"{self.name}.documents.npy": self.documents_sha256,
        }


@dataclass(frozen=True, kw_only=True)
class Part:
    """The tokenised part of a split.

    Attributes:
        shards: the shards in order.
        dropped: number of training documents that were left out because the validation split has the same text.
        lines: number of lines of each source file that was read to its end.
        complete: whether all source files are tokenised.
    """

    shards: tuple[Shard, ...] = ()
    dropped: int = 0
    lines: tuple[int, ...] = ()
    complete: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a corpus.

    Attributes:
        tokenizer: hash of the tokenizer.
        vocab_size: one more than its largest token id.
        end_of_text: id of the token after each document.
        sources: by split, name and fingerprint of each source file.
        splits: the tokenised part of each split.
    """

    tokenizer: str
    vocab_size: int
    end_of_text: int
    sources: Mapping[Split, Sequence[Mapping[str, str]]]
    splits: Mapping[Split, Part]

    def with_part(self, split: Split, part: Part) -> "Manifest":
        """Return the manifest with ``part`` as ``split``."""
        return replace(self, splits={**self.splits, split: part})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; call this after its shards are written, so that it names only complete shards.

    Raises:
        ValueError: the disk is full.
    """
    with _full_disk_explained(folder):
        write_json(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest; return None if there is none.

    Raises:
        ValueError: the manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        if (content := read_json(path)) is None:
            return None
        splits = {split: _read_part(**part) for split, part in content.pop("splits").items()}
        return Manifest(**content, splits=splits)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error


def _read_part(shards: list[dict[str, Any]], dropped: int, lines: list[int], complete: bool) -> Part:
    """Build a part from the entries of a manifest."""
    return Part(
        shards=tuple(Shard(**shard) for shard in shards), dropped=dropped, lines=tuple(lines), complete=complete
    )


def write_shard(folder: Path, name: str, tokens_N: np.ndarray, documents_D3: np.ndarray, position: int) -> Shard:
    """Write a shard; overwrite an existing one of the same name.

    Args:
        folder: folder of the corpus.
        name: beginning of the names of its files.
        tokens_N: token ids.
        documents_D3: documents, as the module describes them.
        position: position of the first token in the split.

    Raises:
        ValueError: the disk is full.
    """
    shard = Shard(
        name=name,
        tokens=len(tokens_N),
        documents=int((documents_D3[:, 0] >= position).sum()),
        tokens_sha256="",
        documents_sha256="",
    )

    # Write the files first, because the checksums are computed from them.
    tokens, documents = shard.files(folder)
    with _full_disk_explained(folder):
        write_atomically(tokens, lambda path: np.save(path, tokens_N))
        write_atomically(documents, lambda path: np.save(path, documents_D3))

    return replace(shard, tokens_sha256=_checksum(tokens), documents_sha256=_checksum(documents))


def open_shard(folder: Path, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Map a shard into memory: its tokens (N,), and its documents (D, 3) as the module describes them.

    Raises:
        ValueError: a file is missing or damaged.
    """
    tokens_N, documents_D3 = (_map(path) for path in shard.files(folder))
    return tokens_N, documents_D3


def _map(path: Path) -> np.ndarray:
    """Map an array file into memory.

    Raises:
        ValueError: it is missing or damaged.
        OSError: it cannot be opened for another reason, for example because too many files are open.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError) as error:
        raise _damaged(path) from error
    return array


def _damaged(path: Path) -> ValueError:
    """Return the error for a file that is damaged or missing."""
    state = "damaged" if path.exists() else "missing"
    return ValueError(f"{path} is {state}: delete the folder {path.parent} and run the same command again")


def verify(folder: Path, manifest: Manifest, console: Console) -> None:
    """Compare every file of a corpus with its checksum.

    Raises:
        ValueError: a file is missing or damaged.
    """
    shards = [shard for part in manifest.splits.values() for shard in part.shards]
    checksums = {path: checksum for shard in shards for path, checksum in shard.files(folder).items()}
    if not checksums:
        return

    # Look for missing files before reading any.
    for path in checksums:
        if not path.is_file():
            raise _damaged(path)

    columns = TextColumn("verifying the corpus"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(path.stat().st_size for path in checksums))
        for path, checksum in checksums.items():
            if _checksum(path) != checksum:
                raise _damaged(path)
            progress.advance(bar, path.stat().st_size)


def _checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a ValueError that says what to do; the corpus stays valid.

    ``write_atomically`` removes its temporary files, and the manifest names only complete shards.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_FULL_DISK:
            raise
        raise ValueError(
            f"cannot write into {folder} ({first_line(error)}): free some space and run the same command again"
        ) from error
