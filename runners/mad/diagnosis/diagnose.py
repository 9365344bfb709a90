"""What one trained model gets right and wrong: by position, by class, in its hidden state, and on a task's probe sets.

``diagnose`` reads the test split and the probe sets and writes ``diagnosis.json`` and ``diagnosis.png``. It is for the
model that was chosen already: nothing here may choose one.

Dimensions: S sequences, T positions, V vocabulary, N scored positions, C classes (tokens that are targets or
predictions at scored positions).
"""

import functools
import operator
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from runners.files import write_atomically, write_json
from runners.mad.diagnosis.linear_probes import (
    Probe,
    ProbeReport,
    UnreadableError,
    calling_the_model,
    probe,
    sequences_per_forward,
)
from tasks.base import LENGTH_PROBE, Accuracy, Batch, Task, Tokens
from tasks.copying import Copying
from tasks.extrapolation import Extrapolation
from tasks.metrics import count, macro_accuracy

MAX_CLASSES = 64
"""Classes in a confusion matrix; of more, those that are missed most often are shown."""
TOP_CONFUSIONS = 20


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Accuracy along the sequence, three aligned columns.

    Attributes:
        index: position, from 0; or the ordinal of the answer within its sequence, from 1.
        accuracy: share of scored positions at this index that are right.
        sequences: sequences that have a scored position at this index.
    """

    index: list[int]
    accuracy: list[float]
    sequences: list[int]


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A token taken for another: ``count`` scored positions, ``share`` of those with this target."""

    target: int
    predicted: int
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """Targets against predictions at the scored positions.

    Attributes:
        occurring: number of classes C.
        classes: tokens of the rows and columns: all C ascending, or the ``MAX_CLASSES`` targets most often missed.
        counts: rows are targets, columns predictions.
        targets: scored positions with each row's target, predictions outside ``classes`` included.
        top: the most frequent confusions of all classes, most frequent first.
    """

    occurring: int
    classes: list[int]
    counts: list[list[int]]
    targets: list[int]
    top: list[Confusion]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What ``diagnosis.json`` holds; accuracies are shares in [0, 1].

    Attributes:
        title: what was diagnosed.
        task: name of the task.
        sequences: sequences of the test split.
        scored_positions: scored positions of the test split.
        accuracy: on the test split.
        macro_accuracy: token accuracy averaged over classes, only for comparison with other suites.
        chance: of a solver that draws each answer uniformly.
        by_position: accuracy of every position that is ever scored.
        by_answer: accuracy of the 1st, 2nd, ... scored position of a sequence.
        confusion: targets against predictions.
        probe: linear probes of the hidden state.
        probe_sets: accuracy on each further evaluation set.
        probe_chances: chance on each of them.
        unreadable_sets: why there is no accuracy on the others.
        trained_length: N of the longest sequences in training, as in the names of sets called "length N".
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
    probe: ProbeReport
    probe_sets: dict[str, Accuracy]
    probe_chances: dict[str, Accuracy]
    unreadable_sets: dict[str, str]
    trained_length: int | None


