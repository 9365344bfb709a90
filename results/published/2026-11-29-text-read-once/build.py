"""Clean the texts that ``texts.py`` wrote, hold out whole manuals, and write files in C4's format and a tokenizer.

    python build.py packages.txt texts my_corpus

It follows ``runners.c4.data.cleaning`` and uses its limits, but hashes each word once, in all cores, reads packages in
the order of the list, and takes each RFC for a manual. Two cores take a quarter of an hour.
"""

import gzip
import json
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing import Pool
from multiprocessing.pool import Pool as Workers
from pathlib import Path

import numpy as np
from extract import PARTS
from numpy.typing import NDArray

from runners.c4.data.cleaning import (
    BANDS,
    CHUNK,
    HELD_OUT,
    LONG,
    MOST,
    ROWS,
    SHINGLE,
    SIMILAR,
    fault_of,
    similarity,
    words_of,
)
from runners.c4.data.cleaning import _multipliers as multipliers
from runners.c4.data.convert import train_tokenizer
from runners.c4.data.prepare import digest_of

RUN = 13
"""Words of a run by which validation and training are compared."""
SHARED = 0.1
"""A training document with this share of its runs in the validation documents is left out."""
TOKENIZER = 10
"""The tokenizer reads one of ten training documents."""


Signature = tuple[NDArray[np.uint32], list[bytes]]
"""Shingles of a document, and the bands of its MinHash signature."""


class Documents:
    """The documents that are kept, as ``without_near_duplicates`` keeps them."""

    def __init__(self) -> None:
        self.kept: list[NDArray[np.uint32]] = []
        self.buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def add(self, signature: Signature) -> bool:
        """Keep a document, or return False if it resembles one that is kept."""
        own, bands = signature
        candidates = {other for key in enumerate(bands) for other in self.buckets.get(key, ())}
        if any(similarity(own, self.kept[other]) >= SIMILAR for other in candidates):
            return False
        for key in enumerate(bands):
            self.buckets[key].append(len(self.kept))
        self.kept.append(own)
        return True


def signature_of(words: NDArray[np.uint32]) -> Signature:
    """Return the signature of a document of hashed words."""
    padded = np.concatenate([words, np.zeros(max(0, SHINGLE - len(words)), np.uint32)]).astype(np.uint64)
    own = np.unique((sums(padded, SHINGLE) >> np.uint64(32)).astype(np.uint32))
    least = np.full(BANDS * ROWS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(own), CHUNK):
        part = own[None, start : start + CHUNK].astype(np.uint64) + np.uint64(1)
        np.minimum(least, (multipliers(BANDS * ROWS)[:, None] * part).min(axis=1), out=least)
    return own, [band.tobytes() for band in least.reshape(BANDS, ROWS)]


def sums(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return a hash of each run of words."""
    count = max(0, len(words) - length + 1)
    parts = (words[i : i + count] * factor for i, factor in enumerate(multipliers(length)))
    return np.asarray(sum(parts, np.zeros(count, np.uint64)))


def hashed(text: str) -> NDArray[np.uint32]:
    """Return the hashes of the words of a text."""
    return np.array([zlib.crc32(word.encode()) for word in words_of(text)], np.uint32)


def read(packages: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield manual and text of each page."""
    places = defaultdict(list)
    for place in sorted(folder.glob("*/*/")):
        places[place.name].append(place)
    for line in packages.read_text().split("\n"):
        for place in places[line.partition(" ")[0]]:
            for file in sorted(place.glob("*.txt")):
                source = place.parent.name
                yield f"{source}/{file.name}" if source == "doc-rfc" else source, file.read_text(encoding="utf-8")


def hashed_page(page: tuple[str, str]) -> tuple[str, list[tuple[str, NDArray[np.uint32]]], Signature]:
    """Return manual, paragraphs with their hashed words, and signature of a page."""
    manual, text = page
    paragraphs = [(part, hashed(part)) for part in PARTS.split(text)]
    return manual, paragraphs, signature_of(np.concatenate([words for _, words in paragraphs]))


def clean(packages: Path, folder: Path, workers: Workers) -> Iterator[tuple[str, str]]:
    """Yield manual and text of each document that is kept, without repeated paragraphs."""
    first, last = Documents(), Documents()
    times: Counter[bytes] = Counter()
    found, shortened = [], []
    for manual, paragraphs, signature in workers.imap(hashed_page, read(packages, folder), chunksize=32):
        if not first.add(signature):
            continue

        kept, seen = [], set[bytes]()
        for text, words in paragraphs:
            key = words.tobytes()
            if times[key] + (key in seen and len(words) >= LONG) < (1 if len(words) >= LONG else MOST):
                kept.append((text, words))
            seen.add(key)
        times.update(seen)

        document = "\n\n".join(text for text, _ in kept)
        if len(kept) == len(paragraphs):
            found.append((manual, document, signature))
        elif not fault_of(document):
            found.append((manual, document, None))
            shortened.append(np.concatenate([words for _, words in kept]))

    signatures = workers.imap(signature_of, shortened, chunksize=64)
    for manual, document, known in found:
        if last.add(known or next(signatures)):
            yield manual, document


def runs_of(text: str) -> list[int]:
    """Return hashes of the runs of words of a text."""
    found: list[int] = sums(hashed(text).astype(np.uint64), RUN).tolist()
    return found


def divide(documents: list[tuple[str, str]], workers: Workers) -> dict[str, list[str]]:
    """Return training and validation documents: whole manuals, and nothing in training that shares much with them.

    Manuals are drawn at random; one with more than a twentieth of the validation characters is not.
    """
    documents = sorted(documents, key=lambda document: digest_of(document[1]))
    sizes: Counter[str] = Counter()
    for manual, text in documents:
        sizes[manual] += len(text)
    left = most = sizes.total() // HELD_OUT
    held_out = set()
    for manual in sorted(sizes, key=digest_of):
        if sizes[manual] <= min(left, most // 20):
            held_out.add(manual)
            left -= sizes[manual]
    validation = [text for manual, text in documents if manual in held_out]

    runs = {run for own in workers.imap(runs_of, validation, chunksize=64) for run in own}
    rest = [text for manual, text in documents if manual not in held_out]
    train = []
    for text, own in zip(rest, workers.imap(runs_of, rest, chunksize=64), strict=True):
        if sum(run in runs for run in own) < SHARED * max(1, len(own)):
            train.append(text)
    return {"train": train, "validation": validation}


def main(packages: Path, folder: Path, corpus: Path) -> None:
    """Write the corpus; documents are in the order of their digests."""
    with Pool() as workers:
        splits = divide(list(clean(packages, folder, workers)), workers)
    (corpus / "tokenizer").mkdir(parents=True)
    for split, texts in splits.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (corpus / f"c4-{split}.json.gz").write_bytes(gzip.compress(lines, 1, mtime=0))
        print(f"{split}: {len(texts):,} documents, {sum(map(len, texts)):,} characters")
    tokenizer = train_tokenizer(splits["train"][::TOKENIZER], 8000)
    (corpus / "tokenizer" / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
