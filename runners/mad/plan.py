"""What a command line of ``runners.mad`` asks for: its options, and the experiments that follow from them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mixers import MIXERS
from mixers.base import Layer, Shape
from mixers.ops.numerics import product_precision
from mixers.registry import building
from runners.cli import applicable, expand, override
from runners.device import find_devices
from runners.mad.experiment import Experiment
from runners.mad.layers import Choice, choose_layers
from runners.mad.options import PRESETS, Options, _read
from runners.mad.training.protocol import Protocol
from tasks import TASKS
from tasks.find import find_task


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


def _layers(options: Options, values: dict[str, Any], say: Callable[[str], None]) -> list[Choice]:
    shape = Shape(width=options.width, mlp_width=options.mlp_width, layers=options.layers)
    names = expand(options.mixer, MIXERS)
    return choose_layers(names, values, shape, options.match, say, strict="all" not in options.mixer)
