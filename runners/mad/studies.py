"""Train studies and read what they reached: the one path behind the command line and ``runners.mad.study``.

For each experiment:

1. find the study that was trained by code which behaves as today's (``runners.mad.search.identity``);
2. train what is missing of its grid (``runners.mad.search.search``);
3. choose the point with the best mean validation score, and repeat it with more seeds if they are asked for; if one of
   them diverges, the next best point takes its place;
4. read the test split for the runs of that point, and of no other (``runners.mad.results.held_out``);
5. write ``summary.json``, and look into the chosen model (``runners.mad.diagnosis``).
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from optuna.trial import FrozenTrial
from rich.console import Console

from mixers.base import Layer, log_once
from mixers.contract import POSITIONS, check_foreign, warn_unused
from mixers.models import Backbone
from mixers.named import is_path
from mixers.registry import find_mixer
from runners.device import find_devices
from runners.files import DamagedFileError, read_json
from runners.mad.experiment import Experiment, call_as_in_training, first_layer, run_folder, study_folder
from runners.mad.memory import runs_at_once
from runners.mad.results.choice import (
    GridPoint,
    choose_among,
    choose_in_other_grids,
    choose_point,
    diverged_seeds,
    repeats_of,
)
from runners.mad.results.held_out import Reading, kept_parameters, read_test, stored_readings
from runners.mad.results.kept import Keep
from runners.mad.results.summary import Summary, read_summary, summarise, write_summary
from runners.mad.results.tables import edge_advice
from runners.mad.search.identity import identify
from runners.mad.search.progress import Display
from runners.mad.search.rebuild import has_record, rebuild, unknown_runs
from runners.mad.search.search import Searcher
from runners.mad.search.study import RESULTS, check_homes, done_of, done_trials, open_study, run_of, show_result
from runners.mad.search.tracker import Tracker
from runners.mad.search.watch import Watchers
from runners.mad.search.workers import Workers, train_elsewhere
from runners.mad.training.protocol import Run
from runners.memory import ran_out_of_memory
from runners.provenance import keep_sources
from runners.storage import Store
from runners.task_names import find_task
from runners.tracking import Tracking

NO_BATCHING_RULE = re.compile(r"There is a performance drop because .* the batching rule for ([\w:]+)")
"""PyTorch's warning of an operation that ``torch.func.vmap`` computes run by run."""

Say = Callable[[str], None]
"""Prints a line."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where and how studies are trained.

    Attributes:
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file.
        device: ``auto``, ``cpu`` or ``cuda``.
        together: runs trained as one ensemble, at most.
        tracking: where curves are logged.
        rebuild: take finished runs that the storage lacks from their folders.
        keep: which models stay once a study has its result.
    """

    out: Path
    storage: str
    device: str
    together: int
    tracking: Tracking
    rebuild: bool = False
    keep: Keep = "all"


def try_layers(experiments: Sequence[Experiment], device: torch.device) -> None:
    """Call each experiment's model as training will, before the first is trained, which may take hours.

    The code of all is read before that, too: users edit their layers meanwhile, which does not change what is trained.
    Warnings about parameters follow once all layers have passed.

    Raises:
        ContractError: a layer from outside does not do what the trainer takes for granted.
    """
    named = {find_mixer(e.mixer) for e in experiments} | {find_task(e.task) for e in experiments}
    keep_sources("runners.mad.training.loop", *named)

    unused = []
    for experiment in experiments:
        build, positions = partial(first_layer, experiment), partial(_positions, experiment)
        unused.append(check_foreign(experiment.mixer, build, device, positions))
        if is_path(experiment.mixer):
            _check_beyond_training(experiment, build, device)
        length = positions() if is_path(experiment.mixer) else min(POSITIONS, positions())
        with _one_line_on_slow_operations(experiment.mixer):
            call_as_in_training(experiment, experiment.build, length, device)

    for experiment, names in zip(experiments, unused, strict=True):
        warn_unused(experiment.mixer, names)


