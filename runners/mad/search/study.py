"""The Optuna study of an experiment: its name, its parameters, its note, and which of its trials are done."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from mixers.costs import costs
from runners.cli import LARGEST_LR
from runners.cost_cells import sentence_of
from runners.mad.experiment import Experiment
from runners.mad.training.protocol import Run
from runners.mad.training.result import Metrics
from runners.storage import IDENTITY, Store, existing_storage, identity_of, is_url, params_of

LR_BOUNDS = (1e-8, LARGEST_LR)
WEIGHT_DECAY_BOUNDS = (0.0, 10.0)
DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(*LR_BOUNDS, log=True),
    "weight_decay": FloatDistribution(*WEIGHT_DECAY_BOUNDS),
}
"""What the dashboard judges the importance of. The seed is an attribute of a trial, because nobody tunes it."""
METRIC_NAME = "% of sequences right"
EARLIER_METRIC = "validation score"
"""Metric of studies that were begun when their value was ``tasks.metrics.score``; it stays the metric of all trials."""
RESULTS = ("chosen", "test", "folder of the best run")
"""Attributes of a study that its result fills in."""
NOT_YET = "not trained yet"
RESULT_HEADING = "## Result"


class ForeignFolderError(ValueError):
    """A study belongs to another results folder."""


def stored_name(experiment: Experiment, storage: BaseStorage) -> str:
    """Return the name of the experiment's study: its title, or what earlier versions named a study that is there."""
    try:
        storage.get_study_id_from_name(experiment.name)
    except KeyError:
        return experiment.title
    return experiment.name


def load_study(experiment: Experiment, storage: BaseStorage) -> optuna.Study:
    """Return the experiment's study.

    Raises:
        KeyError: there is none.
    """
    return optuna.load_study(storage=storage, study_name=stored_name(experiment, storage))


def open_study(experiment: Experiment, store: Store) -> optuna.Study:
    """The experiment's study, which is made if there is none.

    Raises:
        ForeignFolderError: its runs lie in another results folder, perhaps in one of the same path on another machine.
    """
    with store.exclusive():
        name = stored_name(experiment, store.storage)
        study = optuna.create_study(storage=store.storage, study_name=name, direction="maximize", load_if_exists=True)
        known = study.user_attrs
        _check_home(study, store.folder, store.is_database)
        mine = {"results_folder": str(store.folder), "results_folder_identity": store.identity}

        # In the order in which the dashboard shows them.
        if "results_folder" not in known:
            for attribute in RESULTS:
                study.set_user_attr(attribute, NOT_YET)

        for attribute, value in mine.items():
            if attribute not in known:
                study.set_user_attr(attribute, value)
    return study


def check_homes(experiments: Sequence[Experiment], folder: Path, url: str) -> None:
    """Check that the experiments' studies, where there are any, keep their runs in a folder; nothing is written.

    Args:
        experiments: whose studies are checked.
        folder: results folder.
        url: Optuna storage URL, or path of a journal file.

    Raises:
        ForeignFolderError: as ``open_study``.
        ValueError: the storage cannot be opened.
    """
    if (storage := existing_storage(url)) is None:
        return
    folder = Path(os.path.realpath(folder))
    for experiment in experiments:
        with suppress(KeyError):  # no such study yet
            _check_home(load_study(experiment, storage), folder, is_url(url))


def _check_home(study: optuna.Study, folder: Path, is_database: bool) -> None:
    """Raise ForeignFolderError if the runs of a study lie in another results folder than ``folder``."""
    known = study.user_attrs
    home = known.get("results_folder", str(folder))
    if is_database and home != str(folder):
        raise ForeignFolderError(f"study {study.study_name!r} belongs to the results folder {home}: give --out {home}")

    # The path of another machine may be the same.
    identity, here = known.get("results_folder_identity"), identity_of(folder)
    if identity in (None, here):
        return
    own = "share one results folder between the machines, or give a --storage of its own"
    if here is None:
        raise ForeignFolderError(
            f"study {study.study_name!r} keeps its runs in the folder whose {IDENTITY} is {identity}, and {folder} has "
            f"no {IDENTITY}: {own}; if the file was lost, write that line into it again"
        )
    raise ForeignFolderError(
        f"study {study.study_name!r} keeps its runs in another folder than the {folder} of this machine: {own}"
    )


def describe_study(study: optuna.Study, experiment: Experiment, store: Store) -> None:
    """Store the settings and a note for the dashboard with a study, once."""
    if "config" in study.user_attrs:
        return
    from optuna_dashboard import save_note  # takes seconds to import

    text = note(experiment)  # counts the costs of the layer, which takes too long for a lock
    with store.exclusive(), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([METRIC_NAME])
        save_note(study, text)
        study.set_user_attr("config", experiment.to_dict())


