"""What a command line of ``runners.mad`` asks for: its options, and the experiments that follow from them."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mixers import MIXERS
from mixers.accounting import Figure
from mixers.base import Layer, Shape
from runners.environment import find_devices, product_precision
from runners.experiment import Experiment, building
from runners.layers import Choice, choose_layers
from runners.options import applicable, check_out, expand, find_task, override, parse
from runners.search import LR_BOUNDS, WEIGHT_DECAY_BOUNDS
from runners.track import Mode
from runners.train import Protocol
from tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train single layers on diagnostic tasks and tabulate what they reach.

    Attributes:
        mixer: layers to train: registered names, package.module:Class, or all.
        task: tasks to train on, or all.
        difficulty: baseline, all (every sweep of the task), or names such as vocab-size-32.
        seeds: repetitions with seeds 0, 1, ...; more than one gives means with 95% intervals.
        lr: peak learning rates of the grid.
        weight_decay: weight decays of the grid.
        epochs: passes over the training split, 200 unless --steps are given.
        steps: optimizer steps, in place of epochs.
        batch_size: sequences a step.
        evaluations: evaluations on the validation split during training.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: stacked layers.
        match: make each layer but the Transformer as wide as gives it the Transformer's parameters, state, or FLOPs.
        together: runs trained as one ensemble; lower it to share a study among processes or to save memory.
        device: auto takes the GPUs if there are any; several share the work.
        out: folder of results.
        storage: Optuna storage URL, or path of a journal file; by default studies.journal in the results folder.
        wandb: Weights & Biases mode.
        preset: demo is one RT layer against one Transformer layer on a short in-context recall.
        list: print the layers with parameters, state and FLOPs, and train nothing.
        dry_run: print what would be trained, what of it is finished and what the rest takes, and train nothing.
    """

    mixer: tuple[str, ...]
    task: tuple[str, ...]
    difficulty: tuple[str, ...] = ("baseline",)
    seeds: int = 1
    lr: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decay: tuple[float, ...] = (0.0, 0.1)
    epochs: int | None = None
    steps: int | None = Protocol.steps
    batch_size: int = Protocol.batch_size
    evaluations: int = Protocol.evaluations
    width: int = Shape.width
    mlp_width: int = Shape.mlp_width
    layers: int = Shape.layers
    match: Figure | None = None
    together: int = 64
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")
    storage: str | None = None
    wandb: Mode = "disabled"
    preset: Literal["grid", "demo"] = "grid"
    list: bool = False
    dry_run: bool = False


PRESETS: dict[str, tuple[Options, dict[str, Any]]] = {
    "grid": (Options(mixer=(), task=()), {}),
    "demo": (
        Options(
            mixer=("rt", "transformer"),
            task=("in-context-recall",),
            lr=(1e-3,),
            weight_decay=(0.0,),
            steps=250,
            batch_size=64,
            evaluations=5,
            preset="demo",
        ),
        {"length": 48, "eval_examples": 320},
    ),
}
"""Defaults of each preset: options, and settings of its own tasks."""


