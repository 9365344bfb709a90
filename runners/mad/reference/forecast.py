"""How long the training of reference cells takes: steps are timed on a CPU; other cells tell how long a GPU took.

A cell that is not there is expected to take the mean of its layer's cells times the mean of its task's cells, over the
mean of all; means are geometric, and a layer or task without a cell counts as the mean of all.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from runners.device import find_devices
from runners.mad.duration import Clock, Duration, sentence, work_left
from runners.mad.options import Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.entries import Entry
from runners.storage import existing_storage

Place = tuple[str, str]
"""Layer and task."""


def forecast(
    missing: Sequence[tuple[Entry, str]], plan: Callable[[Entry, str], Options], cells: Collection[Mapping[str, Any]]
) -> str:
    """Say in words how long the training of missing cells takes; empty if nothing is known.

    Args:
        missing: rows and tasks.
        plan: makes the options of a cell.
        cells: the cells of the protocol that are there.
    """
    took = {(cell["layer"], cell["task"]): cell["seconds"] for cell in cells if "CPU" not in cell["device"]}
    gpus = " or ".join(sorted({cell["device"] for cell in cells if "CPU" not in cell["device"]}))
    clock, durations = None, []

    for entry, task in missing:
        options = plan(entry, task)
        if clock is None:
            devices = find_devices(options.device)
            clock = Clock(devices, -(-len(options.runs) // len(devices)))
            if devices[0].type == "cuda":  # where the first step is compiled, which takes longer than all others
                clock.left = 0.0
        (experiment,) = plan_experiments(options, dict(entry.options), {})
        storage = existing_storage(options.settings.storage)
        work = work_left(experiment, options.runs, options.more_seeds, storage, options.out)
        here = clock.duration(experiment, work).here

        runs = len(options.runs) + len(options.more_seeds)
        share = work.run_steps / (runs * experiment.protocol.total_steps(experiment.task_config.train_examples))
        seconds = expected_seconds(took, (entry.name, task))
        durations.append(
            Duration(here=here, recorded=None if seconds is None else seconds * share, device=gpus if took else "")
        )
    return sentence(durations)


def expected_seconds(took: Mapping[Place, float], place: Place) -> float | None:
    """Return the seconds that a cell is expected to take, from those that others took; None without others."""
    if not took:
        return None
    everything = fmean(map(log, took.values()))
    of_layer, of_task = (
        fmean([log(seconds) for other, seconds in took.items() if other[i] == place[i]] or [everything]) for i in (0, 1)
    )
    return exp(of_layer + of_task - everything)
