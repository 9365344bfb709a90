"""An experiment: a layer on a task under a protocol; and the experiments that follow from the options."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mixers import MIXERS
from mixers.base import Layer, Shape
from mixers.costs import Costs, costs
from mixers.matching import FIGURES, count, match
from mixers.models import BACKBONES, Backbone
from mixers.named import is_path, members_of, text_of
from mixers.ops.numerics import product_precision
from mixers.options import identity, override, switch
from mixers.registry import building, find_mixer, variant_label
from mixers.short_convolution import with_short_convolution
from mixers.stack import StackLayer
from mixers.transformer import Transformer
from runners.device import find_devices
from runners.mad.options import HEADS, PRESETS, RUNGS, Options, preset_name, tasks_of
from runners.mad.points import SATURATED
from runners.mad.training.protocol import Protocol, Run
from runners.options import applicable, expand, flag_of, heads_of
from runners.tables import abbreviated
from runners.task_names import find_task
from tasks.base import FRESH, Task

LONGEST_NAME = 180
"""Largest number of characters in a study's name, which names its folder; file systems allow 255 bytes."""

POSITIONS_ON_A_CPU = 2**15
"""Positions of a step beyond which more runs at once save little time on a CPU, but need more memory."""

Say = Callable[[str], None]
"""Prints a line."""


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """A layer with the settings to build it.

    Attributes:
        mixer: registered name, ``package.module:Class``, or a stack of such names.
        mixer_config: the layer's ``Config``.
        shape: widths and number of layers.
        short_convolution: positions that the convolution before each layer spans; 0 for none.
        heads: number of heads that the preset gives to layers that have heads; 0 for their own.
    """

    mixer: str
    mixer_config: Any
    shape: Shape
    short_convolution: int = switch(0)
    heads: int = switch(0)

    @cached_property
    def layer(self) -> type[Layer]:
        """The layer's class."""
        return with_short_convolution(find_mixer(self.mixer), self.short_convolution)

    @cached_property
    def label(self) -> str:
        """Name of the layer in tables, with its settings that differ from the defaults and from the preset's."""
        kind = type(self.mixer_config)
        defaults = vars(override(kind, with_heads(kind, self.heads)))
        settings = {name: y for name, y in vars(self.mixer_config).items() if y != defaults[name]}
        return variant_label(self.mixer, settings, self.shape.layers, self.short_convolution)

    @property
    def costs(self) -> Costs:
        """Costs of all layers.

        Raises:
            ValueError: the layer cannot be built.
        """
        with building(self.mixer):
            found = costs(self.layer, self.mixer_config, self.shape)
        return found if issubclass(self.layer, StackLayer) else found.times(self.shape.layers)


