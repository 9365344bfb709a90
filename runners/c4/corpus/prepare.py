"""C4 as token shards: tokenised once, checksummed, memory-mapped (``runners.c4.shards`` describes the files).

A corpus is a folder ``corpora/<hash>``; the hash is of the tokenizer and the sources, so other data are another corpus.
All shards but a split's last are full: a corpus is the same however many calls it took, and however many were killed.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from runners.c4.corpus.shards import Manifest, Part, open_shard, read_manifest, verify, write_manifest, write_shard
from runners.c4.corpus.sources import ADVICE, SPLITS, Split, describe, find_files, first_line, hub, read

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS = 2**22
BATCH_DOCUMENTS = 1024
"""Documents that are encoded together, on all cores."""
FORMAT = 1
END_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenised corpus, of which a run sees so many tokens whatever else other runs have tokenised.

    Attributes:
        folder: where the shards are.
        manifest: what they are.
        asked: by split, the tokens that were asked for.
    """

    folder: Path
    manifest: Manifest
    asked: Mapping[Split, int]

    def tokens(self, split: Split) -> int:
        """Tokens of ``split`` to use: those asked for, or all where there are fewer."""
        return min(self.asked[split], self.manifest.splits[split].tokens)

    def targets(self, split: Split, seq_len: int) -> int:
        """Targets in an epoch of ``split``: those of the windows of ``seq_len`` that its tokens fill."""
        return (self.tokens(split) - 1) // seq_len * seq_len

    def shortage(self, seq_len: int) -> str:
        """What becomes of a run whose splits have fewer tokens than it asked for; empty where they have enough."""
        found = {split: self.tokens(split) for split in SPLITS if self.tokens(split) < self.asked[split]}
        parts = []
        if "train" in found:
            times = (self.asked["train"] - 1) / found["train"]
            parts.append(f"the train split has {found['train']:,} tokens: read {times:.2f} times")
        if "validation" in found:
            asked = self.asked["validation"] - 1
            parts.append(f"validation reads {self.targets('validation', seq_len):,} tokens of {asked:,} asked for")
        return "; ".join(parts)


def prepare(
    out: Path, data: Sequence[str], tokenizer: str, train_tokens: int, validation_tokens: int, console: Console
) -> Corpus:
    """The corpus below ``out/corpora``: what is there is verified, what is missing is tokenised.

    Args:
        out: folder of all results.
        data: C4-format files and folders of them, files named ``*validation*`` being the validation split; none for
            ``allenai/c4`` (config ``en``), streamed from the Hugging Face hub.
        tokenizer: name on the hub, or a file.
        train_tokens: tokens to have of the training split, or all if it has fewer.
        validation_tokens: the same of the validation split.
        console: where progress is drawn.

    Raises:
        ValueError: data or tokenizer cannot be had, a shard is damaged, or there is no room.
    """
    files = find_files(data)  # first, for the tokenizer may come from the hub
    encoder = load_tokenizer(tokenizer)
    encoder.encode_special_tokens = True  # a text that spells end-of-text does not end there
    empty = Manifest(
        tokenizer=tokenizer_hash(encoder),
        vocab_size=vocab_size(encoder),
        end_of_text=end_of_text(encoder),
        sources={split: [describe(file) for file in files[split]] for split in SPLITS},
        splits={split: Part() for split in SPLITS},
    )
    asked: dict[Split, int] = {"validation": validation_tokens, "train": train_tokens}
    # training documents are compared with all validation documents there are: more of these, another corpus
    identity = [FORMAT, SHARD_TOKENS, math.ceil(validation_tokens / SHARD_TOKENS), empty.tokenizer, empty.sources]
    folder = out / "corpora" / sha256(json.dumps(identity).encode()).hexdigest()[:16]
    verify(folder, read_manifest(folder) or empty, console)
    with _locked(folder, console):
        manifest = read_manifest(folder) or empty
        for leftover in folder.glob(".*-*"):
            leftover.unlink()
        for split, tokens in asked.items():
            manifest = _extend(folder, manifest, split, tokens, files[split], encoder, console)
            if not manifest.splits[split].tokens and tokens:
                raise ValueError(f"no document for the {split} split in {files[split][0]} and the like: {ADVICE}")
    return Corpus(folder=folder, manifest=manifest, asked=asked)


def load_tokenizer(name: str) -> "Tokenizer":
    """Tokenizer of a ``tokenizer.json`` file, or of a name on the Hugging Face hub; it neither truncates nor pads.

    Raises:
        ValueError: no such file or name, no network, or no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("tokenising needs the package tokenizers: pip install '.[pretraining]'") from error
    is_file = Path(name).is_file()
    if not is_file and (name.endswith(".json") or Path(name).is_dir()):
        raise ValueError(f"no tokenizer file {name}: give --tokenizer a tokenizer.json or a name on the hub")
    try:
        if is_file:
            tokenizer = Tokenizer.from_file(name)
        else:
            with hub():
                tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception, and whatever the network's raises
        where, more = ("file", "") if is_file else ("on the hub, or no network", ", and --data too without a network")
        raise ValueError(
            f"no tokenizer {name!r} {where} ({first_line(error)}): give --tokenizer a tokenizer.json file{more}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(tokenizer: "Tokenizer") -> str:
    """Hash of all that a tokenizer is, the same from a file and from the hub."""
    return sha256(tokenizer.to_str().encode()).hexdigest()


def vocab_size(tokenizer: "Tokenizer") -> int:
    """One more than the largest token id, which a tokenizer's own count can be smaller than."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text(tokenizer: "Tokenizer") -> int:
    """The token that stands after each document.

    Raises:
        ValueError: the tokenizer has none.
    """
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = [special[token] for token in END_OF_TEXT if token in special]
    if not found:
        raise ValueError(
            f"the tokenizer has no end-of-text token: give another one, or add one of {', '.join(END_OF_TEXT)} to its "
            "added_tokens as a special token"
        )
    return found[0]


