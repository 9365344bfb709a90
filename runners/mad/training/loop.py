"""The training loop: an ensemble of runs of one model on one task.

Between two evaluations:

1. The runs take optimizer steps on data that lies on the device, each run in its own order of the epoch: one step at a
   time on a CPU, the rest of the epoch at once on a GPU.
2. The training losses add up on the device. Between evaluations only checkpoints are read from it.
3. If SIGINT or SIGTERM has come, the loop saves a checkpoint of each run and raises ``StoppedError``.
4. If the last checkpoints are older than ``SECONDS_BETWEEN_CHECKPOINTS``, new ones replace them.
5. The caller is told how many steps are done: on a CPU every second, on a GPU after a checkpoint.

At an evaluation:

6. Each run is measured on the validation split. A run whose loss there is not finite is frozen.
7. Parameters with a higher score than at all earlier evaluations are kept.
8. Each curve gets a point: the step, the mean training loss since the last evaluation, and the metrics.
9. Checkpoints are saved if they are due. They contain the point: no checkpoint of this step is without it.
10. A wish to stop is heeded as in 3. Only then the caller is told of the evaluation.

Training ends at the last step, or once all runs have diverged or reached the accuracy with which they end. A run that
has reached it keeps those parameters, whatever it does while others go on.

On a CUDA device the optimizer step (forward, loss, backward, AdamW) is one CUDA graph, unless the runs are computed one
after another. The same runs trained together repeat bitwise on the CPU. On CUDA they do so where all kernels repeat,
which those of RT and the Transformer do (see ``mixers.ops.kernels``). A run in other company agrees within rounding,
because products of another size may round differently.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixers.models import Backbone
from runners.files import load_tensors, save_tensors, typed
from runners.interrupt import StoppedError
from runners.mad.training.ensemble import Ensemble, Resident, evaluate
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.step import Stepper
from tasks.base import Task
from tasks.metrics import score

SECONDS_BETWEEN_CHECKPOINTS = 20.0
SECONDS_BETWEEN_REPORTS = 1.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Accuracies of one run on a split.

    Attributes:
        sequence_accuracy: share of sequences in [0, 1] whose scored positions are all right.
        token_accuracy: share of scored positions in [0, 1] that are right.
        loss: mean cross-entropy of the scored positions in nats.
        score: value that picks the best evaluation of a run, and the seed whose model is diagnosed; see
            ``tasks.metrics.score``.
    """

    sequence_accuracy: float
    token_accuracy: float
    loss: float
    score: float


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


Listener = Callable[[int, list[CurvePoint]], None]
"""Called after each evaluation with the step and each run's point."""

Resumed = Callable[[int, list[list[CurvePoint]]], None]
"""Called before the first step, where there are checkpoints, with their step and each run's curve so far."""

Progressed = Callable[[int], None]
"""Called between evaluations with the steps done: on a CPU every second, on a GPU after a checkpoint."""


