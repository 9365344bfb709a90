"""The pictures of language models: loss curves against that of the Transformer."""

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from scipy.interpolate import PchipInterpolator

from mixers import MIXERS
from runners.report.language import Model
from runners.report.svg import Chart
from runners.style import Style, styles

Models = Mapping[str, Model]
"""Models by label."""
PANELS = {
    "depth": ("transformer-12",),
    "variants of the layer": ("rt-3", "rt-6-no-persistent-norm", "rt-6-block-4", "rt-6-block-16"),
    "variants of training": ("rt-6-beta2-0.99", "rt-6-batch-32", "transformer-6-beta2-0.99", "transformer-6-batch-32"),
}
"""Models of 30M parameters that are drawn beside ``rt-6`` and ``transformer-6``, by the title of a panel."""
LAST = 30
"""Ratio of the last to the first number of tokens on the axis."""
WIDEST = 4
"""Ratio of the largest difference shown to the largest one at the end of training."""
BASELINES = ("transformer", "transformer-6")
"""Labels of the models that the others of a panel are compared with, where they are there."""


def panels_of_families(models: Models) -> Mapping[str, Models]:
    """Return a panel for each family of layers with a finished model, and one for one's own; the Transformer in all."""
    families: dict[str, dict[str, Model]] = {}
    for name in sorted(models, key=lambda name: [*MIXERS, name].index(name)):
        layer = models[name].layer
        family = MIXERS[layer].family if layer in MIXERS else "yours"
        families.setdefault(family, {})[layer.rpartition(":")[2]] = models[name]
    beside = {name: models[name] for name in BASELINES[:1] if name in models}
    return {family: {**of_family, **beside} for family, of_family in families.items()}


def panels_at_30m(models: Models) -> dict[str, Models]:
    """Return a panel for each of ``PANELS`` and each parametrisation in which one of its models is there."""
    panels: dict[str, Models] = {}
    for parametrisation, ending in (("paper's", ""), ("authors'", "-authors")):
        for title, others in PANELS.items():
            names = [name for name in ("rt-6", *others, "transformer-6") if name + ending in models]
            if {*names} & {*others}:
                panels[f"{title}, {parametrisation} parametrisation"] = {name: models[name + ending] for name in names}
    return panels


def loss_pictures(panels: Mapping[str, Models]) -> dict[str, Markup]:
    """Return a chart for each panel: the validation loss, less that of the Transformer, against the tokens read.

    Panels without the Transformer, or without another model, are left out.
    """
    legend, drawn = styles([label for models in panels.values() for label in models]), {}
    for title, models in panels.items():
        if len(models) > 1 and {*BASELINES} & {*models}:
            chart = Chart(description=f"{title}: validation loss less the Transformer's", labels={}, size=(260, 165))
            _draw_losses(models, legend, chart)
            drawn[title] = chart.svg()
    return drawn


def _draw_losses(found: Models, legend: Mapping[str, Style], chart: Chart) -> None:
    base = next(label for label in BASELINES if label in found)
    base_tokens, base_SE = _curves(found[base])

    # Between evaluations, a curve as losses have it, without overshoot.
    base_E = base_SE.mean(0)
    base_loss = PchipInterpolator(np.log(base_tokens), base_E) if len(base_E) > 1 else lambda _: base_E
    most, low, high = 0.0, 0.0, 0.0
    for row, model in found.items():
        # The end of training, because the first steps would take most of the panel.
        tokens_E, losses_SE = _curves(model)
        first, look = max(base_tokens[0], base_tokens[-1] / LAST), legend[row]
        shown = (tokens_E >= first) & (tokens_E <= base_tokens[-1])

        # Differences to the Transformer after as many tokens.
        x_E, y_SE = tokens_E[shown], losses_SE[:, shown]
        y_SE = y_SE - base_loss(np.log(x_E))
        loss, ahead = losses_SE[:, -1].mean(), float(y_SE[:, -1].mean())
        tip = f"{row}: {loss:.3f} at the end" + (f", {ahead:+.3f} from {base}" if row != base else "")
        chart.band(x_E, y_SE.min(0), y_SE.max(0), look.color)
        chart.line(x_E, y_SE.mean(0), look, tip)
        chart.end(row, ahead, look.color)
        most, low, high = max(most, abs(ahead)), min(low, y_SE.min()), max(high, y_SE.max())

    # The end decides the range: a model that has hardly begun to learn would take most of it.
    if most > 0:
        chart.limits["y"] = max(1.1 * low, -WIDEST * most), min(1.1 * high, WIDEST * most)
    chart.logs, chart.left, chart.labels = "x", 38, {"x": "tokens", "y": "nats per token"}
    chart.text = lambda x: f"{round(x / 1e6):,}M" if x >= 1e6 else f"{x:,.0f}"


def _curves(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of E evaluations, and the validation losses (S, E) of the seeds at the best learning rate."""
    losses_SE = np.array([run.curve["loss"] for run in model.best], float)
    return np.array(model.best[0].curve["step"]) * (model.tokens / model.best[0].steps), losses_SE
