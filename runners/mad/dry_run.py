"""The table of ``--dry-run``: the runs that a command would train, and their cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optuna.storages import BaseStorage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mixers.costs import attempt, count_parameters, count_state, from_short, operations
from mixers.named import is_path
from runners.mad.duration import Clock, Duration, sentence, work_left
from runners.mad.experiment import Experiment
from runners.mad.search.identity import identify
from runners.mad.search.search import saved_step
from runners.mad.search.study import done_of, run_of
from runners.mad.studies import try_layers
from runners.mad.training.protocol import Run
from runners.tables import Name, abbreviated, fits

FOOTNOTE = (
    "parameters of the model; state of its layers in floats after a sequence; FLOPs of a training step: three times "
    "those of the forward pass, matrix products and convolutions only"
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Cost of training a grid; None for a figure that cannot be counted on the CPU.

    Attributes:
        runs: number of runs of the grid.
        finished: number of runs of the grid that are finished.
        saved: number of steps of the other runs that checkpoints hold.
        steps: number of optimizer steps of a run.
        parameters: number of parameters of the model.
        state_floats: number of floats in the layers' state after a training sequence.
        flops: operations of a training step of one run, forward and backward.
    """

    runs: int
    finished: int
    saved: int
    steps: int
    parameters: int
    state_floats: int | None
    flops: int | None

    @property
    def unfinished_steps(self) -> int:
        """Number of steps of the unfinished runs, including saved steps."""
        return (self.runs - self.finished) * self.steps

    def cells(self) -> list[str]:
        """Return the cells of a table's row."""
        figures = (self.parameters, self.state_floats, self.flops)
        counts = ["?" if figure is None else abbreviated(figure) for figure in figures]
        return [f"{self.finished:,} / {self.runs:,}", f"{self.steps:,}", *counts]


def forecast(experiment: Experiment, grid: Sequence[Run], storage: BaseStorage | None, folder: Path) -> Forecast:
    """Count the cost of an experiment, and the part of it that is finished or saved.

    Args:
        experiment: layer and task.
        grid: runs of the experiment.
        storage: storage of finished runs; None if there is none yet.
        folder: results folder with the checkpoints.
    """
    layer, config, protocol = experiment.layer, experiment.mixer_config, experiment.protocol
    model = replace(experiment, mixer_config=layer.plain_config(config)).build().requires_grad_(False)
    examples, length = experiment.instance.split("train").inputs_ST.shape

    def flops(positions: int) -> int:
        return operations(model, torch.zeros(1, positions, dtype=torch.long))

    # FLOPs of a forward pass, computed from short sequences if the layer allows it.
    forward = attempt("FLOPs", layer, lambda: from_short(layer, config, length, flops))
    done = [] if storage is None else [run_of(trial) for trial in done_of(grid, experiment, storage)]
    return Forecast(
        runs=len(grid),
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
    clock: Clock,
    more_seeds: Sequence[int] = (),
) -> None:
    """Print one row per layer under each task, then the total cost and duration of the unfinished runs.

    The layers are tried first, so that an error of one of them stands alone.

    Args:
        experiments: experiments of the command.
        grid: runs of each experiment.
        storage: where finished runs are recorded; None if there is none yet.
        folder: results folder with the checkpoints.
        console: where to print.
        clock: times steps on the device where the layers would be trained.
        more_seeds: seeds with which the chosen point is repeated; times contain them, FLOPs do not.

    Raises:
        ContractError: a layer breaks the rules that the trainer relies on.
    """
    known, found, works = [], [], []
    with console.status("trying the layers") as status:
        _try_layers(experiments, clock.devices[0])

        for i, experiment in enumerate(experiments):
            status.update(f"counting {experiment.label} on {experiment.task}, {i + 1} of {len(experiments)}")
            if storage is not None:
                experiment = identify(experiment, storage, partial(console.print, soft_wrap=True))
            known.append(experiment)
            found.append(forecast(experiment, grid, storage, folder))
            works.append(work_left(experiment, grid, more_seeds, storage, folder))

        status.update(f"timing steps, for {clock.left:.0f} seconds at most")
        durations = clock.durations(known, works)

    table = _table(known, found, durations)
    if not fits(table, console):
        table.padding = 0
    console.print(table)

    # The totals below the table.
    points = len({(run.lr, run.weight_decay) for run in grid})
    seeds = len({run.seed for run in grid})
    estimates = "; ~ an estimate" if any(duration.estimated for duration in durations) else ""
    console.print(f"runs: points of the grid × seeds, {points} × {seeds}; {FOOTNOTE}{estimates}")
    if not any(work.runs for work in works):
        console.print("all runs are finished")
        return

    console.print(_remainder(found))
    if more_seeds:
        seeds_more = f"{len(more_seeds)} more seed{'s' * (len(more_seeds) > 1)}"
        runs_more = f"up to {len(more_seeds) * len(experiments):,} runs, which count in the time but not in the FLOPs"
        console.print(f"then the chosen point of each experiment is repeated with {seeds_more}, {runs_more}")
    if any(duration.here != 0.0 for duration in durations) and (text := sentence(durations)):
        console.print(f"time: {text}", soft_wrap=True)


def _table(experiments: Sequence[Experiment], costs: Sequence[Forecast], durations: Sequence[Duration]) -> Table:
    """Return a table with one row per experiment, in a section for each task."""
    table = Table(title="would be trained", title_justify="left")
    table.add_column("task\n  mixer", overflow="fold")
    times = ["time\nhere"] + ["on a\nGPU"] * any(duration.recorded is not None for duration in durations)
    for heading in ("finished\n/ runs", "steps", "para-\nmeters", "state", "FLOPs\n/ step", *times):
        table.add_column(heading, justify="right")

    for i, (experiment, cost, duration) in enumerate(zip(experiments, costs, durations, strict=True)):
        if not i or experiment.setting != experiments[i - 1].setting:
            table.add_section()
            table.add_row(Text(experiment.setting, "bold"))
        remark = f"\n    {experiment.remark}" if experiment.remark else ""
        table.add_row(Name(f"  {experiment.label}{remark}"), *cost.cells(), *duration.cells()[: len(times)])
    return table


def _try_layers(experiments: Sequence[Experiment], device: torch.device) -> None:
    """Try each layer once per setting on the CPU, or on the device if one fails there, because it may need a GPU."""
    distinct = [*{_setting(experiment): experiment for experiment in experiments}.values()]
    try:
        try_layers(distinct, torch.device("cpu"))
    except Exception:  # a user's layer may raise anything
        if device.type == "cpu":
            raise
        try_layers(distinct, device)


def _setting(experiment: Experiment) -> tuple[Any, ...]:
    """Return the settings that decide whether a layer can be trained; the task counts for a layer from outside."""
    task = experiment.task if is_path(experiment.mixer) else experiment.instance.backbone
    return *experiment.layer_choice.key, task


def _remainder(found: Sequence[Forecast]) -> str:
    """Return a sentence on the runs that are finished, the steps that are saved, and the FLOPs of the rest."""
    finished = sum(f.finished for f in found)
    saved = sum(f.saved for f in found)
    steps = sum(f.unfinished_steps for f in found)

    flops = "?"
    if all(f.flops is not None for f in found):
        flops = f"{float(sum((f.unfinished_steps - f.saved) * (f.flops or 0) for f in found)):.3g}"

    rest = f"of the others {saved:,} of {steps:,} steps are saved, the rest takes" if saved else "the others take"
    return f"{finished:,} of {sum(f.runs for f in found):,} runs are finished; {rest} {flops} FLOPs"
