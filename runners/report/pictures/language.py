"""Scores of diagnostics against the losses of small language models."""

from collections.abc import Sequence
from math import isfinite

from markupsafe import Markup
from matplotlib import rc_context

from runners.drawing import styles
from runners.report.cells import METRICS, Board
from runners.report.language import LOSSES, MEAN_RANK, Correlations, LanguageModel, scores_of
from runners.report.pictures import Picture
from runners.report.svg import STYLE, mark, panel, to_svg
from tasks import TASKS


def language_picture(
    board: Board, models: Sequence[LanguageModel], found: dict[str, list[Correlations]], loss: str
) -> Picture:
    """Return one panel per score, with one mark per layer: score against loss. Layers that diverged have no mark.

    Args:
        board: accuracies of the layers.
        models: language models of the layers.
        found: the correlations by metric.
        loss: short name of the loss.
    """
    drawn = [model for model in models if model.counts and isfinite(model.loss(loss))]
    legend = styles([model.layer for model in drawn])
    panels: dict[str, dict[str, Markup]] = {}
    for metric in METRICS:
        rho = {row.score: row.between[loss] for row in found[metric]}
        for score in (*TASKS, MEAN_RANK):
            scores = scores_of(board, score, metric)
            both = [model for model in drawn if isfinite(scores.get(model.layer, float("nan")))]
            if len(both) < 2:
                continue

            figure, axes = panel()
            tips = {}
            with rc_context(STYLE):
                for n, model in enumerate(both):
                    x = abs(scores[model.layer])
                    mark(axes, x, model.loss(loss), legend[model.layer], f"point{n}")
                    tips[f"point{n}"] = f"{model.layer}: {x:.3g}, loss {model.loss(loss):.3f}"
                axes.set_xlabel(score if score == MEAN_RANK else f"{metric} accuracy")
                axes.set_ylabel("nats per token")
                axes.margins(0.08)
                axes.locator_params(nbins=4)
                if (value := rho[score]) is not None:
                    axes.set_title(
                        f"families: ρ = {value.value:.2f} [{value.low:.2f}, {value.high:.2f}]", loc="left", fontsize=8
                    )
                    figure.subplots_adjust(top=0.9)
            described = f"{score}: {LOSSES[loss][1]} against {metric} accuracy, {len(both)} layers"
            panels.setdefault(score, {})[metric] = to_svg(figure, described, tips)

    return Picture(
        name=f"language-{loss}",
        title=f"Scores against the {LOSSES[loss][1]}",
        question="Do layers that score better on a task model language better? Each mark is a layer. A falling cloud "
        "means yes; for the mean rank, a rising cloud does.",
        panels=panels,
        legend=legend,
        missing="" if panels else "Nothing to draw yet: two layers must have a score and a finished language model.",
    )
