"""Return the prose of a file of a Debian package: HTML, manual pages, info, POD, help of R, comments, and others."""

import gzip
import json
import re
import subprocess
import zlib
from collections.abc import Callable
from html import unescape
from textwrap import dedent

from resiliparse.extract.html2text import extract_plain_text

JUNK = re.compile(
    # Sources, indices and lists that doxygen, javadoc, Sphinx, haddock, rustdoc and gtk-doc generate.
    r"_source\.html|-members\.html|/(functions|globals|namespacemembers|classes|annotated|hierarchy|inherits|files)[_.]"
    r"|/dir_[0-9a-f]+\.html|_8[a-z_]*\.html|/(index-all|allclasses|allpackages|constant-values|deprecated-list)"
    r"|/(class-use|src-html|source-repository|search|_modules|_sources|_static|index-files|searchindex|sourceview)/"
    r"|(package|overview)-(tree|frame|use)\.|genindex|py-modindex|doc-index|/src/.*\.html$|-example\.html|-graph\."
    # Translations.
    r"|/man/[a-z]{2}(_[A-Z]+)?/|/(ar|ca|cs|da|de|el|es|fa|fi|fr|hr|hu|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sk|sl|sv|tr|uk|vi|zh)"
    r"([-_@][A-Za-z]{2,4})?/|\.(cs|da|de|es|fr|it|ja|ko|nl|pl|pt|pt-br|pt_BR|ru|sv|tr|zh|zh-cn|zh_CN)\.(html|txt|md|rst)"
    r"|/translations?/|/locales?/|/doc/RFC/.*\.(html|pdf)"
    # Licences and logs.
    r"|/(copying|license|licence|copyright|changelog|changes|authors|thanks|credits)[^/]*$",
    re.IGNORECASE,
)
NO_TEXT = ("srcref", "Rd_option", "Rd_tag", "srcfile", "class", "html", "latex", "dynamicFlag", "names", "example")
TAGS = "code link emph strong bold pkg url href dQuote sQuote file"
INLINE = tuple(f"\\{tag}" for tag in TAGS.split())
"""Markup of R's help within a paragraph."""
PARTS = re.compile(r"\n[ \t]*\n")


def decoded(data: bytes) -> str:
    """Return a text in UTF-8; other bytes are replaced."""
    return data.decode("utf-8", "replace")


def html(data: bytes) -> str:
    """Return the main part of a page, without code and tables."""
    skipped = ["pre", "table"]
    text = decoded(data)
    return extract_plain_text(text, main_content=True, list_bullets=False, alt_texts=False, skip_elements=skipped)


def plain(data: bytes) -> str:
    """Return a text with each paragraph flush left."""
    text = re.sub(r"\r\n?", "\n", decoded(data))
    return "\n\n".join(dedent(part).strip("\n") for part in PARTS.split(text.expandtabs()))


def rfc(data: bytes) -> str:
    """Return a text without headers and footers of pages; a paragraph across pages is joined."""
    text = re.sub(r"\n*[^\n]*\[Page [^\]\n]*\][ \t]*\n+\f?\n*(RFC [^\n]*\n+)?", "\n\f\n", decoded(data))
    text = re.sub(r"(?<=[a-z,])\n+\f\n+[ \t]*(?=[a-z])", "\n", text).replace("\f", "\n")
    return plain(text.encode())


def man(data: bytes) -> str:
    """Return a manual page, formatted by mandoc with one line a paragraph."""
    if data.startswith((b".so ", b'.\\"-*- nroff')) and len(data) < 200:
        return ""
    command = ["mandoc", "-T", "utf8", "-O", "indent=0,width=900"]
    text = decoded(subprocess.run(command, input=data, capture_output=True, check=False).stdout)
    lines = re.sub(r".\x08", "", text).split("\n")
    return plain("\n".join(line for line in lines if "          " not in line.strip()).encode())


