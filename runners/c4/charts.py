"""Charts of loss curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from runners.c4.curve import Row
from runners.drawing import label_ends, styles
from runners.files import write_atomically

FEW = 4
"""Most runs whose names stand at the ends of their lines, without a legend."""


def plot_curves(curves: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw training and validation losses of runs against the tokens read.

    Args:
        curves: rows of the runs by their names, which begin with the name of the layer.
        path: PNG file to write.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, few = figure.subplots(), len(curves) <= FEW
    look = styles(list(curves))
    training: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}
    validation: dict[str, Any] = {"marker": "o", "markersize": 3}

    for name, rows in curves.items():
        style: dict[str, Any] = {"color": look[name].color, "linestyle": look[name].line}
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

    steps = sorted({rows[-1].step for rows in curves.values() if rows})
    length = " to ".join(f"{n:,}" for n in dict.fromkeys((*steps[:1], *steps[-1:])))
    axes.set_title(f"loss of {len(curves)} run{'s' * (len(curves) > 1)} of {length} steps", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    shown = [pair for pair in zip(handles, names, strict=True) if not few or pair[1] not in curves]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 2}
    place: dict[str, Any] = below if few else {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axes.legend(*zip(*shown, strict=True), fontsize=7, **place)
    if few:
        label_ends(axes, [(name, _last(rows), look[name].color) for name, rows in curves.items() if rows], size=7)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _last(rows: Sequence[Row]) -> float:
    """Return the last validation loss of a run; without one, its last training loss."""
    measured = [row.validation_loss for row in rows if row.validation_loss is not None]
    return measured[-1] if measured else rows[-1].loss
