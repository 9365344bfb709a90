"""Read texts, and make a corpus of English prose of them: each document and paragraph once, whole documents held out.

*Prose*: the paragraphs of a file that are prose, and the pages with enough such paragraphs. The number and the mean
length of a page's words have the limits of Gopher's training data (Rae et al. 2021, arXiv:2112.11446, appendix A.1).
The rules for stop words and letters are this project's own, and stricter. Gopher asks for two of eight stop words in a
page, and for a letter in 80% of the words. Pages that only list names, and pages in other languages with English links,
fulfil that; a folder of documentation holds many of both.

*Near-duplicates*: a shingle is a sequence of ``SHINGLE`` consecutive words. Two documents are near-duplicates if their
sets of shingles have a Jaccard similarity of at least ``SIMILAR``. MinHash (Broder 1997) with locality-sensitive
hashing finds candidates, which are then compared exactly. A pair at the threshold is found with probability
1 - (1 - 0.7⁴)³² = 0.9998.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runners.c4.data.prepare import digest_of
from runners.c4.data.sources import Split
from runners.progress import bar

HTML = (".html", ".htm", ".xhtml")
"""Endings of HTML files."""
LEAST_WORDS = 50
"""Least number of words of a page."""
WORD_LENGTH = (3.0, 10.0)
"""Least and largest mean number of characters of a page's words."""
LETTERS = 0.75
"""Least share of letters and spaces in a paragraph of prose; tables and code have less."""
STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with", "a", "in", "is", "for"])
"""Gopher's stop words, and four more that are as frequent."""
STOP_SHARE = 0.15
"""Least share of stop words in a page of English prose.

Of 2,686 technical documents (PEPs, Rust RFCs, EIPs, Kubernetes proposals), nine tenths have 0.15 to 0.26, and half have
less than 0.21. Of those below 0.15, which have 4% of the words, about half are lists of names, tables, code and
translations; of those below 0.1, nearly all are. Of 905 pages of C4, those below 0.15 have 4% of the words, too.
"""
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
HELD_OUT = 40
"""One of forty documents is validation data."""
PARAGRAPHS = re.compile(r"\n[ \t]*\n")
WORDS = re.compile(r"[^\W_]+")


def read_text(file: Path) -> str | None:
    """Return the text of a file, of an HTML file its main part without code and tables; None if it is not UTF-8."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return None
    if file.suffix.lower() not in HTML:
        return text

    from resiliparse.extract.html2text import extract_plain_text  # of the extra html

    skipped = ["pre", "table"]
    prose: str = extract_plain_text(text, main_content=True, list_bullets=False, alt_texts=False, skip_elements=skipped)
    return prose


def clean_documents(manuals: Mapping[Path, Path]) -> dict[Split, list[str]]:
    """Return the English prose of files, each document and paragraph once; whole manuals are validation data.

    Print how many files were left out, and why. No validation document is a near-duplicate of a training document,
    because all near-duplicates are removed. Pages of one manual resemble each other in other ways, too, so manuals are
    held out as a whole, as long as they are small enough; if none is, single documents are. Both splits are in a random
    order. It depends only on the texts, and what is held out only on them and on the names of the manuals.

    Args:
        manuals: the files, each with its manual.

    Raises:
        ValueError: fewer than two documents are left.
    """
    manual_of: dict[str, Path] = {}
    left_out: Counter[str] = Counter()
    for file in bar(manuals, "reading texts"):
        text = read_text(file)
        prose = "\n\n".join(filter(is_prose, PARAGRAPHS.split(text or "")))
        if reason := "not in UTF-8" if text is None else fault_of(prose):
            left_out[reason] += 1
        else:
            manual_of.setdefault(prose, manuals[file])

    # Remove near-duplicates first, so that their paragraphs do not count as repeated, and once more at the end, because
    # documents may resemble each other only without repeated paragraphs.
    unique = without_near_duplicates([*manual_of])
    pairs = zip(unique, without_repeats(unique), strict=True)
    shortened = {short: manual_of[text] for text, short in pairs if not fault_of(short)}
    documents = sorted(without_near_duplicates([*shortened]), key=digest_of)
    left_out["too little without repeated paragraphs"] = len(unique) - len(shortened)
    left_out["a near-duplicate"] = len(manuals) - len(documents) - left_out.total()

    reasons = [f"{count:,} {reason}" for reason, count in left_out.most_common() if count]
    print("; ".join([f"{len(documents):,} of {len(manuals):,} files kept", *reasons]))
    if len(documents) < 2:
        raise ValueError("too few documents are left for two splits: name more texts, or leave --clean out")

    # Hold out manuals in a random order, each if it still fits.
    pages_of: dict[Path, list[str]] = defaultdict(list)
    for text in documents:
        pages_of[shortened[text]].append(text)
    most = max(1, len(documents) // HELD_OUT)
    validation: list[str] = []
    for manual in sorted(pages_of, key=lambda manual: digest_of(manual.name)):
        pages = pages_of[manual]
        validation += pages if len(validation) + len(pages) <= most else []
    validation = validation or documents[:most]
    held_out = set(validation)
    return {"train": [text for text in documents if text not in held_out], "validation": validation}


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph consists mostly of letters and spaces."""
    letters = sum(map(str.isalpha, paragraph)) + paragraph.count(" ")
    return letters >= LETTERS * len(paragraph) and not paragraph.isspace() and paragraph != ""


