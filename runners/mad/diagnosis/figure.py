"""Figure of a diagnosis."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from runners.drawing import PLAIN_TEXT
from runners.mad.diagnosis.confusions import ConfusionMatrix
from runners.mad.diagnosis.findings import Diagnosis
from runners.mad.diagnosis.linear_probes import Probe, ProbeReport
from runners.mad.diagnosis.profile import along_the_sequence
from tasks.base import LENGTH_PREFIX, Accuracy

AXES = {
    "position": "position in the sequence, from 0 (tokens)",
    "answer": "answer within its sequence (1 = first scored position)",
}
TICKS = 16
"""Most tokens named at an axis of the confusion matrix."""
BARS = ("#0072b2", "#56b4e9", "#999999", "#d55e00")
"""Colours of the bars of a linear probe, which the colour-blind tell apart (Okabe and Ito 2008)."""
BAR = 0.38
"""Width of a bar of an extrapolation set, in distances between sets."""


@PLAIN_TEXT
def draw_figure(diagnosis: Diagnosis) -> Figure:
    """Draw accuracy along the sequence, confusion matrix, linear probes and, if there are any, extrapolation sets."""
    sets = bool(diagnosis.extrapolation_sets or diagnosis.unreadable_sets)
    figure = Figure(figsize=(13, 9.5) if sets else (18, 5.2), layout="constrained")

    accuracy = diagnosis.accuracy
    figure.suptitle(
        f"{textwrap.fill(diagnosis.title, 130)}\n{diagnosis.task}, test: sequence accuracy {accuracy.sequence:.1%}, "
        f"token accuracy {accuracy.token:.1%} ({diagnosis.sequences:,} sequences, {diagnosis.scored_positions:,} "
        "scored positions)"
    )

    axes = figure.subplots(2, 2).flat if sets else figure.subplots(1, 3).flat
    _plot_profile(next(axes), diagnosis)
    _plot_confusions(figure, next(axes), diagnosis.confusion)
    _plot_linear_probes(next(axes), diagnosis.probe)
    if sets:
        _plot_extrapolation(next(axes), diagnosis)
    return figure


def _accuracy_axis(axes: Axes, label: str, top: float = 1.05) -> None:
    axes.set_ylim(0, top)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _plot_profile(axes: Axes, diagnosis: Diagnosis) -> None:
    """Plot the accuracy by position, or by ordinal if the answers stand at many different positions."""
    axis, profile = along_the_sequence(diagnosis.by_position, diagnosis.by_answer)
    label = AXES[axis]

    counts = axes.twinx()
    counts.bar(profile.index, profile.sequences, color="0.9", width=min(np.diff(profile.index), default=1))
    counts.set_ylim(0, 1.05 * diagnosis.sequences)
    counts.set_ylabel("sequences scored here (bars)", color="0.45")

    # The bars belong behind the line, which is on the older axes.
    axes.set_zorder(counts.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.plot(profile.index, profile.accuracy, marker=".", color="C0", label="model", clip_on=False)
    axes.axhline(diagnosis.chance.token, color="black", linestyle="dotted", label="chance")

    _accuracy_axis(axes, "token accuracy")
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_title("Accuracy along the sequence")
    _legend_below(axes)


def _plot_confusions(figure: Figure, axes: Axes, confusion: ConfusionMatrix) -> None:
    share_CC = np.array(confusion.counts) / np.maximum(1, confusion.targets)[:, None]
    image = axes.imshow(share_CC, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the target's scored positions", format=PercentFormatter(1))

    shown = len(confusion.classes)
    ticks = range(0, shown, -(-shown // TICKS))
    names = [str(confusion.classes[i]) for i in ticks]
    axes.set_xticks(ticks, names, rotation=90 if shown > TICKS else 0)
    axes.set_yticks(ticks, names)

    axes.set_xlabel("predicted token")
    axes.set_ylabel("target token")
    which = f"all {shown}" if shown == confusion.occurring else f"the {shown} most missed of {confusion.occurring}"
    axes.set_title(f"Confusion matrix ({which} tokens)")


def _plot_linear_probes(axes: Axes, report: ProbeReport) -> None:
    """Plot one group of bars a probe, with the deviation over the folds as error bars."""
    _write_reasons(axes, report.probes)
    for group, probe in enumerate(report.probes):
        _plot_linear_probe(axes, group, probe, values=len(report.probes) == 1)

    # Bars of no height, one for each label.
    labels = ("linear probe: hidden state", "linear probe: embedding", "most frequent answer", "model itself")
    handles = [axes.bar(0, 0, color=color, label=label) for color, label in zip(BARS, labels, strict=True)]
    axes.legend(handles=handles, loc="upper center", ncols=2, fontsize=8)

    axes.set_xlim(-0.6, len(report.probes) - 0.4)
    axes.set_xticks(range(len(report.probes)), [_probe_label(probe) for probe in report.probes], fontsize=8)
    examples = sum(probe.examples for probe in report.probes)
    mean = "" if report.hidden is None else f", mean accuracy from the hidden state {report.hidden:.1%}"
    axes.set_xlabel(f"{examples:,} examples{mean}")
    _accuracy_axis(axes, "accuracy (error bars: deviation over folds)", top=1.3)
    axes.set_title("Is the answer linearly in the hidden state?")


def _write_reasons(axes: Axes, probes: list[Probe]) -> None:
    """Write why probes were not possible: once in the middle if none was, otherwise at the place of each."""
    impossible = {group: probe.impossible for group, probe in enumerate(probes) if probe.impossible}
    if len(impossible) == len(probes):
        reasons = dict.fromkeys(f"not possible: {reason}" for reason in impossible.values())
        axes.text((len(probes) - 1) / 2, 0.5, "\n".join(reasons), ha="center", va="center", fontsize=8)
        return

    for group, reason in impossible.items():
        text = textwrap.fill(f"not possible: {reason}", 40)
        axes.text(group, 0.5, text, ha="center", va="center", rotation=90, fontsize=8)


def _plot_linear_probe(axes: Axes, group: int, probe: Probe, values: bool) -> None:
    """Plot the bars of one probe, if it was possible, and with ``values`` their heights as text."""
    if probe.hidden is None or probe.embedding is None:
        return
    heights = (probe.hidden.mean, probe.embedding.mean, probe.majority or 0.0, probe.model or 0.0)
    errors = (probe.hidden.deviation, probe.embedding.deviation, 0.0, 0.0)
    for i, (height, error, color) in enumerate(zip(heights, errors, BARS, strict=True)):
        bars = axes.bar(group + 0.2 * (i - 1.5), height, 0.2, yerr=error or None, capsize=3, color=color)
        if values:
            axes.bar_label(bars, fmt="{:.1%}", padding=2)


def _probe_label(probe: Probe) -> str:
    where = "all scored positions" if probe.position is None else f"position {probe.position}"
    dropped = f"\n{probe.dropped_classes} answers\nleft out" if probe.dropped_classes else ""
    unfinished = "\nnot\nconverged" if probe.converged is False else ""
    return f"{where}{dropped}{unfinished}"


def _plot_extrapolation(axes: Axes, diagnosis: Diagnosis) -> None:
    """Plot the accuracy on the test split and on the extrapolation sets, beside chance.

    Sets called "length N" are a curve over N, and sets of other names are lines beside it. Without a curve all sets are
    bars.
    """
    sets = {"test": diagnosis.accuracy, **diagnosis.extrapolation_sets}
    chances = {"test": diagnosis.chance, **diagnosis.extrapolation_chances}
    numbers = {name: name.removeprefix(LENGTH_PREFIX) for name in sets}
    lengths = {int(number): name for name, number in numbers.items() if number.isdecimal()}
    others = [name for name in sets if name not in lengths.values()]

    if lengths:
        _plot_lengths(axes, sets, chances, lengths, others)
        if diagnosis.trained_length is not None:
            label = f"longest in training: {diagnosis.trained_length}"
            axes.axvline(diagnosis.trained_length, color="0.5", linewidth=1, label=label)
        axes.set_xlabel('N of the set "length N" (tokens)')
    else:
        _plot_bars(axes, sets, chances, others)
        axes.set_xticks(range(len(others)), others)

    if unreadable := ", ".join(diagnosis.unreadable_sets):
        below = textwrap.fill(f"the model fails on: {unreadable}", 60)
        axes.set_xlabel(f"{axes.get_xlabel()}\n{below}".strip())
    _accuracy_axis(axes, "accuracy")
    axes.set_title("Extrapolation sets")
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    """Add a legend below the label of the x axis, where no data are."""
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _plot_lengths(
    axes: Axes,
    sets: dict[str, Accuracy],
    chances: dict[str, Accuracy],
    lengths: dict[int, str],
    others: list[str],
) -> None:
    """Plot curves over the length, and a line for each of the other sets.

    Args:
        axes: where to plot.
        sets: accuracies by name of the set.
        chances: their chance levels.
        lengths: names of the sets called "length N", by N.
        others: names of the other sets.
    """
    ascending = sorted(lengths)
    for i, (metric, chance_label) in enumerate((("sequence", ""), ("token", "chance"))):
        curve = [getattr(sets[lengths[length]], metric) for length in ascending]
        chance = [getattr(chances[lengths[length]], metric) for length in ascending]
        axes.plot(ascending, curve, marker="o", color=f"C{i}", label=f"{metric} accuracy", clip_on=False)
        axes.plot(ascending, chance, color="black", linestyle="dotted", label=chance_label)

        for name, style in zip(others, ("dashed", "dashdot") * len(others), strict=False):
            value = getattr(sets[name], metric)
            axes.axhline(value, color=f"C{i}", linestyle=style, linewidth=1, label=f"{metric}, {name}")


def _plot_bars(axes: Axes, sets: dict[str, Accuracy], chances: dict[str, Accuracy], names: list[str]) -> None:
    """Plot two bars per set, sequence and token accuracy, each with its chance level."""
    for i, (metric, chance_label) in enumerate((("sequence", ""), ("token", "chance"))):
        at = np.arange(len(names)) + BAR * (i - 0.5)
        bars = axes.bar(at, [getattr(sets[name], metric) for name in names], BAR, label=f"{metric} accuracy")
        axes.bar_label(bars, fmt="{:.1%}", path_effects=[withStroke(linewidth=3, foreground="white")])

        chance = [getattr(chances[name], metric) for name in names]
        axes.hlines(chance, at - BAR / 2, at + BAR / 2, color="black", linestyles="dotted", label=chance_label)
