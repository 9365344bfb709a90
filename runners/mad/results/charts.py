"""The chart of a comparison: bars for a few mixers, a heat map for many."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from runners.drawing import PLAIN_TEXT, Style, styles, write_chart
from runners.mad.results.standings import FEW, Standing, by_layer, count_mixers
from runners.mad.results.tables import span

COLORS = colormaps["viridis"].with_extremes(bad="lightgrey")
LONGEST_LINE = 40
"""Largest number of characters in a line of a name."""
LONGEST_TICK = 20
"""Largest number of characters in a line of a setting below its bars."""
METRICS = ("sequence", "token")
"""Accuracies, with one panel each."""
LIGHT, DARK = "#ffffff", "#111111"
"""Colours of the text on cells of a heat map."""
TOP, NUMBERS = 1.13, 1.035
"""Upper end of a panel of bars, and the height of the numbers: above all bars, whiskers and lines."""

Cells = NDArray[np.float64]


def plot_comparison(own: Sequence[Standing], rows: Sequence[Standing], path: Path) -> None:
    """Draw test accuracies by task and mixer, with ceiling and chance, into a PNG file.

    Args:
        own: the user's own layers; they are marked where there are reference rows beside many layers.
        rows: reference rows.
        path: the file.
    """
    standings = [*own, *rows]
    marked = {s.mixer for s in own} if rows else set()
    figure = draw_heat_map(standings, marked) if count_mixers(standings) > FEW else draw_bars(standings)
    write_chart(figure, path)


@PLAIN_TEXT
def draw_bars(standings: Sequence[Standing]) -> Figure:
    """Draw one panel per accuracy, with one group of bars per setting and the numbers in a row above the bars.

    Whiskers are 95% intervals, clipped to [0, 1].
    """
    settings = list(dict.fromkeys((s.task, s.difficulty) for s in standings))
    mixers = list(dict.fromkeys(s.mixer for s in sorted(standings, key=attrgetter("place"))))
    look = styles(mixers)
    figure = Figure(figsize=(max(6.0, 1.6 * len(settings) + 2), 7), layout="constrained")

    for axes, metric in zip(figure.subplots(2, 1, sharex=True), METRICS, strict=True):
        width = 0.8 / len(mixers)
        for s in standings:
            slot = mixers.index(s.mixer)
            x = settings.index((s.task, s.difficulty)) + (slot - (len(mixers) - 1) / 2) * width
            _draw_bar(axes, s, metric, x, width, look[s.mixer].color)

        axes.set_ylim(0, TOP)
        axes.set_yticks(np.linspace(0, 1, 6))
        axes.set_ylabel(f"{metric} accuracy")
        ticks = [task if _same_setting(standings) else _tick(task, words) for task, words in settings]
        axes.set_xticks(range(len(settings)), ticks, fontsize=8)

    several = max(_seeds(standings)) > 1
    meaning = "bars and numbers: means; whiskers: 95% t-intervals within [0, 1]" if several else ""
    figure.suptitle("\n".join(filter(None, (title(standings), meaning))), fontsize=10)
    _add_legend(figure, look)
    return figure


def title(standings: Sequence[Standing]) -> str:
    """Return the first line of a chart's title: figure, number of steps, and number of seeds."""
    steps = sorted({s.steps for s in standings if s.steps is not None})
    seeds = _seeds(standings)
    length = f" after {' to '.join(f'{n:,}' for n in sorted({steps[0], steps[-1]}))} steps" if steps else ""
    same = f", {standings[0].difficulty} settings" if _same_setting(standings) else ""
    return f"test accuracy{length}{same}, {span(seeds)} seed{'s' if max(seeds) > 1 else ''}"


def _same_setting(standings: Sequence[Standing]) -> bool:
    """Return whether all settings have the same name, which is then shown only in the title."""
    return len({s.difficulty for s in standings}) == 1 and len(standings[0].difficulty) <= LONGEST_TICK


def _tick(task: str, difficulty: str) -> str:
    """Return the label of a setting."""
    return f"{task}\n{textwrap.fill(difficulty, LONGEST_TICK, break_on_hyphens=False)}"


def _draw_bar(axes: Axes, standing: Standing, metric: str, x: float, width: float, color: str) -> None:
    """Draw one bar with its whiskers and its number, and lines for chance and ceiling."""
    estimate = standing.accuracy(metric)
    if estimate is not None:
        mean = estimate.mean
        half_width = estimate.half_width or 0.0
        low, high = max(0.0, mean - half_width), min(1.0, mean + half_width)

        axes.bar(x, mean, 0.94 * width, color=color)
        if estimate.half_width is not None:
            axes.errorbar(x, mean, [[mean - low], [high - mean]], color="black", capsize=3)
        axes.text(x, NUMBERS, f"{mean:.2f}", ha="center", va="bottom", fontsize=8)

    left, right = x - width / 2, x + width / 2
    axes.hlines(getattr(standing.ceiling, metric), left, right, colors="black", linewidth=1.5)
    axes.hlines(getattr(standing.chance, metric), left, right, colors="black", linewidth=1.0, linestyles="dotted")


def _add_legend(figure: Figure, look: Mapping[str, Style]) -> None:
    """Add the legend below the panels, in as many columns as fit."""
    handles: list[Any] = [Patch(color=style.color, label=_broken(mixer)) for mixer, style in look.items()]
    handles.append(Line2D([], [], color="black", label="ceiling"))
    handles.append(Line2D([], [], color="black", linestyle="dotted", label="chance"))

    # A legend's width is known only when it is part of the figure.
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _broken(mixer: str) -> str:
    """Break a long name into lines."""
    lines = [mixer] if len(mixer) <= LONGEST_LINE else mixer.replace(":", ":\n").splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, LONGEST_LINE, break_on_hyphens=False))


