"""What is trained: a layer on a task under a protocol, and the hash that tells two of them apart."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mixers import MIXERS
from mixers.backbone import BACKBONES, Backbone
from mixers.base import Layer, Shape
from runners.ensemble import Run
from runners.train import Protocol
from tasks import TASKS
from tasks.base import Task

OWN_PACKAGES = ("mixers", "tasks", "runners")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A layer on a task.

    Attributes:
        mixer: registered name, or ``package.module:Class``.
        mixer_config: the layer's ``Config``.
        task: registered name.
        task_config: the task's ``Config``.
        difficulty: name of the setting, for people; what counts is ``task_config``.
        shape: what the backbone fixes.
        protocol: how it is trained.
        precision: dtype of the matrix products.
    """

    mixer: str
    mixer_config: Any
    task: str
    task_config: Any
    difficulty: str
    shape: Shape
    protocol: Protocol
    precision: str

    @cached_property
    def layer(self) -> type[Layer]:
        return find_mixer(self.mixer)

    @cached_property
    def instance(self) -> Task:
        """The task with its data."""
        return TASKS[self.task](self.task_config)

    def build(self) -> Backbone:
        """A model with fresh parameters from torch's global generator."""
        task = self.instance
        return BACKBONES[task.backbone](self.layer, self.mixer_config, self.shape, task.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """All that decides the result, as JSON-able values."""
        return asdict(self)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over configuration, data and code: equal if and only if the result is meant to be equal."""
        config = {name: value for name, value in self.to_dict().items() if name != "difficulty"}
        code = code_version(self.layer, TASKS[self.task])
        return _sha256(json.dumps([config, self.instance.fingerprint(), code], sort_keys=True))

    @property
    def name(self) -> str:
        """Name of the study: mixer, task, difficulty, and the head of the fingerprint."""
        return f"{self.mixer} {self.task} {self.difficulty} {self.fingerprint[:8]}"

    def run_id(self, run: Run) -> str:
        """Name of a run's files."""
        return _sha256(self.fingerprint + json.dumps(asdict(run), sort_keys=True))[:16]


def find_mixer(name: str) -> type[Layer]:
    """Layer class of a registered name or an import path ``package.module:Class``.

    Raises:
        ValueError: no such layer; the message says what there is.
    """
    if name in MIXERS:
        return MIXERS[name]
    if ":" not in name:
        raise ValueError(f"no mixer {name!r}: choose from {', '.join(MIXERS)}, or give package.module:Class")
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import mixer {name!r}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Layer)):
        raise ValueError(f"{name!r} is no mixer: it must be a subclass of mixers.base.Layer")
    return found


def code_version(*roots: type) -> str:
    """SHA-256 over the code that a result depends on: the modules of ``roots`` and of training, and what they import
    from this project or from the root's own package. Comments, docstrings and layout do not count.
    """
    packages = {*OWN_PACKAGES, *(root.__module__.partition(".")[0] for root in roots)}
    waiting = ["runners.train", *(root.__module__ for root in roots)]
    seen: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        source = _source(name)
        if name in seen or source is None:
            continue
        tree = ast.parse(source)
        seen[name] = ast.dump(_without_docstrings(tree))
        waiting += [module for module in _imports(tree) if module.partition(".")[0] in packages]
    return _sha256(json.dumps(sorted(seen.items())))


def _source(module_name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:  # the name of a class or function inside a module
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).read_text()


def _imports(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                statement
                for statement in node.body
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            ]
    return tree


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
