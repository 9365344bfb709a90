"""The experiments that follow from the options."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mixers import MIXERS
from mixers.base import Shape
from mixers.ops.numerics import product_precision
from mixers.options import override
from mixers.origin import where
from runners.cli import applicable, expand
from runners.device import find_devices
from runners.mad.experiment import Experiment, first_layer
from runners.mad.layer_choice import LayerChoice
from runners.mad.layers import choose_layers
from runners.mad.memory import check_memory
from runners.mad.options import PRESETS, Options, preset_name
from runners.mad.training.protocol import Protocol
from runners.task_names import find_task
from tasks import TASKS
from tasks.contract import check_task

Say = Callable[[str], None]
"""A function that prints a line."""


def plan_experiments(
    options: Options, mixer_values: dict[str, Any], task_values: dict[str, Any], say: Say = lambda line: None
) -> list[Experiment]:
    """Return the experiments of the options: tasks × difficulties × layers; each layer is built once as a check.

    Args:
        options: checked options.
        mixer_values: settings of layers; each layer takes the settings that it has.
        task_values: settings of tasks, likewise.
        say: prints the settings that do not apply to a layer or a task.

    Raises:
        ValueError: a name or a setting is wrong; the message says how to correct it.
    """
    protocol = Protocol(
        batch_size=options.batch_size,
        epochs=Protocol.epochs if options.epochs is None else options.epochs,
        steps=options.steps,
        evaluations=options.evaluations,
    )
    layers = plan_layers(options, mixer_values, say)
    device, *others = find_devices(options.device)
    precision = product_precision(device)
    together = min(options.together, math.ceil(len(options.runs) / (1 + len(others))))
    configs = {task: find_task(task).Config for task in expand(options.task, TASKS)}

    # Results have the preset's name if the layer has its widths, whether --match has chosen them or not.
    with_widths = [
        replace(options, width=layer.shape.width, mlp_width=layer.shape.mlp_width, match=None) for layer in layers
    ]

    experiments = []
    for task, values in applicable("task", task_values, configs, say).items():
        for of_layers in zip(*(difficulties(task, own, values) for own in with_widths), strict=True):
            protocol.check(of_layers[0][1].train_examples)
            unchecked = task not in TASKS
            for layer, own, (difficulty, task_config) in zip(layers, with_widths, of_layers, strict=True):
                experiment = Experiment(
                    mixer=layer.mixer,
                    mixer_config=layer.config,
                    task=task,
                    task_config=task_config,
                    difficulty=difficulty,
                    shape=layer.shape,
                    short_convolution=layer.short_convolution,
                    protocol=protocol,
                    precision=precision,
                    preset=preset_name(own),
                )
                check_memory(experiment, together, device)
                if unchecked:
                    check_own_task(experiment)
                    unchecked = False
                first_layer(experiment)  # raises for a layer that cannot be built, before anything is stored
                experiments.append(experiment)
    return experiments


def check_own_task(experiment: Experiment) -> None:
    """Check a task from outside, all of whose sequences this draws.

    Raises:
        ValueError: it breaks a rule, or its code raises an error; one line.
    """
    try:
        check_task(experiment.instance)
    except Exception as error:  # a user's task may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"task {experiment.task!r}: {where(error)}{kind}{error}") from error


def plan_layers(options: Options, values: dict[str, Any], say: Say) -> list[LayerChoice]:
    """Return the layers of the options.

    Raises:
        ValueError: a layer is unknown, cannot be built, or cannot meet ``--match``.
    """
    shape = Shape(width=options.width, mlp_width=options.mlp_width, layers=options.layers)
    names = expand(options.mixer, MIXERS)
    strict = "all" not in options.mixer
    return choose_layers(names, values, shape, options.short_convolution, options.match, say, strict)


def difficulties(task: str, options: Options, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the chosen difficulties of a task: names and configurations.

    Args:
        task: registered name.
        options: checked options.
        values: settings of the task, which override the preset's.

    Raises:
        ValueError: the task has no such difficulty.
    """
    task_class = find_task(task)

    # The baseline: defaults, then settings of the preset, then given settings.
    _, preset_tasks = PRESETS[options.preset]
    preset_values = preset_tasks.get(task, {})
    values = {**preset_values, **values}
    base = _configured(task, values)

    # The chosen names among the baseline and the task's sweeps.
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

    # The baseline's label says whether its settings come from the task, the preset or the command line.
    as_preset = task in preset_tasks and base == override(task_class.Config, preset_values)
    own_name = as_preset and preset_name(options) == options.preset
    label = "baseline" if base == task_class.Config() else options.preset if own_name else "custom"
    suffix = "-custom" if values else ""

    return [(label, base) if name == "baseline" else (name + suffix, _configured(task, named[name])) for name in chosen]


def _configured(task: str, values: dict[str, Any]) -> Any:
    """Return a task's settings. An error names the task, because other tasks may accept the same values."""
    try:
        return override(find_task(task).Config, values)
    except ValueError as error:
        raise ValueError(f"task {task}: {error}") from error
