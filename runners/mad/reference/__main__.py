"""Train the missing reference results, then write their overview.

    python -m runners.mad.reference                                  # every missing cell, on all GPUs
    python -m runners.mad.reference --layers rt transformer --tasks compression
    python -m runners.mad.reference --preset quick                   # the same for the preset quick of runners.mad
    python -m runners.mad.reference --overview                       # train nothing, write the overview
    python -m runners.mad.reference --dry-run                        # which cells are missing or stale
    python -m runners.mad.reference --minutes 60                     # begin only what ends within an hour

Each cell is one layer on one task: 200 epochs at each point of the wide grid, then five seeds of the chosen point. With
``--preset quick``, a cell has small settings, which are not the published protocol, and is stored in a separate folder.

A finished cell is a small file in ``results/reference``. A stopped cell resumes from its checkpoints in ``--out``, if
that folder still exists. On several GPUs, one process per GPU takes cells, and each cell is trained once. Several
commands that share both folders also divide the cells among themselves. With ``--minutes``, a cell is left for another
time if it is expected to end too late. An error in a cell is one line; the other cells are trained, and the command
ends with status 1.

The overview is ``overview.png``, a heat map, and ``overview.md``: the ranking of the layers, the effective depth of RT,
and its accuracy against the length of its blocks.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

from filelock import FileLock, Timeout
from rich.console import Console

from runners.cli import check_out, cli, shown_as
from runners.deadline import Deadline
from runners.ending import others_continue, run_command, user_errors
from runners.gpus import beginning, is_worker, run_on_all_gpus, starts_workers
from runners.guidance import row_of
from runners.mad.duration import Duration, sentence
from runners.mad.options import Options
from runners.mad.reference.cells import (
    FOLDER,
    Cell,
    ProtocolName,
    cell_file,
    options_of,
    protocol_folder,
    read_cell,
    read_cells,
    train_cell,
    write_cell,
)
from runners.mad.reference.entries import ENTRIES, Entry
from runners.mad.reference.forecast import Place, forecast, table_of
from runners.mad.reference.overview import write_overview
from runners.mad.reference.staleness import find_stale
from runners.task_names import find_task
from tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Train the missing reference results.

    Attributes:
        layers: rows to train, all unless given.
        tasks: tasks to train on, all unless given.
        preset: full is the published protocol; quick is the preset of runners.mad, stored in quick below the folder.
        folder: where the cells are stored.
        out: results folder of the studies behind the cells.
        minutes: begin only cells that are expected to end within this time, for rented machines and batch queues.
        overview: write the overview of the existing cells, and train nothing.
        dry_run: print which cells are missing or stale and how long training takes, and train nothing.
    """

    layers: Annotated[tuple[str, ...], shown_as()] = ()
    tasks: Annotated[tuple[str, ...], shown_as()] = ()
    preset: ProtocolName = "full"
    folder: Path = FOLDER
    out: Path = Path("results/reference-studies")
    minutes: Annotated[float | None, shown_as("FLOAT")] = None
    overview: bool = False
    dry_run: bool = False

    @property
    def cells(self) -> Path:
        """Folder of the preset's cells."""
        return protocol_folder(self.folder, self.preset)

    @property
    def studies(self) -> Path:
        """Results folder of the preset's studies."""
        return protocol_folder(self.out, self.preset)

    def plan(self, entry: Entry, task: str) -> Options:
        """Return the options of a cell's training."""
        # One storage per cell, because processes that share one wait for each other.
        storage = str(self.studies / "cells" / f"{entry.name}-{task}.journal")
        return options_of(entry, task, self.preset, out=self.studies, storage=storage)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    began = beginning()
    arguments = sys.argv[1:] if arguments is None else arguments
    console = Console(markup=False)
    say = partial(console.print, soft_wrap=True)
    with user_errors(ValueError, OSError):
        options = cli(ReferenceOptions, ReferenceOptions(), arguments)
        check_out(options.out, writes=not (options.dry_run or options.overview))
        check_out(options.cells, "--folder", writes=not options.dry_run)
        if options.overview and options.dry_run:
            raise ValueError("--overview writes the overview, and --dry-run writes nothing: leave one of them out")
        deadline = None if options.minutes is None else Deadline(options.minutes, began)
        wanted = [(entry, task) for entry in chosen_entries(options.layers) for task in chosen_tasks(options.tasks)]
        there = [(entry, task) for entry, task in wanted if cell_file(options.cells, entry, task).exists()]
        missing = [place for place in wanted if place not in there]

    # Print the state and the plan; only the process started by the user prints, not those it starts for GPUs.
    by_hand = not is_worker()
    trains = bool(missing) and not options.overview
    durations: dict[tuple[str, str], Duration] = {}
    with user_errors(ValueError, OSError):
        if by_hand:
            print_state(there, missing, options, say)
        if trains and (by_hand or deadline is not None):
            names = [(entry.name, task) for entry, task in missing]
            durations = dict(zip(names, forecast(missing, options.plan, known_cells(options)), strict=True))
        if trains and by_hand:
            print_forecast(missing, [*durations.values()], options, console)
    if options.dry_run:
        return

    # Training.
    whole = True
    if trains:
        if starts_workers():
            whole = run_on_all_gpus("runners.mad.reference", arguments, began)
        else:
            with user_errors(OSError):
                whole = train_cells(missing, durations, deadline, options, console)

    if by_hand:
        with user_errors(ValueError, OSError):
            print_end(missing, deadline, options, say)
    if not whole:
        raise SystemExit(1)