@dataclass(frozen=True, kw_only=True)
class Experiment(LayerChoice):
    """A layer on a task.

    Attributes:
        task: registered name, or ``package.module:Class``.
        task_config: the task's ``Config``.
        difficulty: name of the task's setting, which is a part of the study's name.
        protocol: length and settings of training.
        precision: dtype of the matrix products.
        preset: name of the preset, for readers; the other settings identify the experiment.
        one_by_one: compute the runs one after another, which changes no result.
        until_ceiling: whether a run ends once it reaches the ceiling.
    """

    task: str
    task_config: Any
    difficulty: str
    protocol: Protocol
    precision: str
    preset: str = "grid"
    one_by_one: bool = False
    until_ceiling: bool = switch(False)

    @property
    def instance(self) -> Task:
        """The task with its data, which consecutive experiments on one task share; only the last one is in memory."""
        return drawn(find_task(self.task), _ByText.of(self.task_config))

    @property
    def data(self) -> dict[str, Any]:
        """Facts of the data, which are kept without the data; see ``data_facts``."""
        return data_facts(find_task(self.task), _ByText.of(self.task_config))

    @property
    def rung(self) -> int | None:
        """Number of the rung on the task's ladder, from 1; None for another difficulty."""
        return int(found[1]) if (found := re.match(r"rung-(\d+)", self.difficulty)) else None

    def at_rung(self, number: int) -> "Experiment":
        """Return the experiment on another rung of the ladder."""
        config = replace(self.task_config, **[*find_task(self.task).ladder.rungs.values()][number - 1])
        return replace(self, task_config=config, difficulty=re.sub(r"rung-\d+", f"rung-{number}", self.difficulty))

    @property
    def until(self) -> float:
        """Token accuracy on the validation split with which a run ends."""
        return self.data["validation"]["token"] - SATURATED if self.until_ceiling else math.inf

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.protocol.total_steps(self.task_config.train_examples)

    def runs_at_once(self, together: int, device: torch.device) -> int:
        """Return how many runs are trained as one ensemble: ``together``, fewer on a CPU if a run's steps are long."""
        if device.type != "cpu":
            return together
        return max(1, min(together, POSITIONS_ON_A_CPU // (self.protocol.batch_size * self.task_config.train_length)))

    def build(self) -> Backbone:
        """Build a model whose parameters are drawn from torch's global generator."""
        task = self.instance
        model = BACKBONES[task.backbone](self.layer, self.mixer_config, self.shape, task.vocab_size)
        model.one_by_one = self.one_by_one
        return model

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over settings and data, and over the text of the modules of a user's layer and task."""
        left_out = ("difficulty", "preset", "one_by_one")
        settings = {name: value for name, value in identity(self).items() if name not in left_out}
        settings |= {name: identity(getattr(self, name)) for name in ("mixer_config", "task_config")}
        texts = [text_of(name) for name in (self.mixer, self.task) if is_path(name)]
        content = [settings, self.data["fingerprint"], *texts]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def name(self) -> str:
        """Name of the study: layer, task, difficulty, and the start of the fingerprint."""
        words = f"{self.label} {self.task} {self.difficulty}"
        return f"{words[:LONGEST_NAME]} {self.fingerprint[:8]}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the study in a results folder."""
        return out / "studies" / re.sub(r"[^\w.+-]+", "-", self.name, flags=re.ASCII)

    def folder_of(self, run: Run, out: Path) -> Path:
        """Return the folder of a run in a results folder."""
        return self.folder(out) / f"lr{run.lr}-wd{run.weight_decay}-seed{run.seed}"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The fields of a ``Record`` that all runs of the study share."""
        counted = self.costs
        facts = {
            "study": self.name,
            "layer": self.label,
            "family": self.layer.family,
            "mixer_config": asdict(self.mixer_config),
            **asdict(self.shape),
            "task_config": identity(self.task_config),
            "batch_size": self.protocol.batch_size,
            "steps": self.steps,
            "evaluations": self.protocol.evaluations,
            "optimizer": asdict(self.protocol.optimizer),
            "ceiling": self.data["ceiling"],
            "chance": self.data["chance"],
            "parameters": counted.parameters,
            "state": _by_text(counted.state_floats),
            "flops_per_token": _by_text(counted.flops_per_token),
            "remark": self.layer.remark(self.mixer_config, self.task_config.train_length),
        }
        same = ("mixer", "short_convolution", "task", "difficulty", "preset", "fingerprint", "precision")
        return {**facts, **{name: getattr(self, name) for name in same}}


def plan(
    options: Options, mixer_options: dict[str, Any], task_options: dict[str, Any], say: Say = lambda line: None
) -> list[Experiment]:
    """Return the experiments of the options: tasks × difficulties × layers.

    Args:
        options: options of the command.
        mixer_options: settings of layers; each layer takes the settings that it has.
        task_options: settings of tasks, likewise.
        say: prints the settings that do not apply to a layer or a task.

    Raises:
        ValueError: a name or a setting is wrong; the message says how to correct it.
    """
    for name, preset in {"mixer": "--preset demo", "task": "--preset quick or --preset demo"}.items():
        if not getattr(options, name):
            raise ValueError(f"{flag_of(name)} is missing: give at least one value, or use {preset}")
    layers = choose_layers(options, mixer_options, say)
    precision = product_precision(find_devices(options.device)[0])
    configs = {task: find_task(task).Config for task in expand(options.task, tasks_of(options.preset))}

    experiments: list[Experiment] = []
    for task, values in applicable("task", task_options, configs, say).items():
        by_layer = []
        for layer in layers:
            # Widths, which --match may have chosen, decide whether results have the preset's name.
            adapted = replace(options, width=layer.shape.width, mlp_width=layer.shape.mlp_width, match=None)
            by_layer.append(
                [
                    Experiment(
                        **{entry.name: getattr(layer, entry.name) for entry in fields(layer)},
                        task=task,
                        task_config=task_config,
                        difficulty=difficulty,
                        protocol=options.protocol,
                        precision=precision,
                        preset=preset_name(adapted),
                        until_ceiling=options.preset == "profile",
                    )
                    for difficulty, task_config in difficulties(task, adapted, values)
                ]
            )
        experiments += chain(*zip(*by_layer, strict=True))

    # The n-th rungs of all ladders do not wait for each other, as the rungs of the last ladder would.
    if options.preset == "profile":
        experiments.sort(key=lambda experiment: RUNGS.index(f"rung-{experiment.rung}"))

    for experiment in experiments:
        options.protocol.check(experiment.task_config.train_examples)
    return experiments


def choose_layers(options: Options, values: dict[str, Any], say: Say) -> list[LayerChoice]:
    """Return the layers of the options; ``--match`` gives each the width at which it costs what the Transformer does.

    Raises:
        ValueError: a layer is unknown, or cannot match the Transformer and is named.
    """
    shape = Shape(width=options.width, mlp_width=options.mlp_width)
    size, figure = options.short_convolution, options.match
    configs = {mixer: find_mixer(mixer).Config for mixer in expand(options.mixer, MIXERS)}
    settings = applicable("mixer", values, configs, say)
    heads = HEADS if options.preset == "profile" else 0
    choices = [
        LayerChoice(
            mixer=name,
            mixer_config=override(config, with_heads(config, heads) | settings[name]),
            shape=replace(shape, layers=options.layers or len(members_of(name))),
            short_convolution=size,
            heads=heads,
        )
        for name, config in configs.items()
    ]
    if figure is None:
        return choices

    # What the others meet.
    known = [entry.name for entry in fields(Transformer.Config)]
    of_transformer = override(Transformer.Config, {k: v for k, v in values.items() if k.replace("-", "_") in known})
    transformer = with_short_convolution(Transformer, size)
    try:
        target = count(figure, transformer, of_transformer, shape)
    except ValueError as error:
        raise ValueError(f"--match {figure}: no Transformer of width {shape.width}: {error}") from error
    what = FIGURES[figure][0]
    say(f"transformer: width {shape.width}, MLP {shape.mlp_width}: {abbreviated(target)} {what}, which others meet")

    matched = []
    for choice in choices:
        if choice.layer is transformer:
            matched.append(choice)
            continue
        try:
            # A whole stack meets as many Transformer layers as it has layers.
            times = choice.shape.layers if issubclass(choice.layer, StackLayer) else 1
            met, reached = match(figure, times * target, choice.layer, choice.mixer_config, choice.shape)
        except Exception as error:  # a user's layer may raise anything while it is counted
            if "all" not in options.mixer:
                raise ValueError(f"--match {figure}: {choice.mixer}: {error}") from error
            say(f"left out: --match {figure}: {choice.mixer}: {error}")
            continue
        matched.append(replace(choice, shape=met))
        difference = f"{abbreviated(reached)} {what}, {reached / (times * target) - 1:+.1%}"
        say(f"{choice.mixer}: width {met.width}, MLP {met.mlp_width}: {difference}")
    return matched


def with_heads(config: type, heads: int) -> dict[str, int]:
    """Return the settings of a layer's ``Config`` that give it a number of heads; none for 0, or without heads."""
    return dict.fromkeys(heads_of(config), heads) if heads else {}


def difficulties(task: str, options: Options, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the chosen difficulties of a task: names and configurations.

    Args:
        task: registered name, or import path.
        options: options of the command.
        values: settings of the task, which override the preset's.

    Raises:
        ValueError: the task has no such difficulty, or refuses a setting.
    """
    task_class = find_task(task)
    preset_values = PRESETS[options.preset][1].get(task, {})
    given, values = values, {**preset_values, **values}

    def configured(**changes: Any) -> Any:
        try:
            return override(task_class.Config, {**values, **changes})
        except ValueError as error:  # which names the task, because others may accept the same values
            raise ValueError(f"task {task}: {error}") from error

    # The baseline's name says whether its settings come from the task, the preset or the command line.
    base = configured()
    as_preset = bool(preset_values) and base == override(task_class.Config, preset_values)
    named_by_preset = as_preset and preset_name(options) == options.preset
    label = "baseline" if base == task_class.Config() else options.preset if named_by_preset else "custom"

    known: dict[str, tuple[str, dict[str, Any]]] = {"baseline": (label, {})}
    for name, sweep in task_class.sweeps.items():
        for value in sweep:
            named = f"{name.replace('_', '-')}-{value}"
            known[named] = (f"{named}-custom" if values else named, {name: value})

    # Rungs; settings of the command line override those that all rungs share.
    rungs: dict[str, tuple[str, dict[str, Any]]] = {}
    if (ladder := task_class.ladder) is not None:
        shared = {k: v for k, v in {"train_examples": FRESH, **ladder.shared}.items() if k not in values}
        for number, rung in enumerate(ladder.rungs.values(), 1):
            rungs[f"rung-{number}"] = (f"rung-{number}" + "-custom" * bool(given), {**shared, **rung})
    if not rungs and options.preset == "profile":
        raise ValueError(f"task {task} has no ladder, which --preset profile trains: give its class one")

    if unknown := [name for name in options.difficulty if name not in ("all", *known, *rungs)]:
        raise ValueError(f"{task} has no difficulty {unknown[0]!r}: choose from all, {', '.join([*known, *rungs])}")
    chosen = [{**known, **rungs}[name] for name in expand(options.difficulty, known)]
    return [(name, configured(**changes)) for name, changes in chosen]


@dataclass(frozen=True)
class _ByText:
    """A configuration as a key of a cache: equal by its text, since one with lists has no hash."""

    text: str
    config: Any = field(compare=False)

    @staticmethod
    def of(config: Any) -> "_ByText":
        return _ByText(json.dumps(asdict(config), sort_keys=True), config)


@lru_cache(maxsize=1)
def drawn(kind: type[Task], settings: _ByText) -> Task:
    """Return a task with its data; it is kept for the next experiment."""
    return kind(settings.config)


@cache
def data_facts(kind: type[Task], settings: _ByText) -> dict[str, Any]:
    """Return the hash of a task's data, its ceiling and chance on the test split, and its ceiling on validation."""
    task = drawn(kind, settings)
    on_test = {"ceiling": asdict(task.ceiling("test")), "chance": asdict(task.chance("test"))}
    return {"fingerprint": task.fingerprint(), **on_test, "validation": asdict(task.ceiling("validation"))}


def _by_text(figures: dict[int, int] | None) -> dict[str, int] | None:
    """Return figures by position with keys as JSON has them."""
    return None if figures is None else {str(positions): figure for positions, figure in figures.items()}