def train(
    build: Callable[[], Backbone],
    task: Task,
    protocol: Protocol,
    runs: Sequence[Run],
    device: torch.device,
    checkpoints: Sequence[Path],
    listener: Listener = lambda step, points: None,
    resumed: Resumed = lambda step, curves: None,
    progressed: Progressed = lambda step: None,
    until: float = math.inf,
    asked: Sequence[int] = (),
) -> Generator[None, None, list[Result]]:
    """Train runs together.

    Yields before each evaluation, when the device has the steps up to it: on a GPU, others can be trained meanwhile.

    Args:
        build: makes the model of one run, with parameters from torch's global generator.
        task: gives the training and the validation split.
        protocol: steps, batch size, evaluations and optimizer.
        runs: what is trained.
        device: where it is trained.
        checkpoints: one file per run, or an empty sequence. If all files exist, and hold the parameters that the model
            has today, training resumes from them; they must hold the same step.
        listener: called after each evaluation.
        resumed: called if training resumes.
        progressed: called between evaluations.
        until: token accuracy on the validation split with which a run ends; the ensemble ends with the last one.
        asked: signals that have come, as of ``runners.interrupt.asked_to_stop``.

    Returns:
        The result of each run.

    Raises:
        StoppedError: SIGINT or SIGTERM has come; the checkpoints are written.
        DamagedFileError: a checkpoint cannot be read.
    """
    loop = _Loop(build, task, protocol, runs, device, checkpoints, until)
    if checkpoints and all(path.exists() for path in checkpoints) and loop.load():
        resumed(loop.step, loop.curves)

    evaluations = protocol.evaluation_steps(loop.ensemble.optimizer.total_steps)
    done, on_cpu = len(loop.curves[0]), device.type == "cpu"
    for target in evaluations[done:]:
        if all(curve and (curve[-1].validation is None or loop.ending(curve)) for curve in loop.curves):
            break
        loop.counted = time.monotonic()

        # One step on a CPU, which may need seconds for it; up to the end of the epoch on a GPU.
        while loop.step < target:
            epoch, within_epoch = divmod(loop.step, loop.stepper.steps_per_epoch)
            steps = 1 if on_cpu else min(loop.stepper.steps_per_epoch - within_epoch, target - loop.step)
            loop.stepper.begin(epoch)
            for _ in range(steps):
                loop.stepper.take_step()
            loop.step += steps
            if loop.step == target:
                break
            loop.stop_if(asked)

            # A GPU may be far behind the steps that it was handed, but not when a checkpoint has been read from it.
            if loop.count_and_save() or (on_cpu and loop.counted - loop.reported > SECONDS_BETWEEN_REPORTS):
                progressed(loop.step)
                loop.reported = loop.counted

        # Stop before the listener, which may find that other processes have stopped too.
        yield
        loop.add_points()
        loop.count_and_save()
        loop.stop_if(asked)
        listener(target, [curve[-1] for curve in loop.curves])
    return loop.results()