def diagnose(model: Backbone, task: Task, folder: Path, title: str) -> Diagnosis:
    """Diagnose a trained model on its device and write ``diagnosis.json`` and ``diagnosis.png`` to ``folder``.

    Args:
        model: trained on ``task``; it stays in its mode.
        task: gives the test split and the probe sets.
        folder: made if missing; each file is whole or absent.
        title: of the figure.

    Raises:
        UnreadableError: the model fails on the test split, or its output at a scored position is not finite.
    """
    batch = task.split("test")
    predictions_ST, accuracy = predict(model, batch)
    scored_ST = batch.scored_ST
    right_N = (predictions_ST == batch.targets_ST)[scored_ST]
    macro_R = macro_accuracy(
        torch.from_numpy(predictions_ST[None]),
        torch.from_numpy(batch.targets_ST),
        torch.from_numpy(scored_ST),
        task.vocab_size,
    )
    report = probe(model, task, batch, predictions_ST)
    probe_sets, unreadable_sets = {}, {}
    for name, further in task.probes().items():
        try:
            probe_sets[name] = predict(model, further)[1]
        except UnreadableError as error:
            unreadable_sets[name] = str(error)
    diagnosis = Diagnosis(
        title=title,
        task=task.name,
        sequences=len(batch),
        scored_positions=len(right_N),
        accuracy=accuracy,
        macro_accuracy=macro_R.item(),
        chance=task.chance("test"),
        by_position=_profile(right_N, np.nonzero(scored_ST)[1]),
        by_answer=_profile(right_N, scored_ST.cumsum(axis=1)[scored_ST]),
        confusion=confusions(batch.targets_ST[scored_ST], predictions_ST[scored_ST]),
        probe=report,
        probe_sets=probe_sets,
        probe_chances={name: task.chance(name) for name in probe_sets},
        unreadable_sets=unreadable_sets,
        trained_length=_trained_length(task),
    )
    figure = draw_figure(diagnosis)
    write_atomically(folder / "diagnosis.png", lambda temporary: figure.savefig(temporary, dpi=150))
    write_json(folder / "diagnosis.json", asdict(diagnosis))  # last: where it is, the figure is too
    return diagnosis


@torch.no_grad()
def predict(model: Backbone, batch: Batch) -> tuple[Tokens, Accuracy]:
    """Most likely token (S, T) at every position of a split, and the accuracy at the scored ones.

    Raises:
        UnreadableError: the model fails on the split, or its output at a scored position is not finite.
    """
    device = next(model.parameters()).device
    chunk = sequences_per_forward(model, batch)
    predictions, counts = [], []
    for here in (slice(start, start + chunk) for start in range(0, len(batch), chunk)):
        arrays = (batch.inputs_ST[here], batch.targets_ST[here], batch.scored_ST[here])
        inputs_BT, targets_BT, scored_BT = (torch.from_numpy(array).to(device) for array in arrays)
        with calling_the_model(), product_autocast(device):
            logits_BTV = model(inputs_BT)
            finite = bool(logits_BTV[scored_BT].isfinite().all())
        if not finite:
            raise UnreadableError("the model's outputs are not finite")
        predictions.append(logits_BTV.float().argmax(-1).cpu().numpy())
        counts.append(count(logits_BTV[None], targets_BT, scored_BT))
    total = functools.reduce(operator.add, counts)
    accuracy = Accuracy(sequence=total.sequence_accuracy.item(), token=total.token_accuracy.item())
    return np.concatenate(predictions), accuracy


def _trained_length(task: Task) -> int | None:
    match task:
        case Extrapolation():
            return int(task.config.length)
        case Copying():
            return task.config.max_length
    return None


def _profile(right_N: NDArray[np.bool_], index_N: Tokens) -> Profile:
    total, correct = np.bincount(index_N), np.bincount(index_N, weights=right_N)
    index = np.flatnonzero(total)
    return Profile(
        index=index.tolist(), accuracy=(correct[index] / total[index]).tolist(), sequences=total[index].tolist()
    )


def confusions(targets_N: Tokens, predictions_N: Tokens) -> ConfusionMatrix:
    """Confusion matrix of at most ``MAX_CLASSES`` classes and the most frequent confusions of all of them."""
    classes, occurrences = np.unique(targets_N, return_counts=True)
    occurring = np.union1d(targets_N, predictions_N)
    targets = dict(zip(classes.tolist(), occurrences.tolist(), strict=True))
    wrong_N = targets_N != predictions_N
    shown = occurring
    if len(occurring) > MAX_CLASSES:
        missed = np.bincount(targets_N[wrong_N], minlength=classes[-1] + 1)[classes]
        shown = np.sort(classes[np.argsort(-missed, kind="stable")[:MAX_CLASSES]])
    pairs, frequency = np.unique(
        np.column_stack([targets_N[wrong_N], predictions_N[wrong_N]]), axis=0, return_counts=True
    )
    first = np.argsort(-frequency, kind="stable")[:TOP_CONFUSIONS]
    return ConfusionMatrix(
        occurring=len(occurring),
        classes=shown.tolist(),
        counts=confusion_matrix(targets_N, predictions_N, labels=shown).tolist(),
        targets=[targets.get(token, 0) for token in shown.tolist()],
        top=[
            Confusion(target=target, predicted=predicted, count=times, share=times / targets[target])
            for (target, predicted), times in zip(pairs[first].tolist(), frequency[first].tolist(), strict=True)
        ],
    )


