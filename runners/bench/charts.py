"""Charts of latency against sequence length, which both benchmarks draw."""

from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes

from runners.bench.scaling import Points, latency_exponent

LATENCY = "latency, ms (median, range)"


def draw_latencies(axes: Axes, curves: Iterable[tuple[str, str, Points]], style: str = "o-") -> None:
    """Draw latency against N.

    Args:
        axes: where to draw.
        curves: label, colour and points of each curve. The exponent is added to a label that is not empty. A curve
            without points is left out.
        style: mark and line, as matplotlib's ``fmt``.
    """
    for label, color, points in curves:
        if not points:
            continue
        # Medians, with the range of the repeats as error bars.
        lengths, times = zip(*points, strict=True)
        middle, low, high = (np.array([of(repeats) for repeats in times]) for of in (median, min, max))

        exponent = latency_exponent(points)
        if label and exponent is not None:
            label += f": $N^{{{exponent:.2f}}}$"
        axes.errorbar(lengths, middle, (middle - low, high - middle), fmt=style, capsize=2, color=color, label=label)


def finish_axes(axes: Axes, lengths: Sequence[int]) -> None:
    """Set logarithmic axes with ticks at ``lengths``, and a legend below them; axes without data say so."""
    axes.set(xlabel="sequence length N")
    if axes.has_data():
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    else:
        axes.text(0.5, 0.5, "nothing was timed", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()


def share_range(panels: Iterable[Axes]) -> None:
    """Give all panels that have data one range of latencies."""
    drawn = [axes for axes in panels if axes.has_data()]
    ends = [axes.get_ylim() for axes in drawn]
    for axes in drawn:
        axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
