"""Extract the prose of an HTML page: its paragraphs without navigation, code and tables.

If a page marks its main part, only that part is read: its elements ``main``, or else its only article. A block whose
text lies mostly inside links is left out as navigation (link density: Kohlschütter et al. 2010, "Boilerplate Detection
using Shallow Text Features"). Elements without an end tag end where browsers end them (HTML Living Standard, section
13.2.6.4.7, without its rules for wrongly nested formatting).
"""

from collections import Counter, defaultdict
from collections.abc import Set
from html.parser import HTMLParser
from typing import Literal, NamedTuple

LEFT_OUT = {
    *("script", "style", "noscript", "template", "svg", "math", "title", "nav", "header", "footer", "aside"),
    *("form", "button", "select", "textarea", "pre", "table"),
}
"""Elements that hold no prose."""
BLOCKS = {
    *("p", "div", "li", "ul", "ol", "dl", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "h6", "hr"),
    *("body", "main", "section", "article", "blockquote", "figure", "figcaption"),
}
"""Elements that begin and end a paragraph."""
AFTER_PARAGRAPH = BLOCKS | {"nav", "header", "footer", "aside", "form", "pre", "table"}
"""Elements that end an element ``p`` before them."""
ENDED_BY_NEXT = {
    "li": ({"li"}, {"ul", "ol", "table"}),
    **dict.fromkeys(("dt", "dd"), ({"dt", "dd"}, {"dl", "table"})),
}
"""Elements that end with the next element of their list: the tags that an element ends, and those of their lists."""
VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
}
"""Elements without an end tag."""
NAVIGATION = {
    *("navigation", "nav", "navbar", "navheader", "navfooter", "sidebar", "sphinxsidebar", "related", "menu"),
    *("toc", "contents", "localtoc", "toctree-wrapper", "breadcrumb", "breadcrumbs", "headerlink"),
    *("header", "footer", "search", "banner", "contentinfo", "copyright"),
}
"""Classes and roles of elements that hold no prose."""
LINKED = 0.5
"""Share of a block's characters inside links from which the block counts as navigation."""

Part = Literal["", "left out", "main", "article"]
"""What an element is for its content; empty if it is none of the others."""


def text_of_html(page: str) -> str:
    """Return the paragraphs of a page, separated by blank lines; empty if it has none."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    reader.end_block()

    articles = [article for article in reader.articles if article]
    main = reader.main or (articles[0] if len(articles) == 1 else [])
    return "\n\n".join(main or reader.paragraphs)


class _Open(NamedTuple):
    """An element that has begun and not ended."""

    tag: str
    part: Part


class _Reader(HTMLParser):
    """Collects the paragraphs of a page, and separately those of its main part and of each outermost article."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.main: list[str] = []
        self.articles: list[list[str]] = []

        # Text of the current block, its number of characters inside links, and the number of open links.
        self._parts: list[str] = []
        self._linked = 0
        self._links = 0

        # The open elements, outermost first, the places of each tag among them, and how many of each kind are open.
        self._open: list[_Open] = []
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        self._within: Counter[Part] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        part = _part_of(tag, attrs)
        if tag in AFTER_PARAGRAPH:
            self._end_element({"p"}, {"table"})
        if tag in ENDED_BY_NEXT:
            self._end_element(*ENDED_BY_NEXT[tag])
        if tag in BLOCKS or part:
            self.end_block()

        # Without href, the element is the target of a link.
        if tag == "a" and not self._within["left out"]:
            self._links += any(name == "href" for name, _ in attrs)
        if tag in VOID:
            self.handle_data(" ")
            return

        if part == "article" and not self._within["article"]:
            self.articles.append([])
        self._places[tag].append(len(self._open))
        self._open.append(_Open(tag, part))
        self._within[part] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self.end_block()
        elif tag == "a" and not self._within["left out"]:
            self._links = max(0, self._links - 1)

        # The end of an element inside a line ends no block, and an end inside a table ends no element around it.
        is_inline = tag not in BLOCKS and tag not in LEFT_OUT
        self._end_element({tag}, BLOCKS | {"table"} if is_inline else {"table"})

    def handle_data(self, data: str) -> None:
        if not self._within["left out"]:
            self._parts.append(data)
            self._linked += bool(self._links) * len(data.strip())

    def end_block(self) -> None:
        """Keep the block that was read, unless it is empty or navigation."""
        text = " ".join("".join(self._parts).split())
        if text and self._linked < LINKED * len(text):
            self.paragraphs.append(text)
            if self._within["main"]:
                self.main.append(text)
            if self._within["article"]:
                self.articles[-1].append(text)
        self._parts.clear()
        self._linked = self._links = 0

    def _end_element(self, tags: Set[str], limits: Set[str]) -> None:
        """End the innermost open element with one of ``tags`` and all inside it, unless it lies outside a limit."""
        place = self._innermost(tags)
        if place < 0 or place < self._innermost(limits):
            return

        while len(self._open) > place:
            element = self._open.pop()
            self._places[element.tag].pop()
            if element.tag in BLOCKS or element.part:
                self.end_block()
            self._within[element.part] -= 1

    def _innermost(self, tags: Set[str]) -> int:
        """Return the place of the innermost open element with one of ``tags``; -1 if there is none.

        The places of each tag are kept, because a search through all open elements takes a time that grows with the
        square of their number on a page that closes none.
        """
        return max(places[-1] if (places := self._places[tag]) else -1 for tag in tags)


def _part_of(tag: str, attrs: list[tuple[str, str | None]]) -> Part:
    """Return what an element is for its content, by its tag, its classes and its role."""
    words = {word for name, value in attrs if name in ("class", "role") and value for word in value.split()}
    if tag in LEFT_OUT or not NAVIGATION.isdisjoint(words):
        return "left out"
    if tag == "main" or "main" in words:
        return "main"
    return "article" if tag == "article" else ""
