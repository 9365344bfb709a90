"""Studies and run folders that disagree: finished runs that a damaged or lost storage no longer holds.

A run is finished when its folder holds its record; ``--keep`` may have deleted its model. ``rebuild`` makes a trial
of each finished run that the storage lacks. The code that trained it is known from its record; its rehearsal is known
only if it is today's code.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from runners.files import damaged, read_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.search.identity import sign_rebuilt
from runners.mad.search.study import DISTRIBUTIONS, is_done, load_study, open_study, run_of, shown_value
from runners.mad.training.protocol import Run
from runners.mad.training.result import Metrics
from runners.storage import Store

NO_FIGURES = ("study", "config", "fingerprint", "code", "curve")
"""Entries of a run's record that its trial does not have."""


def unknown_runs(experiment: Experiment, runs: Sequence[Run], store: Store) -> list[Run]:
    """Return those of ``runs`` that are neither done nor running by the storage."""
    try:
        study = load_study(experiment, store.storage)
    except KeyError:
        known = set()
    else:
        with store.exclusive():
            known = _known(study.get_trials(deepcopy=False), store)
    return [run for run in runs if run not in known]


def has_record(experiment: Experiment, run: Run, folder: Path) -> bool:
    """Return whether a run is finished by its folder in the results folder ``folder``, from which it can be rebuilt."""
    return (run_folder(folder, experiment, run) / "config.json").exists()


def rebuild(experiment: Experiment, store: Store) -> int:
    """Make a trial of each finished run that the storage lacks, for all revisions of an experiment; return how many.

    Raises:
        DamagedFileError: the record of a run cannot be read.
    """
    added = 0
    for name, records in _records(experiment, store.folder).items():
        _, _, revision = name.removeprefix(experiment.name).partition(" r")
        revised = replace(experiment, revision=int(revision or 1))
        study = open_study(revised, store)
        sign_rebuilt(revised, [record["code"] for record in records.values()], store)

        with store.exclusive():
            trials = study.get_trials(deepcopy=False)
            known = _known(trials, store)
            lost = {run: record for run, record in records.items() if run not in known}

            # A trial that a killed process has left would be trained again.
            for trial in trials:
                if trial.state == TrialState.RUNNING and run_of(trial) in lost:
                    study.tell(trial.number, state=TrialState.FAIL)
            for run, record in sorted(lost.items(), key=lambda item: tuple(vars(item[0]).values())):
                study.add_trial(_trial(study, run, record, run_folder(store.folder, revised, run)))
        added += len(lost)
    return added


def _records(experiment: Experiment, folder: Path) -> dict[str, dict[Run, Any]]:
    """Return the records of an experiment's finished runs, by study and run; each revision has its own study."""
    found: dict[str, dict[Run, Any]] = {}
    for path in sorted((folder / "runs").glob("*/config.json")):
        record = read_json(path)
        if not (isinstance(record, dict) and {*NO_FIGURES} <= record.keys()):
            raise damaged(path, f"a record has {', '.join(NO_FIGURES)}")
        name = record["study"]
        of_experiment = name == experiment.name or name.startswith(f"{experiment.name} r")
        if of_experiment and record["fingerprint"] == experiment.fingerprint:
            found.setdefault(name, {})[Run(**record["config"]["run"])] = record
    return found


def _known(trials: Iterable[FrozenTrial], store: Store) -> set[Run]:
    """Return the runs that are done, or that a living process trains; the caller holds the storage's lock."""
    return {
        run_of(trial)
        for trial in trials
        if is_done(trial) or (trial.state == TrialState.RUNNING and not store.is_orphan(trial))
    }


def _trial(study: optuna.Study, run: Run, record: dict[str, Any], folder: Path) -> FrozenTrial:
    """Return the trial as the search would have stored it (``runners.mad.search.search``)."""
    figures = {name: value for name, value in record.items() if name not in NO_FIGURES}
    diverged = "validation_score" not in figures
    validations = {p["step"]: Metrics(**p["validation"]) for p in record["curve"] if p["validation"] is not None}
    kept = {field.name: figures.get(f"validation_{field.name}", math.nan) for field in fields(Metrics)}
    return create_trial(
        state=TrialState.FAIL if diverged else TrialState.COMPLETE,
        value=None if diverged else shown_value(study, Metrics(**kept)),
        params={name: getattr(run, name) for name in DISTRIBUTIONS},
        distributions=DISTRIBUTIONS,
        user_attrs={"seed": run.seed, "folder": str(folder), **figures},
        system_attrs={"fixed_params": vars(run)},
        intermediate_values={step: shown_value(study, metrics) for step, metrics in validations.items()},
    )
