"""Evaluation on the test split, only for the runs of a chosen point, and once per run.

The figures are stored in the run's folder as ``test.json``, from which later calls read them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from runners.files import DamagedFileError, load_tensors, read_json, validated, write_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.training.data import Resident
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.evaluate import evaluate
from runners.mad.training.protocol import Run
from tasks.base import Accuracy, Task
from tasks.metrics import Counts


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Figures of a run's kept parameters on the test split.

    Attributes:
        sequence_accuracy: share of sequences in [0, 1].
        token_accuracy: share of scored positions in [0, 1].
        loss: mean cross-entropy over scored positions in nats; None if it is not finite.
        extrapolation: accuracies by extrapolation set, without sets on which the model fails.
    """

    sequence_accuracy: float
    token_accuracy: float
    loss: float | None
    extrapolation: dict[str, Accuracy] = field(default_factory=dict)


def read_test(
    experiment: Experiment, runs: Sequence[Run], folder: Path, device: torch.device, together: int
) -> dict[Run, Reading]:
    """Return the test figures of finished runs; evaluate the runs that have none yet.

    Args:
        experiment: layer and task.
        runs: finished runs.
        folder: results folder.
        device: device of the evaluation.
        together: largest number of models in memory at a time, as in training.

    Raises:
        DamagedFileError: the parameters of a run without figures are missing, or its figures are damaged.
    """
    known = stored_readings(experiment, runs, folder)
    unread = [run for run in runs if run not in known]
    for start in range(0, len(unread), together):
        for run, reading in _read(experiment, unread[start : start + together], folder, device).items():
            write_json(run_folder(folder, experiment, run) / "test.json", asdict(reading))
            known[run] = reading

    return known


def stored_readings(experiment: Experiment, runs: Sequence[Run], folder: Path) -> dict[Run, Reading]:
    """Return the test figures that earlier calls stored of finished runs; evaluate nothing.

    Raises:
        DamagedFileError: figures are damaged.
    """
    found = {run: _known(run_folder(folder, experiment, run) / "test.json") for run in runs}
    return {run: reading for run, reading in found.items() if reading is not None}


def _known(path: Path) -> Reading | None:
    """Return the figures that an earlier call stored, if any."""
    values = read_json(path)
    return None if values is None else validated(path, Reading, values)


def _read(experiment: Experiment, runs: Sequence[Run], folder: Path, device: torch.device) -> dict[Run, Reading]:
    """Evaluate runs on the test split and on the extrapolation sets."""
    # An ensemble with the kept parameters.
    members = Ensemble(experiment.build, runs, experiment.protocol.optimizer, 1, device)
    kept = [kept_parameters(experiment, run, folder, members.shapes) for run in runs]
    for name, rows in members.named(members.params_RP).items():
        for row, parameters in zip(rows, kept, strict=True):
            row.copy_(parameters[name])

    # Counts on the test split, and accuracies on the extrapolation sets on which the model does not fail.
    counts = _counts(members, experiment.instance, "test")
    extrapolation: list[dict[str, Accuracy]] = [{} for _ in runs]
    for name in experiment.instance.extrapolation_names:
        try:
            found = _counts(members, experiment.instance, name)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a layer of limited length may raise anything on longer sequences; the diagnosis says what
            continue

        shares = zip(found.sequence_accuracy.tolist(), found.token_accuracy.tolist(), strict=True)
        for accuracies, (sequence, token) in zip(extrapolation, shares, strict=True):
            accuracies[name] = Accuracy(sequence=sequence, token=token)

    columns = (counts.sequence_accuracy.tolist(), counts.token_accuracy.tolist(), counts.loss.tolist())
    return {
        run: Reading(
            sequence_accuracy=sequence,
            token_accuracy=token,
            loss=loss if math.isfinite(loss) else None,
            extrapolation=accuracies,
        )
        for run, sequence, token, loss, accuracies in zip(runs, *columns, extrapolation, strict=True)
    }


def _counts(members: Ensemble, task: Task, name: str) -> Counts:
    """Evaluate all members on a split or extrapolation set."""
    data = Resident.of(task.batch(name), members.device)
    return evaluate(members, members.params_RP, data, task.vocab_size)


def kept_parameters(
    experiment: Experiment, run: Run, folder: Path, shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return the parameters of a finished run that training kept, by name.

    Args:
        experiment: layer and task.
        run: the finished run.
        folder: results folder.
        shapes: shapes of the parameters that the model has today, by name.

    Raises:
        DamagedFileError: the file is missing, cannot be read, or holds other parameters, as after a change of names.
    """
    path = run_folder(folder, experiment, run) / "model.safetensors"
    try:
        parameters = load_tensors(path)[0]
    except (FileNotFoundError, DamagedFileError) as error:
        lost = "is gone, perhaps by --keep" if isinstance(error, FileNotFoundError) else "is damaged"
        raise DamagedFileError(f"{path} {lost}: another --out trains the run again") from error

    found = {name: parameter.shape for name, parameter in parameters.items()}
    if other := sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        named = ", ".join(other[:3]) + (" …" if len(other) > 3 else "")
        raise DamagedFileError(
            f"{path} and today's code do not share the parameters {named}: give them the names and shapes that they "
            "had, or another --out trains the run again"
        )
    return parameters
