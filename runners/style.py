"""How layers are drawn, the same in every chart: colours, marks, lines, and names at the ends of lines.

Any two of the colours are at least 20 apart in CIELAB, also as people with deuteranopia see them (Machado et al. 2009).
A family of layers shares a colour and its members differ in their marks, because nobody tells 30 colours apart. The
Recurrent Transformer has a colour of its own, and so have stacks of different layers, and everything that is not
registered: a user's own layers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image

from mixers import MIXERS
from mixers.registry import find_mixer
from runners.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a layer is drawn.

    Attributes:
        color: on a light ground, as ``#rrggbb``.
        marker: matplotlib's name of the mark.
        line: matplotlib's name of the line.
    """

    color: str
    marker: str
    line: str = "-"


RT = "#d55e00"
OWN = "#901365"
FAMILIES = {
    "attention": "#0072b2",
    "recurrent attention": "#904c00",
    "linear attention": "#1a6ced",
    "delta rule": "#008358",
    "state space": "#bf73b0",
    "recurrent net": "#141414",
    "convolution": "#341a00",
    "stack": "#365412",
}
"""Colour of each family on a light ground."""
DARK = {
    RT: "#ff8a3d",
    OWN: "#f587c2",
    "#0072b2": "#5aa9e6",
    "#904c00": "#f7e404",
    "#1a6ced": "#ebfbff",
    "#008358": "#38efac",
    "#bf73b0": "#99679e",
    "#141414": "#987172",
    "#341a00": "#f1ca86",
    "#365412": "#829248",
}
"""The colour on a dark ground in place of each."""
MARKERS = "osD^vP"
"""Marks of a family's members, in the order of the registry."""
LINES = ("-", "--", ":", "-.")
SHADES = (0.0, 0.3, 0.48, 0.62)
"""Shares of white in the colours of several rows of one style."""


STACK = re.compile(r"[^ :]+\+(?!conv\d)")
"""Begins the label of a stack of different layers, as ``transformer+rt``, and not that of ``rt+conv4``."""


def layer_of(label: str) -> str | None:
    """Return the registered layer that a label begins with, as ``rt`` of ``rt (block 4)``; None without one."""
    label = re.sub(r"^\d+\*", "", label)
    found = [name for name in MIXERS if label == name or (label.startswith(name) and not label[len(name)].isalnum())]
    return max(found, key=len, default=None)


def style_of(label: str) -> Style:
    """Return the style of a label's layer; a layer that is not registered is somebody's own."""
    if STACK.match(label):
        return Style(color=FAMILIES["stack"], marker="s")
    name = layer_of(label)
    if name is None:
        return Style(color=OWN, marker="*")
    if name == "rt":
        return Style(color=RT, marker="o")

    family = find_mixer(name).family
    members = [other for other in MIXERS if other != "rt" and find_mixer(other).family == family]
    place = members.index(name)
    return Style(color=FAMILIES[family], marker=MARKERS[place % len(MARKERS)], line=LINES[place % len(LINES)])


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return the style of each label; further labels of one style are paler and have other marks and lines.

    The styles depend on which labels there are, and not on their order.
    """
    found: dict[str, Style] = {}
    times: dict[Style, int] = {}
    for label in sorted(set(labels), key=lambda label: (label not in MIXERS, label)):  # a layer before its variants
        style = style_of(label)
        n = times[style] = times.get(style, -1) + 1
        if n > 0:  # 16 variants differ in shade or line
            white = SHADES[n % len(SHADES)]
            red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(style.color))
            marker = MARKERS[(MARKERS.find(style.marker) + n) % len(MARKERS)]
            line = LINES[(LINES.index(style.line) + n + n // len(SHADES)) % len(LINES)]
            style = replace(style, color=to_hex((red, green, blue)), marker=marker, line=line)
        found[label] = style
    return {label: found[label] for label in labels}


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], size: float = 8) -> None:
    """Write the name of each line to the right of the panel, joined to its end and never over another name.

    Args:
        axes: the panel, with its last scales.
        ends: name, last point (x and y) and colour of each line.
        size: of the names, in points.
    """
    axes.autoscale_view()
    points = np.array([(x, y) for _, x, y, _ in ends]).reshape(-1, 2)
    heights = axes.transAxes.inverted().transform(axes.transData.transform(points))[:, 1].tolist()
    gap = 1.25 * size / (axes.get_window_extent().height * 72 / axes.figure.dpi)
    for (name, x, y, color), height in zip(ends, spread(heights, gap, 0, 1), strict=True):
        line: dict[str, Any] = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        place: dict[str, Any] = {"xytext": (1.03, height), "textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate(name, (x, y), color=color, va="center", fontsize=size, arrowprops=line, **place)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near ``values`` and in their order, at least ``gap`` apart where the range has room for it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    floor = low
    for i in order:
        places[i] = floor = max(values[i], floor)
        floor += gap
    roof = high
    for i in reversed(order):
        places[i] = roof = min(places[i], roof)
        roof -= gap
    return places


PLAIN_TEXT = rc_context({"text.parse_math": False})
"""Decorates what draws users' texts: a dollar sign in an option is no formula."""


def chart_file(out: Path, words: str, shown: Iterable[object]) -> Path:
    """Return the file of a chart in a results folder; its name ends with a hash of what is shown."""
    digest = sha256(" ".join(map(str, shown)).encode()).hexdigest()
    return out / "figures" / f"{words}-{digest[:8]}.png"


def write_small_png(figure: Figure, path: Path) -> None:
    """Write a chart as a PNG file of 256 colours, which takes a third of the space: the report holds several."""

    def write(temporary: Path) -> None:
        figure.savefig(pixels := BytesIO(), format="png", dpi=100)
        Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(temporary, optimize=True)

    write_atomically(path, write)


def write_chart(figure: Figure, path: Path) -> None:
    """Write a chart as a PNG file, and for a paper as a PDF file beside it."""
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    pdf = path.with_suffix(".pdf")
    write_atomically(pdf, lambda temporary: figure.savefig(temporary, format="pdf", metadata={"CreationDate": None}))
