"""The one training loop: an ensemble of runs of one model on one task.

The data set and the data order lie on the device; between two evaluations only checkpoints are read from it. On a CUDA
device the optimizer step (forward, loss, backward, AdamW) is one CUDA graph. The same runs trained together are
bitwise repeatable on the CPU, and on CUDA where all kernels are (those of RT and the Transformer, see
``mixers.kernels``); a run in other company agrees within rounding, for products of another size may round otherwise.
"""

import functools
import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mixers.backbone import Backbone
from runners.checkpoint import load_tensors, save_tensors
from runners.ensemble import Ensemble, Optimizer, Run
from runners.stop import StoppedError, asked_to_stop
from tasks.base import Batch, Task
from tasks.metrics import Counts, count, score

SECONDS_BETWEEN_CHECKPOINTS = 20.0
SECONDS_BETWEEN_REPORTS = 1.0
ELEMENTS_PER_FORWARD = {"cpu": 2**26, "cuda": 2**31}
"""Size in elements of the largest tensor that an evaluation may make at once."""
ELEMENTS_PER_TOKEN = 8_192
"""Least size of that tensor per token: Mamba's scan holds two of 256 channels with 16 states."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every run of an experiment is trained.

    Attributes:
        batch_size: sequences a step.
        epochs: passes over the training split.
        steps: optimizer steps, in place of epochs.
        evaluations: evenly spaced evaluations on the validation split; the best one's parameters are kept.
        optimizer: AdamW and its schedule.
    """

    batch_size: int = 128
    epochs: int = 200
    steps: int | None = None
    evaluations: int = 40
    optimizer: Optimizer = field(default_factory=Optimizer)

    def total_steps(self, examples: int) -> int:
        """Optimizer steps for a training split of ``examples`` sequences."""
        return self.epochs * self.steps_per_epoch(examples) if self.steps is None else self.steps

    def check(self, examples: int) -> None:
        """Raise ValueError where a batch does not fit into a training split of ``examples`` sequences."""
        if self.batch_size > examples:
            raise ValueError(f"batch size {self.batch_size} is larger than the {examples} training examples: lower it")

    def steps_per_epoch(self, examples: int) -> int:
        """Steps in which every example is seen once (the last batch is filled up from the epoch's start)."""
        return math.ceil(examples / self.batch_size)

    def evaluation_steps(self, total_steps: int) -> list[int]:
        """Steps after which the validation split is read, the last step among them."""
        count = min(self.evaluations, total_steps)
        return [round(total_steps * (i + 1) / count) for i in range(count)]


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


class Stepper:
    """Runs optimizer steps on data that lies on the device; each is a replay of one CUDA graph after ``capture``."""

    def __init__(self, ensemble: Ensemble, data: Batch, batch_size: int) -> None:
        device, runs = ensemble.device, len(ensemble.runs)
        self.ensemble = ensemble
        self.inputs_ST = torch.from_numpy(data.inputs_ST).to(device)
        self.targets_ST = torch.from_numpy(data.targets_ST).to(device)
        self.steps_per_epoch = math.ceil(len(data) / batch_size)
        self.order_NRB = torch.zeros(self.steps_per_epoch, runs, batch_size, dtype=torch.int64, device=device)
        """Sequences of each step of ``epoch``."""
        self.loss_sum_R = torch.zeros(runs, device=device)
        self.epoch = -1
        self.replay = self._step

    def run(self, epoch: int, steps: int) -> None:
        """Take ``steps`` steps, all within ``epoch``."""
        if epoch != self.epoch:
            seeds = [run.seed for run in self.ensemble.runs]
            orders = [data_order(seed, epoch, len(self.inputs_ST)) for seed in seeds]
            shape = self.order_NRB[:, 0].shape
            pinned = torch.from_numpy(np.stack([np.resize(order, shape) for order in orders], axis=1))
            if self.ensemble.device.type == "cuda":
                pinned = pinned.pin_memory()
            self.order_NRB.copy_(pinned, non_blocking=True)
            self.epoch = epoch
        for _ in range(steps):
            self.replay()

    def take_loss_sum(self) -> Tensor:
        """Sum of the losses (R,) since the last call."""
        taken = self.loss_sum_R.clone()
        self.loss_sum_R.zero_()
        return taken

    def capture(self) -> None:
        """Capture a step as a CUDA graph; parameters, optimizer and losses are left as they are."""
        touched = [*self.ensemble.state.values(), self.ensemble.step, self.loss_sum_R]
        before = [tensor.clone() for tensor in touched]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(touched, before, strict=True):
            tensor.copy_(value)
        self.replay = graph.replay

    def _step(self) -> None:
        within = (self.ensemble.step % self.steps_per_epoch)[None]
        index_RB = self.order_NRB.index_select(0, within).squeeze(0)
        self.loss_sum_R += self.ensemble.train_step(self.inputs_ST[index_RB], self.targets_ST[index_RB])


def data_order(seed: int, epoch: int, examples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Order in which a run with ``seed`` sees its examples in ``epoch``; the same on every device."""
    return np.random.default_rng([seed, epoch]).permutation(examples)


class Resident(NamedTuple):
    """A split on the device."""

    inputs_ST: Tensor
    targets_ST: Tensor
    scored_ST: Tensor

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "Resident":
        arrays = (batch.inputs_ST, batch.targets_ST, batch.scored_ST)
        return Resident(*(torch.from_numpy(array).to(device) for array in arrays))


@torch.no_grad()
def evaluate(ensemble: Ensemble, params_RP: Tensor, data: Resident, vocab_size: int) -> Counts:
    """Counts of all runs over a whole split, without host synchronisation."""
    examples, length = data.inputs_ST.shape
    per_sequence = len(ensemble.runs) * length * max(vocab_size, ELEMENTS_PER_TOKEN)
    chunk = max(1, ELEMENTS_PER_FORWARD[ensemble.device.type] // per_sequence)
    parts = [
        count(ensemble.logits(params_RP, data.inputs_ST[here]), data.targets_ST[here], data.scored_ST[here])
        for here in (slice(start, start + chunk) for start in range(0, examples, chunk))
    ]
    return functools.reduce(operator.add, parts)


def _metrics(counts: Counts) -> list[Metrics]:
    columns = (counts.sequence_accuracy, counts.token_accuracy, counts.loss, score(counts))
    return [
        Metrics(sequence_accuracy=s, token_accuracy=t, loss=loss, score=value)
        for s, t, loss, value in zip(*(column.tolist() for column in columns), strict=True)
    ]
