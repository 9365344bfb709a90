"""Turn texts into the contents of shards: encode documents, then concatenate their tokens."""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_DOCUMENTS = 1024
"""Documents that are encoded together, on all cores."""


@dataclass(frozen=True)
class Document:
    """An encoded document.

    Attributes:
        number: index of its line in the sequence of all source lines.
        digest: 64-bit hash of its text.
        tokens_N: its token ids with end-of-text at the end; None for a document that is left out.
    """

    number: int
    digest: int
    tokens_N: np.ndarray | None


@dataclass(frozen=True)
class ShardContent:
    """Content of one shard, before it is written.

    Attributes:
        tokens_N: its token ids.
        documents_D3: its documents, as ``runners.c4.corpus.shards`` describes them.
        number: index of the last document with tokens in the shard.
        dropped: number of documents left out since the beginning of the split.
        is_last: whether no document follows.
    """

    tokens_N: np.ndarray
    documents_D3: np.ndarray
    number: int
    dropped: int
    is_last: bool


def encode(
    documents: Iterator[tuple[int, str]],
    encoder: "Tokenizer",
    end_of_text: int,
    held_out: Set[int],
    advance: Callable[[int, int], None],
) -> Iterator[Document]:
    """Encode documents in batches.

    Args:
        documents: index and text of each document.
        encoder: the tokenizer.
        end_of_text: id of the token to append to each document.
        held_out: digests of the texts to leave out.
        advance: called with the number of documents and of tokens of each batch when it is encoded.
    """
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        # Encode together the documents that are not held out.
        digests = [digest_of(text) for _number, text in batch]
        kept = [text for (_number, text), digest in zip(batch, digests, strict=True) if digest not in held_out]
        encodings = encoder.encode_batch_fast(kept, add_special_tokens=False)
        advance(len(kept), sum(len(encoding) + 1 for encoding in encodings))

        # Return all of them in order.
        following = iter(encodings)
        for (number, _text), digest in zip(batch, digests, strict=True):
            if digest in held_out:
                yield Document(number, digest, None)
                continue

            yield Document(number, digest, np.array([*next(following).ids, end_of_text]))


def pack(
    documents: Iterable[Document], position: int, done: int, dropped: int, shard_tokens: int, dtype: np.dtype[Any]
) -> Iterator[ShardContent]:
    """Concatenate documents and cut them into shards; only the last shard may be shorter than the others.

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

    def content(is_last: bool) -> ShardContent:
        return ShardContent(tokens_N[:filled], np.array(rows, np.int64).reshape(-1, 3), number, dropped, is_last)

    for document in documents:
        if document.tokens_N is None:
            dropped += 1
            continue
        number = document.number

        # Copy one piece of the document into each shard that it overlaps.
        while done < len(document.tokens_N):
            piece_N = document.tokens_N[done : done + shard_tokens - filled]
            rows.append((position + filled - done, document.number, document.digest))
            tokens_N[filled : filled + len(piece_N)] = piece_N
            filled += len(piece_N)
            done += len(piece_N)

            if filled == shard_tokens:
                yield content(is_last=False)
                position += filled
                filled, rows = 0, []
        done = 0

    yield content(is_last=True)


def digest_of(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
