"""Charts of loss curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from runners.c4.curve import Row
from runners.files import write_atomically

LINES = ("-", "--", "-.", ":")
"""Line styles: one for each ten runs of a chart, which has ten colours."""


def plot_curves(curves: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw training and validation losses of runs against the tokens read.

    Args:
        curves: rows of the runs by their names, which the legend shows.
        path: PNG file to write.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    training: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}
    validation: dict[str, Any] = {"marker": "o", "markersize": 3}

    for i, (name, rows) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": f"C{i % 10}", "linestyle": LINES[i // 10 % len(LINES)]}
        axes.plot([row.tokens for row in rows], [row.loss for row in rows], **style, **training)

        measured = [(row.tokens, row.validation_loss) for row in rows if row.validation_loss is not None]
        axes.plot(
            [tokens for tokens, _ in measured],
            [loss for _, loss in measured],
            label=name,
            **style,
            **validation,
        )

    # The legend explains the two kinds of lines.
    for text, kind in (("validation", validation), ("training, each step", training)):
        axes.plot([], [], color="black", label=text, **kind)

    axes.set_xscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
