"""Select English prose: the paragraphs of a file that are prose, and the pages with enough such paragraphs.

The number and the mean length of a page's words have the limits of Gopher's training data (Rae et al. 2021,
arXiv:2112.11446, appendix A.1). The rules for stop words and letters are this project's own, and stricter. Gopher asks
for two of eight stop words in a page, and for a letter in 80% of the words. Pages that only list names, and pages in
other languages with English links, fulfil that; a folder of documentation holds many of both.
"""

import re
from pathlib import Path
from typing import NamedTuple

from runners.c4.corpus.html_text import text_of_html

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
PARAGRAPHS = re.compile(r"\n[ \t]*\n")
WORDS = re.compile(r"[^\W_]+")


class Page(NamedTuple):
    """The text of a file, and the reason why the file is left out; the reason is empty if it is kept."""

    text: str
    reason: str


def read_text(file: Path) -> str:
    """Return the text of a file; for an HTML file, only its prose.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    return text_of_html(text) if file.suffix.lower() in HTML else text


def read_clean(file: Path) -> Page:
    """Return the prose of a file."""
    try:
        text = read_text(file)
    except ValueError:
        return Page("", "not in UTF-8")
    kept = "\n\n".join(part for part in PARAGRAPHS.split(text) if is_prose(part))
    return Page(kept, fault_of(kept))


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
    if stops < STOP_SHARE * len(words) or not low <= sum(map(len, words)) / len(words) <= high:
        return "not English prose"
    return ""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORDS.findall(text.lower())