@contextmanager
def _one_line_on_slow_operations(mixer: str) -> Iterator[None]:
    """Say in one line which operations ``vmap`` computes run by run, in place of PyTorch's warnings, now and later."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield

    slow = dict[str, None]()
    for warning in caught:
        if found := NO_BATCHING_RULE.search(str(warning.message)):
            slow[found[1]] = None
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if slow:
        warnings.filterwarnings("ignore", NO_BATCHING_RULE.pattern, UserWarning)
        log_once(f"mixer {mixer!r}: PyTorch computes {', '.join(slow)} one run after another, which is slower")


def _check_beyond_training(experiment: Experiment, build: Callable[[], Layer], device: torch.device) -> None:
    """Check a layer on the longest sequences of extrapolation sets, unless it fails there, as some layers may.

    Raises:
        ContractError: its outputs are wrong there.
    """
    longest = experiment.task_config.longest_length
    if longest <= _positions(experiment):
        return
    try:
        with torch.no_grad():
            build().to(device)(torch.randn(1, longest, experiment.shape.width, device=device))
    except Exception:  # a user's layer may raise anything
        return
    check_foreign(experiment.mixer, build, device, lambda: longest)


def train_studies(
    experiments: Sequence[Experiment],
    grid: Sequence[Run],
    settings: Settings,
    console: Console,
    more_seeds: Sequence[int] = (),
) -> Iterator[tuple[Experiment, Summary]]:
    """Train what is missing of each experiment's grid; yield each experiment, as identified, with its summary.

    Args:
        experiments: what to train.
        grid: runs of each.
        settings: where and how.
        console: for progress.
        more_seeds: seeds that the chosen point alone is repeated with; the point is chosen without them.

    Raises:
        ValueError: the storage cannot be opened.
        ForeignFolderError, DamagedFileError, SplitOverlapError, OSError: as the parts say.
        WorkerError: the process of another GPU has failed.
        torch.OutOfMemoryError: a GPU has too little memory for the runs of an ensemble.
        StoppedError: SIGINT or SIGTERM has come, and checkpoints are written.
    """
    devices = find_devices(settings.device)[: len(experiments) * len(grid)]
    together = min(settings.together, math.ceil(len(grid) / len(devices)))
    say = partial(console.print, soft_wrap=True)

    check_homes(experiments, settings.out, settings.storage)
    with closing(Store(settings.out, settings.storage)) as store:
        if settings.rebuild:
            say(f"rebuilt: {sum(rebuild(experiment, store) for experiment in experiments)} finished runs")
        experiments = [identify(experiment, store.storage, say) for experiment in experiments]

        # Folders that the storage does not know.
        wanted = [*grid, *(replace(run, seed=seed) for run in grid for seed in more_seeds)]
        for experiment in experiments:
            _say_lost(experiment, unknown_runs(experiment, wanted, store), store.folder, say)

        if len(devices) > 1:
            say(f"{len(devices)} GPUs share each grid, up to {together} runs at a time on each; bars: the first")

        # Other processes get the experiments without the data that these hold, and a tracker of their own.
        bare = [(replace(experiment), experiment.code) for experiment in experiments]
        tracker = Tracker(settings.tracking)
        work = partial(train_elsewhere, bare, grid, store.folder, store.url, together, tracker)

        say_once = cache(say)
        with memory_advice(together), Display(console) as display, Workers(devices[1:], work) as workers:
            mine = Tracker(settings.tracking)
            watcher = Watchers(display, mine, check=workers.check)
            searcher = Searcher(store=store, device=devices[0], together=together, watcher=watcher)
            for experiment in experiments:
                if len(done_of(grid, experiment, store.storage)) < len(grid):
                    workers.start()
                yield experiment, _train_study(experiment, grid, more_seeds, searcher, mine, say_once)


def _train_study(
    experiment: Experiment,
    grid: Sequence[Run],
    more_seeds: Sequence[int],
    searcher: Searcher,
    tracker: Tracker,
    say: Say,
) -> Summary:
    """Train what is missing of an experiment's grid, choose a point and repeat it, and read the test split.

    ``summary.json`` shows the whole study, which may hold more points and seeds than this grid.

    Args:
        experiment: what to train, as identified.
        grid: its runs.
        more_seeds: seeds that the chosen point is repeated with.
        searcher: trains runs.
        tracker: told the test figures.
        say: prints a line, and each only once.

    Returns:
        What this grid shows.
    """
    store = searcher.store
    of_grid = searcher.search(experiment, grid)
    chosen, repeats, unstable = _choose_and_repeat(of_grid, more_seeds, partial(searcher.search, experiment))

    # Read the test split for the points that this grid and the paper's smaller ones choose.
    others = choose_in_other_grids(of_grid, unstable)
    selected = {chosen, *others.values()}
    finished = [run_of(trial) for trial in done_trials(experiment, store)]
    readings = _read_test(experiment, [run for run in finished if _point_of(run) in selected], searcher, say)
    tracker.close({run: asdict(reading) for run, reading in readings.items()})

    # Another command may have finished points of this study meanwhile.
    with store.exclusive():
        whole = _summarise_all(experiment, chosen, readings, others, finished, store)
        write_summary(whole, study_folder(store.folder, experiment))
    if whole.chosen_point is not None and (best := (whole.chosen_point.lr, whole.chosen_point.weight_decay)) != chosen:
        better = f"lr {best[0]:g} with weight decay {best[1]:g}, which another command has chosen,"
        say(f"{experiment.name}: {better} is better on validation: summary.json and comparisons show it")
    flag_study(experiment, whole, store)
    return summarise(experiment, [*of_grid, *repeats], chosen, readings, others)


def _summarise_all(
    experiment: Experiment,
    chosen: GridPoint | None,
    readings: dict[Run, Reading],
    others: dict[str, GridPoint],
    known: Sequence[Run],
    store: Store,
) -> Summary:
    """Summarise all finished runs of a study; points that other commands have chosen keep their test figures.

    Args:
        experiment: the study.
        chosen: the point that this command has chosen; the study's choice is the best of all.
        readings: test figures of its runs, and of the points in ``others``.
        others: points that other grids choose, by their names.
        known: runs that had finished when the test split was read. Another command reads it for later ones, which are
            left out before that if they repeat a point that has test figures.
        store: where the runs are.
    """
    done = done_trials(experiment, store)
    finished = [run_of(trial) for trial in done]
    before = _stored_test(experiment, [run for run in finished if run not in readings], store)
    tested = {*map(_point_of, before), *map(_point_of, readings)}
    done = [t for t in done if (run := run_of(t)) in {*known, *before} or _point_of(run) not in tested]
    finished = [run_of(trial) for trial in done]

    choices = {*map(_point_of, before), *([] if chosen is None else [chosen])}
    unread = {_point_of(run) for run in finished if run not in before and run not in readings}
    best = choose_among(done, choices - unread) or chosen
    return summarise(experiment, done, best, {**before, **readings}, others, choices)


def _choose_and_repeat(
    trials: Sequence[FrozenTrial], seeds: Sequence[int], train_more: Callable[[Sequence[Run]], list[FrozenTrial]]
) -> tuple[GridPoint | None, list[FrozenTrial], set[GridPoint]]:
    """Choose a point of a finished grid and train it with more seeds; if one diverges, the next best takes its place.

    Args:
        trials: trials of the grid.
        seeds: seeds that the chosen point is repeated with.
        train_more: trains runs and returns their trials.

    Returns:
        The chosen point, None if a seed of each point diverged; the trials that repeat points; the points of which such
        a trial diverged.
    """
    repeats: list[FrozenTrial] = []
    unstable: set[GridPoint] = set()
    while (chosen := choose_point(trials, without=unstable)) is not None and seeds:
        found = train_more(repeats_of(chosen, seeds))
        repeats += found
        if not diverged_seeds(found):
            break
        unstable.add(chosen)
    return chosen, repeats, unstable


def _say_lost(experiment: Experiment, unknown: Sequence[Run], folder: Path, say: Say) -> None:
    """Say which of the runs that the storage does not know are finished by their folders, or by the summary alone."""
    recorded = [run for run in unknown if has_record(experiment, run, folder)]
    if recorded:
        counted = f"{len(recorded)} finished run{'s' * (len(recorded) > 1)}"
        say(f"{experiment.name}: the storage lacks {counted}, to be trained again: --rebuild takes them over")

    try:
        summarised = read_summary(study_folder(folder, experiment)).runs
    except ValueError:  # there is none, or it is damaged, and will be written again
        return
    if gone := [run for run in unknown if run in summarised and run not in recorded]:
        counted = f"{len(gone)} finished run{'s' * (len(gone) > 1)} of summary.json"
        say(f"{experiment.name}: the storage lacks {counted}, and their folders are gone: they are trained again")


def look_into(experiment: Experiment, settings: Settings, say: Say) -> None:
    """Diagnose the study's chosen model, unless its files are there; say where the diagnosis lies and what it lacks."""
    folder = study_folder(settings.out.resolve(), experiment)
    summary = read_summary(folder)
    run = summary.best_run
    if run is None:
        return
    seeds = len(summary.chosen_point.seeds) if summary.chosen_point else 0
    best = f", the best of {seeds} seeds on validation" if seeds > 1 else ""
    title = f"{experiment.heading}, lr {run.lr:g}, weight decay {run.weight_decay:g}, seed {run.seed}{best}"
    record, figure = folder / "diagnosis.json", folder / "diagnosis.png"

    if not figure.exists() or (read_json(record) or {}).get("title") != title:
        from runners.mad.diagnosis.diagnose import diagnose  # imports scikit-learn, which takes seconds
        from runners.mad.diagnosis.outputs import UnreadableError

        try:
            model = kept_model(experiment, run, settings.out)
            diagnose(model.to(find_devices(settings.device)[0]), experiment.instance, folder, title)
        except DamagedFileError as error:
            say(f"no diagnosis: {error}")
            return
        except UnreadableError as error:
            say(f"no diagnosis: {experiment.label} on {experiment.setting} cannot be read on the test split: {error}")
            return

    for name, reason in read_json(record).get("unreadable_sets", {}).items():
        say(f"diagnosis without {name!r}: {experiment.label} on {experiment.setting} cannot be read there: {reason}")
    say(f"diagnosis of the chosen model: {figure}")


