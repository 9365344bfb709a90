"""C4 as token shards: tokenised once, checksummed, memory-mapped (``runners.c4.corpus.shards`` describes the files).

A corpus is a folder ``corpora/<hash>``. The hash covers the tokenizer and the sources, so other data make another
corpus. All shards of a split except the last are full. The corpus is therefore the same whether one call or several
calls tokenise it, and whether any of them are killed.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from runners.c4.corpus.packing import ShardContent, encode, pack
from runners.c4.corpus.shards import Manifest, Part, open_shard, read_manifest, verify, write_manifest, write_shard
from runners.c4.corpus.sources import ADVICE, SPLITS, DataError, Split, describe, find_files, read
from runners.c4.corpus.tokenizer import end_of_text, load_tokenizer, tokenizer_hash, vocab_size
from runners.files import clear_leftovers
from runners.progress import Bars

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS = 2**22
LITTLE = 0.5
"""A run that reads a smaller share of the training text gets a warning."""
FEW_VALIDATION_TOKENS = 2**16
"""A run with fewer validation tokens gets a warning."""
FORMAT = 1
"""Version of the file format; another version makes another corpus."""


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

    def check_window(self, split: Split, seq_len: int) -> None:
        """Check that ``split`` has a window of ``seq_len`` targets.

        Raises:
            DataError: it has fewer tokens.
        """
        tokens = self.tokens(split)
        if tokens <= seq_len:
            raise DataError(
                f"the {split} split has {tokens:,} tokens, fewer than one window of {seq_len + 1:,}: lower --seq-len "
                "or give more --data"
            )

    def shortage(self, seq_len: int) -> str:
        """Return how the run differs if it asked for more tokens than its splits have; empty if they have enough."""
        found = {split: self.tokens(split) for split in SPLITS if self.tokens(split) < self.asked[split]}
        parts = []

        if "train" in found:
            times = (self.asked["train"] - 1) / found["train"]
            parts.append(f"the train split has {found['train']:,} tokens: read {times:.2f} times")

        if "validation" in found:
            asked = self.asked["validation"] - 1
            parts.append(f"validation reads {self.targets('validation', seq_len):,} tokens of {asked:,} asked for")

        return "; ".join(parts)

    def warnings(self, seq_len: int) -> list[str]:
        """Return warnings for a run that reads a small share of its text, or too few validation tokens."""
        lines = []
        part, used = self.manifest.splits["train"], self.tokens("train") - 1
        if used < part.tokens * LITTLE:
            given = f"{'' if part.complete else 'more than '}{part.tokens:,}"
            lines.append(f"training reads the first {used:,} of {given} tokens of the text: more --steps read more")

        validation, whole = self.targets("validation", seq_len), self.manifest.splits["validation"].tokens
        if validation < FEW_VALIDATION_TOKENS:
            advice = ["more --validation-tokens"] if whole >= min(2 * validation, FEW_VALIDATION_TOKENS) else []
            advice += ["a larger validation file"] if whole < FEW_VALIDATION_TOKENS else []
            read = f"validation reads the first {validation:,} of {whole:,} tokens, which makes its loss uncertain"
            lines.append(f"{read}: give {' or '.join(advice)}")
        return lines


def prepare(
    out: Path,
    data: Sequence[str],
    tokenizer: str,
    train_tokens: int,
    validation_tokens: int,
    console: Console,
    seq_len: int = 0,
) -> Corpus:
    """Return the corpus below ``out/corpora``; verify existing shards and tokenise missing ones.

    If the data are invalid, a new corpus is deleted again.

    Args:
        out: folder of all results.
        data: C4-format files and folders of them. Files named ``*validation*`` are the validation split. If empty,
            ``allenai/c4`` (config ``en``) is streamed from the Hugging Face hub.
        tokenizer: name on the hub, or a file.
        train_tokens: tokens needed from the training split; all are taken if it has fewer.
        validation_tokens: tokens needed from the validation split, likewise.
        console: console on which progress is drawn.
        seq_len: targets per window; each split must fill at least one window.

    Raises:
        ValueError: data or tokenizer are not available, a shard is damaged, or the disk is full.
        DataError: the data are invalid.
    """
    files, encoder, empty = _open_sources(data, tokenizer)
    folder = out / "corpora" / _name(empty, validation_tokens)
    verify(folder, read_manifest(folder) or empty, console)

    asked: dict[Split, int] = {"validation": validation_tokens, "train": train_tokens}
    with _deleted_if_invalid(folder), _locked(folder, console):
        manifest = read_manifest(folder) or empty
        clear_leftovers(folder)
        for split, tokens in asked.items():
            manifest = _extend(folder, manifest, split, tokens, files[split], encoder, console)
            part = manifest.splits[split]
            if not part.tokens and part.dropped:
                raise DataError(
                    f"all training documents ({part.dropped:,}) are validation documents, too, and are left out: "
                    "give --data with other training documents"
                )
            if not part.tokens and tokens:
                raise DataError(f"no document for the {split} split in {files[split][0]} and the like: {ADVICE}")

        corpus = Corpus(folder=folder, manifest=manifest, asked=asked)
        for split in SPLITS:
            corpus.check_window(split, seq_len)
        return corpus


def corpus_name(data: Sequence[str], tokenizer: str, validation_tokens: int) -> str:
    """Return the name of the folder of a corpus; nothing is tokenised or written.

    Arguments are those of ``prepare``.

    Raises:
        ValueError: data or tokenizer are not available.
    """
    return _name(_open_sources(data, tokenizer)[2], validation_tokens)


def _open_sources(data: Sequence[str], tokenizer: str) -> tuple[dict[Split, list[str]], "Tokenizer", Manifest]:
    """Return the source files, the tokenizer, and the manifest of a corpus before anything is tokenised."""
    # Check the files first, because the tokenizer may come from the hub.
    files = find_files(data)
    encoder = load_tokenizer(tokenizer)
    encoder.encode_special_tokens = True  # a text that spells end-of-text does not end there
    return files, encoder, _empty_manifest(encoder, files)


def _name(empty: Manifest, validation_tokens: int) -> str:
    """Return the name of the folder of a corpus, a hash of what decides its content."""
    # Training documents are compared with all validation documents, so more validation shards make another corpus.
    identity = [FORMAT, SHARD_TOKENS, math.ceil(validation_tokens / SHARD_TOKENS), empty.tokenizer, empty.sources]
    return sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _empty_manifest(encoder: "Tokenizer", files: Mapping[Split, Sequence[str]]) -> Manifest:
    """Return the manifest of a corpus before anything is tokenised."""
    return Manifest(
        tokenizer=tokenizer_hash(encoder),
        vocab_size=vocab_size(encoder),
        end_of_text=end_of_text(encoder),
        sources={split: describe(files[split]) for split in SPLITS},
        splits={split: Part() for split in SPLITS},
    )


@contextmanager
def _deleted_if_invalid(folder: Path) -> Iterator[None]:
    """Delete a new corpus, its lock and the folders made for it if the data are invalid."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except DataError:
        if folder in made:
            shutil.rmtree(folder)
            folder.with_suffix(".lock").unlink(missing_ok=True)
            with suppress(OSError):  # meanwhile another corpus was made in the folder
                for path in made[1:]:
                    path.rmdir()
        raise