def draw_figure(diagnosis: Diagnosis) -> Figure:
    """One figure: accuracy along the sequence, confusion matrix, linear probes and, if there are any, probe sets."""
    sets = bool(diagnosis.probe_sets or diagnosis.unreadable_sets)
    figure = Figure(figsize=(13, 9.5) if sets else (18, 5.2), layout="constrained")
    accuracy = diagnosis.accuracy
    figure.suptitle(
        f"{textwrap.fill(diagnosis.title, 120)}\n{diagnosis.task}, test: sequence accuracy {accuracy.sequence:.1%}, "
        f"token accuracy {accuracy.token:.1%} ({diagnosis.sequences:,} sequences, {diagnosis.scored_positions:,} "
        "scored positions)"
    )
    axes = figure.subplots(2, 2).flat if sets else figure.subplots(1, 3).flat
    _plot_profile(next(axes), diagnosis)
    _plot_confusions(figure, next(axes), diagnosis.confusion)
    _plot_probes(next(axes), diagnosis.probe)
    if sets:
        _plot_probe_sets(next(axes), diagnosis)
    return figure


def _accuracy_axis(axes: Axes, label: str, top: float = 1.05) -> None:
    axes.set_ylim(0, top)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _plot_profile(axes: Axes, diagnosis: Diagnosis) -> None:
    """By position, unless answers stand at so many different places that their ordinal reads better."""
    profile, label = diagnosis.by_position, "position in the sequence, from 0 (tokens)"
    if len(profile.index) > 2 * len(diagnosis.by_answer.index):
        profile, label = diagnosis.by_answer, "answer within its sequence (1 = first scored position)"
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
    axes.legend(loc="best")