def show_result(study: optuna.Study, result: Mapping[str, str]) -> None:
    """Show a study's result in the dashboard, as attributes and at the end of its note.

    Args:
        study: the study.
        result: text for each of ``RESULTS``.
    """
    known = study.user_attrs
    changed = [attribute for attribute in RESULTS if known.get(attribute) != result[attribute]]
    if not changed:
        return
    for attribute in changed:
        study.set_user_attr(attribute, result[attribute])

    # What stands above the result may have been edited in the dashboard.
    from optuna_dashboard import get_note, save_note  # takes seconds to import

    lines = "\n".join(f"- **{attribute}**: {result[attribute]}" for attribute in RESULTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        above, _, _ = get_note(study).partition(RESULT_HEADING)
        save_note(study, f"{above.rstrip()}\n\n{RESULT_HEADING}\n\n{lines}\n")


def shown_value(study: optuna.Study, metrics: Metrics) -> float:
    """Return the value of a trial or of an evaluation in the dashboard.

    Two decimals of the per cent of sequences right, then four digits of the share of tokens right: 1.782939 is 1.78% of
    the sequences and 29.39% of the tokens. Nothing is chosen by it: runs are chosen by ``tasks.metrics.score``.

    Args:
        study: the study.
        metrics: on the validation split.
    """
    if study.metric_names == [EARLIER_METRIC]:
        return metrics.score
    tokens = min(math.floor(metrics.token_accuracy * 1e4), 9999)
    return round(round(100 * metrics.sequence_accuracy, 2) + tokens * 1e-6, 6)


def note(experiment: Experiment) -> str:
    """The protocol in Markdown, shown beside the study in the dashboard."""
    protocol, task = experiment.protocol, experiment.instance
    layer = costs(experiment.layer, experiment.mixer_config, experiment.shape)
    ceiling, chance = task.ceiling("test"), task.chance("test")
    steps = protocol.total_steps(experiment.task_config.train_examples)

    sections = {
        "mixer": asdict(experiment.mixer_config),
        "task": asdict(experiment.task_config),
        "shape": asdict(experiment.shape),
        "optimizer": asdict(protocol.optimizer),
    }
    settings = "\n".join(
        f"- **{title}**: {', '.join(f'{name} {value}' for name, value in values.items())}"
        for title, values in sections.items()
        if values
    )

    return f"""# {experiment.label} on {experiment.task}, {experiment.difficulty}

{steps} steps of {protocol.batch_size} sequences, cosine schedule, {experiment.precision} products;
{protocol.evaluations} evaluations on the validation split, whose best parameters are kept.
The point is chosen on validation alone; the test split is read once, for the chosen point.

{settings}

One layer: {sentence_of(layer)} (matrix products only).

The value of a trial is read as follows: 1.782939 stands for 1.78% of the validation sequences and 29.39% of their
tokens right. Points are chosen by sequences right, then tokens right, then loss, as a mean over seeds.
Sequence / token accuracy on the test split: ceiling {ceiling.sequence:.4f} / {ceiling.token:.4f},
chance {chance.sequence:.2e} / {chance.token:.4f}.

Fingerprint of configuration and data: `{experiment.fingerprint}`
"""


def run_of(trial: FrozenTrial) -> Run:
    """The run that a trial stands for, also while Optuna is still writing its parameters."""
    values = params_of(trial)
    return Run(**{name: values[name] for name in (*DISTRIBUTIONS, "seed")})


def write_parameters(trial: Trial, run: Run) -> None:
    """Write the parameters of a claimed trial, also those that a killed process had not written yet."""
    trial.suggest_float("lr", *LR_BOUNDS, log=True)
    trial.suggest_float("weight_decay", *WEIGHT_DECAY_BOUNDS)
    trial.set_user_attr("seed", run.seed)


def is_done(trial: FrozenTrial) -> bool:
    """Return whether a trial never has to run again: it is complete, or it diverged."""
    return trial.state == TrialState.COMPLETE or "diverged_step" in trial.user_attrs


def done_trials(experiment: Experiment, store: Store) -> list[FrozenTrial]:
    """All trials of the experiment's study that are done, also those of other grids.

    Raises:
        KeyError: there is no such study.
    """
    return [trial for trial in load_study(experiment, store.storage).get_trials(deepcopy=False) if is_done(trial)]


def done_of(grid: Sequence[Run], experiment: Experiment, storage: BaseStorage) -> list[FrozenTrial]:
    """The trials of a grid that are done; nothing is written, and there may be no such study."""
    try:
        study = load_study(experiment, storage)
    except KeyError:
        return []
    return split_by_state(study, grid)[0]


def split_by_state(study: optuna.Study, grid: Sequence[Run]) -> tuple[list[FrozenTrial], list[FrozenTrial]]:
    """Done trials and running trials of a grid, the first of each run, in the grid's order."""
    done: dict[Run, FrozenTrial] = {}
    running: dict[Run, FrozenTrial] = {}
    for trial in study.get_trials(deepcopy=False):
        if is_done(trial):
            done.setdefault(run_of(trial), trial)
        elif trial.state == TrialState.RUNNING:
            running.setdefault(run_of(trial), trial)
    return (
        [done[run] for run in grid if run in done],
        [running[run] for run in grid if run in running and run not in done],
    )


def study_names(storage: BaseStorage) -> dict[str, dict[str, Any]]:
    """User attributes of all studies of a storage, by name."""
    return {study.study_name: study.user_attrs for study in storage.get_all_studies()}
