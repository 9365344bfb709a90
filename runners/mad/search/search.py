"""The hyperparameter search: a grid in an Optuna study, each point trained exactly once by however many processes.

1. Under the storage's lock a process claims trials, as many as it trains at once: first those whose owner was killed,
   then points of the grid that nobody has taken.
2. Trials whose checkpoints stand at the same step are trained as one ensemble.
3. Each result is written to the run's folder, then told to Optuna; the checkpoint is deleted.
4. When nothing is left to claim, the process waits for the trials of other processes.

Processes that share a study share the results folder.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from runners.device import device_name
from runners.files import clear_leftovers, load_info, save_tensors, write_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.memory import runs_at_once
from runners.mad.search.identity import sign_study
from runners.mad.search.study import (
    describe_study,
    is_done,
    open_study,
    run_of,
    shown_value,
    split_by_state,
    write_parameters,
)
from runners.mad.search.watch import Watcher
from runners.mad.training.loop import train
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.provenance import versions
from runners.storage import Store

SECONDS_BETWEEN_LOOKS = 1.0

Claimed = Sequence[tuple[Trial, Run]]
"""Trials of this process, with their runs."""


@dataclass(frozen=True, kw_only=True)
class Searcher:
    """Trains the runs of studies on one device.

    Attributes:
        store: storage and results folder of the studies.
        device: where runs are trained.
        together: runs trained as one ensemble, at most.
        watcher: told what happens.
    """

    store: Store
    device: torch.device
    together: int
    watcher: Watcher

    def search(self, experiment: Experiment, grid: Sequence[Run]) -> list[FrozenTrial]:
        """Train what is missing of ``grid``; return its trials in the grid's order."""
        study = open_study(experiment, self.store)
        while True:
            self.train_available(experiment, grid)
            done, elsewhere = split_by_state(study, grid)
            self.watcher.waiting(len(elsewhere))
            if len(done) == len(grid):
                return done
            if elsewhere:
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def train_available(self, experiment: Experiment, grid: Sequence[Run]) -> None:
        """Train the runs of ``grid`` that are neither done nor claimed by another process."""
        study = open_study(experiment, self.store)
        describe_study(study, experiment, self.store)
        sign_study(experiment, self.store)
        limit = runs_at_once(experiment, self.together, self.device)
        while True:
            claimed, more = _claim(study, grid, self.store, limit)
            if not claimed:
                return
            waiting = more + len(claimed)
            for ensemble in _equal_progress(claimed, experiment, self.store):
                waiting -= len(ensemble)
                self._train_ensemble(study, ensemble, experiment, waiting)

    def _train_ensemble(self, study: optuna.Study, claimed: Claimed, experiment: Experiment, more: int) -> None:
        """Train an ensemble of trials and tell Optuna each result; ``more`` runs of the grid have not begun."""
        trials, runs = [trial for trial, _ in claimed], [run for _, run in claimed]
        checkpoints = [_checkpoint(experiment, run, self.store.folder) for run in runs]
        task, protocol, watcher = experiment.instance, experiment.protocol, self.watcher
        watcher.started(experiment, runs, protocol.total_steps(len(task.split("train"))), more)

        # Evaluations go to Optuna, but not those that a killed process has reported.
        reported = [set(study.trials[trial.number].intermediate_values) for trial in trials]

        def report(points: Sequence[CurvePoint]) -> None:
            for trial, point, before in zip(trials, points, reported, strict=True):
                if point.validation is not None and point.step not in before:
                    trial.report(shown_value(study, point.validation), point.step)

        def evaluated(step: int, points: Sequence[CurvePoint]) -> None:
            report(points)
            watcher.evaluated(step, points)

        def resumed(step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
            for points in zip(*curves, strict=True):
                report(points)
            watcher.resumed(step, curves)

        results = train(
            experiment.build, task, protocol, runs, self.device, checkpoints, evaluated, resumed, watcher.progressed
        )

        for trial, run, result, checkpoint in zip(trials, runs, results, checkpoints, strict=True):
            self._record(trial, run, result, experiment, len(trials))
            if result.validation is None:
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, shown_value(study, result.validation))
            checkpoint.unlink(missing_ok=True)
        watcher.finished(results)

    def _record(self, trial: Trial, run: Run, result: Result, experiment: Experiment, members: int) -> None:
        """Write a run's files, then the figures by which trials are compared as attributes of its trial.

        The record comes after the model: a run with a record is finished (``runners.mad.search.rebuild``).
        """
        folder = run_folder(self.store.folder, experiment, run)
        clear_leftovers(folder)

        figures: dict[str, Any] = {
            "best_step": result.best_step,
            "seconds": result.seconds,
            "steps_per_second": result.steps_per_second,
            "trained_together": members,
            "versions": versions(),
            "device": device_name(self.device),
        }
        if result.validation is not None:
            figures |= {f"validation_{name}": value for name, value in asdict(result.validation).items()}
        if result.diverged_step is not None:
            figures["diverged_step"] = result.diverged_step

        settings = {**experiment.to_dict(), "run": asdict(run)}
        record = {
            "study": experiment.name,
            "config": settings,
            "fingerprint": experiment.fingerprint,
            "code": experiment.code,
            **figures,
            "curve": [asdict(point) for point in result.curve],
        }
        save_tensors(folder / "model.safetensors", result.parameters, settings)
        write_json(folder / "config.json", record)

        for name, value in {"folder": str(folder), **figures}.items():
            trial.set_user_attr(name, value)


def saved_step(experiment: Experiment, run: Run, folder: Path) -> int:
    """The step from which a run of a results folder would resume; 0 where there is no checkpoint."""
    path = _checkpoint(experiment, run, folder)
    return int(load_info(path)["step"]) if path.exists() else 0


def _claim(study: optuna.Study, grid: Sequence[Run], store: Store, limit: int) -> tuple[Claimed, int]:
    """Claim up to ``limit`` runs: those whose process was killed first, then those that nobody has begun.

    Return the number of runs that could have been claimed beyond the limit, too.
    """
    with store.exclusive():
        trials = study.get_trials(deepcopy=False)

        # A run that diverged is done, also if its process was killed before it could tell Optuna.
        orphans = [t for t in trials if t.state == TrialState.RUNNING and run_of(t) in grid and store.is_orphan(t)]
        for trial in orphans:
            if is_done(trial):
                study.tell(trial.number, state=TrialState.FAIL)

        left = [run_of(trial) for trial in orphans if not is_done(trial)]
        known = {run_of(trial) for trial in trials if trial.state == TrialState.RUNNING or is_done(trial)}
        free = [*left, *(run for run in grid if run not in known)]
        unclaimed = free[:limit]

        store.end_queued(trials)
        # All trials are claimed before the first parameter is written, which takes time.
        mine = [store.claim(study, asdict(run), trials) for run in unclaimed]
        claimed = list(zip(mine, unclaimed, strict=True))
        for claim in claimed:
            write_parameters(*claim)
        return claimed, len(free) - len(claimed)


def _equal_progress(claimed: Claimed, experiment: Experiment, store: Store) -> list[Claimed]:
    """Groups of trials that can be trained together, because their checkpoints stand at the same step."""

    def step(pair: tuple[Trial, Run]) -> int:
        return saved_step(experiment, pair[1], store.folder)

    return [list(group) for _, group in groupby(sorted(claimed, key=step), step)]


def _checkpoint(experiment: Experiment, run: Run, folder: Path) -> Path:
    return run_folder(folder, experiment, run) / "checkpoint.safetensors"
