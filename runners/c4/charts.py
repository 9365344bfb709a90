"""Charts of loss curves, and of gradients by distance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from runners.records import Record
from runners.style import styles, write_chart


def plot_curves(groups: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw training losses (thin) and validation losses of runs against the tokens read.

    Args:
        groups: runs of each model, one for each seed, by its label, which begins with the name of the layer. The lines
            of one label look alike.
        path: PNG file to write.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, look = figure.subplots(), styles(list(groups))
    lines = {}
    for label, group in groups.items():
        name = label.replace("$", r"\$")  # what users write is no formula
        style: dict[str, Any] = {"color": look[label].color, "linestyle": look[label].line}
        for record in group:
            tokens = np.array(record.curve["step"]) * record.batch_size * record.settings["seq_len"]
            axes.plot(tokens, record.curve["train_loss"], **style, linewidth=0.6, alpha=0.5)
            (line,) = axes.plot(tokens, record.curve["loss"], **style, marker="o", markersize=3)
        last = [record.curve["loss"][-1] for record in group if record.curve["loss"]]
        mean = f" {fmean(last):.3f}" if last else ""
        lines[name + mean + f" (mean of {len(last)})" * (len(last) > 1)] = line

    # A dash and a dot need long handles.
    axes.set(xscale="log", xlabel="tokens", ylabel="cross-entropy (nats per token)")
    axes.legend(lines.values(), lines, fontsize=7, handlelength=4, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.set_title(f"validation loss, and training loss (thin), of {sum(map(len, groups.values()))} runs", fontsize=10)
    axes.grid(alpha=0.3)
    write_chart(figure, path)


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
