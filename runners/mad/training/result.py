"""What training yields: metrics, curves, results."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Accuracies as shares in [0, 1], mean cross-entropy of scored positions in nats, and the selection score."""

    sequence_accuracy: float
    token_accuracy: float
    loss: float
    score: float


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One evaluation of one run: optimizer steps done, mean training loss since the last one, validation metrics.

    Once the run has diverged, metrics are None, and so is a loss that is not finite.
    """

    step: int
    train_loss: float | None
    validation: Metrics | None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "CurvePoint":
        """Inverse of ``dataclasses.asdict``."""
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
        steps_per_second: optimizer steps a second of the whole ensemble.
    """

    curve: list[CurvePoint]
    best_step: int
    diverged_step: int | None
    validation: Metrics | None
    parameters: dict[str, Tensor]
    seconds: float
    steps_per_second: float
