"""The pictures of language models: loss curves, gradients by distance, and scores against losses."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan

import numpy as np
from markupsafe import Markup
from scipy.interpolate import PchipInterpolator

from mixers import MIXERS
from runners.report.boards import METRICS, Board
from runners.report.language import MEAN_RANK, PARTS, Correlations, Model, scores_of
from runners.report.pictures import Looks, Picture, end_label
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
INK = Style(color="var(--ink)", marker="o")
POINTS = 80
"""Largest number of distances at which a gradient is drawn."""
BASELINES = ("transformer", "transformer-6")
"""Labels of the models that the others of a panel are compared with, where they are there."""


def panels_of_families(models: Models) -> Mapping[str, Models]:
    """Return a panel for each family of layers with a finished model, and one for one's own; the Transformer in all."""
    families: dict[str, dict[str, Model]] = {}
    for name in sorted(models, key=lambda name: [*MIXERS, name].index(name)):
        layer = models[name].layer
        family = MIXERS[layer].family if layer in MIXERS else "yours"
        families.setdefault(family, {})[end_label(layer)] = models[name]
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


def loss_picture(panels: Mapping[str, Models], name: str, title: str) -> Picture:
    """Return the validation loss, less that of the Transformer, against the tokens read.

    Panels without the Transformer, or without another model, are left out.
    """
    compared = {at: found for at, found in panels.items() if len(found) > 1 and {*BASELINES} & {*found}}
    return _picture(
        compared,
        _draw_losses,
        name,
        title,
        "Who learns faster, who is ahead in the end, and from when on? Validation loss less that of the Transformer "
        "after as many tokens, each at its best learning rate; below zero is ahead. The line is the mean of the seeds, "
        "the band goes from seed to seed. A line that leaves its panel is further off.",
    )


def gradient_picture(panels: Mapping[str, Models], name: str, title: str) -> Picture:
    """Return the size of the gradient against the distance."""
    measured = {
        at: known
        for at, found in panels.items()
        if (known := {label: model for label, model in found.items() if any(run.gradient for run in model.best)})
    }
    return _picture(
        measured,
        _draw_gradients,
        name,
        title,
        "Norm of the gradient of the loss at position t by the embedding at t − d, divided by that at d = 0: one seed "
        "at the best learning rate, mean over sequences of validation text with its 95% interval. A line ends where no "
        "gradient passes, as that of Transformer-XL, which is trained segment by segment.",
    )


def _picture(
    panels: Mapping[str, Models], draw: Callable[[Models, Looks, Chart], None], name: str, title: str, question: str
) -> Picture:
    legend = styles([label for models in panels.values() for label in models])
    drawn = {}
    for at, models in panels.items():
        chart = Chart(description=f"{title}: {at}", labels={})
        draw(models, legend, chart)
        drawn[at] = {"both": chart.svg()}
    return Picture(name=name, title=title, question=question, panels=drawn, legend=legend, lines=True)


def _draw_losses(found: Models, legend: Looks, chart: Chart) -> None:
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
        if not shown.any():
            continue

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


def _draw_gradients(found: Models, legend: Looks, chart: Chart) -> None:
    for row, model in found.items():
        gradient = next(run.gradient for run in model.best if run.gradient)
        mean_T, half_T = np.array([gradient["norm"], gradient["half_width"]]) / gradient["norm"][0]
        at, look = np.unique(np.geomspace(1, len(mean_T) - 1, POINTS).astype(int)), legend[row]
        low_T = np.maximum(mean_T - half_T, mean_T / 10)  # an interval may reach zero, a logarithm may not
        at = at[mean_T[at] > 0]
        chart.band(at, low_T[at], (mean_T + half_T)[at], look.color)
        chart.line(at, mean_T[at], look, f"{row}: {mean_T[len(mean_T) // 2]:.2g} at d = {len(mean_T) // 2}")
    chart.logs, chart.left, chart.labels = "xy", 48, {"x": "distance d in tokens", "y": "relative to d = 0"}


def _curves(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of E evaluations, and the validation losses (S, E) of the seeds at the best learning rate."""
    losses_SE = np.array([run.curve["loss"] for run in model.best], float)
    return np.array(model.best[0].curve["step"]) * (model.tokens / model.best[0].steps), losses_SE


def score_picture(board: Board, models: Sequence[Model], found: Mapping[str, Sequence[Correlations]]) -> Picture:
    """Return one panel per score, with one mark per layer: score against the validation loss.

    Layers that diverged have no mark.

    Args:
        board: accuracies of the layers.
        models: language models of the layers.
        found: the correlations by metric.
    """
    drawn = [model for model in models if model.counts and isfinite(model.mean("loss"))]
    legend = styles([model.layer for model in drawn])
    panels: dict[str, dict[str, Markup]] = {}
    for metric in METRICS:
        rhos = {row.score: row.rhos for row in found[metric]}
        for score, values in scores_of(board, metric).items():
            both = [model for model in drawn if isfinite(values.get(model.layer, nan))]
            if len(both) < 2:
                continue
            known = {title: rhos[score][part]["loss"] for part, title in [*PARTS.items()][1:]}
            title = ", ".join(f"{part} {rho.value:.2f}" for part, rho in known.items() if rho is not None)
            label = score if score == MEAN_RANK else f"{metric} accuracy"
            chart = Chart(
                description=f"validation loss against {score}", left=38, labels={"x": label, "y": "nats per token"}
            )
            for model in both:
                x, y = abs(values[model.layer]), model.mean("loss")
                chart.mark(x, y, legend[model.layer], f"{model.layer}: {x:.3g}, loss {y:.3f}")
            panels.setdefault(score, {})[metric] = Markup(f"<small>ρ {title}</small>" if title else "") + chart.svg()
    return Picture(
        name="language-loss",
        title="Scores against the validation loss",
        question="Do layers that score better on a task model language better? Each mark is a layer. A falling cloud "
        "means yes; for the mean rank, a rising cloud does.",
        panels=panels,
        legend=legend,
    )


def forest_picture(found: Mapping[str, Sequence[Correlations]]) -> Picture:
    """Return the correlation of each score with the validation loss within families, with its interval.

    Args:
        found: the correlations by metric.
    """
    drawn = {}
    for metric, rows in found.items():
        known = [(row.score, rho) for row in rows if (rho := row.rhos["within"]["loss"]) is not None]
        if not known:
            continue
        known.sort(key=lambda pair: pair[1].value)
        label = f"ρ with the validation loss, scores by {metric} accuracy"
        size, limits = (500, 40 + 15 * len(known)), {"x": (-1.02, 1.02), "y": (-0.7, len(known) - 0.3)}
        names: dict[str, Mapping[float, str]] = {"y": {n: score for n, (score, _) in enumerate(known)}}
        chart = Chart(description=label, labels={"x": label, "y": ""}, size=size, limits=limits, ticks=names, left=130)
        chart.rule("x", 0)
        for n, (score, rho) in enumerate(known):
            chart.line([rho.low, rho.high], [n, n], INK, width=1.2)
            tip = f"{score}: {rho.value:.2f} ({rho.low:.2f} to {rho.high:.2f})"
            chart.mark(rho.value, n, INK, tip, rho.significant)
        drawn[metric] = chart.svg()
    return Picture(
        name="within-families",
        title="Which scores order relatives as their losses do?",
        question="Spearman's ρ within families of layers, with its 95% interval; 1 means that better scores go with "
        "lower losses. Filled: clearer than chance, all scores tested together.",
        panels={"": drawn} if drawn else {},
        wide=True,
    )
