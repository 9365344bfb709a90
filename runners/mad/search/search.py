"""The hyperparameter search: a grid in an Optuna study, each point run exactly once by however many processes.

Points are enqueued beforehand and taken by ask and tell under a file lock, as many at a time as are trained together.
A running trial whose owner is gone (see ``runners.store``) is taken over, and goes on from its last checkpoint.
Processes that share a study must share the results folder.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from mixers.costs import costs
from runners.device import device_name
from runners.files import load_info, save_tensors, write_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.search.watch import Watcher
from runners.mad.training.loop import train
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.provenance import versions
from runners.storage import Store

LR_BOUNDS = (1e-8, 10.0)

WEIGHT_DECAY_BOUNDS = (0.0, 10.0)

SEED_BOUNDS = (0, 2**31 - 1)

DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(*LR_BOUNDS, log=True),
    "weight_decay": FloatDistribution(*WEIGHT_DECAY_BOUNDS),
    "seed": IntDistribution(*SEED_BOUNDS),
}

METRIC_NAME = "validation score"


class ForeignFolderError(ValueError):
    """A study in a database belongs to another results folder."""


def search(
    experiment: Experiment, grid: Sequence[Run], store: Store, device: torch.device, together: int, watcher: Watcher
) -> list[FrozenTrial]:
    """Train what is missing of ``grid``, at most ``together`` runs at a time; return its trials in the grid's order."""
    study = open_study(experiment, store)
    while True:
        train_available(study, experiment, grid, store, device, together, watcher)
        done, open_trials = _split_by_state(study, grid)
        watcher.waiting(len(open_trials))
        if len(done) == len(grid):
            return done
        if open_trials:
            time.sleep(1.0)


def train_available(
    study: optuna.Study,
    experiment: Experiment,
    grid: Sequence[Run],
    store: Store,
    device: torch.device,
    together: int,
    watcher: Watcher,
) -> None:
    """Train what of ``grid`` is neither done nor in the hands of another process."""
    while taken := _take(study, grid, store, together):
        for group in _equal_progress(taken, experiment, store):
            _run(study, group, experiment, store, device, watcher)


def open_study(experiment: Experiment, store: Store) -> optuna.Study:
    """The experiment's study, made and described when it is new."""
    with store.exclusive():
        study = optuna.create_study(
            storage=store.storage, study_name=experiment.name, direction="maximize", load_if_exists=True
        )
        if "results_folder" not in study.user_attrs:
            study.set_user_attr("results_folder", str(store.folder))
    home = study.user_attrs["results_folder"]
    if store.is_database and home != str(store.folder):
        raise ForeignFolderError(f"study {experiment.name!r} belongs to the results folder {home}: give --out {home}")
    if "fingerprint" not in study.user_attrs:
        note = describe(experiment)  # counts what the layer costs, too long for a lock
        with store.exclusive():
            if "fingerprint" not in study.user_attrs:
                _introduce(study, experiment, note)
    return study


def _introduce(study: optuna.Study, experiment: Experiment, note: str) -> None:
    from optuna_dashboard import save_note  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([METRIC_NAME])
    study.set_user_attr("config", experiment.to_dict())
    save_note(study, note)
    study.set_user_attr("fingerprint", experiment.fingerprint)


def finished(experiment: Experiment, store: Store) -> list[FrozenTrial]:
    """All trials of the experiment's study that are done, also those of other grids."""
    return [trial for trial in open_study(experiment, store).get_trials(deepcopy=False) if is_done(trial)]


def finished_of(grid: Sequence[Run], experiment: Experiment, storage: BaseStorage) -> list[FrozenTrial]:
    """The trials of a grid that would not be run again; nothing is written, and there may be no such study."""
    try:
        study = optuna.load_study(storage=storage, study_name=experiment.name)
    except KeyError:
        return []
    return _split_by_state(study, grid)[0]


def describe(experiment: Experiment) -> str:
    """The protocol in Markdown, shown beside the study in the dashboard."""
    protocol, task = experiment.protocol, experiment.instance
    layer = costs(experiment.layer, experiment.mixer_config, experiment.shape)
    ceiling, chance = task.ceiling("test"), task.chance("test")
    steps = protocol.total_steps(experiment.task_config.train_examples)
    settings = "\n".join(
        f"- **{title}**: {', '.join(f'{name} {value}' for name, value in values.items())}"
        for title, values in (
            ("mixer", asdict(experiment.mixer_config)),
            ("task", asdict(experiment.task_config)),
            ("shape", asdict(experiment.shape)),
            ("optimizer", asdict(protocol.optimizer)),
        )
    )
    return f"""# {experiment.mixer} on {experiment.task}, {experiment.difficulty}

{steps} steps of {protocol.batch_size} sequences, cosine schedule, {experiment.precision} products;
{protocol.evaluations} evaluations on the validation split, whose best parameters are kept.
The point is chosen on validation alone; the test split is read once, for the chosen point.

{settings}

One layer: {layer.sentence()} (matrix products only).

The value is {METRIC_NAME}: it orders trials by sequences right, then tokens right, then loss.
Sequence / token accuracy on the test split: ceiling {ceiling.sequence:.4f} / {ceiling.token:.4f},
chance {chance.sequence:.2e} / {chance.token:.4f}.

Fingerprint of configuration, data and code: `{experiment.fingerprint}`
"""


def run_of(trial: FrozenTrial) -> Run:
    """The run that a trial stands for, also while its parameters are still being written."""
    values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return Run(**{name: values[name] for name in DISTRIBUTIONS})


