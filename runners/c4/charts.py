"""Charts of loss curves, and of gradients by distance."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from runners.c4.curve import Row
from runners.style import label_ends, styles, write_chart

FEW = 4
"""Largest number of runs that are named at the ends of their lines instead of in a legend."""
BINS = 8
"""Number of points of a smoothed curve while the number of steps doubles."""


def plot_curves(curves: Mapping[str, Sequence[Sequence[Row]]], path: Path) -> None:
    """Draw training and validation losses of runs against the tokens read, those of training as ``smoothed``.

    Args:
        curves: curves of each model, one for each seed, by its label, which begins with the name of the layer. The
            lines of one label look alike.
        path: PNG file to write.
    """
    curves = {name.replace("$", r"\$"): seeds for name, seeds in curves.items()}  # what users write is no formula
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, few = figure.subplots(), len(curves) <= FEW
    look = styles(list(curves))
    training: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}
    validation: dict[str, Any] = {"marker": "o", "markersize": 3}
    lines = []

    for name, seeds in curves.items():
        style: dict[str, Any] = {"color": look[name].color, "linestyle": look[name].line}
        for rows in seeds:
            axes.plot(*smoothed(rows), **style, **training)

            measured = [(row.tokens, row.validation_loss) for row in rows if row.validation_loss is not None]
            tokens, losses = [tokens for tokens, _ in measured], [loss for _, loss in measured]
            (line,) = axes.plot(tokens, losses, **style, **validation)
        lines.append(line)

    # The legend explains the two kinds of lines.
    kinds = {"validation": validation, "training, mean of some steps": training}
    for kind in kinds.values():
        lines += axes.plot([], [], color="black", **kind)

    runs = [rows for seeds in curves.values() for rows in seeds]
    steps = sorted({rows[-1].step for rows in runs if rows})
    length = " to ".join(f"{n:,}" for n in dict.fromkeys((*steps[:1], *steps[-1:])))
    axes.set_title(f"loss of {len(runs)} run{'s' * (len(runs) > 1)} of {length} steps", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    named = zip(lines, [*curves, *kinds], strict=True)  # by hand, because Matplotlib drops names such as __main__:L
    shown = [pair for pair in named if not few or pair[1] not in curves]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 2}
    place: dict[str, Any] = below if few else {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axes.legend(*zip(*shown, strict=True), fontsize=7, handlelength=4, **place)  # long enough for a dash and a dot
    if few:
        ends = []
        for name, seeds in curves.items():
            if losses := [_last(rows) for rows in seeds if rows]:
                of_seeds = f" (mean of {len(losses)})" if len(losses) > 1 else ""
                ends.append((f"{name} {fmean(losses):.3f}{of_seeds}", fmean(losses), look[name].color))
        label_ends(axes, ends, size=7)
    write_chart(figure, path)


def smoothed(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return tokens and training losses of a curve, whose noise would hide other curves.

    These are means over steps whose numbers are within a ratio of 2 to 1/``BINS``, so that the first steps stand alone.
    """
    bins: dict[int, list[Row]] = {}
    for row in rows:
        bins.setdefault(round(BINS * math.log2(row.step)), []).append(row)
    means = [(fmean(row.tokens for row in members), fmean(row.loss for row in members)) for members in bins.values()]
    return [tokens for tokens, _ in means], [loss for _, loss in means]


def plot_gradients(relative: Mapping[str, NDArray[np.float64]], path: Path) -> None:
    """Draw the gradient norm against the distance, with 95% intervals.

    Args:
        relative: by name of a model, which begins with the name of the layer: mean and half width (2, T) at distances
            0 to T - 1, divided by the mean at distance 0.
        path: PNG file to write.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, look = figure.subplots(), styles(list(relative))
    for name, (mean_T, half_T) in relative.items():
        distance = np.arange(1, len(mean_T))
        style: dict[str, Any] = {"color": look[name].color, "linestyle": look[name].line}
        axes.plot(distance, mean_T[1:], label=name, linewidth=1.2, **style)
        low_T = np.maximum(mean_T - half_T, mean_T / 10)  # an interval may reach zero, a logarithm may not
        axes.fill_between(distance, low_T[1:], (mean_T + half_T)[1:], color=look[name].color, alpha=0.2, linewidth=0)

    axes.set(xscale="log", yscale="log", xlabel="distance d in tokens", ylabel="size relative to d = 0")
    axes.set_title("gradient of the loss at t by the input embedding at t − d", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")  # names of variants are long
    write_chart(figure, path)


def _last(rows: Sequence[Row]) -> float:
    """Return the last validation loss of a run; without one, its last training loss."""
    measured = [row.validation_loss for row in rows if row.validation_loss is not None]
    return measured[-1] if measured else rows[-1].loss
