"""What is trained: a layer on a task under a protocol, and the hash that tells two of them apart."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache, cached_property, lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch

from mixers import MIXERS
from mixers.backbone import BACKBONES, Backbone
from mixers.base import Layer, Shape
from runners.ensemble import Ensemble, Run
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
        """The task with its data, which experiments on it that follow each other share."""
        return _task(TASKS[self.task], self.task_config)

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
        code = code_version("runners.train", self.layer, TASKS[self.task])
        return _sha256(json.dumps([config, _data_fingerprint(self.instance), code], sort_keys=True))

    @property
    def name(self) -> str:
        """Name of the study: mixer, task, difficulty, and the head of the fingerprint."""
        return f"{self.mixer} {self.task} {self.difficulty} {self.fingerprint[:8]}"

    @property
    def setting(self) -> str:
        """The task, and its difficulty where that is not the baseline."""
        return self.task if self.difficulty == "baseline" else f"{self.task} ({self.difficulty})"

    def run_id(self, run: Run) -> str:
        """Name of a run's files."""
        return _sha256(self.name + self.fingerprint + json.dumps(asdict(run), sort_keys=True))[:16]


@lru_cache(maxsize=1)
def _task(kind: type[Task], config: Any) -> Task:
    return kind(config)


@lru_cache(maxsize=1)
def _data_fingerprint(task: Task) -> str:
    return task.fingerprint()


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
    except Exception as error:  # importing runs a user's code, which may fail in any way
        raise ValueError(f"cannot import mixer {name!r}: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Layer)):
        raise ValueError(f"{name!r} is no mixer: it must be a subclass of mixers.base.Layer")
    try:
        usable = is_dataclass(found.Config())
    except TypeError:
        usable = False
    if not usable:
        raise ValueError(f"mixer {name!r}: its Config must be a dataclass whose fields all have defaults")
    return found


@contextmanager
def building(mixer: str) -> Iterator[None]:
    """Name the mixer in what goes wrong while its layer is built.

    Raises:
        ValueError: it cannot be built; one line. Other errors are faults of its code, and stay with a note.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"cannot build mixer {mixer!r}: {error}") from error
    except Exception as error:
        error.add_note(f"while mixer {mixer!r} was built")
        raise


def call_as_in_training(
    experiment: Experiment, build: Callable[[], Backbone], positions: int, device: torch.device
) -> None:
    """Call a model on one sequence for all runs at once, here for two; what goes wrong names the mixer.

    Of a layer from outside the backward pass, too: it may fail for all runs where it does not for one.

    Raises:
        ContractError: the model's buffers depend on the seed.
    """
    foreign = experiment.mixer not in MIXERS
    two = [Run(lr=1.0, weight_decay=0.0, seed=seed) for seed in range(2)]
    runs = Ensemble(build, two, experiment.protocol.optimizer, 1, device)
    try:
        with torch.set_grad_enabled(foreign):
            params_RP = runs.params_RP.requires_grad_(foreign)
            logits_RBTV = runs.logits(params_RP, torch.zeros(2, 1, positions, dtype=torch.int64, device=device))
            if foreign:
                torch.autograd.grad(logits_RBTV.sum(), params_RP)
    except Exception as error:
        error.add_note(f"while mixer {experiment.mixer!r} was called for all runs at once, as in training")
        raise


def code_version(*roots: type | str, alone: Sequence[str] = ()) -> str:
    """SHA-256 over the code that a result depends on: modules by name, those of classes and of their base classes, and
    all they import that is not part of Python or an installed library; of modules ``alone``, not what they import.
    Comments, docstrings and layout do not count; Python's minor version does, for its syntax trees differ.
    """
    waiting: list[str] = []
    for root in roots:
        waiting += [root] if isinstance(root, str) else [ancestor.__module__ for ancestor in root.__mro__]
    seen = {name: _parsed(source)[1] for name in alone if (source := _source(name)) is not None}
    while waiting:
        name = waiting.pop()
        source = _source(name)
        if name in seen or source is None:
            continue
        statements, seen[name] = _parsed(source)
        waiting += _imports(statements, _package(name))
    return _sha256(json.dumps(sorted(seen.items())))


@cache
def _parsed(source: str) -> tuple[list[ast.Import | ast.ImportFrom], str]:
    """Import statements of a module, and the text of its syntax tree without docstrings."""
    tree = _without_docstrings(ast.parse(source))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)], ast.dump(tree)


def _source(module_name: str) -> str | None:
    """Source of a module that is neither Python's nor an installed library's; None for others and for no modules."""
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    try:
        if top not in OWN_PACKAGES and _is_installed(importlib.util.find_spec(top)):
            return None  # before its inner modules are looked for, which would import it
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # the name of a class or function inside a module; a library that is not there
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).read_text()


def _is_installed(spec: ModuleSpec | None) -> bool:
    if spec is None:
        return False
    files = [spec.origin or "", *(spec.submodule_search_locations or ())]
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(Path(file).is_relative_to(place) for file in files for place in places)


def _package(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return module_name if is_package else module_name.rpartition(".")[0]


def _imports(statements: Sequence[ast.Import | ast.ImportFrom], package: str) -> list[str]:
    """Absolute names of the modules that a module of ``package`` imports, or imports names from."""
    names: list[str] = []
    for node in statements:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names += [base if _source(name) is None else name for name in inner]
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
