"""What a command would train and what that takes: the table of ``--dry-run``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from optuna.storages import BaseStorage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixers.contract import check_foreign
from mixers.costs import attempt, count_parameters, count_state, countable, from_short, operations, short
from runners.mad.experiment import Experiment, call_as_in_training
from runners.mad.search.identity import identify
from runners.mad.search.search import saved_step
from runners.mad.search.study import done_of, run_of
from runners.mad.training.protocol import Run

FOOTNOTE = (
    "parameters of the model; state of its layers in floats after a sequence; FLOPs of a training step: three times "
    "those of the forward pass, matrix products and convolutions only"
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What training a grid takes; None is what could not be counted on the CPU.

    Attributes:
        finished: runs of the grid that are done, and would not be run again.
        saved: steps of the others that checkpoints hold.
        steps: optimizer steps of a run.
        parameters: of the model.
        state_floats: floats that the layers carry after a training sequence.
        flops: operations of a training step of one run, forward and backward.
    """

    finished: int
    saved: int
    steps: int
    parameters: int
    state_floats: int | None
    flops: int | None


def forecast(experiment: Experiment, grid: Sequence[Run], storage: BaseStorage | None, folder: Path) -> Forecast:
    """What an experiment would take, and what of it is done in a storage, if there is one, or saved in a folder.

    A layer that runs alone on the CPU is also tried as before training; the error of one that cannot be is passed on.

    Raises:
        ContractError: it does not do what the trainer takes for granted.
    """
    layer, config, protocol = experiment.layer, experiment.mixer_config, experiment.protocol
    model = replace(experiment, mixer_config=countable(config)).build().requires_grad_(False)
    examples, length = experiment.instance.split("train").inputs_ST.shape
    counted: list[int] = []

    def flops(positions: int) -> int:
        counted.append(positions)
        return operations(model, torch.zeros(1, positions, dtype=torch.long))

    forward = attempt("FLOPs", layer, lambda: from_short(layer, config, length, flops))
    if forward is not None:
        check_foreign(experiment.mixer, lambda: experiment.build().stack[0], torch.device("cpu"), lambda: length)
        call_as_in_training(experiment, experiment.build, min(counted), torch.device("cpu"))
    done = [] if storage is None else [run_of(trial) for trial in done_of(grid, experiment, storage)]
    return Forecast(
        finished=len(done),
        saved=sum(saved_step(experiment, run, folder) for run in grid if run not in done),
        steps=protocol.total_steps(examples),
        parameters=count_parameters(model),
        state_floats=attempt("state", layer, lambda: sum(count_state(y, [length])[length] for y in model.stack)),
        flops=None if forward is None else 3 * protocol.batch_size * forward,
    )


def print_forecast(
    experiments: Sequence[Experiment],
    grid: Sequence[Run],
    storage: BaseStorage | None,
    folder: Path,
    console: Console,
) -> None:
    """Under each task one row a layer, then what is left to do of all."""
    table = Table(title="would be trained", title_justify="left")
    table.add_column("task\n  mixer", overflow="fold")
    for heading in ("finished\n/ runs", "steps", "parameters", "state", "FLOPs\n/ step"):
        table.add_column(heading, justify="right")
    finished, saved, steps, flops = 0, 0, 0, 0.0
    with console.status("counting") as status:
        for i, experiment in enumerate(experiments):
            status.update(f"counting {experiment.mixer} on {experiment.task}")
            if not i or experiment.setting != experiments[i - 1].setting:
                table.add_section()
                table.add_row(Text(experiment.setting, "bold"))
            if storage is not None:
                experiment = identify(experiment, storage, partial(console.print, soft_wrap=True))
            found = forecast(experiment, grid, storage, folder)
            runs = (f"{found.finished:,} / {len(grid):,}", f"{found.steps:,}")
            figures = (found.parameters, found.state_floats, found.flops)
            cells = ("?" if figure is None else short(figure) for figure in figures)
            table.add_row(f"  {experiment.mixer}", *runs, *cells)
            finished, saved = finished + found.finished, saved + found.saved
            to_take = (len(grid) - found.finished) * found.steps
            steps += to_take
            flops += (to_take - found.saved) * (math.nan if found.flops is None else found.flops)
    points, seeds = len({(run.lr, run.weight_decay) for run in grid}), len({run.seed for run in grid})
    console.print(table)
    console.print(
        f"runs: points of the grid × seeds, {points} × {seeds}; {FOOTNOTE}\n"
        f"{finished:,} of {len(experiments) * len(grid):,} runs are finished; "
        + (f"of the others {saved:,} of {steps:,} steps are saved, the rest takes " if saved else "the others take ")
        + f"{'?' if math.isnan(flops) else f'{flops:.3g}'} FLOPs"
    )
