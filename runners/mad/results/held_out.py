"""The test split: read for the runs of a chosen point alone, and of each run once.

What was read stays in the run's folder as ``test.json``; after that neither the model nor the split is touched again.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from runners.files import DamagedFileError, load_tensors, read_json, write_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.training.data import Resident
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.evaluate import evaluate
from runners.mad.training.protocol import Run
from tasks.base import Accuracy, Task
from tasks.metrics import Counts


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a run's kept parameters reach on the test split.

    Attributes:
        sequence_accuracy: share of sequences in [0, 1].
        token_accuracy: share of scored positions in [0, 1].
        loss: mean cross-entropy of scored positions in nats; None if it is not finite.
        extrapolation: accuracies on the task's extrapolation sets, as far as the model can read them.
    """

    sequence_accuracy: float
    token_accuracy: float
    loss: float | None
    extrapolation: dict[str, Accuracy] = field(default_factory=dict)


def read_test(
    experiment: Experiment, runs: Sequence[Run], folder: Path, device: torch.device, together: int
) -> dict[Run, Reading]:
    """Test figures of finished runs below a results folder, by run.

    At most ``together`` models are in memory at a time, as in training.

    Raises:
        DamagedFileError: a run that was not read before has lost its parameters, or what was read is damaged.
    """
    paths = {run: run_folder(folder, experiment, run) / "test.json" for run in runs}
    known = {run: reading for run, path in paths.items() if (reading := _known(path)) is not None}
    unread = [run for run in runs if run not in known]
    for start in range(0, len(unread), together):
        for run, reading in _read(experiment, unread[start : start + together], folder, device).items():
            write_json(paths[run], asdict(reading))
            known[run] = reading
    return known


def _known(path: Path) -> Reading | None:
    """What was read before, if it was."""
    values = read_json(path)
    try:
        return None if values is None else TypeAdapter(Reading).validate_python(values)
    except ValidationError as error:
        reason = "it holds no test figures"
        raise DamagedFileError(f"{path} is damaged ({reason}): delete it and run the same command again") from error


def _read(experiment: Experiment, runs: Sequence[Run], folder: Path, device: torch.device) -> dict[Run, Reading]:
    kept = [kept_parameters(experiment, run, folder) for run in runs]
    members = Ensemble(experiment.build, runs, experiment.protocol.optimizer, 1, device)
    for name, rows in members.named(members.params_RP).items():
        for row, parameters in zip(rows, kept, strict=True):
            row.copy_(parameters[name])
    counts = _counts(members, experiment.instance, "test")
    extrapolation: list[dict[str, Accuracy]] = [{} for _ in runs]
    for name in experiment.instance.extrapolation_names:
        try:
            found = _counts(members, experiment.instance, name)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # layers of bounded length may fail on longer sequences in any way; the diagnosis says how
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
    """What all members get right on a split or extrapolation set."""
    data = Resident.of(task.batch(name), members.device)
    return evaluate(members, members.params_RP, data, task.vocab_size)


def kept_parameters(experiment: Experiment, run: Run, folder: Path) -> dict[str, Tensor]:
    """Parameters that training kept of a finished run below a results folder, by name.

    Raises:
        DamagedFileError: they are gone, or cannot be read.
    """
    path = run_folder(folder, experiment, run) / "model.safetensors"
    try:
        return load_tensors(path)[0]
    except (FileNotFoundError, DamagedFileError) as error:
        raise DamagedFileError(f"{path} is gone or damaged: another --out trains the run again") from error
