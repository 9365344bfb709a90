"""Loss curves of RT and the Transformer at 30M parameters."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context

from runners.c4.reference.cells import chosen_rate
from runners.drawing import Style, styles
from runners.report.pictures import Picture
from runners.report.svg import STYLE, name_lines, panel, to_svg
from runners.report.transition import ENDINGS, Models

DRAWN = ("rt-6", "transformer-6", "transformer-12")
"""Models whose curves are drawn, in the paper's parametrisation."""
LAST = 100
"""Ratio of the last to the first number of tokens on the axis."""


def transition_picture(models: Models) -> Picture:
    """Return the validation loss against the tokens read, one panel per parametrisation."""
    legend = styles(DRAWN)
    panels = {}
    for name, ending in ENDINGS.items():
        found = {row: models[row + ending] for row in DRAWN if row + ending in models}
        if found:
            panels[f"{name} parametrisation"] = {"both": _draw(found, legend, name)}

    return Picture(
        name="transition",
        title="RT against the Transformer as language models",
        question="Does RT learn faster, and who is ahead in the end? Validation loss against the tokens read, at the "
        "best learning rate of each model. The line is the mean of the seeds, the band reaches from seed to seed.",
        panels=panels,
        legend=legend,
        missing="" if panels else "Nothing to draw yet: no model is trained.",
    )


def _draw(found: Models, legend: Mapping[str, Style], name: str) -> Markup:
    figure, axes = panel()
    ends, lowest = [], np.inf
    with rc_context(STYLE):
        for row, cell in found.items():
            tokens_E, losses_SE = _curves(cell)
            mean_E, style = losses_SE.mean(0), legend[row]
            axes.plot(tokens_E, mean_E, style.line, color=style.color, linewidth=1.6)
            axes.fill_between(tokens_E, losses_SE.min(0), losses_SE.max(0), color=style.color, alpha=0.2, linewidth=0)
            ends.append((row, float(mean_E[-1]), style.color))
            lowest = min(lowest, float(mean_E[-1]))

        # Show the end of training, because the first steps would take most of the panel.
        axes.set(xscale="log", xlim=(tokens_E[-1] / LAST, tokens_E[-1]), ylim=(lowest - 0.1, lowest + 1.2))
        axes.set(xlabel="tokens", ylabel="nats per token")
        name_lines(axes, ends)
    last = ", ".join(f"{row} {loss:.3f}" for row, loss, _ in ends)
    return to_svg(figure, f"validation loss against tokens, {name} parametrisation; at the end {last}")


def _curves(cell: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of E evaluations, and the validation losses (S, E) of the seeds at the best learning rate."""
    rate, config = chosen_rate(cell["runs"]), cell["config"]
    curves = [run["curve"] for run in cell["runs"] if run["lr"] == rate]
    losses_SE = np.array([[loss for _, _, loss in curve] for curve in curves])
    steps_E = np.array([step for step, _, _ in curves[0]])
    return steps_E * config["batch_size"] * config["seq_len"], losses_SE