def info(data: bytes) -> str:
    """Return the nodes of an info file without their headers and menus."""
    nodes = decoded(data).split("\x1f")[1:]
    bodies = [node.strip().partition("\n")[2].partition("\n* Menu:")[0] for node in nodes]
    return plain("\n\n".join(bodies).encode())


def pod(data: bytes) -> str:
    """Return the paragraphs of Perl's documentation, without code and commands."""
    pattern = r"(?ms)^=(?:pod|head|over|item|encoding|begin)\b.*?(?=^=cut|\Z)"
    text = "\n\n".join(re.findall(pattern, decoded(data)))
    parts = [re.sub(r"^=(head\d|item)\s*", "", part.strip("\n")) for part in PARTS.split(text)]
    prose = "\n\n".join(part for part in parts if part[:1] not in ("=", " ", "\t", ""))
    for _ in range(2):
        prose = re.sub(r"[A-Z]<<+ (.*?) >>+|[A-KM-Z]<([^<>]*)>", lambda m: m[1] or m[2] or "", prose, flags=re.DOTALL)
        prose = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], prose)
    return prose


def help_page(data: bytes) -> str:
    """Return the paragraphs of a page in Mallard or DocBook."""
    text = re.sub(r"(?s)<(screen|programlisting|code|info|!--).*?(</\1|--)>", " ", decoded(data))
    found = re.findall(r"(?s)<(?:p|para|title|simpara)(?:\s[^>]*)?>(.*?)</(?:p|para|title|simpara)>", text)
    return "\n\n".join(" ".join(unescape(re.sub(r"<[^>]+>", "", part)).split()) for part in found)


def help_database(data: bytes) -> str:
    """Return the help of an R package: of its serialised pages the strings that are text, not code."""
    pages, at = [], 0
    while at < len(data):  # a page has its size in four bytes before it
        engine = zlib.decompressobj()
        page = engine.decompress(data[at + 4 :])
        at = len(data) - len(engine.unused_data)
        pages.append(_help_text(page))
    return "\n\n".join(pages)


def _help_text(page: bytes) -> str:
    """Return the text of a page. R writes the tag of each part behind it."""
    strings, at = [], 0
    for match in re.finditer(rb"\x00(?:\x04\x00|\x00\x80)\x09\x00(...)", page, re.DOTALL):
        if match.start() >= at:
            at = match.end() + int.from_bytes(match[1])
            strings.append(decoded(page[match.end() : at]))

    text, held = [], ""
    for before, string in zip(["", *strings], strings, strict=False):
        if string == "TEXT" or (string == "RCODE" and "\n" not in held):
            text.append(held)
        elif string.startswith("\\"):
            text.append("\n\n" if string not in INLINE else "")
        if not string.startswith(("env::", "\\")) and string not in NO_TEXT and before != "Rd_option":
            held = string if string not in ("TEXT", "RCODE", "VERB", "COMMENT", "LIST") else ""
    return plain("".join(text).encode())


def comments(prefix: str) -> Callable[[bytes], str]:
    """Return a function that gives the comments of a source file, whose lines begin with ``prefix``."""
    pattern = re.compile(rf"(?m)(?:^[ \t]*{prefix}.*\n)+")
    strip = re.compile(rf"(?m)^[ \t]*{prefix} ?")

    def read(data: bytes) -> str:
        blocks = [strip.sub("", block) for block in pattern.findall(decoded(data))]
        return "\n\n".join(re.sub(r"(?s)```.*?(```|\Z)", "", block).strip("\n") for block in blocks)

    return read


def c_comments(data: bytes) -> str:
    """Return the comments of a file in C or C++ that have at least eight words and no licence."""
    found = re.findall(r"(?ms)/\*(.*?)\*/|((?:^[ \t]*//[^\n]*\n)+)", decoded(data))
    texts = (re.sub(r"(?m)^[ \t]*(?:\*+|//+[/!]?) ?", "", block or lines) for block, lines in found)
    kept = (text for text in texts if text.count(" ") >= 8 and not re.search(r"(?i)copyright|licen[sc]e|spdx", text))
    return "\n\n".join(plain(text.encode()).strip() for text in kept)


