"""Charts as SVG inside a page: small, in the colours of the page's light or dark scheme, with texts on hover.

Matplotlib would need a tenth of a second for each of several hundred charts, and ten times the bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.ticker import LogLocator, MaxNLocator

from runners.style import Style, spread

SIZE = 8.0
"""Height of a letter in the units of a chart."""
TOP, BOTTOM, RIGHT = 6, 30, 6
"""Space around the data."""
MARKS = {
    "o": "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0",
    "s": "M-.9,-.9H.9V.9H-.9z",
    "D": "M0,-1.2L1.2,0 0,1.2 -1.2,0z",
    "^": "M0,-1.1L1.1,.9H-1.1z",
    "v": "M0,1.1L1.1,-.9H-1.1z",
    "P": "M-.4,-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4z",
    "*": "M0,-1.5L.4,-.5 1.4,-.5 .6,.2 .9,1.2 0,.6 -.9,1.2 -.6,.2 -1.4,-.5 -.4,-.5z",
}
"""Paths of matplotlib's marks, about two units wide."""
DASHES = {"-": "none", "--": "5 2", ":": "1.5 2", "-.": "6 2 1.5 2"}
"""Dash patterns of matplotlib's lines."""

Figures = Sequence[float] | np.ndarray


def paint(color: str) -> str:
    """Return a colour of ``runners.style`` as the page's, which has another one on a dark ground."""
    return f"var(--c{color[1:]},{color})" if color.startswith("#") else color


@dataclass(kw_only=True)
class Chart:
    """A chart of lines, bands and marks; what is drawn later lies above, and marks above all.

    Attributes:
        description: content in words, for readers who do not see it.
        labels: names of the axes ``x`` and ``y``.
        logs: axes with a logarithmic scale, such as ``xy``.
        limits: ends of an axis; those of the data if they are not given.
        ticks: ticks of an axis with their texts; round numbers if they are not given.
        text: returns the text of a round number on the axis x.
        size: width and height.
        left: space to the left of the data.
    """

    description: str
    labels: Mapping[str, str]
    logs: str = ""
    limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    ticks: dict[str, Mapping[float, str]] = field(default_factory=dict)
    text: Callable[[float], str] = "{:g}".format
    size: tuple[float, float] = (206, 148)
    left: float = 30
    _shapes: list[tuple[Figures, Figures, str, str]] = field(default_factory=list)
    _marks: list[tuple[float, float, str]] = field(default_factory=list)
    _ends: list[tuple[str, float, str]] = field(default_factory=list)

    def line(self, xs: Figures, ys: Figures, style: Style, tip: str = "", width: float = 1.4, alpha: float = 1) -> None:
        """Draw a line with a text on hover."""
        css = f"fill:none;stroke:{paint(style.color)};stroke-width:{width};stroke-dasharray:{DASHES[style.line]}"
        self._shapes.append((xs, ys, f"{css};opacity:{alpha}", tip))

    def band(self, xs: Figures, lows: Figures, highs: Figures, color: str) -> None:
        """Draw a pale band."""
        there_and_back, around = [*xs, *reversed(xs)], [*lows, *reversed(highs)]
        self._shapes.append((there_and_back, around, f"fill:{paint(color)};opacity:.18", ""))

    def mark(self, x: float, y: float, style: Style, hollow: bool = False) -> None:
        """Draw a mark, filled or hollow."""
        color = paint(style.color)
        css = f"fill:var(--card);stroke:{color};stroke-width:.4" if hollow else f"fill:{color}"
        self._marks.append((x, y, f'd="{MARKS[style.marker]}" style="{css}"'))

    def end(self, name: str, y: float, color: str) -> None:
        """Write a name to the right of the chart, beside the end of its line and never over another name."""
        self._ends.append((name, y, color))

    def svg(self) -> Markup:
        """Return the chart as an ``svg`` element."""
        (width, height), left, bottom = self.size, self.left, self.size[1] - BOTTOM
        right = width - RIGHT - 0.56 * SIZE * max((len(name) + 1 for name, _, _ in self._ends), default=0)
        (x_of, xticks), (y_of, yticks) = self._axis("x", left, right), self._axis("y", bottom, TOP)
        parts = [f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(self.description)}">']

        def write(text: str, x: float, y: float, more: str = 'class="middle"') -> None:
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>')

        # Ticks and names of the axes.
        for x, text in xticks.items():
            write(text, float(x_of(x)), bottom + 10)
        for y, text in yticks.items():
            parts.append(f'<path class="grid" d="M{left:g},{y_of(y):.1f}H{right:.1f}"/>')
            write(text, left - 4, float(y_of(y)) + 2.8, 'class="end"')
        write(self.labels["x"], (left + right) / 2, height - 6)
        write(self.labels["y"], -(TOP + bottom) / 2, 8, 'class="middle" transform="rotate(-90)"')

        # Lines and bands end at the edge; marks do not.
        box = f'x="{left:g}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP:g}"'
        parts.append(f'<svg {box} viewBox="{left:g} {TOP} {right - left:.1f} {bottom - TOP:g}">')
        for xs, ys, css, tip in self._shapes:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x_of(xs), y_of(ys), strict=True))
            title = f"<title>{escape(tip)}</title>" if tip else ""
            parts.append(f'<path d="M{points}" style="{css}">{title}</path>')
        parts.append("</svg>")
        for x, y, shape in self._marks:
            place = f"translate({x_of(x):.1f} {y_of(y):.1f})scale(3)"
            parts.append(f'<path transform="{place}" {shape}/>')

        places = spread([-float(y_of(y)) for _, y, _ in self._ends], 1.15 * SIZE, -bottom, -TOP)
        for (name, _, color), y in zip(self._ends, places, strict=True):
            write(name, right + 3, 2.8 - y, f'style="fill:{paint(color)}"')
        return Markup("".join([*parts, "</svg>"]))

    def _axis(self, axis: str, start: float, end: float) -> tuple[Callable[[Any], np.ndarray], Mapping[float, str]]:
        """Return the scale of an axis whose data lie from ``start`` to ``end``, and its ticks."""
        i, warp = "xy".index(axis), np.log10 if axis in self.logs else np.asarray
        drawn = [*(shape[i] for shape in self._shapes), [mark[i] for mark in self._marks]]
        values = warp(np.concatenate([np.asarray(figures, float) for figures in drawn]))
        low, high = warp(self.limits[axis]) if axis in self.limits else (values.min(), values.max())
        if axis not in self.limits:
            margin = 0.05 * (high - low) or 0.5
            low, high = low - margin, high + margin

        def scale(figures: Any) -> np.ndarray:
            return start + (warp(figures) - low) / (high - low) * (end - start)

        if axis in self.ticks:
            return scale, self.ticks[axis]
        if axis in self.logs:
            locator: Any = LogLocator(subs=(1.0, 3.0) if high - low < 2.5 and end - start > 100 else (1.0,))
            found = locator.tick_values(10**low, 10**high)
        else:
            found = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        text = self.text if axis == "x" else "{:g}".format
        return scale, {y: text(y) for y in found.tolist() if low <= warp(y) <= high}