def _seeds(standings: Sequence[Standing]) -> list[int]:
    """Return the numbers of seeds in the means; [1] if there are no means."""
    return [s.seeds for s in standings if s.test] or [1]


@dataclass(frozen=True)
class Grid:
    """The cells of a heat map: one row per mixer, between ceiling and chance, and one column per setting.

    Attributes:
        rows: labels of the rows.
        settings: labels of the columns.
        diverged: pairs of mixer and setting without figures, because grid points or seeds diverged.
    """

    rows: list[str]
    settings: list[str]
    diverged: set[tuple[str, str]]

    def text(self, row: int, column: int, accuracy: float, half_width: float) -> str:
        """Return the text of a cell; NaN stands for a missing figure."""
        if math.isnan(accuracy):
            return "div." if (self.rows[row], self.settings[column]) in self.diverged else "–"
        return f"{accuracy:.2f}" + ("" if math.isnan(half_width) else f"\n±{half_width:.2f}")


@PLAIN_TEXT
def draw_heat_map(standings: Sequence[Standing], marked: Collection[str] = ()) -> Figure:
    """Draw one panel per accuracy, with one row per mixer, grouped by family, and one column per setting.

    The names of the ``marked`` mixers are bold, with an arrow.
    """
    heading = title(standings)
    if _same_setting(standings):  # the title names it
        standings = [replace(standing, difficulty="baseline") for standing in standings]
    mixers = {s.mixer: s.family for s in by_layer(standings)}
    grid = Grid(
        rows=["ceiling", *mixers, "chance"],
        settings=list(dict.fromkeys(s.setting for s in standings)),
        diverged={(s.mixer, s.setting) for s in standings if s.failure},
    )

    # Rows of each block: ceiling, families, chance.
    families = [(family, len(list(members))) for family, members in groupby(mixers.values())]
    sizes = np.array([1, *(size for _, size in families), 1])
    ends = sizes.cumsum() - 0.5

    # A figure with space for labels and for cells of several lines.
    labels = [_broken(f"→ {row}" if row in marked else row) for row in grid.rows]
    seeds = _seeds(standings)
    lines = max(label.count("\n") for label in labels) + 1
    height = 2.8 + max(0.28 if max(seeds) == 1 else 0.36, 0.16 * lines) * len(grid.rows)
    figure = Figure(figsize=(4 + max(4, len(grid.settings)), height), layout="constrained")
    meaning = "" if max(seeds) == 1 else "\nmeans ± half the 95% t-interval"
    figure.suptitle(heading + meaning, fontsize=11)

    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric in zip(panels, METRICS, strict=True):
        accuracies, half_widths = _cells(standings, grid, metric)
        image = _draw_cells(axes, grid, accuracies, half_widths)
        axes.hlines(ends[:-1], -0.5, len(grid.settings) - 0.5, colors="white", linewidth=2)
        axes.set_title(f"{metric} accuracy", fontsize=10)

    # Mixers on the left, families on the right.
    panels[0].set_yticks(range(len(grid.rows)), labels, fontsize=8)
    for tick, row in zip(panels[0].get_yticklabels(), grid.rows, strict=True):
        tick.set_fontweight("bold" if row in marked else "normal")
    side = panels[1].secondary_yaxis("right")
    side.set_yticks((ends - sizes / 2)[1:-1], [family for family, _ in families], fontsize=8)
    side.tick_params(length=0)

    bar = figure.colorbar(image, ax=panels, location="bottom", shrink=0.35, aspect=45, pad=0.02)
    bar.set_label("accuracy", fontsize=9)
    bar.outline.set_visible(False)

    if np.isnan(accuracies).any():
        diverged = "div.: every grid point, or a seed of the chosen one, diverged; " if grid.diverged else ""
        figure.supxlabel(f"grey: {diverged}–: no test accuracy yet", fontsize=8)
    return figure


def _cells(standings: Sequence[Standing], grid: Grid, metric: str) -> tuple[Cells, Cells]:
    """Return accuracies and half widths of their intervals, each (rows, settings); NaN for a missing figure."""
    accuracies = np.full((len(grid.rows), len(grid.settings)), np.nan)
    half_widths = np.full_like(accuracies, np.nan)

    for s in standings:
        column = grid.settings.index(s.setting)
        accuracies[[0, -1], column] = getattr(s.ceiling, metric), getattr(s.chance, metric)

        if estimate := s.accuracy(metric):
            row = grid.rows.index(s.mixer)
            accuracies[row, column] = estimate.mean
            if estimate.half_width is not None:
                half_widths[row, column] = estimate.half_width

    return accuracies, half_widths


def _draw_cells(axes: Axes, grid: Grid, accuracies: Cells, half_widths: Cells) -> AxesImage:
    """Draw the colours and texts of a panel's cells, and the names of its columns; return the colours."""
    image = axes.imshow(accuracies, cmap=COLORS, vmin=0, vmax=1, aspect="auto")

    for (row, column), accuracy in np.ndenumerate(accuracies):
        text = grid.text(row, column, accuracy, float(half_widths[row, column]))
        color = DARK if math.isnan(accuracy) else _ink(accuracy)
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7 if "\n" in text else 8)

    columns = [_broken(setting) for setting in grid.settings]
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.tick_params(length=0)
    return image


def _ink(accuracy: float) -> str:
    """Return a dark text colour for light cells, and a light one for dark cells; equal numbers get equal colours."""
    red, green, blue, _ = COLORS(round(accuracy, 2))
    return DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else LIGHT
