"""Metrics, curves and results of training."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tasks.metrics import Counts, score


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Accuracies of one run on a split.

    Attributes:
        sequence_accuracy: share of sequences in [0, 1] whose scored positions are all right.
        token_accuracy: share of scored positions in [0, 1] that are right.
        loss: mean cross-entropy of the scored positions in nats.
        score: value by which runs and evaluations are selected, see ``tasks.metrics.score``.
    """

    sequence_accuracy: float
    token_accuracy: float
    loss: float
    score: float


def metrics_by_run(counts: Counts) -> list[Metrics]:
    """Return each run's metrics; this waits for the device."""
    columns = (counts.sequence_accuracy, counts.token_accuracy, counts.loss, score(counts))
    return [
        Metrics(sequence_accuracy=sequence, token_accuracy=token, loss=loss, score=value)
        for sequence, token, loss, value in zip(*(column.tolist() for column in columns), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One evaluation of one run.

    Attributes:
        step: optimizer steps done.
        train_loss: mean training loss since the last evaluation, in nats; None if it is not finite.
        validation: metrics on the validation split; None once the run has diverged.
    """

    step: int
    train_loss: float | None
    validation: Metrics | None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "CurvePoint":
        """Undo ``dataclasses.asdict``."""
        metrics = values["validation"]
        return CurvePoint(**{**values, "validation": None if metrics is None else Metrics(**metrics)})


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        curve: evaluations in order.
        best_step: step whose parameters were kept; 0 if no evaluation was finite.
        diverged_step: step, counted from 1, at which loss or gradient was first not finite.
        validation: metrics of the kept parameters; None for a diverged run.
        parameters: kept parameters by name.
        seconds: wall time of training, evaluations included, shared with the other runs of the ensemble.
        steps_per_second: optimizer steps per second of the whole ensemble.
    """

    curve: list[CurvePoint]
    best_step: int
    diverged_step: int | None
    validation: Metrics | None
    parameters: dict[str, Tensor]
    seconds: float
    steps_per_second: float