def docstrings(data: bytes) -> str:
    """Return the strings in triple quotes of a Python file."""
    pattern = r"(?ms)(?:^|=)[ \t]*[rRuUbB]?(\"{3}|'{3})(.*?)\1"
    found = (match[2] for match in re.finditer(pattern, decoded(data)))
    return "\n\n".join(plain(text.encode()) for text in found if " " in text)


def dictionary(data: bytes) -> str:
    """Return the entries of a dictionary, or of a collection of quotations."""
    text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    return plain(text.replace(b"\n%\n", b"\n\n"))


def descriptions(data: bytes) -> str:
    """Return the texts of a JSON file that describes an interface."""
    found = re.findall(r'"(?:documentation|description)"\s*:\s*"((?:[^"\\]|\\.){40,})"', decoded(data))
    texts = [re.sub(r"<(?:code|a|b|i|/)[^>]*>", "", json.loads(f'"{text}"')) for text in found]
    return "\n\n".join(html(text.encode()) if "<" in text else text for text in texts)


KINDS: list[tuple[str, str, Callable[[bytes], str]]] = [
    ("rfc", r"/doc/RFC/.*/rfc\d+\.txt(\.gz)?$", rfc),
    ("html", r"(?<!/doc/RFC)/[^/]*\.x?html?(\.gz)?$", html),
    ("man", r"^\./usr/share/man/man[1-9]/[^/]*(?<!pm)(?<!pm\.gz)$", man),
    ("info", r"^\./usr/share/info/.*\.info(-\d+)?(\.gz)?$", info),
    ("pod", r"/perl[^/]*/.*\.(pm|pod)$|/perl5/.*\.(pm|pod)$|\.pod(\.gz)?$", pod),
    ("help", r"^\./usr/share/help/C/.*\.(page|docbook|xml)$|/doc/(kde/)?HTML/en/.*\.(docbook|xml)$", help_page),
    ("r", r"/help/[^/]*\.rdb$", help_database),
    ("go", r"^\./usr/share/gocode/.*(?<!_test)\.go$", comments("//")),
    ("rust", r"^\./usr/share/cargo/.*\.rs$", comments("//[/!]")),
    ("python", r"dist-packages/(?!.*/tests?/).*\.py$", docstrings),
    ("c", r"^linux[^:]*/.*\.[chS]$", c_comments),
    ("c", r"^(gcc|gdb|glibc|binutils)[^:]*/(?!.*testsuite).*\.(c|h|cc|cpp|def|md|S)$", c_comments),
    ("dictionary", r"/dictd/.*\.dict\.dz$|/games/fortunes/[^.]*$", dictionary),
    ("json", r"/data/.*/service-2\.json(\.gz)?$|/discovery_cache/.*\.json$", descriptions),
    ("rst", r"\.(rst|rest)(\.txt)?(\.gz)?$", plain),
    ("markdown", r"\.(md|markdown|Rmd)(\.gz)?$", plain),
    ("txt", r"^\./usr/share/(?!.*examples/).*(\.txt|/(README|NEWS|FAQ|HOWTO|TODO)[^/]*)(\.gz)?$", plain),
]
PATTERNS = [(name, re.compile(pattern), reader) for name, pattern, reader in KINDS]


def kind_of(name: str) -> tuple[str, Callable[[bytes], str]] | None:
    """Return the kind of a file and the function that reads it; None if it holds no prose."""
    if JUNK.search(name):
        return None
    return next(((kind, reader) for kind, pattern, reader in PATTERNS if pattern.search(name)), None)


def read(name: str, data: bytes, reader: Callable[[bytes], str]) -> str:
    """Return the text of a file, which may be packed."""
    return reader(gzip.decompress(data) if name.endswith(".gz") else data)