def _suggest(trial: Trial) -> Run:
    """The run of a trial that was enqueued; writes what a killed process left out of its parameters."""
    return Run(
        lr=trial.suggest_float("lr", *LR_BOUNDS, log=True),
        weight_decay=trial.suggest_float("weight_decay", *WEIGHT_DECAY_BOUNDS),
        seed=trial.suggest_int("seed", *SEED_BOUNDS),
    )


def is_done(trial: FrozenTrial) -> bool:
    """Whether a trial never has to be run again: complete, or diverged."""
    return trial.state == TrialState.COMPLETE or "diverged_step" in trial.user_attrs


def _split_by_state(study: optuna.Study, grid: Sequence[Run]) -> tuple[list[FrozenTrial], list[FrozenTrial]]:
    """Done and unfinished trials of the grid, the first of each run, in the grid's order."""
    done: dict[Run, FrozenTrial] = {}
    unfinished: dict[Run, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        if is_done(trial):
            done.setdefault(run_of(trial), trial)
        elif trial.state == TrialState.RUNNING:
            unfinished.setdefault(run_of(trial), trial)
    return [done[run] for run in grid if run in done], [
        unfinished[run] for run in grid if run in unfinished and run not in done
    ]


def _take(study: optuna.Study, grid: Sequence[Run], store: Store, limit: int) -> list[tuple[Trial, Run]]:
    """Up to ``limit`` trials to run now: those that died under their owner first, then missing ones.

    No trial waits while the lock is free but one whose command was killed; nobody is to work that off for another grid.
    """
    with store.exclusive():
        known: set[Run] = set()
        taken: list[Trial] = []
        for trial in study.get_trials(deepcopy=False):
            if trial.state == TrialState.WAITING:
                store.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            elif trial.state == TrialState.RUNNING or is_done(trial):
                known.add(run_of(trial))
            if trial.state == TrialState.RUNNING and run_of(trial) in grid and store.is_orphan(trial):
                if is_done(trial):  # it had diverged, and its owner died before it could say so
                    study.tell(trial.number, state=TrialState.FAIL)
                elif len(taken) < limit:
                    taken.append(Trial(study, trial._trial_id))
        for run in [run for run in grid if run not in known][: limit - len(taken)]:
            study.enqueue_trial(asdict(run))
            taken.append(study.ask())
        for mine in taken:
            store.own(mine)
        return [(mine, _suggest(mine)) for mine in taken]


Taken = Sequence[tuple[Trial, Run]]


def _equal_progress(taken: Taken, experiment: Experiment, store: Store) -> list[Taken]:
    """Trials that can be trained together: those whose checkpoints stand at the same step."""

    def step(pair: tuple[Trial, Run]) -> int:
        return saved_step(experiment, pair[1], store.folder)

    return [list(group) for _, group in groupby(sorted(taken, key=step), step)]


def saved_step(experiment: Experiment, run: Run, folder: Path) -> int:
    """The step after which a run of a results folder would go on; 0 where there is no checkpoint."""
    path = _checkpoint(experiment, run, folder)
    return int(load_info(path)["step"]) if path.exists() else 0


def _checkpoint(experiment: Experiment, run: Run, folder: Path) -> Path:
    return run_folder(folder, experiment, run) / "checkpoint.safetensors"


def _run(
    study: optuna.Study,
    taken: Taken,
    experiment: Experiment,
    store: Store,
    device: torch.device,
    watcher: Watcher,
) -> None:
    """Train an ensemble of trials and tell Optuna each result."""
    trials, runs = [trial for trial, _ in taken], [run for _, run in taken]
    checkpoints = [_checkpoint(experiment, run, store.folder) for run in runs]
    task, protocol = experiment.instance, experiment.protocol
    watcher.started(experiment, runs, protocol.total_steps(len(task.split("train"))))
    reported = [set(study.trials[trial.number].intermediate_values) for trial in trials]

    def report(points: Sequence[CurvePoint]) -> None:
        for trial, point, before in zip(trials, points, reported, strict=True):
            if point.validation is not None and point.step not in before:
                trial.report(point.validation.score, point.step)

    def evaluated(step: int, points: Sequence[CurvePoint]) -> None:
        report(points)
        watcher.evaluated(step, points)

    def resumed(step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        for points in zip(*curves, strict=True):
            report(points)
        watcher.resumed(step, curves)

    results = train(experiment.build, task, protocol, runs, device, checkpoints, evaluated, resumed, watcher.progressed)
    for trial, run, result, checkpoint in zip(trials, runs, results, checkpoints, strict=True):
        _record(trial, run, result, experiment, store, device, len(trials))
        if result.validation is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, result.validation.score)
        checkpoint.unlink(missing_ok=True)
    watcher.finished(results)


def _record(
    trial: Trial, run: Run, result: Result, experiment: Experiment, store: Store, device: torch.device, members: int
) -> None:
    """Write a run's files, then its attributes; half-written files of a process that was killed go."""
    folder = run_folder(store.folder, experiment, run)
    for leftover in folder.glob(".*"):
        leftover.unlink()
    record: dict[str, Any] = {
        "config": {**experiment.to_dict(), "run": asdict(run)},
        "fingerprint": experiment.fingerprint,
        "versions": versions(),
        "device": device_name(device),
        "seconds": result.seconds,
        "steps_per_second": result.steps_per_second,
        "trained_together": members,
        "best_step": result.best_step,
        "files": str(folder),
        "curve": [asdict(point) for point in result.curve],
    }
    if result.validation is not None:
        record |= {f"validation_{name}": value for name, value in asdict(result.validation).items()}
    if result.diverged_step is not None:
        record["diverged_step"] = result.diverged_step
    write_json(folder / "config.json", record)
    save_tensors(folder / "model.safetensors", result.parameters, record["config"])
    for name, value in record.items():
        trial.set_user_attr(name, value)
