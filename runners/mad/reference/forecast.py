"""How long the training of missing reference cells takes, estimated from the times of existing cells.

A missing cell is expected to take the mean of its layer's cells times the mean of its task's cells, divided by the mean
of all cells. Means are geometric; a layer or task without a cell counts as the mean of all. On a CPU, steps of some
cells are timed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean
from typing import Any

from runners.device import find_devices
from runners.mad.duration import Clock, sentence, work_left
from runners.mad.options import Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.entries import Entry
from runners.storage import existing_storage

BUDGET = 15.0
"""Seconds after which no further cell is timed."""
Place = tuple[str, str]
"""Layer and task."""


def forecast(
    missing: Sequence[tuple[Entry, str]], plan: Callable[[Entry, str], Options], cells: Collection[Mapping[str, Any]]
) -> str:
    """Return in words how long the training of missing cells takes; empty if nothing is known.

    Args:
        missing: rows and tasks of the missing cells.
        plan: makes the options of a cell.
        cells: the existing cells of the protocol.
    """
    device, took = seconds_of_cells(cells)
    experiments, works, recorded, clock = [], [], [], None

    for entry, task in missing:
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
    pairs = zip(durations, recorded, strict=True)
    return sentence([replace(duration, recorded=seconds, device=device) for duration, seconds in pairs])


def seconds_of_cells(cells: Collection[Mapping[str, Any]]) -> tuple[str, dict[Place, float]]:
    """Return the device on which most cells were trained, and the seconds of training of the cells trained there."""
    devices = Counter(cell["device"] for cell in cells)
    device = max(devices, key=devices.__getitem__, default="")
    return device, {(cell["layer"], cell["task"]): cell["seconds"] for cell in cells if cell["device"] == device}


def expected_seconds(took: Mapping[Place, float], place: Place) -> float | None:
    """Return the seconds that a cell is expected to take, from the seconds of other cells; None without others."""
    if not took:
        return None
    everything = fmean(map(log, took.values()))
    of_layer, of_task = (
        fmean([log(seconds) for other, seconds in took.items() if other[i] == place[i]] or [everything]) for i in (0, 1)
    )
    return exp(of_layer + of_task - everything)
