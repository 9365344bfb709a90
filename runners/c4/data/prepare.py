"""Text as token shards: tokenised once, checksummed, memory-mapped (``runners.c4.data.corpus`` describes the files).

A corpus is a folder ``corpora/<hash>``. The hash covers the tokenizer and the sources, so other data make another
corpus. All shards of a split except the last are full. The corpus is therefore the same whether one call or several
calls tokenise it, and whether any of them are killed.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from hashlib import blake2b, sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from runners.c4.data.corpus import (
    Corpus,
    Manifest,
    Part,
    open_shard,
    read_manifest,
    verify,
    write_manifest,
    write_shard,
)
from runners.c4.data.sources import ADVICE, SPLITS, Split, describe, find_files, read
from runners.c4.data.tokenizer import Tokenizer, end_of_text, load_tokenizer, vocab_size
from runners.files import clear_leftovers
from runners.progress import Bars

SHARD_TOKENS = 2**22
BATCH_DOCUMENTS = 1024
"""Documents that are encoded together, on all cores."""
FORMAT = 1
"""Version of the file format; another version makes another corpus."""


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
        ValueError: data or tokenizer are not available or invalid, or a shard is damaged.
        OSError: the disk is full.
    """
    name, files, encoder, empty = open_sources(data, tokenizer, validation_tokens)
    folder = out / "corpora" / name
    verify(folder, read_manifest(folder) or empty, console)

    asked: dict[Split, int] = {"validation": validation_tokens, "train": train_tokens}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder.with_suffix(".lock")).acquire(timeout=0)
    except Timeout:
        console.print(f"waiting for another process that tokenises into {folder}")
        lock = FileLock(folder.with_suffix(".lock")).acquire()
    with lock:
        manifest = read_manifest(folder) or empty
        clear_leftovers(folder)
        for split, tokens in asked.items():
            manifest = _extend(folder, manifest, split, tokens, files[split], encoder, console)
            if not (part := manifest.splits[split]).tokens:
                same = f" ({part.dropped:,} are validation documents, too)" if part.dropped else ""
                raise ValueError(f"no document for the {split} split in {files[split][0]} and the like{same}: {ADVICE}")

    corpus = Corpus(folder=folder, manifest=manifest, asked=asked)
    for split in SPLITS:
        if (found := corpus.tokens(split)) <= seq_len:
            window = f"one window of {seq_len + 1:,}: lower --seq-len or give more --data"
            raise ValueError(f"the {split} split has {found:,} tokens, fewer than {window}")
    return corpus


def open_sources(
    data: Sequence[str], tokenizer: str, validation_tokens: int
) -> tuple[str, dict[Split, list[str]], Tokenizer, Manifest]:
    """Return the name of a corpus, its source files, its tokenizer, and its manifest before anything is tokenised."""
    # Check the files first, because the tokenizer may come from the hub.
    files = find_files(data)
    encoder = load_tokenizer(tokenizer)
    empty = Manifest(
        tokenizer=sha256(encoder.to_str().encode()).hexdigest(),
        vocab_size=vocab_size(encoder),
        end_of_text=end_of_text(encoder),
        sources={split: describe(files[split]) for split in SPLITS},
        splits={split: Part() for split in SPLITS},
    )

    # The name is a hash of what decides the content. Training documents are compared with all validation documents, so
    # more validation shards make another corpus.
    identity = [FORMAT, SHARD_TOKENS, math.ceil(validation_tokens / SHARD_TOKENS), empty.tokenizer, empty.sources]
    return sha256(json.dumps(identity).encode()).hexdigest()[:16], files, encoder, empty