@contextmanager
def _locked(folder: Path, console: Console) -> Iterator[None]:
    """Let one process at a time tokenise into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"waiting for another process that tokenises into {folder}")
        lock.acquire()

    try:
        yield
    finally:
        lock.release()


def _extend(
    folder: Path,
    manifest: Manifest,
    split: Split,
    tokens: int,
    files: Sequence[str],
    encoder: "Tokenizer",
    console: Console,
) -> Manifest:
    """Tokenise until ``split`` has ``tokens`` tokens or its files end; write the manifest after each shard."""
    part = manifest.splits[split]
    if part.complete or part.tokens >= tokens:
        return manifest
    held_out = _digests(folder, manifest.splits["validation"]) if split == "train" else frozenset()

    # Continue with the document in which the last shard ends, even if that shard holds all of it.
    start, number = part.tokens, 0
    if part.shards:
        start, number, _digest = open_shard(folder, part.shards[-1])[1][-1].tolist()

    lines = list(part.lines)
    dtype = np.dtype(np.uint16 if manifest.vocab_size <= 2**16 else np.uint32)
    total = math.ceil(tokens / SHARD_TOKENS) * SHARD_TOKENS

    with _Bar(console, f"tokenising {split}", part.documents - bool(part.shards), start, total) as bar:
        documents = encode(read(files, lines, number), encoder, manifest.end_of_text, held_out, bar.advance)
        for content in pack(documents, part.tokens, part.tokens - start, part.dropped, SHARD_TOKENS, dtype):
            part = _write(folder, split, part, content, lines)
            manifest = manifest.with_part(split, part)
            write_manifest(folder, manifest)
            if part.tokens >= tokens:
                break
    return manifest


def _write(folder: Path, split: Split, part: Part, content: ShardContent, lines: Sequence[int]) -> Part:
    """Write the next shard of ``split``, unless it is empty; return the part with this shard.

    Args:
        folder: folder of the corpus.
        split: the split.
        part: the tokenised part of the split so far.
        content: content of the next shard.
        lines: number of lines of each source file that was read to its end, including files read ahead of the shard.
    """
    shards = part.shards
    if len(content.tokens_N):
        name = f"{split}-{len(shards):05}"
        shards += (write_shard(folder, name, content.tokens_N, content.documents_D3, part.tokens),)

    # Leave out files that were only read ahead, because how far that goes depends on where this call began.
    ends = accumulate(lines)
    ended = [n for n, end in zip(lines, ends, strict=True) if content.is_last or end <= content.number]
    return Part(shards=shards, dropped=content.dropped, lines=tuple(ended), complete=content.is_last)


def _digests(folder: Path, part: Part) -> frozenset[int]:
    """Return the digests of all documents of a split."""
    return frozenset(digest for shard in part.shards for digest in open_shard(folder, shard)[1][:, 2].tolist())


class _Bar:
    """Progress of tokenising: documents, tokens, tokens per second, time left. A log has one line at the end."""

    def __init__(self, console: Console, description: str, documents: int, tokens: int, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self._progress = Bars(*columns, console=console)
        self._description = description
        self._documents = documents
        self._bar = self._progress.add_task(description, total=total, completed=tokens, text="")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._progress.disable:
            tokens = self._progress.tasks[0].completed
            line = f"{self._description}: {self._documents:,} documents, {tokens:,.0f} tokens"
            self._progress.console.print(line, soft_wrap=True)

    def advance(self, documents: int, tokens: int) -> None:
        """Add documents and tokens that were encoded."""
        self._documents += documents
        self._progress.advance(self._bar, tokens)

        task = self._progress.tasks[0]
        speed = f" · {task.speed:,.0f} tokens/s" if task.speed else ""
        self._progress.update(self._bar, text=f"{self._documents:,} documents · {task.completed:,.0f} tokens{speed}")
