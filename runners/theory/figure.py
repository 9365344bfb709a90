"""The figure of theorem 2: how the weights of the path lengths change with the position."""

import math
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from runners.files import write_atomically
from runners.theory.path_lengths import stirling

LONGEST = 512
"""Largest position k."""
LARGEST_LENGTH = 16
"""Largest path length r."""
CURVES = (2, 8, 32, 128, LONGEST)
"""Positions k whose weights are drawn as curves."""


def plot_path_lengths(path: Path) -> None:
    """Write a PNG of the weights [k r] / k!: on the left all k with their mean, on the right some k as curves."""
    rows = []
    for position, row in enumerate(stirling(LONGEST), start=1):
        permutations = math.factorial(position)
        rows.append([number / permutations for number in row])

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)

    # On the left a map of all positions.
    shown = LARGEST_LENGTH
    grid = np.array([[*row[: shown + 1], *[0.0] * (shown + 1 - len(row))][1:] for row in rows]).T
    k = np.arange(1, LONGEST + 1)

    # Weights. Those below 1e-4 stay white.
    edges = np.append(k - 0.5, LONGEST + 0.5), np.arange(0.5, shown + 1)
    mesh = left.pcolormesh(*edges, np.ma.masked_less(grid, 1e-4), norm=LogNorm(1e-4, 1.0), cmap="Blues")
    figure.colorbar(mesh, ax=left, label="weight  [k r] / k!")

    # Mean path length.
    left.plot(k, np.cumsum(1 / k), color="darkorange", label="mean  1 + 1/2 + ... + 1/k")
    left.plot(k, np.log(k), color="darkorange", linestyle="dotted", label="ln k")

    left.set(xscale="log", xlabel="position k", ylabel="path length r", xlim=(1, LONGEST), ylim=(0.5, shown + 0.5))
    left.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))

    # On the right curves of some positions.
    for n, position in enumerate(CURVES):
        weights = rows[position - 1][1 : LARGEST_LENGTH + 1]
        lengths = range(1, len(weights) + 1)
        right.plot(lengths, weights, marker="o", markersize=3, color=f"C{n}", label=f"k = {position}")

    right.set(xlabel="path length r", ylabel="weight  [k r] / k!", ylim=(0, None))
    right.legend(fontsize=8, ncols=len(CURVES), loc="upper center", bbox_to_anchor=(0.5, -0.14))

    figure.suptitle("Theorem 2: weights of the paths of length r from position 1 to position k")

    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