def plan(arguments: Sequence[str], say: Callable[[str], None] = lambda line: None) -> tuple[Options, list[Experiment]]:
    """Options and experiments of a command line; everything is checked that can be before training.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    options, mixer_values, task_values = _read(arguments)
    protocol = Protocol(
        batch_size=options.batch_size,
        epochs=Protocol.epochs if options.epochs is None else options.epochs,
        steps=options.steps,
        evaluations=options.evaluations,
    )
    layers = _layers(options, mixer_values, say)
    precision = product_precision(find_devices(options.device)[0])
    experiments = []
    configs = {task: find_task(task).Config for task in expand(options.task, TASKS)}
    for task, values in applicable("task", task_values, configs, say).items():
        for difficulty, task_config in settings(task, options, values):
            for layer in layers:
                experiment = Experiment(
                    mixer=layer.mixer,
                    mixer_config=layer.config,
                    task=task,
                    task_config=task_config,
                    difficulty=difficulty,
                    shape=layer.shape,
                    protocol=protocol,
                    precision=precision,
                )
                protocol.check(task_config.train_examples)
                first_layer(experiment)  # so that what cannot be built is refused before anything is stored
                experiments.append(experiment)
    return options, experiments


def chosen_layers(arguments: Sequence[str], say: Callable[[str], None]) -> list[Choice]:
    """The layers of a command line that trains nothing, all unless some are named.

    Raises:
        ValueError: as ``plan``.
    """
    options, mixer_values, _ = _read(arguments)
    return _layers(options, mixer_values, say)


def settings(task: str, options: Options, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Named task configurations of the chosen difficulties.

    Raises:
        ValueError: the task has no such difficulty.
    """
    task_class = find_task(task)
    preset, preset_values = PRESETS[options.preset]
    own = task in preset.task
    values = {**preset_values, **values} if own else values
    base = _configured(task, values)
    named = {
        f"{name.replace('_', '-')}-{value}": {**values, name: value}
        for name, sweep in task_class.sweeps.items()
        for value in sweep
    }
    chosen = dict.fromkeys(
        n for name in options.difficulty for n in (("baseline", *named) if name == "all" else (name,))
    )
    if unknown := [name for name in chosen if name != "baseline" and name not in named]:
        raise ValueError(f"{task} has no difficulty {unknown[0]!r}: choose from baseline, all, {', '.join(named)}")
    as_preset = own and base == override(task_class.Config, preset_values)
    label = "baseline" if base == task_class.Config() else options.preset if as_preset else "custom"
    suffix = "-custom" if values else ""
    return [(label, base) if name == "baseline" else (name + suffix, _configured(task, named[name])) for name in chosen]


def first_layer(experiment: Experiment) -> Layer:
    """The first layer of a model that leaves no trace in random numbers; errors name the mixer."""
    with torch.random.fork_rng(devices=[]), building(experiment.mixer):
        return experiment.build().stack[0]


def _configured(task: str, values: dict[str, Any]) -> Any:
    """A task's settings; of several tasks, one may refuse values that others take, and its name is told."""
    try:
        return override(find_task(task).Config, values)
    except ValueError as error:
        raise ValueError(f"task {task}: {error}") from error


def _read(arguments: Sequence[str]) -> tuple[Options, dict[str, Any], dict[str, Any]]:
    """Options, and what is set of the mixers' and of the tasks' settings."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--preset", nargs="?", default="grid")
    preset, _ = PRESETS.get(peek.parse_known_args(arguments)[0].preset, PRESETS["grid"])
    if "--list" in arguments:
        preset = replace(preset, mixer=("all",))
    if any(argument.partition("=")[0] == "--epochs" for argument in arguments):
        preset = replace(preset, steps=None)
    options, nested = parse(Options, preset, arguments)
    _check(options)
    return options, nested["mixer"], nested["task"]


def _layers(options: Options, values: dict[str, Any], say: Callable[[str], None]) -> list[Choice]:
    shape = Shape(width=options.width, mlp_width=options.mlp_width, layers=options.layers)
    names = expand(options.mixer, MIXERS)
    return choose_layers(names, values, shape, options.match, say, strict="all" not in options.mixer)


def _check(options: Options) -> None:
    needed = ("mixer", "lr", "weight_decay", "difficulty")
    for name in needed if options.list else (*needed, "task"):
        if not getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing: give at least one value, or use --preset demo")
    counts = ("seeds", "epochs", "steps", "batch_size", "evaluations", "width", "mlp_width", "layers", "together")
    for name in counts:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    check_out(options.out)
    if options.list and options.dry_run:
        raise ValueError("--list and --dry-run exclude each other: give one")
    if options.steps is not None and options.epochs is not None:
        raise ValueError("--epochs and --steps exclude each other: give one")
    for name, (low, high) in {"lr": LR_BOUNDS, "weight_decay": WEIGHT_DECAY_BOUNDS}.items():
        if bad := [value for value in getattr(options, name) if not low <= value <= high]:
            raise ValueError(f"--{name.replace('_', '-')} {bad[0]:g} must lie between {low:g} and {high:g}")