@contextmanager
def _locked(folder: Path, console: Console) -> Iterator[None]:
    """One process at a time tokenises into ``folder``."""
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
    """Tokenise until ``split`` has ``tokens`` tokens or the files end; the manifest is written after each shard."""
    part = manifest.splits[split]
    if part.complete or part.tokens >= tokens:
        return manifest
    held_out = _digests(folder, manifest.splits["validation"]) if split == "train" else frozenset()
    start, number = part.tokens, 0
    if part.shards:  # goes on with the document that the last shard ends in, whether or not that is all of it
        start, number, _digest = open_shard(folder, part.shards[-1])[1][-1].tolist()
    lines = list(part.lines)
    total = math.ceil(tokens / SHARD_TOKENS) * SHARD_TOKENS
    with _Bar(console, f"tokenising {split}", part.documents - bool(part.shards), start, total) as bar:
        encoded = _encode(read(files, lines, number), encoder, manifest.end_of_text, held_out, bar)
        dtype = np.uint16 if manifest.vocab_size <= 2**16 else np.uint32
        for packed in _pack(encoded, part.tokens, part.tokens - start, part.dropped, np.dtype(dtype)):
            shards = part.shards
            if len(packed.tokens_N):
                shards += (
                    write_shard(folder, f"{split}-{len(shards):05}", packed.tokens_N, packed.documents_D3, part.tokens),
                )
            # not what was read ahead, which depends on where this call began
            ended = [
                n for n, end in zip(lines, accumulate(lines), strict=True) if packed.is_last or end <= packed.number
            ]
            part = Part(shards=shards, dropped=packed.dropped, lines=tuple(ended), complete=packed.is_last)
            manifest = manifest.with_part(split, part)
            write_manifest(folder, manifest)
            if part.tokens >= tokens:
                break
    return manifest


def _digests(folder: Path, part: Part) -> frozenset[int]:
    return frozenset(digest for shard in part.shards for digest in open_shard(folder, shard)[1][:, 2].tolist())


@dataclass(frozen=True)
class _Document:
    """``tokens_N`` of a document that is left out are None."""

    number: int
    digest: int
    tokens_N: np.ndarray | None


@dataclass(frozen=True)
class _Packed:
    """Content of a shard, of which ``number`` is the last document; ``dropped`` counts from the split's beginning."""

    tokens_N: np.ndarray
    documents_D3: np.ndarray
    number: int
    dropped: int
    is_last: bool


def _pack(
    documents: Iterable[_Document], position: int, done: int, dropped: int, dtype: np.dtype[Any]
) -> Iterator[_Packed]:
    """Shards from ``position`` on; of the first document ``done`` tokens are in an earlier shard."""
    tokens_N = np.empty(SHARD_TOKENS, dtype)
    rows: list[tuple[int, int, int]] = []
    filled = number = 0

    def packed(is_last: bool) -> _Packed:
        return _Packed(tokens_N[:filled], np.array(rows, np.int64).reshape(-1, 3), number, dropped, is_last)

    for document in documents:
        if document.tokens_N is None:
            dropped += 1
            continue
        number = document.number
        while done < len(document.tokens_N):
            piece_N = document.tokens_N[done : done + SHARD_TOKENS - filled]
            rows.append((position + filled - done, document.number, document.digest))
            tokens_N[filled : filled + len(piece_N)] = piece_N
            filled += len(piece_N)
            done += len(piece_N)
            if filled == SHARD_TOKENS:
                yield packed(is_last=False)
                position, filled, rows = position + filled, 0, []
        done = 0
    yield packed(is_last=True)


def _encode(
    documents: Iterator[tuple[int, str]],
    encoder: "Tokenizer",
    end_of_text: int,
    held_out: frozenset[int],
    bar: "_Bar",
) -> Iterator[_Document]:
    """Token ids of documents; those with a digest in ``held_out`` are left out."""
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        digests = [_digest(text) for _number, text in batch]
        kept = [text for (_number, text), digest in zip(batch, digests, strict=True) if digest not in held_out]
        encodings = iter(encoder.encode_batch_fast(kept, add_special_tokens=False))
        tokens = 0
        for (number, _text), digest in zip(batch, digests, strict=True):
            if digest in held_out:
                yield _Document(number, digest, None)
                continue
            ids_N = np.array([*next(encodings).ids, end_of_text])
            tokens += len(ids_N)
            yield _Document(number, digest, ids_N)
        bar.advance(len(kept), tokens)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class _Bar:
    """Progress of tokenising: documents, tokens, tokens per second, time left."""

    def __init__(self, console: Console, description: str, documents: int, tokens: int, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._documents = documents
        self._bar = self._progress.add_task(description, total=total, completed=tokens, text="")

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, documents: int, tokens: int) -> None:
        """So many more are done."""
        self._documents += documents
        self._progress.advance(self._bar, tokens)
        task = self._progress.tasks[0]
        speed = f" · {task.speed:,.0f} tokens/s" if task.speed else ""
        self._progress.update(self._bar, text=f"{self._documents:,} documents · {task.completed:,.0f} tokens{speed}")
