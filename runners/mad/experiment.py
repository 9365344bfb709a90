"""An experiment: a layer on a task under a protocol, with the hash that identifies it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from mixers.base import Layer, Shape, switch, switched_off
from mixers.models import BACKBONES, Backbone
from mixers.named import is_path
from mixers.registry import building, find_mixer
from mixers.short_convolution import mixer_label
from mixers.vmap_errors import explaining_vmap
from runners.files import typed
from runners.mad.layer_choice import LayerChoice
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.provenance import code_version, sha256_of
from runners.task_names import find_task
from tasks.base import Task

LONGEST_FOLDER = 200
"""Largest number of bytes in a study's folder name; file systems allow 255."""
LONGEST_DIFFERENCE = 200
"""Largest number of characters for changed settings in a study's title; SQL storages allow 512 in all."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The settings of an experiment as a file keeps them: layer and task by name, their settings as JSON values.

    The attributes are those of ``Experiment``. Of a user's layer or task, the code may be gone.
    """

    mixer: str
    mixer_config: dict[str, Any]
    task: str
    task_config: dict[str, Any]
    difficulty: str
    shape: Shape
    protocol: Protocol
    precision: str
    short_convolution: int = 0
    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A layer on a task.

    Attributes:
        mixer: registered name, or ``package.module:Class``.
        mixer_config: the layer's ``Config``.
        task: registered name.
        task_config: the task's ``Config``.
        difficulty: name of the task's setting, for readers; only ``task_config`` identifies it.
        shape: widths and number of layers.
        protocol: length and settings of training.
        precision: dtype of the matrix products.
        short_convolution: positions that the convolution before each layer spans; 0 for none.
        preset: name of the preset, for readers; the other settings identify the experiment.
        revision: number, from 1, of the study among studies with equal settings whose code trains differently
            (``runners.mad.search.identity``).
    """

    mixer: str
    mixer_config: Any
    task: str
    task_config: Any
    difficulty: str
    shape: Shape
    protocol: Protocol
    precision: str
    short_convolution: int = switch(0)
    preset: str = switch("grid")
    revision: int = 1

    @cached_property
    def layer_choice(self) -> LayerChoice:
        """The layer with its settings."""
        return LayerChoice(
            mixer=self.mixer,
            config=self.mixer_config,
            shape=self.shape,
            short_convolution=self.short_convolution,
        )

    @property
    def layer(self) -> type[Layer]:
        """The layer's class."""
        return self.layer_choice.layer

    @cached_property
    def instance(self) -> Task:
        """The task with its data; consecutive experiments on one task share it."""
        settings = json.dumps(asdict(self.task_config), sort_keys=True)
        return _task(find_task(self.task), _ByText(settings, self.task_config))

    @property
    def length(self) -> int:
        """Number of positions of a training sequence."""
        return int(self.instance.split("train").inputs_ST.shape[1])

    @property
    def remark(self) -> str | None:
        """Remark of tables on results of the layer at the length of the training sequences; None if there is none."""
        return self.layer.remark(self.mixer_config, self.length)

    def build(self) -> Backbone:
        """Build a model whose parameters are drawn from torch's global generator."""
        task = self.instance
        return BACKBONES[task.backbone](self.layer, self.mixer_config, self.shape, task.vocab_size)

    @property
    def described(self) -> "Described":
        """The settings as a file keeps them."""
        return typed(Described, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that decide the result, as JSON-able values, without switches that are off."""
        left_out = ["revision", *switched_off(self)]
        settings = {name: value for name, value in asdict(self).items() if name not in left_out}
        for name in switched_off(self.mixer_config):
            del settings["mixer_config"][name]
        return settings

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration and data; identifies the experiment."""
        settings = {name: value for name, value in self.to_dict().items() if name not in ("difficulty", "preset")}
        return sha256_of(json.dumps([settings, _data_fingerprint(self.instance)], sort_keys=True))

    @cached_property
    def code(self) -> str:
        """SHA-256 over the code of the layer, the task and the trainer (``runners.provenance.code_version``)."""
        return code_version("runners.mad.training.loop", self.layer, find_mixer(self.mixer), find_task(self.task))

    @property
    def label(self) -> str:
        """Name of the layer in tables, with its settings that differ from the defaults."""
        return self.layer_choice.label

    @property
    def name(self) -> str:
        """Name of the study: layer, task, difficulty, start of the fingerprint, and the revision if not the first."""
        return f"{self._plain_label} {self._rest}"

    @property
    def heading(self) -> str:
        """Name of the study in headings of tables and charts: as ``name``, but with the label of the layer."""
        return f"{self.label} {self._rest}"

    @property
    def title(self) -> str:
        """Name of the study in the storage: as ``name``, with the changed settings instead of ``custom``."""
        words = [self._plain_label, self.task, self.difficulty]
        if differences := self._differences():
            words[2:] = [word for word in words[2:] if word not in ("baseline", "custom")]
            words.append(f"({shorten(', '.join(differences), LONGEST_DIFFERENCE, placeholder=' …')})")
        return " ".join([*words, self._end])

    @property
    def _plain_label(self) -> str:
        """The layer without its settings, as in the names of studies."""
        return mixer_label(self.mixer, self.short_convolution)

    @property
    def _end(self) -> str:
        return self.fingerprint[:8] + ("" if self.revision == 1 else f" r{self.revision}")

    @property
    def _rest(self) -> str:
        """Return the part of a study's name after the layer."""
        return f"{self.task} {self.difficulty} {self._end}"

    def _differences(self) -> list[str]:
        """Return the settings that differ from the defaults, in words; under a preset, only settings of the layer."""
        pairs = [(self.mixer_config, type(self.mixer_config)())]
        if self.preset == "grid":
            pairs += [(self.shape, Shape()), (self.protocol, Protocol())]
        if self.difficulty.endswith("custom"):
            pairs.append((self.task_config, type(self.task_config)()))

        return [
            f"{name.replace('_', '-')} {value}"
            for given, default in pairs
            for name, value in vars(given).items()
            if value != getattr(default, name) and not is_dataclass(value)
        ]

    @property
    def setting(self) -> str:
        """The task, with its difficulty unless it is the baseline."""
        return self.task if self.difficulty == "baseline" else f"{self.task} ({self.difficulty})"

    def run_id(self, run: Run) -> str:
        """Return the name of a run's folder."""
        return run_id(self.name, self.fingerprint, run)


def run_id(study: str, fingerprint: str, run: Run) -> str:
    """Return the name of a run's folder, from the name and the fingerprint of its study."""
    return sha256_of(study + fingerprint + json.dumps(asdict(run), sort_keys=True))[:16]


@dataclass(frozen=True)
class _ByText:
    """A configuration as a key: it may hold lists, which are none."""

    text: str
    config: Any = field(compare=False)


@lru_cache(maxsize=1)
def _task(kind: type[Task], settings: _ByText) -> Task:
    return kind(settings.config)


@lru_cache(maxsize=1)
def _data_fingerprint(task: Task) -> str:
    return task.fingerprint()


def call_as_in_training(
    experiment: Experiment, build: Callable[[], Backbone], positions: int, device: torch.device
) -> None:
    """Call a model on one sequence for two runs at once, as training does for all runs.

    For a layer from outside this includes the backward pass, which may fail for several runs even if it works for one.

    Args:
        experiment: experiment whose layer is tried.
        build: builds the model of one run.
        positions: length of the sequence.
        device: device on which the model is called.

    Raises:
        ContractError: the layer cannot be computed for several runs at once.
        Exception: errors of the layer's own code, with a note that names the mixer.
    """
    foreign = is_path(experiment.mixer)
    two = [Run(lr=1.0, weight_decay=0.0, seed=seed) for seed in range(2)]
    ensemble = Ensemble(build, two, experiment.protocol.optimizer, 1, device)

    # Both passes for a layer from outside; the tests cover the backward passes of the others.
    try:
        with torch.set_grad_enabled(foreign), explaining_vmap(ensemble.model):
            params_RP = ensemble.params_RP.requires_grad_(foreign)
            tokens_RBT = torch.zeros(2, 1, positions, dtype=torch.int64, device=device)
            logits_RBTV = ensemble.logits(params_RP, tokens_RBT)
            if foreign:
                torch.autograd.grad(logits_RBTV.sum(), params_RP)

    except Exception as error:
        error.add_note(f"while mixer {experiment.mixer!r} was called for all runs at once, as in training")
        raise


def run_folder(folder: Path, experiment: Experiment, run: Run) -> Path:
    """Return the folder of one run below a results folder."""
    return folder / "runs" / experiment.run_id(run)


def study_folder(folder: Path, experiment: Experiment) -> Path:
    """Return the folder of a study's summary and figures below a results folder, named after the study's heading.

    It is named after the study, without the layer's settings, where these are too long. Earlier versions always did so;
    such a folder is still found.
    """
    path, short = (folder / "studies" / re.sub(r"[^\w.+-]+", "-", e) for e in (experiment.heading, experiment.name))
    return short if short.is_dir() or len(path.name.encode()) > LONGEST_FOLDER else path


def first_layer(experiment: Experiment) -> Layer:
    """Build a model and return its first layer; the state of torch's generator is restored.

    Raises:
        ValueError: the layer cannot be built; the message names the mixer.
    """
    with torch.random.fork_rng(devices=[]), building(experiment.mixer):
        return experiment.build().stack[0]