def print_state(
    there: Sequence[Place], missing: Sequence[Place], options: ReferenceOptions, say: Callable[[str], None]
) -> None:
    """Print how many cells exist, how many are stale, and with ``--dry-run`` which cells are stale."""
    files = [cell_file(options.cells, entry, task) for entry, task in there]
    verdicts = find_stale([read_cell(file) for file in files])
    stale = [file for file, is_stale in zip(files, verdicts, strict=True) if is_stale]

    counted = f", {len(stale)} of them stale: delete a stale cell's file to train it again" if stale else ""
    say(f"{len(there)} of {len(there) + len(missing)} cells are in {options.cells}{counted}")
    if options.dry_run:
        for file in stale:
            say(f"stale: {file.parent.name} on {file.stem}")


def print_end(
    missing: Sequence[Place], deadline: Deadline | None, options: ReferenceOptions, say: Callable[[str], None]
) -> None:
    """Print how many of the missing cells are not trained; write the overview, unless that is all of them."""
    left = sum(not cell_file(options.cells, entry, task).exists() for entry, task in missing)
    if left and not options.overview:
        limited = "" if deadline is None else f", where {deadline}"
        say(f"not trained: {left} cell{'s' * (left > 1)}{limited}")
        if left == len(missing):
            return

    preset = "" if options.preset == "full" else f" --preset {options.preset}"
    for path in write_overview(options.cells, f"python -m runners.mad.reference{preset}"):
        say(f"written: {path}")


def print_forecast(
    missing: Sequence[Place], durations: Sequence[Duration], options: ReferenceOptions, console: Console
) -> None:
    """Print how many cells will be trained, with ``--dry-run`` which, and how long that takes."""
    plan = options.plan(*missing[0])
    cells = f"{len(missing)} cell{'s' * (len(missing) > 1)}"
    console.print(
        f"to train: {cells}, each at {len(plan.runs)} points of the grid, then at the chosen point with "
        f"{len(plan.more_seeds)} more seeds; Ctrl-C stops, and the same command resumes",
        soft_wrap=True,
    )

    if options.dry_run:
        layers = [entry.name for entry in chosen_entries(options.layers)]
        console.print(table_of(missing, durations, layers))
    if text := sentence(durations):
        console.print(f"time: {text}", soft_wrap=True)


def known_cells(options: ReferenceOptions) -> list[Cell]:
    """Return all cells that exist."""
    return [cell for task in TASKS for cell in read_cells(options.cells, ENTRIES.values(), task)]


def chosen_entries(names: Sequence[str]) -> list[Entry]:
    """Return rows by name; all rows if there are no names.

    Raises:
        ValueError: there is no such row.
    """
    return [ENTRIES[row_of(name, ENTRIES)] for name in names or ENTRIES]


def chosen_tasks(names: Sequence[str]) -> list[str]:
    """Return the names of tasks; all tasks if there are no names.

    Raises:
        ValueError: there is no such task.
    """
    for name in names:
        find_task(name)
        if name not in TASKS:
            raise ValueError(f"{name} is no task of the reference results: choose from {', '.join(TASKS)}")
    return list(names or TASKS)


def train_cells(
    missing: Sequence[Place],
    durations: Mapping[tuple[str, str], Duration],
    deadline: Deadline | None,
    options: ReferenceOptions,
    console: Console,
) -> bool:
    """Train cells; return False if one of them stopped with an error. A cell of another process counts as trained.

    With a deadline, ``durations`` holds how long the training of each cell takes.
    """
    failed: list[str] = []
    for entry, task in missing:
        expected = 0.0 if deadline is None else durations[entry.name, task].seconds
        if deadline is not None and not deadline.allows(expected):
            continue
        began = monotonic()
        with others_continue(f"{entry.name} on {task}", failed, ValueError):
            if train_if_free(entry, task, options, console) and deadline is not None:
                deadline.learn(expected, monotonic() - began)
    return not failed


def train_if_free(entry: Entry, task: str, options: ReferenceOptions, console: Console) -> bool:
    """Train a cell and return True, unless another process is training it or has finished it."""
    locks = options.studies / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(locks / f"{entry.name}-{task}.cell", timeout=0):
            if cell_file(options.cells, entry, task).exists():
                return False
            cell = train_cell(entry, task, options.plan(entry, task), console)
            path = write_cell(options.cells, entry, task, cell)
            console.print(f"{path}: {cell.seconds:.0f} s of training", soft_wrap=True)
            return True
    except Timeout:
        return False


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoints")