def kept_model(experiment: Experiment, run: Run, out: Path) -> Backbone:
    """The model of a finished run with the parameters that its best evaluation kept, on the CPU.

    Raises:
        DamagedFileError: its parameters are gone, cannot be read, or are others than those of the model.
    """
    model = experiment.build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(kept_parameters(experiment, run, out.resolve(), shapes), strict=False)  # without buffers
    return model


def kept_record(experiment: Experiment, run: Run, out: Path) -> dict[str, Any]:
    """The record of a finished run with its curve, from its ``config.json``.

    Raises:
        DamagedFileError: it is gone or damaged.
    """
    path = run_folder(out.resolve(), experiment, run) / "config.json"
    reason: Exception | None = None
    try:
        record: dict[str, Any] | None = read_json(path)
    except DamagedFileError as error:
        record, reason = None, error

    if record is None:
        raise DamagedFileError(f"{path} is gone or damaged: another --out trains the run again") from reason
    return record


@contextmanager
def memory_advice(together: int) -> Iterator[None]:
    """Say what helps when there is too little memory.

    Raises:
        OutOfMemoryError: with that advice.
    """
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(f"out of memory: lower --together (now {together})") from error


def flag_study(experiment: Experiment, summary: Summary, store: Store) -> None:
    """Show the chosen point, its test accuracies and the folder of its best run with the study in the dashboard."""
    chosen, run = summary.chosen_point, summary.best_run
    if chosen is None or run is None:
        result = dict.fromkeys(RESULTS, "every point diverged")
    else:
        at = f"lr {chosen.lr:g}, weight decay {chosen.weight_decay:g}"
        estimates = chosen.estimates or {}
        read = [(name, estimates.get(f"test_{name}_accuracy")) for name in ("sequence", "token")]
        result = {
            "chosen": at if summary.edge is None else f"{at}: {edge_advice(summary)}",
            "test": ", ".join(f"{name} accuracy {value.text()}" for name, value in read if value) or "not read",
            "folder of the best run": str(run_folder(store.folder, experiment, run)),
        }
    show_result(open_study(experiment, store), result)


def _point_of(run: Run) -> GridPoint:
    return run.lr, run.weight_decay


def _positions(experiment: Experiment) -> int:
    """Length of the sequences of the validation split."""
    return experiment.instance.split("validation").inputs_ST.shape[1]


def _stored_test(experiment: Experiment, runs: Sequence[Run], store: Store) -> dict[Run, Reading]:
    """Test figures that are stored; those of a run whose file is damaged are left out."""
    found: dict[Run, Reading] = {}
    for run in runs:
        with suppress(DamagedFileError):
            found |= stored_readings(experiment, [run], store.folder)
    return found


def _read_test(experiment: Experiment, runs: Sequence[Run], searcher: Searcher, say: Say) -> dict[Run, Reading]:
    """Test figures of the chosen point's runs; without their models there are none, and a line says so."""
    device, together = searcher.device, searcher.together
    try:
        return read_test(experiment, runs, searcher.store.folder, device, runs_at_once(experiment, together, device))
    except DamagedFileError as error:
        say(f"no test accuracy: {error}")
        return {}
