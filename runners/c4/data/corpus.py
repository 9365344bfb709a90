"""A tokenised corpus: a manifest and checksummed shards on disk, and batches of token windows from them.

The folder of a corpus has a ``manifest.json`` and two arrays for each shard:

- ``<split>-<number>.tokens.npy`` holds the documents one after the other, each followed by end-of-text.
- ``<split>-<number>.documents.npy`` has one row per document with tokens in the shard: the position of its first token
  in the split, its index in the sources, and the digest of its text.

A batch depends only on the seed and the step: no global generator is used, and no state is kept between calls. A run
that continues from step k therefore reads the same windows as a run from step 0, with any number of ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import file_digest
from pathlib import Path

import numpy as np
from rich.console import Console

from runners.c4.data.sources import Split
from runners.c4.data.tokenizer import Tokenizer
from runners.files import damaged, read_json, validated, write_atomically, write_json
from runners.progress import Bars

MANIFEST = "manifest.json"
LITTLE = 0.5
"""A run that reads a smaller share of the training text gets a warning."""
FEW_VALIDATION_TOKENS = 2**16
"""A run with fewer validation tokens gets a warning."""
PIECE = 2**18
"""Number of tokens that are decoded together, to limit memory."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a split: a file of tokens and a file of documents.

    Attributes:
        name: beginning of the names of both files.
        tokens: number of tokens in the shard.
        tokens_sha256: checksum of the file of tokens.
        documents_sha256: checksum of the file of documents.
    """

    name: str
    tokens: int
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; call this after its shards are written, so that it names only complete shards."""
    write_json(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest; return None if there is none.

    Raises:
        DamagedFileError: the manifest is damaged.
    """
    content = read_json(folder / MANIFEST, _remedy(folder))
    return None if content is None else validated(folder / MANIFEST, Manifest, content, _remedy(folder))


def write_shard(folder: Path, name: str, tokens_N: np.ndarray, documents_D3: np.ndarray) -> Shard:
    """Write a shard; overwrite an existing one of the same name.

    Args:
        folder: folder of the corpus.
        name: beginning of the names of its files.
        tokens_N: token ids.
        documents_D3: documents, as the module describes them.

    Raises:
        OSError: the disk is full; the manifest names only complete shards, so the corpus stays valid.
    """
    shard = Shard(name=name, tokens=len(tokens_N), tokens_sha256="", documents_sha256="")

    # Write the files first, because the checksums are computed from them.
    tokens_file, documents_file = shard.files(folder)
    write_atomically(tokens_file, lambda path: np.save(path, tokens_N))
    write_atomically(documents_file, lambda path: np.save(path, documents_D3))
    return replace(shard, tokens_sha256=_checksum(tokens_file), documents_sha256=_checksum(documents_file))


def open_shard(folder: Path, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Map a shard that ``verify`` has read into memory: tokens (N,), and documents (D, 3) as the module describes them.

    Raises:
        OSError: a file cannot be opened, for example because too many files are open.
    """
    tokens_N, documents_D3 = (np.load(path, mmap_mode="r", allow_pickle=False) for path in shard.files(folder))
    return tokens_N, documents_D3


def verify(folder: Path, manifest: Manifest, console: Console) -> None:
    """Compare every file of a corpus with its checksum.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """
    shards = [shard for part in manifest.splits.values() for shard in part.shards]
    checksums = [file for shard in shards for file in shard.files(folder).items()]
    with Bars(console=console, transient=True) as bars:
        for path, checksum in bars.track(checksums, description="verifying the corpus"):
            if not path.is_file() or _checksum(path) != checksum:
                raise damaged(path, "its checksum does not fit" if path.exists() else "it is missing", _remedy(folder))


def _checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _remedy(folder: Path) -> str:
    """Return what to do if a file of a corpus is damaged."""
    return f"delete the folder {folder} and run the same command again"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenised corpus as one run sees it: limited to the tokens it asked for, even if other runs tokenised more.

    Attributes:
        folder: folder of the shards.
        manifest: description of the shards.
        asked: by split, the number of tokens that the run asked for.
    """

    folder: Path
    manifest: Manifest
    asked: Mapping[Split, int]

    def tokens(self, split: Split) -> int:
        """Return the number of tokens of ``split`` to use: as many as the run asked for, or all if fewer exist."""
        return min(self.asked[split], self.manifest.splits[split].tokens)

    def targets(self, split: Split, seq_len: int) -> int:
        """Return the number of targets in an epoch of ``split``, counting only full windows of ``seq_len`` targets."""
        return (self.tokens(split) - 1) // seq_len * seq_len

    def shortage(self, seq_len: int) -> str:
        """Return how the run differs if it asked for more tokens than its splits have; empty if they have enough."""
        found, asked = self.tokens("train"), self.asked
        said: dict[Split, str] = {
            "train": f"the train split has {found:,} tokens: read {(asked['train'] - 1) / found:.2f} times",
            "validation": f"validation reads {self.targets('validation', seq_len):,} tokens of "
            f"{asked['validation'] - 1:,} asked for",
        }
        return "; ".join(line for split, line in said.items() if self.tokens(split) < asked[split])

    def warnings(self, seq_len: int) -> list[str]:
        """Return warnings for a run that reads a small share of its text, or too few validation tokens."""
        lines = []
        part, used = self.manifest.splits["train"], self.tokens("train") - 1
        if used < LITTLE * part.tokens:
            given = f"{'' if part.complete else 'more than '}{part.tokens:,}"
            lines.append(f"training reads the first {used:,} of {given} tokens of the text: more --steps read more")
        if (validation := self.targets("validation", seq_len)) < FEW_VALIDATION_TOKENS:
            advice = "give more --validation-tokens, or a larger validation file"
            lines.append(f"validation reads {validation:,} tokens, which makes its loss uncertain: {advice}")
        return lines


class Windows:
    """A split as windows of T+1 tokens that overlap by one: every token but the first is a target once per epoch.

    The windows of all epochs form one sequence, and batch k is its k-th piece; an epoch may end within a batch. Tokens
    at the end that do not fill a window are left out.

    Args:
        corpus: the corpus, from ``runners.c4.data.prepare``, with T+1 tokens or more.
        split: name of the split.
        seq_len: T.
        seed: seed of the shuffled order, which differs between epochs; None keeps the order of the text.
    """

    def __init__(self, corpus: Corpus, split: Split, seq_len: int, seed: int | None) -> None:
        tokens = corpus.tokens(split)
        self._seq_len = seq_len
        self._count = (tokens - 1) // seq_len

        # A batch needs two orders if an epoch ends within it.
        self._order = lru_cache(maxsize=2)(partial(_order, self._count, seed))

        # The shards that the run uses, and the position in the split at which each shard ends.
        shards = corpus.manifest.splits[split].shards
        ends = np.cumsum([shard.tokens for shard in shards])
        used = np.searchsorted(ends, tokens) + 1
        self._ends = ends[:used]
        self._shards = [open_shard(corpus.folder, shard)[0] for shard in shards[:used]]

    def __len__(self) -> int:
        """Return the number of windows in an epoch."""
        return self._count

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> np.ndarray:
        """Return the windows of one rank: every ``world``-th window of batch ``step``.

        Args:
            step: index of the batch.
            batch_size: number of windows of the batch over all ranks, a multiple of ``world``.
            rank: index of this rank.
            world: number of ranks.

        Returns:
            Tokens (batch_size / world, T+1), int64.

        """
        places = range(step * batch_size, (step + 1) * batch_size)[rank::world]

        windows = []
        for place in places:  # a window may lie in several shards
            begin = int(self._order(place // self._count)[place % self._count]) * self._seq_len
            end, pieces = begin + self._seq_len + 1, []
            first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
            for shard in range(first, last + 1):
                tokens_N = self._shards[shard]
                offset = int(self._ends[shard]) - len(tokens_N)
                pieces.append(tokens_N[max(0, begin - offset) : end - offset])
            windows.append(np.concatenate(pieces, dtype=np.int64))
        return np.stack(windows)


def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return the indices of all windows (count,) in the order of an epoch."""
    return np.arange(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count)


def bytes_per_token(windows: Windows, seq_len: int, tokenizer: Tokenizer) -> float | None:
    """Return the mean number of UTF-8 bytes per target token of a split; end-of-text counts as zero bytes.

    It converts nats per token into bits per byte. All targets of ``windows`` count, which are those that an evaluation
    reads. The tokens are decoded, so characters that the tokenizer drops do not count. A space or character at the
    border of two pieces of ``PIECE`` tokens may be counted wrongly by a few bytes. None if the text is empty.

    Args:
        windows: a split, in the order of the text.
        seq_len: targets per window.
        tokenizer: the tokenizer that made the tokens.
    """
    together = max(1, min(PIECE // seq_len, len(windows)))
    size = 0
    for step in range(math.ceil(len(windows) / together)):
        left = len(windows) - step * together  # the last piece goes on with the first windows
        targets_NT = windows.batch(step, together)[:left, 1:]
        text = tokenizer.decode(targets_NT.reshape(-1).tolist(), skip_special_tokens=True)
        size += len(text.encode())
    return size / (len(windows) * seq_len) or None
