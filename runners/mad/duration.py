"""How long training takes: on this machine, from timed steps, and on a GPU, from the reference results."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mixers.costs import attempt
from runners.mad.experiment import Experiment
from runners.mad.memory import runs_at_once
from runners.mad.reference.cells import FOLDER, PROTOCOLS, Cell, cell_file, protocol_folder, read_cell
from runners.mad.reference.entries import ENTRIES
from runners.mad.results.choice import GridPoint, choose_point, diverged_seeds, repeats_of
from runners.mad.search.search import saved_step
from runners.mad.search.study import done_of, run_of
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Run
from runners.mad.training.step import Stepper
from runners.progress import spell

STEPS = 3
"""Largest number of steps of each shape that are timed, after a first step that is not."""
FORWARD = 1 / 3
"""Time of a sequence's forward pass, relative to that of its training: by their operations, not measured."""
BUDGET, BUDGET_OF_A_SHAPE = 45.0, 10.0
"""Seconds after which no further shape, and no further step of a shape, is timed; many layers share the budget."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The part of an experiment that is not trained yet.

    Attributes:
        runs: number of unfinished runs of the grid; once it is finished, of the repetitions of the chosen point.
        run_steps: number of optimizer steps, those of all repetitions included, that checkpoints do not hold.
    """

    runs: int
    run_steps: int


@dataclass(frozen=True, kw_only=True)
class Duration:
    """How long the work on an experiment takes; None if unknown.

    Attributes:
        here: seconds on this machine.
        estimated: whether ``here`` follows from steps of other shapes.
        recorded: seconds on the device of the reference results.
        device: name of that device.
    """

    here: float | None
    estimated: bool = False
    recorded: float | None
    device: str = ""

    @property
    def seconds(self) -> float:
        """Seconds here or else on the other device; 0 if neither is known."""
        return (self.recorded if self.here is None else self.here) or 0.0

    def cells(self) -> list[str]:
        """Return both times as cells of a table: ~ marks an estimate, ? an unknown time on this machine."""
        here = "?" if self.here is None else "~" * self.estimated + spell(self.here)
        return [here, "" if self.recorded is None else spell(self.recorded)]


class Clock:
    """Estimates how long experiments take.

    Args:
        devices: the devices that share each grid.
        together: largest number of runs trained as one ensemble.
        budget: seconds for all timing.

    Attributes:
        left: what is left of these seconds.
    """

    def __init__(self, devices: Sequence[torch.device], together: int, budget: float = BUDGET) -> None:
        self.devices = devices
        self.together = together
        self.budget = self.left = budget
        self._timed: dict[Any, float | None] = {}
        self._rates: dict[Any, float] = {}

    def durations(self, experiments: Sequence[Experiment], works: Sequence[Work]) -> list[Duration]:
        """Return how long the work on each experiment takes: training and its evaluations.

        Shapes are timed in the order of their sequences' lengths, until the budget is spent. A step of another shape is
        estimated: in each position of its sequences, it takes as long as the longest timed shape of its layer, or as
        the median layer if none of its own was timed.
        """
        todo = [pair for pair in zip(experiments, works, strict=True) if pair[1].run_steps]
        layers = len({_model(experiment) for experiment, _ in todo})
        for experiment, work in sorted(todo, key=lambda pair: pair[0].length):
            self._time(experiment, self._members(experiment, work), limit=min(BUDGET_OF_A_SHAPE, self.budget / layers))
        return [self._duration(experiment, work) for experiment, work in zip(experiments, works, strict=True)]

    def _duration(self, experiment: Experiment, work: Work) -> Duration:
        """Return how long the work on an experiment takes, from what was timed."""
        if not work.run_steps:
            return Duration(here=0.0, recorded=0.0)

        # A step of a shape that failed stays unknown.
        members = self._members(experiment, work)
        shape = _shape(experiment, members)
        estimated = shape not in self._timed
        step = self._estimate(experiment, members) if estimated else self._timed[shape]
        run_steps = work.run_steps * _with_evaluations(experiment)
        here = None if step is None else step / members * run_steps / len(self.devices)

        found = seconds_on_gpu(experiment)
        recorded, device = (None, "") if found is None else (found[0] * work.run_steps, found[1])
        return Duration(here=here, estimated=estimated and here is not None, recorded=recorded, device=device)

    def _members(self, experiment: Experiment, work: Work) -> int:
        """Return the runs of an ensemble, whose step serves all of them."""
        together = runs_at_once(experiment, self.together, self.devices[0])
        return min(together, math.ceil(work.runs / len(self.devices)))

    def _time(self, experiment: Experiment, members: int, limit: float) -> None:
        """Time a step of ``members`` runs, unless it is known or probably longer than what is left of the budget."""
        shape, estimate = _shape(experiment, members), self._estimate(experiment, members)
        if shape in self._timed or self.left <= (estimate or 0.0):
            return

        began = time.monotonic()
        seconds = attempt("time", experiment.layer, partial(time_step, experiment, members, self.devices[0], limit))
        self.left -= time.monotonic() - began

        self._timed[shape] = seconds
        if seconds is not None:
            self._rates[_model(experiment)] = seconds / (members * experiment.length)

    def _estimate(self, experiment: Experiment, members: int) -> float | None:
        """Return the expected seconds of a step of ``members`` runs; None before any step is timed."""
        if not self._rates:
            return None
        rate = self._rates.get(_model(experiment), median(self._rates.values()))
        return rate * members * experiment.length


