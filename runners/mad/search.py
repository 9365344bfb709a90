"""The search: a grid whose points are each trained exactly once, by however many processes.

For each experiment:

1. A process claims missing runs of the grid, as many as it trains at once (``runners.runs``).
2. Runs whose checkpoints stand at the same step are trained as one ensemble.
3. Model and record of a run are written to its folder, then Optuna is told; the checkpoint is deleted.
4. Once the grid is finished, the point that validation chooses is repeated with more seeds, if they are asked for. If
   one of them diverges, the next best point takes its place.
5. If nothing is left to claim, the process waits for those of others.
6. The test split is read for the chosen point (``runners.mad.chosen``).

On several GPUs, a process for each trains what it can claim. The ladders of a profile, which are independent, have
several processes a GPU, or one for each core. Nothing passes between processes but the folders.
"""

import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path

import optuna
import pandas as pd
import torch
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.storages import BaseStorage
from rich.console import Console

from mixers.costs import costs
from runners.device import device_name, find_devices, find_places, ran_out_of_memory, shared_threads
from runners.files import DamagedFileError, save_tensors
from runners.interrupt import INTERRUPTED, StoppedError, end_with_parent
from runners.mad.checks import check, check_ladders
from runners.mad.chosen import (
    CHECKPOINT,
    MODEL,
    chosen_and_repeats,
    delete_models,
    diagnose_best,
    evaluate_on_test,
    missing_runs,
    read_runs,
    runs_of,
    saved_step,
)
from runners.mad.display import Display
from runners.mad.experiment import Experiment, Say
from runners.mad.options import BOUNDS, Options
from runners.mad.points import choose
from runners.mad.ranking import beside, print_results
from runners.mad.rows import load
from runners.mad.tables import print_study
from runners.mad.training.loop import CurvePoint, train
from runners.mad.training.protocol import Run
from runners.progress import open_console
from runners.records import Columns, Record, commit, read_all, table_of, versions, write
from runners.runs import claimed
from runners.search import Outcome, ask, catch_up, naming_storage, open_storage, open_study, report

SECONDS_BETWEEN_LOOKS = 1.0
DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(*BOUNDS["lr"], log=True),
    "weight_decay": FloatDistribution(*BOUNDS["weight_decay"]),
}
"""Parameters of trials, of which a study has those that vary in it; the others, and the seed, are attributes."""
Studies = Generator[tuple[Experiment, pd.DataFrame], None, None]
"""Finished studies with the tables of their records, each trained when it is asked for."""


def train_studies(experiments: Sequence[Experiment], options: Options, console: Console) -> Studies:
    """Train what is missing of each experiment's grid; yield each experiment with the table of its records.

    The table holds the grid of the options, and the repeats of the points that it chose. Rungs of a profile that other
    rungs decide are left out.

    Args:
        experiments: what to train.
        options: the grid, and where and how it is trained.
        console: for progress.

    Raises:
        ValueError: the storage cannot be opened.
        DamagedFileError: a record or a checkpoint is damaged.
        OSError: a file cannot be written.
        StoppedError: SIGINT or SIGTERM has come, and checkpoints are written.
    """
    # Classes of a notebook or a program are known to this process alone.
    alone = any("__main__:" in name for e in experiments for name in (e.mixer, e.task))
    most = 1 if alone else len(experiments) * len(options.runs)
    ladders = {(experiment.label, experiment.task) for experiment in experiments if options.preset == "profile"}
    places = find_places(options.device, len(ladders))[:most]
    storage = open_storage(options.place)
    with (
        naming_storage(options.place),
        closing(Display(console, options)) as display,
        in_other_processes(places, experiments, options),
        shared_threads(places),
    ):
        worker = Worker(options, places, places[0], storage, display)
        for n, experiment in enumerate(experiments):
            if not runs_of(experiment, options):
                continue  # a rung that others decide
            while missing := missing_runs(experiment, options):
                if not worker.train_some(experiments[n:]):
                    display.open_bar(f"waiting for {len(missing)} runs of other processes", None)
                    time.sleep(SECONDS_BETWEEN_LOOKS)
            display.remove_bar()
            table = worker.search(experiment).evaluate_chosen()
            display.chosen(experiment, table)
            yield experiment, table


def prepare(
    experiments: Sequence[Experiment], options: Options, say: Say
) -> tuple[list[Experiment], pd.DataFrame | None]:
    """Check what can be checked before training.

    Returns:
        The experiments as ``runners.mad.checks.check`` returns them, and the records of the reference rows.

    Raises:
        ValueError: an option, the login or a layer is invalid.
        ContractError: a layer from outside breaks a rule that the trainer relies on.
    """
    device, is_profile = find_devices(options.device)[0], options.preset == "profile"
    reference = None if is_profile else load(options.reference, {experiment.task for experiment in experiments})
    checked = (check_ladders if is_profile else check)(experiments, options.together, device, say)
    for experiment in checked:
        costs(experiment.layer, experiment.mixer_config, experiment.shape, say)  # says here what cannot be counted
    if not options.dry_run:
        options.log_in()
    return checked, reference


