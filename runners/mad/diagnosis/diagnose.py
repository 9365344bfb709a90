"""Diagnosis of one trained model: accuracy by position, confusions, linear probes, and accuracy beyond training.

``diagnose`` reads the test split and the extrapolation sets, and writes ``diagnosis.json`` and ``diagnosis.png``. It is
meant for a model that is already chosen; its results must not be used to choose one.

Dimensions: S sequences, T positions, N scored positions.
"""

from dataclasses import asdict
from pathlib import Path

import torch

from mixers.models import Backbone
from runners.files import write_atomically, write_json
from runners.mad.diagnosis.confusions import count_confusions
from runners.mad.diagnosis.figure import draw_figure
from runners.mad.diagnosis.findings import Diagnosis
from runners.mad.diagnosis.linear_probes import fit_probes
from runners.mad.diagnosis.outputs import UnreadableError, predict
from runners.mad.diagnosis.profile import profiles
from tasks.base import Accuracy, Task
from tasks.metrics import macro_accuracy


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
    diagnosis = _examine(model, task, title)

    # The JSON file is written last, so that the figure exists wherever it does.
    figure = draw_figure(diagnosis)
    write_atomically(folder / "diagnosis.png", lambda temporary: figure.savefig(temporary, dpi=150))
    write_json(folder / "diagnosis.json", asdict(diagnosis))
    return diagnosis


def _examine(model: Backbone, task: Task, title: str) -> Diagnosis:
    """Read the test split and the extrapolation sets."""
    batch = task.split("test")
    predictions_ST, accuracy = predict(model, batch)

    # Scored positions.
    scored_ST = batch.scored_ST
    by_position, by_answer = profiles((predictions_ST == batch.targets_ST).astype(float), scored_ST)
    (macro,) = macro_accuracy(
        torch.from_numpy(predictions_ST[None]),
        torch.from_numpy(batch.targets_ST),
        torch.from_numpy(scored_ST),
        task.vocab_size,
    ).tolist()

    probe = fit_probes(model, task, batch, predictions_ST)
    extrapolation_sets, unreadable_sets = _extrapolate(model, task)

    return Diagnosis(
        title=title,
        task=task.name,
        sequences=len(batch),
        scored_positions=int(scored_ST.sum()),
        accuracy=accuracy,
        macro_accuracy=macro,
        chance=task.chance("test"),
        by_position=by_position,
        by_answer=by_answer,
        confusion=count_confusions(batch.targets_ST[scored_ST], predictions_ST[scored_ST]),
        probe=probe,
        extrapolation_sets=extrapolation_sets,
        extrapolation_chances={name: task.chance(name) for name in extrapolation_sets},
        unreadable_sets=unreadable_sets,
        trained_length=task.trained_length,
    )


def _extrapolate(model: Backbone, task: Task) -> tuple[dict[str, Accuracy], dict[str, str]]:
    """Return the accuracy on each extrapolation set, and why there is none on the others."""
    accuracies, reasons = {}, {}
    for name, batch in task.extrapolation_sets().items():
        try:
            _, accuracies[name] = predict(model, batch)
        except UnreadableError as error:
            reasons[name] = str(error)
    return accuracies, reasons
