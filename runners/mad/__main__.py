"""Train single layers on diagnostic tasks and tabulate what they reach.

    python -m runners.mad --mixer rt --task compression
    python -m runners.mad --mixer rt transformer --task all --seeds 5
    python -m runners.mad --mixer my_package.my_module:MyLayer --task in-context-recall --steps 2000
    python -m runners.mad --mixer rt transformer --task compression --mixer.heads 4 --match flops
    python -m runners.mad --preset demo
    python -m runners.mad --mixer all --task all --dry-run
    python -m runners.mad --list

By default the six points of the published grid (Oncescu et al. 2026, appendix "Synthetic experiments") at the task's
baseline setting. The same command again goes on where it stopped.
"""

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product

import torch
from rich.console import Console

from mixers.base import ContractError
from mixers.contract import POSITIONS, check_foreign
from runners.cli import run_command, user_errors
from runners.device import find_devices
from runners.files import DamagedFileError, read_json
from runners.mad.dry_run import print_forecast
from runners.mad.experiment import Experiment, call_as_in_training, study_folder
from runners.mad.layers import print_layers
from runners.mad.options import Options
from runners.mad.plan import chosen_layers, first_layer, plan
from runners.mad.results.charts import plot_comparison
from runners.mad.results.held_out import Reading, kept_parameters, read_test
from runners.mad.results.standings import Standing, print_comparison
from runners.mad.results.summary import Summary, print_summary, summarise, write_summary
from runners.mad.search.progress import Display
from runners.mad.search.search import ForeignFolderError, finished, run_of, search
from runners.mad.search.tracker import Tracker
from runners.mad.search.watch import Watchers
from runners.mad.search.workers import Crew, CrewError, work_off
from runners.mad.training.loop import SECONDS_BETWEEN_CHECKPOINTS
from runners.mad.training.protocol import Run
from runners.storage import Store, existing_storage
from runners.tracking import check_login
from tasks.base import SplitOverlapError

LONGEST_NAME = 100

"""Characters of a chart's file name taken from the command line; file systems take 255 bytes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, console = sys.argv[1:] if arguments is None else arguments, Console(markup=False)
    say = partial(console.print, soft_wrap=True)
    with user_errors(ValueError, OSError):
        if "--list" in arguments:
            print_layers(chosen_layers(arguments, say), console)
            return
        options, experiments = plan(arguments, say)
        points = product(options.lr, options.weight_decay, range(options.seeds))
        grid = list(dict.fromkeys(Run(lr=lr, weight_decay=decay, seed=seed) for lr, decay, seed in points))
        storage = options.storage or str(options.out / "studies.journal")
        if options.dry_run:
            print_forecast(experiments, grid, existing_storage(storage), options.out, console)
            return
        check_login(options.wandb)
        devices = find_devices(options.device)[: len(experiments) * len(grid)]
    for experiment in experiments:  # before the first is trained, which may take hours
        with user_errors(ContractError):
            build = partial(first_layer, experiment)
            check_foreign(experiment.mixer, build, devices[0], partial(_positions, experiment))
            call_as_in_training(experiment, experiment.build, min(POSITIONS, _positions(experiment)), devices[0])
    with user_errors(ValueError, OSError):
        store = Store(options.out, storage)
    together = min(options.together, math.ceil(len(grid) / len(devices)))
    if len(devices) > 1:
        console.print(f"{len(devices)} GPUs share each grid, up to {together} runs at a time on each; bars: the first")
    # Processes get what is to do without the data that the experiments hold, and a tracker of their own.
    to_do = ([replace(e) for e in experiments], grid, store.folder, store.url, together)
    work = partial(work_off, *to_do, Tracker(options.wandb, options.out))
    say_once = cache(partial(console.print, soft_wrap=True))
    standings = []
    known_errors = (SplitOverlapError, DamagedFileError, ForeignFolderError, CrewError, OSError)
    with (
        user_errors(*known_errors),
        _memory_advice(together),
        closing(store),
        Display(console) as display,
        Crew(devices[1:], work) as crew,
    ):
        watcher = Watchers(display, Tracker(options.wandb, options.out), crew)
        for experiment in experiments:
            trials = search(experiment, grid, store, devices[0], together, watcher)
            read = partial(_read_test, experiment, store, devices[0], together, say_once)
            summary = summarise(experiment, trials, read)
            folder = study_folder(store.folder, experiment)
            write_summary(summarise(experiment, finished(experiment, store), read, chosen_among=trials), folder)
            print_summary(summary, console)
            _diagnose(summary, store, devices[0], console)
            console.print(f"stored in {folder}\n", soft_wrap=True)
            standings.append(Standing.of(summary.to_dict()))
    if len(standings) > 1:
        figure = options.out / "figures" / f"{_figure_name(options, experiments)}.png"
        with user_errors(OSError):
            plot_comparison(standings, figure)
        print_comparison(standings, console)
        console.print(f"chart: {figure}", soft_wrap=True)
    console.print(f"studies: {store.url}\ndashboard: optuna-dashboard {store.url}", soft_wrap=True)
    if options.wandb == "offline" and (logs := options.out / "wandb").exists():
        console.print(f"curves: {logs}; upload them: wandb sync {logs}/offline-run-*", soft_wrap=True)


@contextmanager
def _memory_advice(together: int) -> Iterator[None]:
    """Turn running out of GPU memory into one line and exit status 1."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        print(f"stopped: out of GPU memory: lower --together (now {together})", file=sys.stderr)
        raise SystemExit(1) from error


