"""The paper's grid of learning rates and second-moment decays as an Optuna study; each point is trained once."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState
from rich.console import Console
from rich.table import Table

from runners.c4.config import Config
from runners.c4.curve import Row
from runners.c4.data.corpus import Corpus
from runners.c4.distributed import World
from runners.c4.errors import BusyError, DivergedError
from runners.c4.identity import run_folder
from runners.c4.train import train
from runners.c4.watchers import Watcher
from runners.storage import Store, params_of

LRS = (1e-3, 3e-3, 1e-2)
BETA2S = (0.95, 0.99)
SECONDS_BETWEEN_LOOKS = 5.0
"""Seconds to wait while other processes train the remaining points."""


def points_of(config: Config) -> list[Config]:
    """Return the configurations of the grid's runs."""
    return [replace(config, lr=lr, beta2=beta2, search=False) for lr, beta2 in product(LRS, BETA2S)]


def search(
    config: Config, options: dict[str, Any], corpus: Corpus, world: World, watchers: Sequence[Watcher], store: Store
) -> list[tuple[Config, dict[str, Any] | None]]:
    """Train all points of the grid (paper, section "C4 pretraining experiments").

    Several commands may share one search: each trains points that no other command is training.

    Args:
        config: configuration that the points share.
        options: options of the layer that were set.
        corpus: the data.
        world: the processes of this command.
        watchers: objects to inform, in the first process.
        store: storage of the study.

    Returns:
        Configuration and result of each point; the result is None for a run that diverged.
    """
    points = points_of(config)
    study = _open(config, options, corpus, store) if world.is_first else None
    results: dict[Config, dict[str, Any] | None] = {}

    while len(results) < len(points):
        for point in points:
            if point in results:
                continue

            # Train the point, unless another process is training it.
            trial = _Trial(study, point, run_folder(point, options, corpus.folder.name).name, store)
            try:
                results[point] = train(point, options, corpus, world, [*watchers, trial])
                trial.tell(results[point])
            except DivergedError:
                results[point] = None
                trial.tell(None)
            except BusyError:
                continue

        # The remaining points belong to other processes.
        if len(results) < len(points):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    return [(point, results[point]) for point in points]


def best(results: Sequence[tuple[Config, dict[str, Any] | None]]) -> tuple[Config, dict[str, Any]] | None:
    """Return the point with the lowest validation cross-entropy, and its result; None if all points diverged."""
    finite = [(point, result) for point, result in results if result is not None]
    return min(finite, key=lambda pair: float(pair[1]["validation_loss"]), default=None)


def print_results(results: Sequence[tuple[Config, dict[str, Any] | None]], console: Console) -> None:
    """Print a table with one row per point, an arrow at the best point, and whether it is at an end of the grid."""
    chosen = best(results)
    table = Table(title="validation cross-entropy (nats per token)", title_justify="left")
    for heading in ("", "lr", "beta2", "validation", "last loss", "tokens/s"):
        table.add_column(heading, justify="right")

    for point, result in results:
        names = [f"{point.lr:g}", f"{point.beta2:g}"]
        if result is None:
            table.add_row("", *names, "diverged")
            continue

        figures = [f"{result['validation_loss']:.4f}", f"{result['loss']:.4f}", f"{result['tokens_per_second']:,.0f}"]
        table.add_row("→" if chosen and point == chosen[0] else "", *names, *figures)

    console.print(table)
    ends = {min(LRS): "smallest", max(LRS): "largest"}
    if chosen and chosen[0].lr in ends:
        text = f"lr {chosen[0].lr:g} is the {ends[chosen[0].lr]} of the grid, so a better one may lie beyond it"
        console.print(f"{text}: try --lr, without --search", soft_wrap=True)


def _open(config: Config, options: dict[str, Any], corpus: Corpus, store: Store) -> optuna.Study:
    """Open the study of a search, or create it."""
    # The study has the name of the first point's run folder, without the values in which the points differ.
    name = run_folder(replace(config, lr=LRS[0], beta2=BETA2S[0], search=False), options, corpus.folder.name).name
    kind = name.partition("-lr")[0]
    digest = name.rpartition("-")[2]

    with store.exclusive():
        study = optuna.create_study(
            storage=store.storage,
            study_name=f"c4 {kind} seed {config.seed} {digest}",
            direction="minimize",
            load_if_exists=True,
        )

        # Describe a new study for the dashboard.
        if "config" not in study.user_attrs:
            from optuna_dashboard import save_note  # slow to import

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names(["validation cross-entropy"])

            tokens = config.steps * config.batch_size * config.seq_len
            save_note(study, f"# {kind} on {tokens:,} tokens\n\nGrid of learning rates and beta2, seed {config.seed}.")
            study.set_user_attr("config", {name: str(value) for name, value in vars(config).items()})

    return study


class _Trial(Watcher):
    """The trial of one point, as a watcher of its run. Only the first process has a study; the others do nothing."""

    def __init__(self, study: optuna.Study | None, point: Config, name: str, store: Store) -> None:
        self.study = study
        self.point = point
        self.name = name
        self.store = store
        self._trial: Trial | None = None

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
        """Begin the trial of the point, or take it over."""
        self._take()

    def _take(self) -> None:
        """Take over the trial that a killed process left, or begin a trial."""
        if self.study is None:
            return

        with self.store.exclusive():
            known = self.study.get_trials(deepcopy=False)
            self.store.end_queued(known)
            self._trial = self.store.claim(self.study, self._params, known)
        self._trial.suggest_float("lr", min(LRS), max(LRS), log=True)
        self._trial.suggest_float("beta2", min(BETA2S), max(BETA2S))
        self._trial.set_user_attr("run", self.name)

    def stepped(self, row: Row) -> None:
        """Report an evaluation."""
        if self._trial is None or self.study is None or row.validation_loss is None:
            return
        if row.step not in self.study.trials[self._trial.number].intermediate_values:
            self._trial.report(row.validation_loss, row.step)

    def tell(self, result: dict[str, Any] | None) -> None:
        """Store the value of the point once; the result None means that the run diverged."""
        if self.study is None:
            return

        # A run that was already finished has not begun a trial in this process.
        if self._trial is None:
            with self.store.exclusive():
                known = [trial for trial in self.study.get_trials(deepcopy=False) if params_of(trial) == self._params]
                if any(trial.state != TrialState.RUNNING or not self.store.is_orphan(trial) for trial in known):
                    return
            self._take()

        assert self._trial is not None
        if result is None:
            self.study.tell(self._trial, state=TrialState.FAIL)
        else:
            self.study.tell(self._trial, result["validation_loss"])

    @property
    def _params(self) -> dict[str, float]:
        """Parameters of the point's trial."""
        return {"lr": self.point.lr, "beta2": self.point.beta2}


def study_file(out: Path) -> Path:
    """Return the file of the studies in a results folder, which also holds the studies of the diagnostics."""
    return out / "studies.journal"
