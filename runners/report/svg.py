"""Figures as SVG inside a page: colours follow the page's light or dark scheme, and marks have texts on hover."""

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runners.drawing import DARK, Style, label_ends

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INK, MUTED, GRID = "#010101", "#020202", "#030303"
"""Colours that stand for the page's own; black is left out of an SVG, so that it cannot stand for anything."""
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    color: f"var(--c{color[1:]})" for color in DARK
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.bottom": False,
    "ytick.left": False,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}
SIZE = (2.85, 2.05)
"""Width and height of a panel in inches."""
RIGHT = 0.97
"""Right end of the axes of a panel, as a fraction of its width."""


GEOMETRY = {"d", "x", "y", "width", "height", "transform", "points"}
"""Attributes that hold coordinates."""


def panel() -> tuple[Figure, Axes]:
    """Return a figure of one panel.

    The margins are fixed, because a layout engine would take most of the time that a page needs.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.15, right=RIGHT, bottom=0.21, top=0.96)
        return figure, figure.subplots()


def name_lines(axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write names at the ends of the lines of a panel, with room for the longest.

    Args:
        axes: the panel.
        ends: name, last value and colour of each line.
    """
    label_ends(axes, ends)
    widest = max(text.get_window_extent().width for text in axes.texts)
    axes.figure.subplots_adjust(right=min(0.7, RIGHT - widest / axes.figure.bbox.width))


def to_svg(figure: Figure, description: str, tips: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as an ``svg`` element.

    Args:
        figure: the figure.
        description: content of the figure in words, for readers who do not see it.
        tips: texts on hover, by the ``gid`` of the mark or line.
    """
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    drawn = buffer.getvalue()
    root = ElementTree.fromstring(drawn)

    _add_tips(root, tips or {})
    _rename_ids(root, f"f{zlib.crc32(drawn.encode()):08x}-")
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", description)
    root.set("style", f"max-width:{width * 2:.0f}px")
    _shorten(root)
    return Markup(_themed(ElementTree.tostring(root, encoding="unicode")))


def mark(axes: Axes, x: float, y: float, style: Style, gid: str, **changes: Any) -> None:
    """Draw one mark, with the gid of its text on hover."""
    options = {"ms": 8 if style.marker == "*" else 5.5, "mec": "none", **changes}
    axes.plot([x], [y], style.marker, color=style.color, gid=gid, clip_on=False, zorder=4, **options)


def accuracy_axis(axes: Axes, metric: str) -> None:
    """Set the range of accuracies, the same in all panels."""
    axes.set_ylim(-0.03, 1.05)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "", "0.5", "", "1"])
    axes.set_ylabel(f"{metric} accuracy")


def limit_lines(axes: Axes, ceiling: float, chance: float) -> None:
    """Draw ceiling and chance."""
    axes.axhline(ceiling, color=MUTED, linewidth=0.8)
    axes.axhline(chance, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))


def _add_tips(root: ElementTree.Element, tips: Mapping[str, str]) -> None:
    """Add a title to each element with a text on hover; browsers show it, and screen readers read it."""
    for element in root.iter():
        if (text := tips.get(element.get("id", ""))) is not None:
            title = ElementTree.Element(f"{{{SVG}}}title")
            title.text = text
            element.insert(0, title)
            element.set("class", "tip")


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Remove ids without references, and make the other ids unique in the page."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    for element in root.iter():
        identity = element.attrib.pop("id", None)
        if identity in used:
            element.set("id", prefix + str(identity))
        for name, value in element.attrib.items():
            if name == f"{{{XLINK}}}href" and value.startswith("#"):
                element.set(name, f"#{prefix}{value[1:]}")
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}"))


def _shorten(element: ElementTree.Element) -> None:
    """Remove, in place, everything that is not visible; a page has hundreds of figures.

    This removes metadata, styles of all elements (``style.css`` has them), backgrounds without a colour, groups without
    attributes, rotations by zero, white space, and digits beyond hundredths of a point.
    """
    children = []
    for child in element:
        _shorten(child)
        bare = child.tag == f"{{{SVG}}}g" and not child.attrib
        hidden = child.get("style") == "fill:none" and child.tag == f"{{{SVG}}}path"
        if not hidden and child.tag not in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
            children += list(child) if bare else [child]
    element[:] = children

    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for name in GEOMETRY & element.attrib.keys():
        element.set(name, _rounded(element.attrib[name]))
    if "style" in element.attrib:
        element.set("style", re.sub(r"([:;]) ", r"\1", element.attrib["style"]))


def _rounded(coordinates: str) -> str:
    """Round coordinates to hundredths of a point, and remove white space around the letters of a path."""
    text = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), coordinates)
    return re.sub(r"\s*([MLCQZz])\s*", r"\1", text)


def _themed(text: str) -> str:
    """Replace colours by the page's colours, and remove the font, which the page sets."""
    text = re.sub(r"font-family:'DejaVu Sans'[^;\"]*;?", "", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    return text
