"""Extract the prose of an HTML page: its paragraphs without navigation, code and tables.

If a page marks its main part, only that part is read. A block whose text lies mostly inside links is left out as
navigation (link density: Kohlschütter et al. 2010, "Boilerplate Detection using Shallow Text Features").
"""

from html.parser import HTMLParser

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


def text_of_html(page: str) -> str:
    """Return the paragraphs of a page, separated by blank lines; empty if it has none."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    reader.end_block()
    return "\n\n".join(reader.main or reader.paragraphs)


class _Reader(HTMLParser):
    """Collects the paragraphs of a page, and separately the paragraphs of its main part."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.main: list[str] = []

        # Text of the current block, its number of characters inside links, and the number of open links.
        self._parts: list[str] = []
        self._linked = 0
        self._links = 0

        # The element that is left out and the element of the main part, each with the number of open tags of its name.
        self._skipped = ""
        self._skipped_depth = 0
        self._main = ""
        self._main_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._skipped_depth += tag == self._skipped
            return
        if tag in BLOCKS:
            self.end_block()
        elif tag == "a":
            self._links += any(name == "href" for name, _ in attrs)  # without href, the element is the target of a link
        if tag in VOID:
            self._parts.append(" ")
            return

        # Classes and roles.
        words = {word for name, value in attrs if name in ("class", "role") and value for word in value.split()}
        if tag in LEFT_OUT or not NAVIGATION.isdisjoint(words):
            self.end_block()
            self._skipped, self._skipped_depth = tag, 1
        elif self._main:
            self._main_depth += tag == self._main
        elif tag in ("main", "article") or "main" in words:
            self._main, self._main_depth = tag, 1

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._skipped_depth -= tag == self._skipped
            if not self._skipped_depth:
                self._skipped = ""
            return

        if tag in BLOCKS:
            self.end_block()
        elif tag == "a":
            self._links = max(0, self._links - 1)
        if tag == self._main:
            self.end_block()
            self._main_depth -= 1
            if not self._main_depth:
                self._main = ""

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data)
            self._linked += bool(self._links) * len(data.strip())

    def end_block(self) -> None:
        """Keep the block that was read, unless it is empty or navigation."""
        text = " ".join("".join(self._parts).split())
        if text and self._linked < LINKED * len(text):
            self.paragraphs.append(text)
            if self._main:
                self.main.append(text)
        self._parts.clear()
        self._linked = self._links = 0