class _Loop:
    """State of a training, and the steps of the module's docstring.

    Attributes:
        step: optimizer steps done, or handed to the device.
        curves: evaluations of each run.
        seconds: wall time of training, up to ``counted``.
        counted: clock time up to which ``seconds`` counts.
        saved: clock time of the last checkpoint.
        reported: clock time of the last report.
    """

    def __init__(
        self,
        build: Callable[[], Backbone],
        task: Task,
        protocol: Protocol,
        runs: Sequence[Run],
        device: torch.device,
        checkpoints: Sequence[Path],
        until: float,
    ) -> None:
        self.until = until
        self.device = device
        self.checkpoints = checkpoints
        self.vocab_size = task.vocab_size

        # Data.
        data = task.split("train")
        protocol.check(len(data))
        self.validation = Resident.of(task.split("validation"), device)

        # Runs and their steps.
        self.ensemble = Ensemble(build, runs, protocol.optimizer, protocol.total_steps(len(data)), device)
        self.stepper = Stepper(self.ensemble, data, protocol)
        if device.type == "cuda":
            self.stepper.capture(compiling=math.isinf(until))  # a rung of a profile takes seconds

        # What training yields.
        self.best = BestParameters(self.ensemble.params_RP)
        self.curves: list[list[CurvePoint]] = [[] for _ in runs]
        self.step = 0

        # Clock.
        self.seconds = 0.0
        self.counted = self.saved = self.reported = time.monotonic()

    def ending(self, curve: Sequence[CurvePoint]) -> int | None:
        """Return which point of a curve ends its run, counted from 1; None while none does."""
        for number, point in enumerate(curve, 1):
            if point.validation is not None and point.validation.token_accuracy >= self.until:
                return number
        return None

    def stop_if(self, asked: Sequence[int]) -> None:
        """Save and raise ``StoppedError`` if there is a signal in ``asked``."""
        if asked:
            self.save()
            raise StoppedError(self.step, asked)

    def save(self) -> None:
        """Write one file per run, so that each can be resumed alone or in other company."""
        for r, path in enumerate(self.checkpoints):
            info = {
                "step": self.step,
                "seconds": self.seconds,
                "curve": [asdict(point) for point in self.curves[r]],
                "parameters": self._parameters,
            }
            save_tensors(path, {name: tensor[r] for name, tensor in self._rows().items()}, info)

    def load(self) -> bool:
        """Resume from files that ``save`` wrote, all at the same step.

        Returns:
            Whether they hold the parameters that the model has, in this order; else nothing is changed.
        """
        states = [load_tensors(path) for path in self.checkpoints]
        if any(info.get("parameters") != self._parameters for _, info in states):
            return False

        for r, (tensors, info) in enumerate(states):
            for name, tensor in self._rows().items():
                tensor[r].copy_(tensors[name])
            self.curves[r] = [typed(CurvePoint, point) for point in info["curve"]]
            self.step = info["step"]
            self.seconds = info["seconds"]
        self.ensemble.optimizer.step.fill_(self.step)
        return True

    def results(self) -> list[Result]:
        """Return each run's kept parameters and their metrics."""
        parameters = self.ensemble.named(self.best.params_RP)
        best, diverged_R = self.best.step_R.tolist(), self.ensemble.diverged_R.tolist()
        measured = [{point.step: point.validation for point in curve} for curve in self.curves]

        # What a run did behind its end, in the company of others, does not count.
        found = [self.ending(curve) for curve in self.curves]
        diverged_R = [-1 if end else step for end, step in zip(found, diverged_R, strict=True)]

        return [
            Result(
                curve=self.curves[r][: found[r]],
                best_step=best[r],
                diverged_step=None if diverged < 0 else diverged,
                validation=measured[r][best[r]] if diverged < 0 else None,
                parameters={name: stacked[r] for name, stacked in parameters.items()},
                seconds=self.seconds,
                steps_per_second=self.step / self.seconds,
            )
            for r, diverged in enumerate(diverged_R)
        ]

    def add_points(self) -> None:
        """Measure all runs, keep the best parameters, and add a point to each curve."""
        steps = self.step - (self.curves[0][-1].step if self.curves[0] else 0)
        losses = (self.stepper.take_loss_sum() / steps).tolist()
        counts = evaluate(self.ensemble, self.ensemble.params_RP, self.validation, self.vocab_size)

        # Runs that have diverged keep nothing more.
        optimizer = self.ensemble.optimizer
        optimizer.mark_diverged(~counts.loss.isfinite(), optimizer.step)
        alive_R = optimizer.diverged_R < 0
        running_R = torch.tensor([self.ending(curve) is None for curve in self.curves], device=self.device)
        self.best.keep_better(self.ensemble.params_RP, score(counts), alive_R & running_R, self.step)

        columns = (counts.sequence_accuracy, counts.token_accuracy, counts.loss, score(counts))
        metrics = [
            Metrics(sequence_accuracy=sequence, token_accuracy=token, loss=loss, score=value)
            for sequence, token, loss, value in zip(*(column.tolist() for column in columns), strict=True)
        ]
        for r, alive in enumerate(alive_R.tolist()):
            loss = losses[r] if math.isfinite(losses[r]) else None
            self.curves[r].append(CurvePoint(step=self.step, train_loss=loss, validation=metrics[r] if alive else None))

    def count_and_save(self) -> bool:
        """Count the time since the last call; save if the last checkpoints are old, and return whether it did."""
        now = time.monotonic()
        self.seconds += now - self.counted
        self.counted = now
        due = now - self.saved > SECONDS_BETWEEN_CHECKPOINTS
        if due:
            self.save()
            self.saved = time.monotonic()
        return due

    @property
    def _parameters(self) -> list[list[Any]]:
        """Name and shape of each parameter, in the order in which rows hold them."""
        return [[name, list(shape)] for name, shape in self.ensemble.shapes.items()]

    def _rows(self) -> dict[str, Tensor]:
        """Tensors with a row for each run; live, so that copying into them restores a state."""
        return {**self.ensemble.rows, **self.best.rows, "loss_sum": self.stepper.loss_sum_R}


class BestParameters:
    """Parameters (R, P) of the evaluation of each run with the highest score, that score and its step."""

    def __init__(self, params_RP: Tensor) -> None:
        """Begin with the initial parameters, at step 0 and below every score."""
        runs = len(params_RP)
        device = params_RP.device
        self.params_RP = params_RP.clone()
        self.score_R = torch.full((runs,), -torch.inf, dtype=torch.float64, device=device)
        self.step_R = torch.zeros(runs, dtype=torch.int64, device=device)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Tensors with a row for each run; live, so that copying into them restores."""
        return {"best": self.params_RP, "best_score": self.score_R, "best_step": self.step_R}

    def keep_better(self, params_RP: Tensor, score_R: Tensor, alive_R: Tensor, step: int) -> None:
        """Keep the parameters of the runs that are alive and have a higher score than before."""
        better_R = alive_R & (score_R > self.score_R)
        self.params_RP = torch.where(better_R[:, None], params_RP, self.params_RP)
        self.score_R = torch.where(better_R, score_R, self.score_R)
        self.step_R = torch.where(better_R, step, self.step_R)
