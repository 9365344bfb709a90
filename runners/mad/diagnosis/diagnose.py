"""Diagnosis of one trained model: accuracy by position, confusions, linear probes, and accuracy beyond training.

``diagnose`` reads the test split and the extrapolation sets, and writes ``diagnosis.json`` and ``diagnosis.png``. It is
meant for a model that is already chosen; its results must not be used to choose one.

Dimensions: S sequences, T positions, N scored positions, C classes.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mixers.models import Backbone
from runners.files import write_atomically, write_json
from runners.mad.diagnosis.linear_probes import Probe, fit_probes
from runners.mad.diagnosis.outputs import (
    ConfusionMatrix,
    Profile,
    UnreadableError,
    along_the_sequence,
    count_confusions,
    predict,
    profiles,
)
from runners.style import PLAIN_TEXT
from tasks.base import LENGTH_PREFIX, Accuracy, Task
from tasks.metrics import macro_accuracy

AXES = {
    "position": "position in the sequence, from 0 (tokens)",
    "answer": "answer within its sequence (1 = first scored position)",
}
TICKS = 16
"""Most tokens named at an axis of the confusion matrix."""
LEAST = 20
"""Least number of sequences of a point of the accuracy along the sequence."""
BARS = ("#0072b2", "#56b4e9", "#999999", "#d55e00")
"""Colours of the bars of a linear probe, which the colour-blind tell apart (Okabe and Ito 2008)."""
BAR = 0.38
"""Width of a bar of an extrapolation set, in distances between sets."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Content of ``diagnosis.json``; accuracies are shares in [0, 1].

    Attributes:
        title: names the model.
        task: name of the task.
        sequences: sequences of the test split.
        scored_positions: scored positions of the test split.
        accuracy: accuracy on the test split.
        macro_accuracy: token accuracy averaged over classes, only for comparison with other suites.
        chance: accuracy of a solver that draws each answer uniformly.
        by_position: accuracy of every position that is scored in any sequence.
        by_answer: accuracy of the 1st, 2nd, ... scored position of a sequence.
        confusion: targets against predictions.
        probes: linear probes of the hidden state.
        extrapolation_sets: accuracy on each extrapolation set.
        extrapolation_chances: chance on each of these sets.
        unreadable_sets: by name of each other set, the reason why it has no accuracy.
        trained_length: length N of the longest sequences in training, as in the names of sets called "length N".
    """

    title: str
    task: str
    sequences: int
    scored_positions: int
    accuracy: Accuracy
    macro_accuracy: float
    chance: Accuracy
    by_position: Profile
    by_answer: Profile
    confusion: ConfusionMatrix
    probes: list[Probe]
    extrapolation_sets: dict[str, Accuracy]
    extrapolation_chances: dict[str, Accuracy]
    unreadable_sets: dict[str, str]
    trained_length: int | None


def diagnose(model: Backbone, task: Task, folder: Path, title: str) -> Diagnosis:
    """Diagnose a trained model on its device and write ``diagnosis.json`` and ``diagnosis.png``.

    Args:
        model: a model trained on ``task``; its training mode is not changed.
        task: provides the test split and the extrapolation sets.
        folder: folder of the files, created if missing; each file is complete or absent.
        title: title of the figure.

    Raises:
        UnreadableError: the model fails on the test split, or its output at a scored position is not finite.
    """
    batch = task.split("test")
    scored_ST = batch.scored_ST
    predictions_ST, accuracy = predict(model, batch)
    by_position, by_answer = profiles((predictions_ST == batch.targets_ST).astype(float), scored_ST)
    found_1ST, right_ST, counted_ST = map(torch.from_numpy, (predictions_ST[None], batch.targets_ST, scored_ST))

    # Extrapolation sets, on which a layer may fail.
    extrapolation, reasons = {}, {}
    for name, further in task.extrapolation_sets().items():
        try:
            _, extrapolation[name] = predict(model, further)
        except UnreadableError as error:
            reasons[name] = str(error)

    diagnosis = Diagnosis(
        title=title,
        task=task.name,
        sequences=len(batch),
        scored_positions=int(scored_ST.sum()),
        accuracy=accuracy,
        macro_accuracy=macro_accuracy(found_1ST, right_ST, counted_ST, task.vocab_size).item(),
        chance=task.chance("test"),
        by_position=by_position,
        by_answer=by_answer,
        confusion=count_confusions(batch.targets_ST[scored_ST], predictions_ST[scored_ST]),
        probes=fit_probes(model, task, batch, predictions_ST),
        extrapolation_sets=extrapolation,
        extrapolation_chances={name: task.chance(name) for name in extrapolation},
        unreadable_sets=reasons,
        trained_length=task.trained_length,
    )

    # The JSON file is written last, so that the figure exists wherever it does.
    figure = draw_figure(diagnosis)
    write_atomically(folder / "diagnosis.png", lambda temporary: figure.savefig(temporary, dpi=150))
    write_json(folder / "diagnosis.json", asdict(diagnosis))
    return diagnosis


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
    _plot_linear_probes(next(axes), diagnosis.probes)
    if sets:
        _plot_extrapolation(next(axes), diagnosis)
    return figure


def _plot_profile(axes: Axes, diagnosis: Diagnosis) -> None:
    """Plot the accuracy by position, or by ordinal if the answers stand at many different positions.

    Points of fewer than ``LEAST`` sequences are left out, unless all are.
    """
    axis, profile = along_the_sequence(diagnosis.by_position, diagnosis.by_answer)
    enough = np.array(profile.sequences) >= min(LEAST, max(profile.sequences))
    index, accuracy, sequences = (
        np.array(column)[enough] for column in (profile.index, profile.accuracy, profile.sequences)
    )
    counts = axes.twinx()
    counts.bar(index, sequences, color="0.9", width=min(np.diff(index), default=1))
    counts.set_ylim(0, 1.05 * diagnosis.sequences)
    counts.set_ylabel("sequences scored here (bars)", color="0.45")

    # The bars belong behind the line, which is on the older axes.
    axes.set_zorder(counts.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.plot(index, accuracy, marker=".", color="C0", label="model", clip_on=False)
    axes.axhline(diagnosis.chance.token, color="black", linestyle="dotted", label="chance")

    _accuracy_axis(axes, "token accuracy")
    axes.set_xlabel(AXES[axis])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_title("Accuracy along the sequence")
    _legend_below(axes)


def _plot_confusions(figure: Figure, axes: Axes, confusion: ConfusionMatrix) -> None:
    """Plot the share of each prediction among a target's scored positions; tokens that are no target have no row."""
    targets = np.flatnonzero(confusion.targets)
    share_RC = np.array(confusion.counts)[targets] / np.array(confusion.targets)[targets, None]
    image = axes.imshow(share_RC, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the target's scored positions", format=PercentFormatter(1))

    classes, shown = np.array(confusion.classes), len(confusion.classes)
    columns, rows = (range(0, n, -(-n // TICKS)) for n in share_RC.shape[::-1])
    axes.set_xticks(columns, classes[columns], rotation=90 if shown > TICKS else 0)
    axes.set_yticks(rows, classes[targets[rows]])

    axes.set_xlabel("predicted token")
    axes.set_ylabel("target token")
    which = f"all {shown}" if shown == confusion.occurring else f"the {shown} most missed of {confusion.occurring}"
    axes.set_title(f"Confusion matrix ({which} tokens)")


def _plot_linear_probes(axes: Axes, probes: Sequence[Probe]) -> None:
    """Plot one group of bars a probe, with the deviation over the folds as error bars, or why it was not possible."""
    ticks = []
    for group, probe in enumerate(probes):
        where = "all scored positions" if probe.position is None else f"position {probe.position}"
        dropped = f"\n{probe.dropped_classes} answers\nleft out" if probe.dropped_classes else ""
        ticks.append(f"{where}{dropped}" + ("\nnot\nconverged" if probe.converged is False else ""))
        if probe.hidden is None or probe.embedding is None:
            reason = textwrap.fill(f"not possible: {probe.impossible}", 40)
            axes.text(group, 0.5, reason, ha="center", va="center", rotation=90, fontsize=8)
            continue
        heights = (probe.hidden["mean"], probe.embedding["mean"], probe.majority or 0.0, probe.model or 0.0)
        errors = (probe.hidden["deviation"], probe.embedding["deviation"], 0.0, 0.0)
        for i, (height, error, color) in enumerate(zip(heights, errors, BARS, strict=True)):
            bars = axes.bar(group + 0.2 * (i - 1.5), height, 0.2, yerr=error or None, capsize=3, color=color)
            if len(probes) == 1:
                axes.bar_label(bars, fmt="{:.1%}", padding=2)

    # Bars of no height, one for each label.
    labels = ("linear probe: hidden state", "linear probe: embedding", "most frequent answer", "model itself")
    handles = [axes.bar(0, 0, color=color, label=label) for color, label in zip(BARS, labels, strict=True)]
    axes.legend(handles=handles, loc="upper center", ncols=2, fontsize=8)
    axes.set_xlim(-0.6, len(probes) - 0.4)
    axes.set_xticks(range(len(probes)), ticks, fontsize=8)
    axes.set_xlabel(f"{sum(probe.examples for probe in probes):,} examples")
    _accuracy_axis(axes, "accuracy (error bars: deviation over folds)", top=1.3)
    axes.set_title("Is the answer linearly in the hidden state?")


def _plot_extrapolation(axes: Axes, diagnosis: Diagnosis) -> None:
    """Plot the accuracy on the test split and on the extrapolation sets, beside chance.

    Sets called "length N" are a curve over N, and sets of other names are lines beside it. Without a curve all sets are
    bars.
    """
    sets = {"test": diagnosis.accuracy, **diagnosis.extrapolation_sets}
    chances = {"test": diagnosis.chance, **diagnosis.extrapolation_chances}
    numbers = {name: name.removeprefix(LENGTH_PREFIX) for name in sets}
    lengths = sorted((int(number), name) for name, number in numbers.items() if number.isdecimal())
    curve, at = [name for _, name in lengths], [length for length, _ in lengths]
    others = [name for name in sets if name not in curve]

    for i, kind in enumerate(("sequence", "token")):
        label = "chance" if kind == "token" else ""
        heights = [getattr(sets[name], kind) for name in curve or others]
        limits = [getattr(chances[name], kind) for name in curve or others]
        if curve:
            axes.plot(at, heights, marker="o", color=f"C{i}", label=f"{kind} accuracy", clip_on=False)
            axes.plot(at, limits, color="black", linestyle="dotted", label=label)
            for name, style in zip(others, ("dashed", "dashdot") * len(others), strict=False):
                y = getattr(sets[name], kind)
                axes.axhline(y, color=f"C{i}", linestyle=style, linewidth=1, label=f"{kind}, {name}")
        else:
            x = np.arange(len(others)) + BAR * (i - 0.5)
            bars = axes.bar(x, heights, BAR, label=f"{kind} accuracy")
            axes.bar_label(bars, fmt="{:.1%}", path_effects=[withStroke(linewidth=3, foreground="white")])
            axes.hlines(limits, x - BAR / 2, x + BAR / 2, color="black", linestyles="dotted", label=label)

    if curve and (trained := diagnosis.trained_length) is not None:
        axes.axvline(trained, color="0.5", linewidth=1, label=f"longest in training: {trained}")
    if curve:
        axes.set_xlabel('N of the set "length N" (tokens)')
    else:
        axes.set_xticks(range(len(others)), others)
    if unreadable := ", ".join(diagnosis.unreadable_sets):
        below = textwrap.fill(f"the model fails on: {unreadable}", 60)
        axes.set_xlabel(f"{axes.get_xlabel()}\n{below}".strip())
    _accuracy_axis(axes, "accuracy")
    axes.set_title("Extrapolation sets")
    _legend_below(axes)


def _accuracy_axis(axes: Axes, label: str, top: float = 1.05) -> None:
    axes.set_ylim(0, top)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _legend_below(axes: Axes) -> None:
    """Add a legend below the label of the x axis, where no data are."""
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