def fault_of(page: str) -> str:
    """Return the reason why a page of prose paragraphs is left out; empty if it is kept."""
    words = words_of(page)
    if len(words) < LEAST_WORDS:
        return "too short"

    low, high = WORD_LENGTH
    stops = sum(word in STOP_WORDS for word in words)
    is_english = stops >= STOP_SHARE * len(words) and low <= sum(map(len, words)) / len(words) <= high
    return "" if is_english else "not English prose"


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORDS.findall(text.lower())


def without_near_duplicates(documents: Sequence[str]) -> list[str]:
    """Return the documents, in order, that are no near-duplicates of an earlier document that is kept."""
    kept: list[str] = []
    shingles: list[NDArray[np.uint32]] = []
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    multipliers_R1 = _multipliers(BANDS * ROWS)[:, None]

    for document in bar(documents, "looking for near-duplicates"):
        own = shingles_of(document)

        # Bands of the MinHash signature.
        least_R = np.full(BANDS * ROWS, np.iinfo(np.uint64).max, np.uint64)
        for start in range(0, len(own), CHUNK):
            hashed_RS = multipliers_R1 * (own[None, start : start + CHUNK].astype(np.uint64) + np.uint64(1))
            np.minimum(least_R, hashed_RS.min(axis=1), out=least_R)
        keys = [(number, band.tobytes()) for number, band in enumerate(least_R.reshape(BANDS, ROWS))]

        candidates = {other for key in keys for other in buckets.get(key, ())}
        if not any(similarity(own, shingles[other]) >= SIMILAR for other in candidates):
            for key in keys:
                buckets[key].append(len(kept))
            kept.append(document)
            shingles.append(own)
    return kept


def shingles_of(document: str) -> NDArray[np.uint32]:
    """Return the sorted hashes of a document's shingles, each once; a document of fewer words is one shingle."""
    words = [zlib.crc32(word.encode()) for word in words_of(document)]
    padded = np.array(words + [0] * (SHINGLE - len(words)), np.uint64)

    # The upper half of a weighted sum of 64 bits is the hash.
    ends = len(padded) - SHINGLE + 1
    sums = sum(padded[i : ends + i] * factor for i, factor in enumerate(_multipliers(SHINGLE)))
    return np.unique((sums >> np.uint64(32)).astype(np.uint32))


def _multipliers(count: int) -> NDArray[np.uint64]:
    """Return odd pseudorandom numbers of 64 bits, the same in each call."""
    return np.random.default_rng(count).integers(2**63, size=count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def similarity(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """Return the Jaccard similarity of two sets of shingles."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def without_repeats(documents: Sequence[str]) -> list[str]:
    """Return each document without repeated paragraphs.

    A paragraph of at least ``LONG`` words is kept only where it occurs first. A shorter paragraph is kept in the first
    ``MOST`` documents that contain it. Paragraphs are compared without punctuation and case.
    """
    shortened = []
    times: Counter[int] = Counter()
    for document in documents:
        kept, seen = [], set[int]()
        for paragraph in PARAGRAPHS.split(document):
            words = words_of(paragraph)
            key = digest_of(" ".join(words))
            before = times[key] + (key in seen and len(words) >= LONG)
            if before < (1 if len(words) >= LONG else MOST):
                kept.append(paragraph)
            seen.add(key)
        times.update(seen)
        shortened.append("\n\n".join(kept))
    return shortened