def _plot_confusions(figure: Figure, axes: Axes, confusion: ConfusionMatrix) -> None:
    share_CC = np.array(confusion.counts) / np.maximum(1, confusion.targets)[:, None]
    image = axes.imshow(share_CC, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the target's scored positions", format=PercentFormatter(1))
    shown = len(confusion.classes)
    ticks = range(0, shown, -(-shown // 16))
    axes.set_xticks(ticks, [str(confusion.classes[i]) for i in ticks], rotation=90 if shown > 16 else 0)
    axes.set_yticks(ticks, [str(confusion.classes[i]) for i in ticks])
    axes.set_xlabel("predicted token")
    axes.set_ylabel("target token")
    which = "all" if shown == confusion.occurring else "most missed"
    axes.set_title(f"Confusion matrix ({which} {shown} of {confusion.occurring} tokens)")


def _plot_probes(axes: Axes, report: ProbeReport) -> None:
    """One group of bars a probe; the deviation over the folds as error bars."""
    reasons = [f"not possible: {single.impossible}" for single in report.probes if single.impossible]
    if len(reasons) == len(report.probes):
        middle = (len(reasons) - 1) / 2
        axes.text(middle, 0.5, "\n".join(dict.fromkeys(reasons)), ha="center", va="center", fontsize=8)
    labels = ("linear probe: hidden state", "linear probe: embedding", "most frequent answer", "model itself")
    for group, single in enumerate(report.probes):
        if single.hidden is None or single.embedding is None:
            if len(reasons) < len(report.probes):
                reason = textwrap.fill(f"not possible: {single.impossible}", 40)
                axes.text(group, 0.5, reason, ha="center", va="center", rotation=90, fontsize=8)
            continue
        heights = (single.hidden.mean, single.embedding.mean, single.majority or 0.0, single.model or 0.0)
        errors = (single.hidden.deviation, single.embedding.deviation, 0.0, 0.0)
        for i, (height, error) in enumerate(zip(heights, errors, strict=True)):
            bars = axes.bar(group + 0.2 * (i - 1.5), height, 0.2, yerr=error or None, capsize=3, color=f"C{i}")
            if len(report.probes) == 1:
                axes.bar_label(bars, fmt="{:.1%}", padding=2)
    handles = [axes.bar(0, 0, color=f"C{i}", label=label) for i, label in enumerate(labels)]
    axes.legend(handles=handles, loc="upper center", ncols=2, fontsize=8)
    axes.set_xlim(-0.6, len(report.probes) - 0.4)
    axes.set_xticks(range(len(report.probes)), [_probe_label(single) for single in report.probes], fontsize=8)
    examples = sum(single.examples for single in report.probes)
    mean = "" if report.hidden is None else f", mean accuracy from the hidden state {report.hidden:.1%}"
    axes.set_xlabel(f"{examples:,} examples{mean}")
    _accuracy_axis(axes, "accuracy (error bars: deviation over folds)", top=1.3)
    axes.set_title("Is the answer linearly in the hidden state?")


def _probe_label(single: Probe) -> str:
    where = "all scored positions" if single.position is None else f"position {single.position}"
    dropped = f"\n{single.dropped_classes} answers\nleft out" if single.dropped_classes else ""
    unfinished = "\nnot\nconverged" if single.converged is False else ""
    return f"{where}{dropped}{unfinished}"


def _plot_probe_sets(axes: Axes, diagnosis: Diagnosis) -> None:
    """A curve over N of the sets called "length N"; sets of other names as bars, or as lines beside a curve."""
    sets = {"test": diagnosis.accuracy, **diagnosis.probe_sets}
    chances = {"test": diagnosis.chance, **diagnosis.probe_chances}
    lengths = {
        int(name.removeprefix(LENGTH_PROBE)): name for name in sets if name.removeprefix(LENGTH_PROBE).isdecimal()
    }
    others = [name for name in sets if name not in lengths.values()]
    for i, (metric, chance_label) in enumerate((("sequence", ""), ("token", "chance"))):
        if lengths:
            curve, chance = (
                [getattr(accuracies[lengths[length]], metric) for length in sorted(lengths)]
                for accuracies in (sets, chances)
            )
            axes.plot(sorted(lengths), curve, marker="o", color=f"C{i}", label=f"{metric} accuracy", clip_on=False)
            axes.plot(sorted(lengths), chance, color="black", linestyle="dotted", label=chance_label)
            for name, style in zip(others, ("dashed", "dashdot") * len(others), strict=False):
                value = getattr(sets[name], metric)
                axes.axhline(value, color=f"C{i}", linestyle=style, linewidth=1, label=f"{metric}, {name}")
        else:
            at = np.arange(len(others)) + 0.38 * (i - 0.5)
            bars = axes.bar(at, [getattr(sets[name], metric) for name in others], 0.38, label=f"{metric} accuracy")
            axes.bar_label(bars, fmt="{:.1%}", path_effects=[withStroke(linewidth=3, foreground="white")])
            chance = [getattr(chances[name], metric) for name in others]
            axes.hlines(chance, at - 0.19, at + 0.19, color="black", linestyles="dotted", label=chance_label)
    if lengths:
        if diagnosis.trained_length is not None:
            label = f"longest in training: {diagnosis.trained_length}"
            axes.axvline(diagnosis.trained_length, color="0.5", linewidth=1, label=label)
        axes.set_xlabel('N of the set "length N" (tokens)')
    else:
        axes.set_xticks(range(len(others)), others)
    if unreadable := ", ".join(diagnosis.unreadable_sets):
        below = textwrap.fill(f"the model fails on: {unreadable}", 60)
        axes.set_xlabel(f"{axes.get_xlabel()}\n{below}".strip())
    _accuracy_axis(axes, "accuracy")
    axes.set_title("Further evaluation sets")
    axes.legend(loc="best", fontsize=8)