def _positions(experiment: Experiment) -> int:
    """Length of the sequences that it is validated on."""
    return experiment.instance.split("validation").inputs_ST.shape[1]


def _read_test(
    experiment: Experiment,
    store: Store,
    device: torch.device,
    together: int,
    say: Callable[[str], None],
    runs: Sequence[Run],
) -> dict[Run, Reading]:
    """Readings of the chosen point's runs; without its model there are none, and that is said."""
    try:
        return read_test(experiment, runs, store, device, together)
    except DamagedFileError as error:
        say(f"no test accuracy: {error}")
        return {}


def _diagnose(summary: Summary, store: Store, device: torch.device, console: Console) -> None:
    """Look into the chosen model, unless that has been done, and say where it stands and what could not be read."""
    if summary.chosen_trial is None:
        return
    experiment, run = summary.experiment, run_of(summary.chosen_trial)
    folder = study_folder(store.folder, experiment)
    seeds = summary.seeds
    best = f", the best of {seeds} seeds on validation" if seeds > 1 else ""
    title = f"{experiment.name}, lr {run.lr:g}, weight decay {run.weight_decay:g}, seed {run.seed}{best}"
    there = folder / "diagnosis.json"
    say = partial(console.print, soft_wrap=True)
    if (read_json(there) or {}).get("title") != title:
        from runners.mad.diagnosis.diagnose import diagnose  # slow to import
        from runners.mad.diagnosis.outputs import UnreadableError

        model = experiment.build()
        try:
            model.load_state_dict(kept_parameters(experiment, run, store), strict=False)
            diagnose(model.to(device), experiment.instance, folder, title)
        except DamagedFileError as error:
            say(f"no diagnosis: {error}")
            return
        except UnreadableError as error:
            say(f"no diagnosis: {experiment.mixer} on {experiment.setting} cannot be read on the test split: {error}")
            return
    for name, reason in read_json(there).get("unreadable_sets", {}).items():
        say(f"diagnosis without {name!r}: {experiment.mixer} on {experiment.setting} cannot be read there: {reason}")
    say(f"diagnosis of the chosen model: {folder / 'diagnosis.png'}")


def _figure_name(options: Options, experiments: Sequence[Experiment]) -> str:
    """What was asked for, as far as it fits, and a digest of all settings, so that others have a chart of their own."""
    found = list(dict.fromkeys(experiment.difficulty for experiment in experiments))
    difficulties = options.difficulty if "all" in options.difficulty else found
    words = [options.preset] if options.preset == "demo" else [*options.mixer, *options.task, *difficulties]
    readable = re.sub(r"[^\w.+-]+", "-", "-".join(words))[:LONGEST_NAME]
    digest = hashlib.sha256("".join(experiment.name for experiment in experiments).encode()).hexdigest()
    return f"{readable}-{digest[:8]}"


if __name__ == "__main__":
    due = f"one is due every {SECONDS_BETWEEN_CHECKPOINTS:.0f} seconds"
    run_command(main, f"interrupted: the same command goes on from the last checkpoint, if there is one yet ({due})")
