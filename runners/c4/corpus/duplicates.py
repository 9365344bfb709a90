"""Find documents that nearly repeat an earlier document, and remove paragraphs that earlier documents contain.

A shingle is a sequence of ``SHINGLE`` consecutive words. Two documents are near-duplicates if their sets of shingles
have a Jaccard similarity of at least ``SIMILAR``. MinHash (Broder 1997) with locality-sensitive hashing finds
candidates, which are then compared exactly. A pair at the threshold is found with probability
1 - (1 - 0.7⁴)³² = 0.9998.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runners.c4.corpus.cleaning import PARAGRAPHS, words_of
from runners.c4.corpus.packing import digest_of
from runners.progress import bar

SHINGLE = 5
"""Words of a shingle."""
SIMILAR = 0.7
"""Least Jaccard similarity of near-duplicates."""
BANDS, ROWS = 32, 4
"""Shape of a MinHash signature: documents that agree in all rows of a band are candidates."""
CHUNK = 8192
"""Shingles that are hashed at a time, to limit memory."""
LONG = 8
"""Number of words from which a paragraph is kept in one document only."""
MOST = 10
"""Number of documents that keep a shorter paragraph, for example a heading."""

Hashes = NDArray[np.uint64]


def without_near_duplicates(documents: Sequence[str]) -> list[str]:
    """Return the documents, in order, that are no near-duplicates of an earlier document that is kept."""
    kept: list[str] = []
    shingles: dict[int, NDArray[np.uint32]] = {}
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    for number, document in enumerate(bar(documents, "looking for near-duplicates")):
        own = shingles_of(document)
        keys = list(enumerate(_bands(own)))
        candidates = {other for key in keys for other in buckets.get(key, ())}
        if any(similarity(own, shingles[other]) >= SIMILAR for other in candidates):
            continue

        kept.append(document)
        shingles[number] = own
        for key in keys:
            buckets[key].append(number)
    return kept


def shingles_of(document: str) -> NDArray[np.uint32]:
    """Return the sorted hashes of a document's shingles, each once; a document of fewer words is one shingle."""
    words = np.array([zlib.crc32(word.encode()) for word in words_of(document)], np.uint64)
    if len(words) < SHINGLE:
        words = np.pad(words, (0, SHINGLE - len(words)))

    # The upper half of a weighted sum of 64 bits is the hash.
    shingles = np.lib.stride_tricks.sliding_window_view(words, SHINGLE)
    sums = (shingles * _multipliers(SHINGLE)).sum(axis=1, dtype=np.uint64)
    return np.unique((sums >> np.uint64(32)).astype(np.uint32))


def similarity(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """Return the Jaccard similarity of two sets of shingles."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def without_repeats(documents: Sequence[str]) -> Iterator[str]:
    """Yield each document without repeated paragraphs.

    A paragraph of at least ``LONG`` words is kept only where it occurs first. A shorter paragraph is kept in the first
    ``MOST`` documents that contain it. Paragraphs are compared without punctuation and case.
    """
    times: Counter[int] = Counter()
    for document in documents:
        kept, seen = [], set()
        for paragraph in PARAGRAPHS.split(document):
            words = words_of(paragraph)
            key = digest_of(" ".join(words))
            known = key in seen and len(words) >= LONG
            if not known and times[key] < (1 if len(words) >= LONG else MOST):
                kept.append(paragraph)
            seen.add(key)
        times.update(seen)
        yield "\n\n".join(kept)


def _bands(shingles: NDArray[np.uint32]) -> list[bytes]:
    """Return the bands of a MinHash signature."""
    least: Hashes = np.full(BANDS * ROWS, np.iinfo(np.uint64).max, np.uint64)
    wide = shingles.astype(np.uint64)
    for start in range(0, len(wide), CHUNK):
        hashed = _multipliers(BANDS * ROWS)[:, None] * (wide[None, start : start + CHUNK] + np.uint64(1))
        np.minimum(least, hashed.min(axis=1), out=least)
    return [band.tobytes() for band in least.reshape(BANDS, ROWS)]


def _multipliers(count: int) -> Any:
    """Return odd pseudorandom numbers of 64 bits, the same in each call."""
    return np.random.default_rng(count).integers(2**63, size=count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