def _with_evaluations(experiment: Experiment) -> float:
    """Return the time of a run and its evaluations, relative to that of its steps alone."""
    protocol, task = experiment.protocol, experiment.task_config
    steps = protocol.total_steps(task.train_examples)
    evaluated = len(protocol.evaluation_steps(steps)) * task.eval_examples
    return 1 + FORWARD * evaluated / (protocol.batch_size * steps)


def _model(experiment: Experiment) -> tuple[Any, ...]:
    """Return what decides how long a position takes, in most tasks."""
    return *experiment.layer_choice.key, experiment.protocol.batch_size


def _shape(experiment: Experiment, members: int) -> tuple[Any, ...]:
    """Return what decides how long a step of ``members`` runs takes."""
    task = experiment.instance
    return *_model(experiment), task.backbone, task.vocab_size, experiment.length, members


def time_step(experiment: Experiment, members: int, device: torch.device, limit: float = BUDGET_OF_A_SHAPE) -> float:
    """Return the seconds of one optimizer step of an ensemble: the shortest of ``STEPS`` steps after the first.

    Args:
        experiment: layer, task and protocol.
        members: number of runs of the ensemble.
        device: device on which it is trained.
        limit: seconds after which no further step begins; the first step counts if it is the only one.
    """
    data, protocol = experiment.instance.split("train"), experiment.protocol
    runs = [Run(lr=1e-3, weight_decay=0.0, seed=0)] * members
    ensemble = Ensemble(experiment.build, runs, protocol.optimizer, protocol.total_steps(len(data)), device)
    stepper = Stepper(ensemble, data, protocol.batch_size)
    if device.type == "cuda":
        stepper.capture()

    def step() -> float:
        began = time.monotonic()
        stepper.run(0, 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - began

    taken = [step()]
    while len(taken) <= STEPS and sum(taken) < limit:
        taken.append(step())
    return min(taken[1:] or taken)


def seconds_on_gpu(experiment: Experiment) -> tuple[float, str] | None:
    """Return the seconds of one step of one run on the GPU of a reference result, and the GPU's name.

    The result must have the same layer, task, data, widths and batch; its number of steps may differ. Its seconds
    include evaluations, and are divided evenly among the steps of all its runs. None if there is no such result.
    """
    for entry in ENTRIES.values():
        if entry.mixer != experiment.mixer or entry.layers != experiment.shape.layers:
            continue
        for protocol in PROTOCOLS:
            path = cell_file(protocol_folder(FOLDER, protocol), entry, experiment.task)
            if path.exists() and _same_settings(cell := read_cell(path), experiment):
                run_steps = cell.steps * sum(len(point.seeds) for point in cell.points)
                return cell.seconds / run_steps, cell.device
    return None


def _same_settings(cell: Cell, experiment: Experiment) -> bool:
    """Return whether a reference result was trained on a GPU, with an experiment's settings except the length."""
    if cell.protocol.batch_size != experiment.protocol.batch_size or cell.shape != experiment.shape:
        return False
    same = replace(experiment, protocol=cell.protocol, precision=cell.precision)
    return "CPU" not in cell.device and same.fingerprint == cell.fingerprint


def work_left(
    experiment: Experiment, grid: Sequence[Run], more_seeds: Sequence[int], storage: BaseStorage | None, folder: Path
) -> Work:
    """Return the part of an experiment that is not trained yet.

    Args:
        experiment: layer and task, as identified.
        grid: runs of the grid.
        more_seeds: seeds with which the chosen point is repeated.
        storage: storage of finished runs; None if there is none yet.
        folder: results folder with the checkpoints.
    """

    def saved_steps(runs: Sequence[Run], done: Sequence[FrozenTrial]) -> int:
        finished = [run_of(trial) for trial in done]
        return sum(saved_step(experiment, run, folder) for run in runs if run not in finished)

    done = [] if storage is None else done_of(grid, experiment, storage)
    saved = saved_steps(grid, done)
    unfinished = len(grid) - len(done)

    # The repeated point is known when the grid is finished; it is the next best one if a seed diverged.
    repeats, unstable = len(more_seeds), set[GridPoint]()
    while not unfinished and storage is not None:
        chosen = choose_point(done, without=unstable)
        runs = [] if chosen is None else repeats_of(chosen, more_seeds)
        repeated = done_of(runs, experiment, storage)
        repeats = len(runs) - len(repeated)
        saved = saved_steps(runs, repeated)
        if chosen is None or repeats or not diverged_seeds(repeated):
            break
        unstable.add(chosen)

    steps = experiment.protocol.total_steps(experiment.task_config.train_examples)
    runs_left = unfinished + repeats
    return Work(runs=unfinished or repeats, run_steps=runs_left * steps - saved)


def total(durations: Sequence[Duration]) -> Duration:
    """Return how long several pieces of work take together; a time is None if that of one of them is."""
    here = [duration.here for duration in durations]
    recorded = [duration.recorded for duration in durations]
    return Duration(
        here=None if None in here else sum(seconds or 0.0 for seconds in here),
        estimated=any(duration.estimated for duration in durations),
        recorded=None if None in recorded else sum(seconds or 0.0 for seconds in recorded),
    )


def sentence(durations: Sequence[Duration]) -> str:
    """Return in words how long all work takes here and on the GPU of the reference results; empty if unknown."""
    left = [duration for duration in durations if duration.here != 0.0]
    rows = "rows" if len(left) == len(durations) else "unfinished rows"
    here = [duration.here for duration in left if duration.here is not None]
    timed = len(here) - sum(duration.estimated for duration in left)
    on_gpu = [duration.recorded for duration in left if duration.recorded is not None]
    gpus = " or ".join(sorted({duration.device for duration in left if duration.device}))
    parts = []

    if here:
        about = "about" if len(here) == len(left) else "more than"
        how = f"{timed} of {len(left)} {rows} were timed"
        if timed == len(left):
            how = f"up to {STEPS} steps of each shape were timed"
        elif timed < len(here):
            how += ", others follow from the lengths of their sequences"
        parts.append(f"{about} {spell(sum(here))} here ({how})")
    if gpus:
        which = "" if len(on_gpu) == len(left) else f" of {len(on_gpu)} of {len(left)} {rows}"
        parts.append(f"about {spell(sum(on_gpu))} on one {gpus} (from the reference results{which})")
    return ", ".join(parts)
