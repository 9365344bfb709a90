"""The Optuna study of a search, which plans nothing that the folders of runs do not show.

Programs ask for a trial of each run that they begin, report its evaluations, and tell its value. Where the storage and
the folders of runs disagree, the folders are right: ``catch_up`` tells a study of the runs that it lacks.
"""

import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution
from optuna.samplers import PartialFixedSampler, RandomSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState, create_trial

JOURNAL = "optuna.journal"
"""Name of the storage's file in a results folder, unless another storage is named."""
JOURNAL_HEAD = b'{"op_code":'
"""How a journal of Optuna begins."""
RUN = "run"
"""Attribute of a trial: name of its run."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a study is told of a finished run.

    Attributes:
        run: name of the run.
        params: its hyperparameters.
        value: its value; None if the run diverged.
        curve: values by step.
        attributes: other figures by name.
    """

    run: str
    params: Mapping[str, float]
    value: float | None
    curve: Mapping[int, float] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


def open_storage(storage: str) -> BaseStorage:
    """Open an Optuna storage, which is made if there is none.

    A damaged journal is moved aside, because everything in it can be told again.

    Args:
        storage: URL such as ``sqlite:///studies.db`` or ``postgresql://…``, or the path of a journal file.

    Raises:
        ValueError: the storage cannot be opened, or the file is no journal.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "://" in storage:
        try:
            return optuna.storages.get_storage(storage)
        except Exception as error:  # of Optuna, SQLAlchemy or the database's driver
            raise ValueError(f"cannot open storage {storage}: {error}".replace(storage, shown(storage))) from error

    path = Path(storage)
    if path.is_dir():
        raise ValueError(f"storage {path} is a folder: name a file, or a URL such as sqlite:///studies.db")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(JOURNAL_HEAD)) not in (JOURNAL_HEAD, b""):
                raise ValueError(f"storage {path} is not an Optuna journal and was left as it is: name another file")

    # A lock that ends with its process; and a line that a killed process has not finished is dropped.
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with lock:
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:
            os.truncate(path, len(kept))
    try:
        json.loads((kept.splitlines() or [b"{}"])[-1])  # the last line, which Optuna does not check
        return JournalStorage(JournalFileBackend(str(path), cast(Any, lock)))
    except (ValueError, KeyError, TypeError):  # lines that Optuna did not write
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        log.warning("%s was damaged, and is now %s: studies are told again from the folders of runs", path, aside)
        return JournalStorage(JournalFileBackend(str(path), cast(Any, lock)))


@contextmanager
def naming_storage(storage: str) -> Iterator[None]:
    """Turn errors of an open storage into one line that names it and says what its database says.

    Raises:
        ValueError: the storage takes or gives no data.
    """
    try:
        yield
    except (optuna.exceptions.OptunaError, json.JSONDecodeError) as error:
        words = f"storage {storage}: {error.__cause__ or error}"
        raise ValueError(words.replace(storage, shown(storage))) from error


def shown(storage: str) -> str:
    """Return a storage as it may be printed: a password in a URL is ``***``.

    SQLAlchemy's ``hide_password`` leaves a password in the query, and what follows an @ in a password.
    """
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*:).*@", r"\1***@", storage))


def open_study(
    storage: BaseStorage, name: str, direction: Literal["minimize", "maximize"], attributes: Mapping[str, Any]
) -> optuna.Study:
    """Open a study, which is made if there is none.

    Args:
        storage: the storage.
        name: name of the study.
        direction: ``minimize`` or ``maximize``.
        attributes: what the dashboard shows of the study, by name.
    """
    study = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
    for key, value in attributes.items():
        if study.user_attrs.get(key) != value:
            study.set_user_attr(key, value)
    return study


def catch_up(study: optuna.Study, distributions: Mapping[str, BaseDistribution], outcomes: Iterable[Outcome]) -> None:
    """Tell a study of finished runs that it lacks, and of those whose process ended before it could tell."""
    known = {trial.user_attrs.get(RUN): trial for trial in study.get_trials(deepcopy=False)}
    for outcome in outcomes:
        trial = known.get(outcome.run)
        if trial is None:
            study.add_trial(
                create_trial(
                    state=TrialState.FAIL if outcome.value is None else TrialState.COMPLETE,
                    value=outcome.value,
                    params=dict(outcome.params),
                    distributions=dict(distributions),
                    user_attrs={RUN: outcome.run, **outcome.attributes},
                    intermediate_values=dict(outcome.curve),
                )
            )
        elif not trial.state.is_finished():
            tell(study, Trial(study, trial._trial_id), outcome)


def ask(
    study: optuna.Study, distributions: Mapping[str, BaseDistribution], run: str, params: Mapping[str, float]
) -> Trial:
    """Return the trial of a run that this process has claimed: that of a killed process, or a new one."""
    running = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.RUNNING]
    if left := [trial for trial in running if trial.user_attrs.get(RUN) == run]:
        return Trial(study, left[0]._trial_id)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = PartialFixedSampler(dict(params), RandomSampler())
    trial = study.ask(dict(distributions))
    trial.set_user_attr(RUN, run)
    return trial


def report(study: optuna.Study, trial: Trial, value: float, step: int) -> None:
    """Report an evaluation, unless a killed process has reported it."""
    if step not in study.trials[trial.number].intermediate_values:
        trial.report(value, step)


def tell(study: optuna.Study, trial: Trial, outcome: Outcome) -> None:
    """Tell the outcome of a trial, unless another process has read it in the run's folder and told it."""
    with suppress(optuna.exceptions.UpdateFinishedTrialError):
        for name, value in outcome.attributes.items():
            trial.set_user_attr(name, value)
        state = TrialState.FAIL if outcome.value is None else TrialState.COMPLETE
        study.tell(trial, outcome.value, state=state, skip_if_finished=True)
