"""Find stale reference cells: cells trained on other data, or by code that trains differently from today's.

1. A verdict depends on the cell, the code that plans and trains it, and the versions of PyTorch and NumPy. Their hash
   is the key of the verdict in the user's cache folder (``runners.verdicts``).
2. A cell is stale if today's command would train on other data. Otherwise, a cell of the same code is not stale.
3. All other cells are rehearsed (``runners.mad.search.identity``). If a cell holds a trajectory in float64, the
   rehearsal runs in float64, which detects smaller changes of code; older cells are rehearsed in float32. Cells that
   share a rehearsal, for example those of a layer on tasks of equal vocabulary, share its trajectory. Several processes
   run many rehearsals.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from mixers.registry import find_mixer
from runners.mad.experiment import Experiment
from runners.mad.reference.cells import Cell, experiment_of
from runners.mad.search.identity import Setting, Trajectory, agree, rehearsal_of, trajectory
from runners.processes import mapped
from runners.progress import bar, shows_bars
from runners.provenance import code_version, sha256_of
from runners.verdicts import remembered_verdicts
from tasks import TASKS

DECIDING = (
    *("runners.mad.options", "runners.mad.plan", "runners.mad.experiment", "runners.mad.search.identity"),
    *("runners.mad.reference.cells", "runners.mad.reference.entries", "runners.mad.reference.staleness"),
)
"""Modules that decide what a cell's command would train, beside the modules of layer, task and training."""
FEW = 12
"""Number of rehearsals that one process finishes before further processes have started."""
CHECKING = "retraining a few steps of reference cells"
"""What a progress bar, or a line without a terminal, says while cells are rehearsed."""


def find_stale(cells: Sequence[Cell]) -> list[bool]:
    """Return whether each cell is stale; use the cache."""
    return remembered_verdicts(_keys(cells), lambda places: check([cells[place] for place in places]))


def check(cells: Sequence[Cell]) -> list[bool]:
    """Return whether each cell is stale, without the cache."""
    stale = [True] * len(cells)
    waiting: dict[tuple[Any, ...], tuple[Experiment, Setting]] = {}
    rehearsals: dict[int, tuple[Any, ...]] = {}
    for i, cell in enumerate(_shown(cells, "planning reference cells")):
        experiment = experiment_of(cell)
        if cell.fingerprint != experiment.fingerprint:
            continue
        if cell.code == experiment.code:
            stale[i] = False
        else:
            rehearsals[i] = (*rehearsal_of(experiment), _setting(cell))
            waiting[rehearsals[i]] = replace(experiment), _setting(cell)  # without the data, which may be large

    found = dict(zip(waiting, _rehearse(list(waiting.values())), strict=True))
    for i, rehearsal in rehearsals.items():
        sharp = cells[i].sharp_trajectory
        then, now = cells[i].trajectory if sharp is None else sharp, found[rehearsal]
        stale[i] = then is None or now is None or not agree(then, now, _setting(cells[i]).tolerance)
    return stale


def _setting(cell: Cell) -> Setting:
    """Return the setting of the rehearsal that a cell holds."""
    return Setting(cell.rehearsed_positions, torch.float32 if cell.sharp_trajectory is None else torch.float64)


def _keys(cells: Sequence[Cell]) -> list[str]:
    """Return the key of each cell's verdict."""
    common = [code_version(alone=DECIDING), torch.__version__, np.__version__]
    training = {
        mixer: code_version("runners.mad.training.loop", find_mixer(mixer)) for mixer in {cell.mixer for cell in cells}
    }
    data = {task: code_version(TASKS[task]) for task in {cell.task for cell in cells}}
    return [
        sha256_of(json.dumps([common, training[cell.mixer], data[cell.task], asdict(cell)], sort_keys=True))
        for cell in cells
    ]


def _rehearse(experiments: Sequence[tuple[Experiment, Setting]]) -> list[Trajectory | None]:
    """Return the trajectory of each experiment in its setting.

    Many rehearsals are divided among as many processes as PyTorch uses threads.
    """
    processes = min(torch.get_num_threads(), len(experiments) // FEW)
    if processes > 1:
        work = mapped(trajectory, *zip(*experiments, strict=True), processes=processes, prepare=_take_one_thread)
        try:
            with work as coming:
                return [*_shown(coming, CHECKING, len(experiments))]
        except BrokenProcessPool:  # the system ended a process, for example for lack of memory
            pass
    return [trajectory(*experiment) for experiment in _shown(experiments, CHECKING)]


def _take_one_thread() -> None:
    torch.set_num_threads(1)


def _shown(items: Any, what: str, total: int | None = None) -> Any:
    """Return an iterator over the items that shows a progress bar on a terminal, and elsewhere one line for many."""
    if not shows_bars() and (waiting := total or len(items)) > FEW:
        print(f"{what}: {waiting}, once for this code", file=sys.stderr)
    return bar(items, what, total)
