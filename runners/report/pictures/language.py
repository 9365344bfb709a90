"""Scores of diagnostics against the losses of small language models."""

from collections.abc import Sequence
from math import isfinite

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from runners.drawing import styles
from runners.report.cells import METRICS, Board
from runners.report.language import LOSSES, MEAN_RANK, Correlations, LanguageModel, scores_of
from runners.report.pictures import Picture
from runners.report.svg import GRID, INK, MUTED, RIGHT, STYLE, mark, panel, to_svg
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
        rhos = {row.score: {"between families": row.between[loss], "within": row.within[loss]} for row in found[metric]}
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
                if known := [f"{part} {rho.value:.2f}" for part, rho in rhos[score].items() if rho is not None]:
                    axes.set_title(f"ρ {', '.join(known)}", loc="left", fontsize=8)
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


def forest_picture(found: dict[str, list[Correlations]]) -> Picture:
    """Return the correlation of each score with the validation loss within families, with its interval.

    Args:
        found: the correlations by metric.
    """
    drawn = {metric: svg for metric, rows in found.items() if (svg := _draw_forest(rows, metric)) is not None}
    return Picture(
        name="within-families",
        title="Which scores order relatives as their losses do?",
        question="Spearman's ρ within families of layers, with its 95% interval; 1 means that better scores go with "
        "lower losses. Filled: clearer than chance, all scores tested together.",
        panels={"": drawn} if drawn else {},
        missing="" if drawn else "Nothing to draw yet: too few layers, with relatives, have a finished language model.",
        wide=True,
    )


def _draw_forest(rows: list[Correlations], metric: str) -> Markup | None:
    known = [(row.score, rho) for row in rows if (rho := row.within["total"]) is not None]
    if not known:
        return None

    known.sort(key=lambda pair: pair[1].value)
    figure = Figure(figsize=(7, 0.5 + 0.2 * len(known)))
    tips = {}
    with rc_context(STYLE):
        axes = figure.subplots()

        # Intervals and values, the largest on top.
        for n, (score, rho) in enumerate(known):
            axes.plot([rho.low, rho.high], [n, n], color=MUTED, linewidth=1.2)
            face = INK if rho.significant else "none"
            axes.plot(rho.value, n, "o", color=INK, markerfacecolor=face, gid=f"point{n}")
            tips[f"point{n}"] = f"{score}: {rho.value:.2f} ({rho.low:.2f} to {rho.high:.2f})"

        axes.axvline(0, color=GRID, linewidth=1)
        axes.set_yticks(range(len(known)), [score for score, _ in known])
        axes.set(xlim=(-1.02, 1.02), xlabel=f"ρ with the validation loss, scores by {metric} accuracy")
        axes.grid(axis="y", visible=False)
        figure.subplots_adjust(left=0.27, right=RIGHT, bottom=0.4 / figure.get_figheight(), top=0.98)
    return to_svg(figure, f"correlation with the validation loss within families, {metric} accuracy", tips)
