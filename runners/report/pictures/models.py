"""Language models: loss curves, and the size of the gradient by distance."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.ticker import LogLocator
from scipy.interpolate import PchipInterpolator

from mixers import MIXERS
from mixers.named import is_path
from runners.c4.reference.cells import Cell, ConvergedRun
from runners.drawing import Style, styles
from runners.report.pictures import LONGEST, Picture
from runners.report.svg import STYLE, name_lines, panel, to_svg
from runners.report.transition import ENDINGS, Models

Panels = Mapping[str, Models]
"""Models by the title of the panel that draws them, and by name."""

COMPARED = ("rt-6", "transformer-6", "transformer-12")
"""Models of 30M parameters whose curves are drawn, in the paper's parametrisation."""
VARIANTS = {
    "variants of the layer": ("rt-3", "rt-6-no-persistent-norm", "rt-6-block-4", "rt-6-block-16"),
    "variants of training": ("rt-6-beta2-0.99", "rt-6-batch-32", "transformer-6-beta2-0.99", "transformer-6-batch-32"),
}
"""Models of 30M parameters whose curves are drawn beside those of RT and the Transformer, by the title of a panel."""
LAST = 30
"""Ratio of the last to the first number of tokens on the axis."""
WIDEST = 4
"""Ratio of the largest difference shown to the largest one at the end of training."""
BASELINES = ("transformer", "transformer-6")
"""Labels of the models that the others of a panel are compared with, where they are there."""


def panels_of_parametrisations(models: Models) -> Panels:
    """Return a panel for each parametrisation in which one of the models ``COMPARED`` is there."""
    return _with_models(
        {
            f"{parametrisation} parametrisation": [(row, row + ending) for row in COMPARED]
            for parametrisation, ending in ENDINGS.items()
        },
        models,
    )


def panels_of_variants(models: Models) -> Panels:
    """Return a panel for each kind of ``VARIANTS`` and each parametrisation in which one of them is there."""
    return _with_models(
        {
            kind + (f", {parametrisation}" if ending else ""): [
                (row, row + ending) for row in ("rt-6", *rows, "transformer-6")
            ]
            for parametrisation, ending in ENDINGS.items()
            for kind, rows in VARIANTS.items()
            if any(row + ending in models for row in rows)
        },
        models,
    )


def panels_of_families(models: Models) -> Panels:
    """Return a panel for each family of layers with a model, and one for a user's own; the Transformer is in all."""
    families: dict[str, list[str]] = {}
    for layer in filter(models.__contains__, MIXERS):
        families.setdefault(MIXERS[layer].family, []).append(layer)
    of_families = {family: [(layer, layer) for layer in layers] for family, layers in families.items()}
    own = _short([name for name, cell in models.items() if is_path(cell.layer)])
    beside = ("transformer", "transformer")
    panels = {**of_families, **({"yours": own} if own else {})}
    return _with_models({title: list(dict.fromkeys([*pairs, beside])) for title, pairs in panels.items()}, models)


