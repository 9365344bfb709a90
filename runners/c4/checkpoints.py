"""Checkpoints of a pretraining run: one safetensors file each, whole or absent, of which the newest is used.

A run's folder holds ``run.json`` (configuration and corpus), ``tokenizer.json``, ``checkpoints/step-*.safetensors``,
``curve.csv`` and, once it is finished, ``result.json``; ``downstream.json`` where questions were asked. Tensors are
gathered whole, so that a checkpoint can be read by any number of processes, sharded or not.
"""

import errno
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from mixers.models import LanguageModel
from mixers.registry import find_mixer
from runners.c4.config import Config
from runners.c4.corpus.prepare import load_tokenizer
from runners.c4.model import build
from runners.files import load_tensors, save_tensors
from runners.provenance import code_version

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEPT = 2
"""Newest checkpoints that are kept."""
DECIDING = tuple(
    f"runners.c4.{name}" for name in ("model", "corpus.windows", "distributed", "step", "evaluation.evaluate")
)
"""Modules that decide a run's numbers; they import others that do not, such as those of the command line."""
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
RANDOM = "random"
MODEL = "model"
"""Attribute of the trained module that holds the language model."""


class DiskFullError(OSError):
    """There is no room for a checkpoint."""


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a run's folder; None if it has none."""
    return max(_all(folder), default=None)


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, info: dict[str, Any], first: bool
) -> None:
    """Write the state after ``step`` steps; all processes take part, the ``first`` one writes.

    Raises:
        DiskFullError: no room; what was there is untouched.
    """
    weights, moments = _state(model, optimizer, WHOLE)  # empty in all processes but the first
    if not first:
        return
    tensors: dict[str, Tensor] = {f"model.{name}": y for name, y in weights.items()}
    for name, values in moments["state"].items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(y) for key, y in values.items()}
    tensors[RANDOM] = torch.get_rng_state()
    path = folder / "checkpoints" / f"step-{step:08}.safetensors"
    try:
        save_tensors(path, tensors, {**info, "step": step})
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFullError(
                f"no space for {path}: free some and run the same command again; the last checkpoint is "
                f"{newest(folder) or 'none yet'}"
            ) from error
        raise
    for old in sorted(_all(folder))[:-KEPT]:
        old.unlink()


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint back; returns its info, ``step`` among it.

    Raises:
        DamagedFileError: the file cannot be read.
        ValueError: it is of another model.
    """
    tensors, info = load_tensors(path)
    weights, moments = _state(model, optimizer, None)
    found: dict[str, Any] = {name.removeprefix("model."): y for name, y in tensors.items() if name.startswith("model.")}
    if {name: y.shape for name, y in found.items()} != {name: y.shape for name, y in weights.items()}:
        raise ValueError(f"{path} is a checkpoint of another model: give the configuration it was trained with")
    state: dict[str, dict[str, Tensor]] = {}
    for name, y in tensors.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            state.setdefault(parameter, {})[key] = y
    moments["state"] = state
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=moments, options=WHOLE)
    torch.set_rng_state(tensors[RANDOM])
    return info


def describe_run(config: Config, options: dict[str, Any], corpus: dict[str, Any]) -> dict[str, Any]:
    """What a run is, JSON-able, and the version of its code; written into every checkpoint."""
    values = {**asdict(config), "data": list(config.data), "out": str(config.out)}
    return {"config": values, "mixer_options": options, "corpus": corpus, "code": run_code(config)}


def run_code(config: Config) -> str:
    """Hash of the code that decides a run's numbers: of its layer and the backbone, of training and of evaluation."""
    return code_version(find_mixer(config.mixer), "mixers.models", "mixers.ops.numerics", alone=DECIDING)


def load_model(path: Path, device: torch.device) -> tuple[LanguageModel, Config, "Tokenizer"]:
    """Model, configuration and tokenizer of a checkpoint file, or of the newest one in a run's folder.

    Raises:
        DamagedFileError: the file cannot be read.
        ValueError: there is none, or it is of another version or model.
    """
    file = newest(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise ValueError(f"no checkpoint at {path}: give a run's folder (results/c4/...) or a step-*.safetensors file")
    tensors, info = load_tensors(file)
    if "corpus" not in info:
        raise ValueError(f"{file} is no checkpoint of python -m runners.c4: give a run's folder (results/c4/...)")
    tokenizer = file.parent.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"no {tokenizer}: keep {file.name} in the folder of its run, which has the tokenizer")
    prefix = f"model.{MODEL}."
    try:
        values = info["config"]
        config = Config(**{**values, "data": tuple(values["data"]), "out": Path(values["out"])})
        model = build(config, info["mixer_options"], info["corpus"]["vocab_size"])
        model.load_state_dict({n.removeprefix(prefix): y for n, y in tensors.items() if n.startswith(prefix)})
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{file} is of another version of this project, or of another model: use the version that trained it"
        ) from error
    return model.to(device).eval(), config, load_tokenizer(str(tokenizer))


def clear_leftovers(folder: Path) -> None:
    """Remove what a process killed while it wrote has left in a run's folder; nobody else may be writing."""
    for leftover in (*folder.glob(".*-*"), *(folder / "checkpoints").glob(".*")):  # the lock has no "-"
        leftover.unlink()


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights by name; the optimizer's state by name of the parameter, and its groups."""
    return get_state_dict(model, optimizer, options=options)


def _all(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("step-*.safetensors"))
