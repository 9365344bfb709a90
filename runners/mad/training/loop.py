"""The one training loop: an ensemble of runs of one model on one task.

The data set and the data order lie on the device; between two evaluations only checkpoints are read from it. On a CUDA
device the optimizer step (forward, loss, backward, AdamW) is one CUDA graph. The same runs trained together are
bitwise repeatable on the CPU, and on CUDA where all kernels are (those of RT and the Transformer, see
``mixers.kernels``); a run in other company agrees within rounding, for products of another size may round otherwise.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from mixers.models import Backbone
from runners.files import load_tensors, save_tensors
from runners.interrupt import StoppedError, asked_to_stop
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.evaluate import Resident, _metrics, evaluate
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.result import CurvePoint, Result
from runners.mad.training.step import Stepper
from tasks.base import Task
from tasks.metrics import score

SECONDS_BETWEEN_CHECKPOINTS = 20.0

SECONDS_BETWEEN_REPORTS = 1.0

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
) -> list[Result]:
    """Train ``runs`` together; resume from ``checkpoints`` (one file a run, all at the same step) where they exist.

    Raises:
        StoppedError: SIGINT or SIGTERM has come, and checkpoints are written.
    """
    loop = _Loop(build, task, protocol, runs, device, checkpoints)
    if all(path.exists() for path in checkpoints):
        loop.load()
        resumed(loop.step, loop.curves)
    measured = len(loop.curves[0])
    with asked_to_stop() as asked:
        for target in protocol.evaluation_steps(loop.ensemble.total_steps)[measured:]:
            if all(curve and curve[-1].validation is None for curve in loop.curves):
                break
            loop.advance(target, progressed, asked)
            loop.stop_if(asked)  # before a listener finds that other processes have stopped too
            listener(target, [curve[-1] for curve in loop.curves])
    return loop.results()


class _Loop:
    def __init__(
        self,
        build: Callable[[], Backbone],
        task: Task,
        protocol: Protocol,
        runs: Sequence[Run],
        device: torch.device,
        checkpoints: Sequence[Path],
    ) -> None:
        self.task, self.device, self.protocol, self.checkpoints = task, device, protocol, checkpoints
        data = task.split("train")
        protocol.check(len(data))
        self.examples = len(data)
        self.ensemble = Ensemble(build, runs, protocol.optimizer, protocol.total_steps(len(data)), device)
        self.stepper = Stepper(self.ensemble, data, protocol.batch_size)
        if device.type == "cuda":
            self.stepper.capture()
        self.validation = Resident.of(task.split("validation"), device)
        self.best_RP = self.ensemble.params_RP.clone()
        self.best_score_R = torch.full((len(runs),), -torch.inf, dtype=torch.float64, device=device)
        self.best_step_R = torch.zeros(len(runs), dtype=torch.int64, device=device)
        self.curves: list[list[CurvePoint]] = [[] for _ in runs]
        self.step = 0
        self.seconds = 0.0
        self.counted = self.saved = self.reported = time.monotonic()

    def advance(self, target: int, progressed: Progressed, asked: Sequence[int]) -> None:
        """Train up to step ``target`` and evaluate there, with a checkpoint now and then.

        A checkpoint of a step at which there is an evaluation has it: of one step there are no two kinds.
        """
        self.counted = time.monotonic()
        per_epoch = self.protocol.steps_per_epoch(self.examples)
        steps = target - (self.curves[0][-1].step if self.curves[0] else 0)
        while self.step < target:
            epoch, within = divmod(self.step, per_epoch)
            # A CPU may take seconds for a step, a GPU is handed many at once.
            here = 1 if self.device.type == "cpu" else min(per_epoch - within, target - self.step)
            self.stepper.run(epoch, here)
            self.step += here
            if self.step < target:
                self.stop_if(asked)
                saved = self._save_if_due()
                # A GPU may be far behind what it was handed, but not when a checkpoint has been read from it.
                silent = self.counted - self.reported
                if saved or (self.device.type == "cpu" and silent > SECONDS_BETWEEN_REPORTS):
                    progressed(self.step)
                    self.reported = self.counted
        train_loss = (self.stepper.take_loss_sum() / steps).tolist()
        counts = evaluate(self.ensemble, self.ensemble.params_RP, self.validation, self.task.vocab_size)
        self.ensemble.mark_diverged(~counts.loss.isfinite(), self.ensemble.step)
        alive_R = self.ensemble.diverged_R < 0
        better_R = alive_R & (score(counts) > self.best_score_R)
        self.best_RP = torch.where(better_R[:, None], self.ensemble.params_RP, self.best_RP)
        self.best_score_R = torch.where(better_R, score(counts), self.best_score_R)
        self.best_step_R = torch.where(better_R, self.step, self.best_step_R)
        for curve, loss, metrics, alive in zip(
            self.curves, train_loss, _metrics(counts), alive_R.tolist(), strict=True
        ):
            loss = loss if math.isfinite(loss) else None
            curve.append(CurvePoint(step=target, train_loss=loss, validation=metrics if alive else None))
        self._save_if_due()

    def results(self) -> list[Result]:
        """Each run's kept parameters and their metrics."""
        metrics = _metrics(evaluate(self.ensemble, self.best_RP, self.validation, self.task.vocab_size))
        stacked = self.ensemble.named(self.best_RP)
        results = []
        for r, diverged in enumerate(self.ensemble.diverged_R.tolist()):
            alive = diverged < 0
            results.append(
                Result(
                    curve=self.curves[r],
                    best_step=int(self.best_step_R[r]),
                    diverged_step=None if alive else diverged,
                    validation=metrics[r] if alive else None,
                    parameters={name: parameter[r] for name, parameter in stacked.items()},
                    seconds=self.seconds,
                    steps_per_second=self.step / self.seconds,
                )
            )
        return results

    def _rows(self) -> dict[str, Tensor]:
        """Tensors of the loop with the run axis first, live: copying into them restores a state."""
        return {
            **self.ensemble.state,
            "best": self.best_RP,
            "best_score": self.best_score_R,
            "best_step": self.best_step_R,
            "loss_sum": self.stepper.loss_sum_R,
        }

    def stop_if(self, asked: Sequence[int]) -> None:
        """Save and raise StoppedError if ``asked`` to stop."""
        if asked:
            self.save()
            raise StoppedError(self.step, asked)

    def _save_if_due(self) -> bool:
        """Count the time since the last call, and save if the last checkpoint is old; whether it did."""
        now = time.monotonic()
        self.seconds, self.counted = self.seconds + now - self.counted, now
        due = now - self.saved > SECONDS_BETWEEN_CHECKPOINTS
        if due:
            self.save()
            self.saved = time.monotonic()
        return due

    def save(self) -> None:
        """Write one file a run, so that each can go on alone or in other company."""
        for r, path in enumerate(self.checkpoints):
            info = {"step": self.step, "seconds": self.seconds, "curve": [asdict(point) for point in self.curves[r]]}
            save_tensors(path, {name: tensor[r] for name, tensor in self._rows().items()}, info)

    def load(self) -> None:
        """Go on from files that ``save`` wrote, all at the same step."""
        for r, path in enumerate(self.checkpoints):
            tensors, info = load_tensors(path)
            for name, tensor in self._rows().items():
                tensor[r].copy_(tensors[name])
            self.curves[r] = [CurvePoint.from_dict(point) for point in info["curve"]]
            self.step, self.seconds = info["step"], info["seconds"]
        self.ensemble.step.fill_(self.step)