def _short(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return for each user's own layer a label that fits beside the end of a line, and its name."""
    found, times = [], Counter[str]()
    for name in names:
        label = name.rpartition(".")[2][:LONGEST]
        times[label] += 1
        number = f" {times[label]}" if times[label] > 1 else ""
        found.append((f"{label}{number} ★", name))
    return found


def _with_models(names: Mapping[str, list[tuple[str, str]]], models: Models) -> Panels:
    """Return panels by title from pairs of label and name of a model; panels without a model are left out."""
    found = {title: {label: models[name] for label, name in pairs if name in models} for title, pairs in names.items()}
    return {title: drawn for title, drawn in found.items() if drawn}


def loss_picture(panels: Panels, name: str, title: str) -> Picture:
    """Return the validation loss, less that of the Transformer, against the tokens read.

    Panels without the Transformer, or without another model, are left out.

    Args:
        panels: the models.
        name: anchor in the page.
        title: title.
    """
    compared = {title: models for title, models in panels.items() if len(models) > 1 and _baseline(models)}
    baselines = {_baseline(models) for models in compared.values()}
    return _picture(
        compared,
        _draw_losses,
        name,
        title,
        "Who learns faster, who is ahead in the end, and from when on? Validation loss less that of "
        f"{' or '.join(sorted(filter(None, baselines))) or 'the Transformer'} after as many tokens, each at its best "
        "learning rate; below zero is ahead. Marks are evaluations. The line is the mean of the seeds, the band goes "
        "from seed to seed. A line that leaves its panel is further off.",
        missing="Nothing to draw yet: losses are drawn against that of the Transformer, and need its finished model.",
    )


def _baseline(models: Models) -> str | None:
    """Return the label of the Transformer that the others of a panel are compared with; None if it is not there."""
    return next(filter(models.__contains__, BASELINES), None)


def gradient_picture(panels: Panels, name: str, title: str) -> Picture:
    """Return the size of the gradient against the distance; arguments as for ``loss_picture``."""
    measured = {
        title: found
        for title, models in panels.items()
        if (found := {label: cell for label, cell in models.items() if _measured(cell)})
    }
    return _picture(
        measured,
        _draw_gradients,
        name,
        title,
        "Norm of the gradient of the loss at position t by the embedding at t − d, divided by that at d = 0: one seed "
        "at the best learning rate, mean over sequences of validation text with its 95% interval. A line ends where "
        "no gradient passes: Transformer-XL trains each segment without a gradient into the one before, although it "
        "reads it.",
    )


def _picture(
    panels: Panels,
    draw: Callable[[Models, Mapping[str, Style], str], Markup],
    name: str,
    title: str,
    question: str,
    missing: str = "",
) -> Picture:
    legend = styles([label for models in panels.values() for label in models])
    return Picture(
        name=name,
        title=title,
        question=question,
        panels={title: {"both": draw(models, legend, title)} for title, models in panels.items()},
        legend=legend,
        missing="" if panels else missing,
        lines=True,
    )


def _draw_losses(found: Models, legend: Mapping[str, Style], name: str) -> Markup:
    figure, axes = panel()
    figure.subplots_adjust(left=0.2)  # room for labels such as −0.04
    base = _baseline(found)
    assert base is not None
    base_tokens, base_SE = _curves(found[base])
    # Between evaluations, a curve as losses have it, without overshoot.
    base_E = base_SE.mean(0)
    base_loss = PchipInterpolator(np.log(base_tokens), base_E) if len(base_E) > 1 else lambda _: base_E
    ends, last, tips = [], [], {}
    with rc_context(STYLE):
        for n, (row, cell) in enumerate(found.items()):
            # The end of training, because the first steps would take most of the panel.
            tokens_E, losses_SE = _curves(cell)
            first, style = max(base_tokens[0], base_tokens[-1] / LAST), legend[row]
            shown = (tokens_E >= first) & (tokens_E <= base_tokens[-1])
            if not shown.any():
                continue

            # Differences to the Transformer after as many tokens.
            x_E, y_SE = tokens_E[shown], losses_SE[:, shown]
            y_SE = y_SE - base_loss(np.log(x_E))
            axes.plot(x_E, y_SE.mean(0), style.line, color=style.color, linewidth=1.6, marker=".", gid=f"line{n}")
            axes.fill_between(x_E, y_SE.min(0), y_SE.max(0), color=style.color, alpha=0.2, linewidth=0)

            # Names and texts.
            loss, ahead = losses_SE[:, -1].mean(), y_SE[:, -1].mean()
            tips[f"line{n}"] = f"{row}: {loss:.3f} at the end" + (f", {ahead:+.3f} from {base}" if row != base else "")
            ends.append((row, float(ahead), style.color))
            last.append(f"{row} {loss:.3f}")

        # The end decides the range: a model that has hardly begun to learn would take most of it.
        bottom, top = axes.get_ylim()
        most = WIDEST * max((abs(ahead) for _, ahead, _ in ends), default=0.0)
        if most > 0:
            axes.set_ylim(max(bottom, -most), min(top, most))

        axes.set(xscale="log", xlabel="tokens", ylabel="nats per token")
        axes.xaxis.set_major_formatter(
            lambda tokens, _: f"{round(tokens / 1e6):,}M" if tokens >= 1e6 else f"{tokens:,.0f}"
        )
        axes.minorticks_off()
        name_lines(axes, ends)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if axes.get_position().width > 0.35 else (1,)))
    return to_svg(figure, f"validation loss against tokens, {name}; at the end {', '.join(last)}", tips)


def _draw_gradients(found: Models, legend: Mapping[str, Style], name: str) -> Markup:
    figure, axes = panel()
    far, tips = [], {}
    with rc_context(STYLE):
        for n, (row, cell) in enumerate(found.items()):
            mean_T, half_T = _relative(_measured(cell)[0])
            distance, style = np.arange(1, len(mean_T)), legend[row]
            axes.plot(distance, mean_T[1:], style.line, color=style.color, linewidth=1.4, gid=f"line{n}")
            low_T = np.maximum(mean_T - half_T, mean_T / 10)  # an interval may reach zero, a logarithm may not
            axes.fill_between(distance, low_T[1:], (mean_T + half_T)[1:], color=style.color, alpha=0.2, linewidth=0)
            far.append(f"{row} {mean_T[-1]:.2g}")
            tips[f"line{n}"] = f"{row}: {mean_T[len(mean_T) // 2]:.2g} at d = {len(mean_T) // 2}"
        axes.set(xscale="log", yscale="log", xlabel="distance d in tokens", ylabel="relative to d = 0")
    return to_svg(figure, f"gradient against distance, {name}; at the largest distance {', '.join(far)}", tips)


def _measured(cell: Cell) -> list[ConvergedRun]:
    """Return the runs at the best learning rate whose gradients are measured."""
    return [run for run in cell.best if run.gradient is not None]


def _relative(run: ConvergedRun) -> np.ndarray:
    """Return the means and half widths (2, T) of a run's gradients, divided by the mean at distance 0."""
    found_2T = np.array([run.gradient, run.gradient_half_width])
    return found_2T / found_2T[0, 0]


def _curves(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of E evaluations, and the validation losses (S, E) of the seeds at the best learning rate."""
    curves = [run.curve for run in cell.best]
    losses_SE = np.array([[loss for _, _, loss in curve] for curve in curves])
    steps_E = np.array([step for step, _, _ in curves[0]])
    return steps_E * cell.settings["batch_size"] * cell.settings["seq_len"], losses_SE
