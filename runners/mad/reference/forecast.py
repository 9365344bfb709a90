"""How long the training of missing reference cells takes, estimated from the times of existing cells.

A missing cell is expected to take the mean of its layer's cells times the mean of its task's cells, divided by the mean
of all cells. Means are geometric; a layer or task without a cell counts as the mean of all. On a CPU, steps of some
cells are timed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from math import exp, log
from statistics import fmean

from rich.table import Table

from runners.device import find_devices
from runners.mad.duration import Clock, Duration, total, work_left
from runners.mad.options import Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.cells import Cell
from runners.mad.reference.entries import Entry
from runners.storage import existing_storage

BUDGET = 15.0
"""Seconds after which no further cell is timed."""
Place = tuple[Entry, str]
"""A row and a task."""


def forecast(
    missing: Sequence[Place], plan: Callable[[Entry, str], Options], cells: Collection[Cell]
) -> list[Duration]:
    """Return how long the training of each missing cell takes.

    Args:
        missing: rows and tasks of the missing cells.
        plan: makes the options of a cell.
        cells: the existing cells of the protocol.
    """
    device, took = seconds_of_cells(cells)
    experiments, works, recorded, clock = [], [], [], None

    # Task by task, because consecutive experiments share the data of their task.
    order = sorted(range(len(missing)), key=lambda i: missing[i][1])
    for entry, task in (missing[i] for i in order):
        options = plan(entry, task)
        if clock is None:
            here = find_devices(options.device)
            # Nothing is timed on a GPU, because its first step is compiled, which takes longer than all others.
            budget = 0.0 if here[0].type == "cuda" else BUDGET
            clock = Clock(here, -(-len(options.runs) // len(here)), budget)

        # What is left of the cell.
        (experiment,) = plan_experiments(options, dict(entry.options), {})
        storage = existing_storage(options.settings.storage)
        work = work_left(experiment, options.runs, options.more_seeds, storage, options.out)
        experiments.append(experiment)
        works.append(work)

        # The same share of what the whole cell would take.
        runs = len(options.runs) + len(options.more_seeds)
        share = work.run_steps / (runs * experiment.protocol.total_steps(experiment.task_config.train_examples))
        seconds = expected_seconds(took, (entry.name, task))
        recorded.append(None if seconds is None else seconds * share)

    durations = [] if clock is None else clock.durations(experiments, works)
    found = {
        i: replace(duration, recorded=seconds, device=device)
        for i, duration, seconds in zip(order, durations, recorded, strict=True)
    }
    return [found[i] for i in range(len(missing))]


def table_of(missing: Sequence[Place], durations: Sequence[Duration], layers: Sequence[str]) -> Table:
    """Return a table of missing cells: for each task its layers, and the times that are known, with their devices.

    Args:
        missing: rows and tasks of the missing cells.
        durations: how long the training of each takes.
        layers: names of the rows that the command is about; those of a task are listed or, if shorter, left out.
    """
    devices = {duration.device for duration in durations if duration.recorded is not None}
    known = [any(duration.here is not None for duration in durations), bool(devices)]
    headings = ["time\nhere", f"on one\n{' or '.join(devices)}"]

    table = Table(title="missing", title_justify="left")
    table.add_column("task")
    table.add_column("layers", overflow="fold")
    for heading in compress(headings, known):
        table.add_column(heading, justify="right")

    cells = [*zip(missing, durations, strict=True)]
    for task in dict.fromkeys(task for _, task in missing):
        of_task = [(entry.name, duration) for (entry, name), duration in cells if name == task]
        names, times = zip(*of_task, strict=True)
        others = ", ".join(name for name in layers if name not in names)
        text = min(", ".join(names), f"all but {others}" if others else "all", key=len)
        table.add_row(task, text, *compress(total(times).cells(), known))
    return table


def seconds_of_cells(cells: Collection[Cell]) -> tuple[str, dict[tuple[str, str], float]]:
    """Return the device on which most cells were trained, and the seconds of those cells by layer and task."""
    devices = Counter(cell.device for cell in cells)
    device = max(devices, key=devices.__getitem__, default="")
    return device, {(cell.layer, cell.task): cell.seconds for cell in cells if cell.device == device}


def expected_seconds(took: Mapping[tuple[str, str], float], cell: tuple[str, str]) -> float | None:
    """Return the seconds that a cell is expected to take, from those of others, by layer and task; None without."""
    if not took:
        return None
    everything = fmean(map(log, took.values()))
    of_layer, of_task = (
        fmean([log(seconds) for other, seconds in took.items() if other[i] == cell[i]] or [everything]) for i in (0, 1)
    )
    return exp(of_layer + of_task - everything)