def _extend(
    folder: Path,
    manifest: Manifest,
    split: Split,
    tokens: int,
    files: Sequence[str],
    encoder: Tokenizer,
    console: Console,
) -> Manifest:
    """Tokenise until ``split`` has ``tokens`` tokens or its files end; write the manifest after each shard."""
    part = manifest.splits[split]
    if part.complete or part.tokens >= tokens:
        return manifest

    # No training document has the text of a validation document.
    validation = manifest.splits["validation"].shards if split == "train" else ()
    held_out = {digest for shard in validation for digest in open_shard(folder, shard)[1][:, 2].tolist()}

    # Continue with the document in which the last shard ends, even if that shard holds all of it.
    start, number = part.tokens, 0
    if part.shards:
        start, number, _digest = open_shard(folder, part.shards[-1])[1][-1].tolist()

    lines = list(part.lines)
    dtype = np.dtype(np.uint16 if manifest.vocab_size <= 2**16 else np.uint32)
    columns = TextColumn("{task.description}: {task.completed:,.0f} tokens"), BarColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, transient=True) as bars:
        total = math.ceil(tokens / SHARD_TOKENS) * SHARD_TOKENS
        advance = partial(bars.advance, bars.add_task(f"tokenising {split}", total=total, completed=start))
        documents = encode(read(files, lines, number), encoder, manifest.end_of_text, held_out, advance)
        for tokens_N, documents_D3, last, dropped, complete in pack(
            documents, part.tokens, part.tokens - start, part.dropped, SHARD_TOKENS, dtype
        ):
            shards = part.shards
            if len(tokens_N):
                shards += (write_shard(folder, f"{split}-{len(shards):05}", tokens_N, documents_D3),)

            # Leave out files that were only read ahead, because how far that goes depends on where this call began.
            ended = [n for n, end in zip(lines, accumulate(lines), strict=True) if complete or end <= last]
            part = Part(shards=shards, dropped=dropped, lines=tuple(ended), complete=complete)
            manifest = replace(manifest, splits={**manifest.splits, split: part})
            write_manifest(folder, manifest)
            if part.tokens >= tokens:
                break

    console.print(f"tokenised {split}: {part.tokens:,} tokens", soft_wrap=True)
    return manifest


Document = tuple[int, int, list[int] | None]
"""Index of its line in the sequence of all source lines; 64-bit hash of its text; its token ids with end-of-text at the
end, or None if it is left out."""


def encode(
    documents: Iterator[tuple[int, str]],
    encoder: Tokenizer,
    end_of_text: int,
    held_out: Set[int],
    advance: Callable[[int], object],
) -> Iterator[Document]:
    """Encode documents in batches.

    Args:
        documents: index and text of each document.
        encoder: the tokenizer.
        end_of_text: id of the token to append to each document.
        held_out: digests of the texts to leave out.
        advance: called with the number of tokens of each document.
    """
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        # Encode together the documents that are not held out.
        digests = [digest_of(text) for _number, text in batch]
        kept = [text for (_number, text), digest in zip(batch, digests, strict=True) if digest not in held_out]
        encodings = iter(encoder.encode_batch_fast(kept, add_special_tokens=False))

        # Return all of them in order.
        for (number, _text), digest in zip(batch, digests, strict=True):
            tokens = None if digest in held_out else [*next(encodings).ids, end_of_text]
            advance(len(tokens or ()))
            yield number, digest, tokens


def pack(
    documents: Iterable[Document], position: int, done: int, dropped: int, shard_tokens: int, dtype: np.dtype[Any]
) -> Iterator[tuple[np.ndarray, np.ndarray, int, int, bool]]:
    """Concatenate documents and cut them into shards; only the last shard may be shorter than the others.

    Yields the tokens of each shard (N,); its documents (D, 3), as ``runners.c4.data.corpus`` describes them; the index
    of its last document; the number of documents left out since the beginning of the split; and whether it is the last.

    Args:
        documents: the documents in order; the first one may have begun in an earlier shard.
        position: position in the split of the first token to write.
        done: number of tokens of the first document in earlier shards.
        dropped: number of documents of the split that were left out so far.
        shard_tokens: number of tokens of a full shard.
        dtype: integer type of the tokens.
    """
    tokens_N = np.empty(shard_tokens, dtype)
    rows: list[tuple[int, int, int]] = []
    filled = number = 0

    for index, digest, document_N in documents:
        if document_N is None:
            dropped += 1
            continue
        number = index

        # Copy one piece of the document into each shard that it overlaps.
        while done < len(document_N):
            piece_N = document_N[done : done + shard_tokens - filled]
            rows.append((position + filled - done, number, digest))
            tokens_N[filled : filled + len(piece_N)] = piece_N
            filled += len(piece_N)
            done += len(piece_N)

            if filled == shard_tokens:
                yield tokens_N, np.array(rows, np.int64), number, dropped, False
                position += filled
                filled, rows = 0, []
        done = 0

    yield tokens_N[:filled], np.array(rows, np.int64).reshape(-1, 3), number, dropped, True


def digest_of(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