def print_and_rank(
    studies: Studies,
    options: Options,
    reference: pd.DataFrame | None,
    console: Console,
    diagnosed: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Print each study as soon as it is trained, and where the layers stand.

    Args:
        studies: what ``train_studies`` yields.
        options: what is kept, and how much is printed.
        reference: records of the reference rows, as ``prepare`` returns them; None for none.
        console: where to print.
        diagnosed: whether the chosen model of each study is diagnosed.

    Returns:
        The records, and the chosen points beside reference rows, as ``runners.mad.ranking.beside`` returns them.
    """
    tables = []
    with closing(studies):  # an error here ends the processes on other GPUs, too
        for experiment, table in studies:
            print_study(table, console, options.verbose)
            if diagnosed:
                diagnose_best(experiment, options, partial(console.print, soft_wrap=True))
            delete_models(experiment, table, options)
            tables.append(table)
    trained = pd.concat(tables, ignore_index=True)
    choices, reasons = beside(trained, reference)
    print_results(choices, reasons, console, options.verbose)
    return trained, choices


class Search:
    """Trains the runs of a study on one device."""

    def __init__(
        self,
        experiment: Experiment,
        options: Options,
        devices: Sequence[torch.device],
        device: torch.device,
        storage: BaseStorage,
        display: Display,
    ) -> None:
        """Open the study in Optuna's storage, and tell it of finished runs that it lacks.

        Args:
            experiment: the study.
            options: the grid, and where and how it is trained.
            devices: devices that share the grid.
            device: where this process trains.
            storage: Optuna's storage.
            display: told what happens.
        """
        self.experiment, self.options, self.device, self.display = experiment, options, device, display
        self.folder = experiment.folder(options.out)
        # The ladders of a profile are enough work for all processes.
        share = math.ceil(len(runs_of(experiment, options)) / (1 if options.preset == "profile" else len(devices)))
        self.limit = experiment.runs_at_once(min(options.together, share), device)

        # A parameter with one value has no importance; where another one varies, the dashboard has a study of its own.
        finished = self._finished()
        runs = [*runs_of(experiment, options), *(record for _, record in finished)]
        varying = [name for name in DISTRIBUTIONS if len({getattr(run, name) for run in runs}) > 1]
        self.distributions = {name: DISTRIBUTIONS[name] for name in varying}
        ending = "" if len(varying) == len(DISTRIBUTIONS) else f" over {' '.join(varying) or 'seeds'}"

        # The dashboard shows the settings.
        shown = {**experiment.facts, "folder": str(self.folder.resolve())}
        self.study = open_study(storage, experiment.name + ending, "maximize", shown)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.study.metric_names is None:
                self.study.set_metric_names(["validation token accuracy"])
        catch_up(self.study, self.distributions, [self._outcome(record, file.parent) for file, record in finished])

    def train_ensemble(self, runs: Mapping[Path, Run], waiting: int) -> None:
        """Train claimed runs, by their folders; write and tell each result. ``waiting`` runs come after them."""
        experiment, display = self.experiment, self.display
        trials = [
            ask(self.study, self.distributions, folder.name, {name: getattr(run, name) for name in self.distributions})
            for folder, run in runs.items()
            if not experiment.until_ceiling  # of a rung, which takes seconds, Optuna is told at the end, in one line
        ]
        display.started(experiment, [*runs.values()], waiting)

        def evaluated(step: int, points: Sequence[CurvePoint]) -> None:
            for trial, point in zip(trials, points, strict=False):
                if point.validation is not None:
                    report(self.study, trial, point.validation.token_accuracy, step)
            display.evaluated(step, points)

        def resumed(step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
            display.resumed(step)
            for points in zip(*curves, strict=True):
                evaluated(points[0].step, points)

        try:
            results = train(
                experiment.build,
                experiment.instance,
                experiment.protocol,
                [*runs.values()],
                self.device,
                [folder / CHECKPOINT for folder in runs],
                evaluated,
                resumed,
                display.progressed,
                experiment.until,
            )
        except Exception as error:
            if ran_out_of_memory(error):
                error.add_note(f"lower --together, which is {len(runs)} here")
            raise

        # The record comes after the model, because a run with a record is finished.
        for (folder, run), result in zip(runs.items(), results, strict=True):
            curve: Columns = {
                "step": [point.step for point in result.curve],
                "train_loss": [point.train_loss for point in result.curve],
            }
            for name in ("sequence_accuracy", "token_accuracy", "loss"):
                curve[name] = [point.validation and getattr(point.validation, name) for point in result.curve]
            record = Record(
                **experiment.facts,
                **asdict(run),
                diverged_step=result.diverged_step,
                best_step=result.best_step,
                metrics={} if result.validation is None else {"validation": asdict(result.validation)},
                curve=curve,
                seconds=result.seconds,
                steps_per_second=result.steps_per_second,
                together=len(runs),
                device=device_name(self.device),
                versions=versions(),
                commit=commit(),
            )
            save_tensors(folder / MODEL, result.parameters, {"study": experiment.name, **asdict(run)})
            write(folder, record)
            catch_up(self.study, self.distributions, [self._outcome(record, folder)])
            (folder / CHECKPOINT).unlink(missing_ok=True)
        display.finished(results)

    def evaluate_chosen(self) -> pd.DataFrame:
        """Read the test split for the chosen point of the finished grid; return the table of its records.

        The point that all runs of the study choose, those of other grids included, is read, too. So is that of a rung
        whose rate another one chose, although a seed has diverged there: it counts 0 in a profile.
        """
        runs = runs_of(self.experiment, self.options)
        chosen, repeats = chosen_and_repeats(self.experiment, self.options)
        finished = self._finished()
        points, grid = {chosen, choose(table_of(finished), ())}, {(run.lr, run.weight_decay) for run in runs}
        if self.experiment.rung and len(grid) == 1:
            points |= grid
        selected = [(file.parent, record) for file, record in finished if (record.lr, record.weight_decay) in points]
        try:
            evaluate_on_test(self.experiment, selected, self.device, self.limit)
        except DamagedFileError as error:
            self.display.say(f"no test accuracy: {error}")
        return table_of(read_runs(self.experiment, [*runs, *repeats], self.options.out))

    def _finished(self) -> list[tuple[Path, Record]]:
        """Return the records of all finished runs of the study, those of other grids included."""
        return read_all(self.folder) if self.folder.exists() else []

    def _outcome(self, record: Record, folder: Path) -> Outcome:
        """Return what Optuna is told of a run; its value is the token accuracy on the validation split."""
        figures = record.metrics.get("validation", {})
        constant = [name for name in DISTRIBUTIONS if name not in self.distributions]
        own = {name: getattr(record, name) for name in ("seed", *constant)}
        return Outcome(
            run=folder.name,
            params={name: getattr(record, name) for name in self.distributions},
            value=figures.get("token_accuracy"),
            curve={
                step: value
                for step, value in zip(record.curve["step"], record.curve["token_accuracy"], strict=True)
                if value is not None
            },
            attributes={**own, "folder": str(folder.resolve()), **figures, "seconds": record.seconds},
        )


class Worker:
    """Trains what it can claim on one device, whichever study it belongs to.

    Args:
        options: the grid, and where and how it is trained.
        places: devices of all processes.
        device: that of this one.
        storage: Optuna's storage.
        display: told what happens.
    """

    def __init__(
        self,
        options: Options,
        places: Sequence[torch.device],
        device: torch.device,
        storage: BaseStorage,
        display: Display,
    ) -> None:
        self.options, self.places, self.device, self.storage, self.display = options, places, device, storage, display
        self._searches: dict[str, Search] = {}

    def search(self, experiment: Experiment) -> Search:
        """Return the search of an experiment, opened at its first use."""
        if experiment.name not in self._searches:
            self._searches[experiment.name] = Search(
                experiment, self.options, self.places, self.device, self.storage, self.display
            )
        return self._searches[experiment.name]

    def train_some(self, experiments: Sequence[Experiment]) -> bool:
        """Train runs of the first experiment that has some that no other process trains; return whether one had.

        As many are claimed as are trained at once. Those whose checkpoints stand at one step are an ensemble.
        """
        for experiment in experiments:
            if missing := missing_runs(experiment, self.options):
                search, waiting = self.search(experiment), len(missing)
                by_folder = {experiment.folder_of(run, self.options.out): run for run in missing}
                with claimed([*by_folder], search.limit) as mine:
                    for _, folders in groupby(sorted(mine, key=saved_step), saved_step):
                        ensemble = {folder: by_folder[folder] for folder in folders}
                        waiting -= len(ensemble)
                        search.train_ensemble(ensemble, waiting)
                if mine:
                    return True
        return False


@contextmanager
def in_other_processes(
    places: Sequence[torch.device], experiments: Sequence[Experiment], options: Options
) -> Iterator[None]:
    """Let a process in each place but the first train what it can claim, until all is finished or this one ends."""
    processes: list[BaseProcess] = []
    if any(missing_runs(experiment, options) for experiment in experiments):
        context = multiprocessing.get_context("spawn")
        bare = [replace(experiment) for experiment in experiments]  # without their data
        with program_not_run_again():
            for device in places[1:]:
                processes.append(context.Process(target=help_out, args=(device, places, bare, options), daemon=True))
                processes[-1].start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextmanager
def program_not_run_again() -> Iterator[None]:
    """Keep processes that are spawned from running the user's program, of which they need no class."""
    main = vars(sys.modules["__main__"])
    file = main.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main["__file__"] = file


def help_out(
    device: torch.device, places: Sequence[torch.device], experiments: Sequence[Experiment], options: Options
) -> None:
    """Train what other processes leave, in silence; after an error, its runs are left to the other processes."""
    end_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        with closing(Display(open_console(quiet=True), options)) as display, shared_threads(places):
            worker = Worker(options, places, device, open_storage(options.place), display)
            left = [*experiments]
            while left:
                if not missing_runs(left[0], options):
                    left.pop(0)  # for good, since what decides its runs stands before it
                elif not worker.train_some(left):
                    time.sleep(SECONDS_BETWEEN_LOOKS)
    except (StoppedError, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except Exception as error:
        print(f"{device} stopped, other processes train its runs: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
