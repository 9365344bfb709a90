"""What a command would train: layers and their costs (``--list``), runs and their time (``--dry-run``)."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from rich.console import Console

from mixers.base import Shape
from runners.device import find_devices, find_places, shared_threads
from runners.mad.chosen import missing_runs, runs_of, saved_step
from runners.mad.experiment import Experiment, LayerChoice
from runners.mad.options import START, Options
from runners.mad.tables import printed_table, setting_of
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Run
from runners.mad.training.step import Stepper
from runners.progress import spell
from runners.runs import is_finished
from runners.tables import COSTS, FOOTNOTE, cost_cells, fits
from tasks.base import BLOCK

STEPS = 3
"""Steps of each experiment that are timed, after a first one that is not."""
LONGEST = 45.0
"""Seconds after which no further experiment is timed."""


def print_layers(choices: Sequence[LayerChoice], console: Console) -> None:
    """Print a line for each layer: its costs, its family, and where there is room its paper."""
    rows = []
    with console.status("counting"):
        for choice in choices:
            paper = (choice.layer.paper or "").partition(";")[0].rpartition(", ")[2]
            rows.append([choice.label, *_cells(choice), choice.layer.family, paper])
    headings = ["params", *(heading.replace("\n", " ").removesuffix(" / token") for heading in COSTS[1:])]
    table = printed_table(["mixer", *headings, "family", "paper"], rows)
    if not fits(table, console):
        table = printed_table(["mixer", *headings, "family"], [row[:-1] for row in rows])
    console.print(table)
    widths = {f"width {choice.shape.width}, MLP {choice.shape.mlp_width}\n" for choice in choices}
    console.print(*(widths if len(widths) == 1 else ()), FOOTNOTE, sep="")


def print_plan(experiments: Sequence[Experiment], options: Options, console: Console) -> None:
    """Print a row for each experiment: its finished runs, its steps and costs; and how long the others take here."""
    rows = []
    with console.status("counting"):
        for setting, of_task in groupby(experiments, lambda e: setting_of(e.task, e.difficulty)):
            rows.append([setting, *[""] * (2 + len(COSTS))])
            for experiment in of_task:
                finished = sum(is_finished(experiment.folder_of(run, options.out)) for run in options.runs)
                counts = f"{finished:,} / {len(options.runs):,}", f"{experiment.steps:,}"
                name = f"  {experiment.label}\n    {experiment.facts['remark'] or ''}".rstrip()
                rows.append([name, *counts, *_cells(experiment)])
    console.print(printed_table(["task\n  mixer", "finished\n/ runs", "steps", *COSTS], rows))
    if options.more_seeds:
        console.print(f"then the chosen point of each experiment is repeated with {len(options.more_seeds)} more seeds")

    # The time of what is missing.
    missing = [(experiment, runs) for experiment in experiments if (runs := missing_runs(experiment, options))]
    if not missing:
        console.print("all runs are finished")
        return
    began, seconds, timed = time.monotonic(), 0.0, 0
    with console.status("timing steps"):
        for experiment, runs in missing:
            if time.monotonic() - began > LONGEST:
                break
            seconds += seconds_left(experiment, runs, options)
            timed += 1
    part = "" if timed == len(missing) else f"of the first {timed} of {len(missing)} experiments "
    console.print(f"training {part}takes about {spell(seconds)} here, by {STEPS} steps of each", soft_wrap=True)


def print_duration(experiments: Sequence[Experiment], options: Options, console: Console) -> None:
    """Print how long whole profiles take at most: by a few steps of each layer.

    They are those of the third rung of medium length, and of the longest rung. Between them the time of a position
    grows with the length.
    """
    seeds = [
        run for run in options.runs if (run.lr, run.weight_decay) == (options.runs[0].lr, options.runs[0].weight_decay)
    ]
    layers: dict[tuple[str, Shape], list[Experiment]] = {}
    for experiment in sorted(experiments, key=lambda e: e.task_config.train_length):
        layers.setdefault((experiment.label, experiment.shape), []).append(experiment)

    # Processes on one GPU take turns, those on a CPU do not.
    count = 1 if find_devices(options.device)[0].type == "cuda" else len({(e.label, e.task) for e in experiments})
    longest, places = 0.0, find_places(options.device, count)
    with console.status("timing steps"), shared_threads(places):
        for ladders in layers.values():
            starts, rates = [e for e in ladders if e.rung == START], {}
            for e in (starts[len(starts) // 2], ladders[-1]):
                few = replace(e.task_config, train_examples=max(BLOCK, options.batch_size))
                seconds = seconds_left(replace(e, task_config=few), seeds, options)
                rates[few.train_length] = seconds / len(seeds) / few.train_length
            for e in ladders:
                length = e.task_config.train_length
                share = len(runs_of(e, options) if e.rung == START else seeds) * len({*places}) / len(places)
                longest += np.interp(length, [*rates], [*rates.values()]) * length * share
    shorter = "rungs at the ceiling end early, rungs beyond reach are not trained, and what is finished is not repeated"
    console.print(f"a whole profile takes at most about {spell(longest)} here; {shorter}", soft_wrap=True)


def seconds_left(experiment: Experiment, runs: Sequence[Run], options: Options) -> float:
    """Time a few steps of missing runs, and return how long they take with their evaluations and repetitions."""
    devices = find_devices(options.device)
    members = runs[: min(experiment.runs_at_once(options.together, devices[0]), -(-len(runs) // len(devices)))]
    ensemble = Ensemble(experiment.build, members, experiment.protocol.optimizer, experiment.steps, devices[0])
    stepper = Stepper(ensemble, experiment.instance.split("train"), experiment.protocol)
    if devices[0].type == "cuda":
        stepper.capture(compiling=not experiment.until_ceiling)
    stepper.begin(0)
    for first in (True, False):
        began = time.monotonic()
        for _ in range(1 if first else STEPS):
            stepper.take_step()
            stepper.take_loss_sum().sum().item()  # waits for the device
    step = (time.monotonic() - began) / STEPS / len(members) / len(devices)

    left = sum(experiment.steps - saved_step(experiment.folder_of(run, options.out)) for run in runs)
    if set(runs) <= set(options.runs):
        left += len(options.more_seeds) * experiment.steps

    # A forward pass alone takes a third of a training's time: by their operations, not measured.
    sequences = min(experiment.protocol.evaluations, experiment.steps) * experiment.task_config.eval_examples
    evaluations = sequences / 3 / (experiment.steps * experiment.protocol.batch_size)
    return step * left * (1 + evaluations)


def _cells(choice: LayerChoice) -> list[str]:
    """Return the costs of a layer as cells of a table."""
    return cost_cells(choice.costs.parameters, choice.costs.state_floats, choice.costs.flops_per_token)
