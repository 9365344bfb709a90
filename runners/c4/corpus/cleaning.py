"""Which text of a file is English prose: its paragraphs, and the pages that have enough of them.

The rules of pages follow those of Gopher's training data (Rae et al. 2021, arXiv:2112.11446, table A1), with stricter
ones for stop words and letters, because a folder of documentation holds many pages that only list names.
"""

import re
from pathlib import Path
from typing import NamedTuple

from runners.c4.corpus.html_text import text_of_html

HTML = (".html", ".htm", ".xhtml")
"""Endings of HTML files."""
LEAST_WORDS = 50
"""Words of the shortest page."""
WORD_LENGTH = (3.0, 10.0)
"""Least and largest mean length of a page's words."""
LETTERS = 0.75
"""Share of letters and spaces in a paragraph below which it is a table or code."""
STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with", "a", "in", "is", "for"])
"""Gopher's stop words, and four more that are as frequent."""
STOP_SHARE = 0.2
"""Share of stop words below which a page is not English prose: lists of names have less, most prose 0.22 to 0.3."""
PARAGRAPHS = re.compile(r"\n[ \t]*\n")
WORDS = re.compile(r"[^\W_]+")


class Page(NamedTuple):
    """The text of a file, and the reason why it is left out; empty if it is kept."""

    text: str
    reason: str


def read_text(file: Path) -> str:
    """Return the text of a file, of HTML its prose.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error
    return text_of_html(text) if file.suffix in HTML else text


def read_clean(file: Path) -> Page:
    """Return the prose of a file."""
    try:
        text = read_text(file)
    except ValueError:
        return Page("", "not in UTF-8")
    kept = "\n\n".join(part for part in PARAGRAPHS.split(text) if is_prose(part))
    return Page(kept, fault_of(kept))


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph consists of letters and spaces for the most part."""
    letters = sum(map(str.isalpha, paragraph)) + paragraph.count(" ")
    return letters >= LETTERS * len(paragraph) and not paragraph.isspace() and paragraph != ""


def fault_of(page: str) -> str:
    """Return why a page of prose paragraphs is left out; empty if it is kept."""
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
