"""Train the missing reference results, then write their overview.

    python -m runners.mad.reference                                  # every missing result, on all GPUs
    python -m runners.mad.reference --layers rt "3*gated-deltanet+transformer" --tasks compression
    python -m runners.mad.reference --preset quick                   # the same for the preset quick of runners.mad
    python -m runners.mad.reference --preset profile                 # profiles: the ladders of all sixteen tasks
    python -m runners.mad.reference --overview                       # train nothing, write the overview
    python -m runners.mad.reference --dry-run                        # what is missing, and how long it takes

Each result is one layer on one task: 200 epochs at each point of the wide grid, then five seeds of the chosen point. If
that has the largest learning rate, below the ceiling, 1e-2 and 2e-2 are trained, too, and the points with five seeds
are compared. With ``--preset quick`` a result has small settings, which are not the reference protocol, and a separate
folder. With ``--preset profile`` it is the ladder of the task, and there are more rows: seven layers at the parameters
of the Transformer, and twelve on MQAR and copying at widths 32, 128 and 256.

A finished result is a table of records in ``results/reference``; to train it again, delete it. A stopped one resumes
from its runs in ``--out``. On several GPUs, one process per GPU takes results, and each is trained once. Several
commands that share both folders also divide them among themselves. An error in a result is one line; the others are
trained, and the command ends with status 1.

The overview is ``overview.png``, the accuracies, and ``overview.md``: the ranking of the layers, the effective depth of
RT, and its accuracy against the length of its blocks. That of the profiles has tiers, capacities, the
effective depth, and all rungs, and pictures of these and of scores against state and time.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout
from rich.console import Console

from runners import options, records
from runners.ending import others_continue, run_command, user_errors
from runners.files import rounded
from runners.gpus import is_worker, run_on_all_gpus, starts_workers
from runners.mad.experiment import Experiment, plan
from runners.mad.options import BEYOND, Options, defaults, tasks_of
from runners.mad.points import choose, chosen, points
from runners.mad.rows import ENTRIES, PROFILED, Entry, ReferencePreset, file_of, packed, with_candidates
from runners.mad.search import train_studies
from runners.progress import open_console
from tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """Train the missing reference results.

    Attributes:
        layers: rows to train, all unless given.
        tasks: tasks to train on, unless given the ten of the published table, in profiles all.
        preset: full is the reference protocol; quick and profile are presets of runners.mad, stored in folders of these
            names below the folder.
        folder: where the results are stored; by default in the checkout, or of an installation in the current folder.
        out: results folder of the studies behind them.
        overview: write the overview of the existing results, and train nothing.
        dry_run: print which results are missing and how long training takes, and train nothing.

    Raises:
        ValueError: there is no such row or task.
    """

    layers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    preset: ReferencePreset = "full"
    folder: Path = records.TRAINED_REFERENCE
    out: Path = Path("results/reference-studies")
    overview: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for kind, given, known in (("row", self.layers, self.rows), ("task", self.tasks, TASKS)):
            if unknown := [name for name in given if name not in known]:
                choices = ", ".join(known)
                raise ValueError(f"{unknown[0]} is no {kind} of the reference results: choose from {choices}")

    @property
    def rows(self) -> Mapping[str, Entry]:
        """All rows of the preset by name."""
        return PROFILED if self.preset == "profile" else ENTRIES

    def study(self, entry: Entry, task: str) -> tuple[Options, list[Experiment]]:
        """Return the options of a result's training, and the experiments that follow from them: one, or the rungs."""
        preset = defaults(self.preset)
        out = self.out if self.preset == "full" else self.out / self.preset
        # One storage for each, because processes that share one wait for each other.
        storage = str(out / "storages" / f"{entry.name}-{task}.journal")
        of_one = replace(preset, mixer=(entry.mixer,), task=(task,), layers=entry.layers, out=out, storage=storage)
        of_one = replace(of_one, **entry.sizes)
        return of_one, plan(of_one, dict(entry.options), {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = open_console()
    say = partial(console.print, soft_wrap=True)
    by_hand = not is_worker()  # the processes of the other GPUs print no plan
    with user_errors(ValueError, OSError):
        given = options.parse(ReferenceOptions, arguments)
        entries = [given.rows[name] for name in given.layers or given.rows]
        tasks = given.tasks or (*tasks_of(given.preset),)
        wanted = [(entry, task) for entry in entries for task in tasks if task in (entry.tasks or tasks)]
        missing = [place for place in wanted if not file_of(given.folder, given.preset, *place).exists()]
        if by_hand:
            say(f"{len(wanted) - len(missing)} of {len(wanted)} results are in {given.folder}")
        if given.dry_run:
            from runners.mad.preview import print_duration, print_plan

            studies = [given.study(entry, task) for task in TASKS for entry, name in missing if name == task]
            if studies:
                show = print_duration if given.preset == "profile" else print_plan
                show([experiment for _, of_one in studies for experiment in of_one], studies[0][0], console)
            return

    # Training.
    failed: list[str] = []
    whole = True
    if missing and not given.overview and starts_workers():
        whole = run_on_all_gpus("runners.mad.reference", arguments)
    elif not given.overview:
        with user_errors(OSError):
            for entry, task in missing:
                with others_continue(f"{entry.name} on {task}", failed, ValueError):
                    train(entry, task, given, console)

    if by_hand:
        from runners.mad.reference.overview import write_overview  # both import Matplotlib
        from runners.mad.reference.profiles import write_profiles

        with user_errors(ValueError, OSError):
            profiled = given.preset == "profile"
            for path in write_profiles(given.folder) if profiled else write_overview(given.folder, given.preset):
                say(f"written: {path}")
    if failed or not whole:
        raise SystemExit(1)


def train(entry: Entry, task: str, given: ReferenceOptions, console: Console) -> None:
    """Train a result and write its records, unless another process trains it or has finished it."""
    file = file_of(given.folder, given.preset, entry, task)
    lock = given.out / "locks" / f"{given.preset}-{entry.name}-{task}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(lock, timeout=0):
        if file.exists():
            return
        of_one, experiments = given.study(entry, task)
        is_profile = given.preset == "profile"
        table = pd.concat([table for _, table in train_studies(experiments, of_one, console)])
        if given.preset == "full" and chosen(points(table))["edge"].item() == "largest":
            further = replace(of_one, lr=(*dict.fromkeys(run.lr for run in of_one.runs), *BEYOND))
            ((_, more),) = train_studies(experiments, further, console)
            table = with_candidates(pd.concat([table, more]).drop_duplicates("file"))

        # The name of the row; curves of the chosen point alone, none of rungs.
        best = None if is_profile else choose(table)
        found = records.read_all(*table["file"])
        of_best = [path.parent for path, run in found if (run.lr, run.weight_decay) == best]
        made = []
        for path, run in found:
            figures = {name: [y if y is None else rounded(y) for y in column] for name, column in run.curve.items()}
            curve = figures | {"step": run.curve["step"]} if path.parent in of_best else {}
            study = f"{entry.name} {task} {run.difficulty if is_profile else given.preset}"
            made.append(replace(run, study=study, layer=entry.name, preset=given.preset, curve=curve))
        records.write_all(file, [packed(made)] if is_profile else made)
        console.print(f"written: {file}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main, "interrupted: the same command resumes from the last checkpoints")
