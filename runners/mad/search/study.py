"""The Optuna study of an experiment: its name, its parameters, its note, and which of its trials are done."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from mixers.costs import costs
from runners.mad.experiment import Experiment
from runners.mad.training.protocol import Run
from runners.storage import Store, params_of

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
    """A study belongs to another results folder."""


def open_study(experiment: Experiment, store: Store) -> optuna.Study:
    """The experiment's study, which is made if there is none.

    Raises:
        ForeignFolderError: its runs lie in another results folder, perhaps in one of the same path on another machine.
    """
    with store.exclusive():
        study = optuna.create_study(
            storage=store.storage, study_name=experiment.name, direction="maximize", load_if_exists=True
        )
        known = study.user_attrs
        mine = {"results_folder": str(store.folder), "results_folder_identity": store.identity}
        home = known.get("results_folder", mine["results_folder"])
        if store.is_database and home != mine["results_folder"]:
            raise ForeignFolderError(
                f"study {experiment.name!r} belongs to the results folder {home}: give --out {home}"
            )

        for name in mine.keys() - known.keys():
            study.set_user_attr(name, mine[name])

    # The path of another machine may be the same.
    if known.get("results_folder_identity", store.identity) != store.identity:
        raise ForeignFolderError(
            f"study {experiment.name!r} keeps its runs in another folder than the {store.folder} of this machine: "
            "share one results folder between the machines, or give a --storage of its own"
        )
    return study


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
    )

    return f"""# {experiment.label} on {experiment.task}, {experiment.difficulty}

{steps} steps of {protocol.batch_size} sequences, cosine schedule, {experiment.precision} products;
{protocol.evaluations} evaluations on the validation split, whose best parameters are kept.
The point is chosen on validation alone; the test split is read once, for the chosen point.

{settings}

One layer: {layer.sentence()} (matrix products only).

The value is {METRIC_NAME}: it orders trials by sequences right, then tokens right, then loss.
Sequence / token accuracy on the test split: ceiling {ceiling.sequence:.4f} / {ceiling.token:.4f},
chance {chance.sequence:.2e} / {chance.token:.4f}.

Fingerprint of configuration and data: `{experiment.fingerprint}`
"""


def run_of(trial: FrozenTrial) -> Run:
    """The run that a trial stands for, also while Optuna is still writing its parameters."""
    values = params_of(trial)
    return Run(**{name: values[name] for name in DISTRIBUTIONS})


def suggest(trial: Trial) -> Run:
    """The run of a claimed trial; writes the parameters that a killed process had not written yet."""
    return Run(
        lr=trial.suggest_float("lr", *LR_BOUNDS, log=True),
        weight_decay=trial.suggest_float("weight_decay", *WEIGHT_DECAY_BOUNDS),
        seed=trial.suggest_int("seed", *SEED_BOUNDS),
    )


def is_done(trial: FrozenTrial) -> bool:
    """Return whether a trial never has to run again: it is complete, or it diverged."""
    return trial.state == TrialState.COMPLETE or "diverged_step" in trial.user_attrs


def done_trials(experiment: Experiment, store: Store) -> list[FrozenTrial]:
    """All trials of the experiment's study that are done, also those of other grids."""
    return [trial for trial in open_study(experiment, store).get_trials(deepcopy=False) if is_done(trial)]


def done_of(grid: Sequence[Run], experiment: Experiment, storage: BaseStorage) -> list[FrozenTrial]:
    """The trials of a grid that are done; nothing is written, and there may be no such study."""
    try:
        study = optuna.load_study(storage=storage, study_name=experiment.name)
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
