"""Checkpoints of a pretraining run: one safetensors file each, whole or absent. The newest one is used.

The folder of a run holds

- ``run.json``: configuration and corpus,
- ``tokenizer.json``,
- ``checkpoints/step-*.safetensors``,
- ``curve.csv``: one row for each step,
- ``result.json``, once the run is finished,
- ``downstream.json``, once it was evaluated on downstream sets.

A checkpoint holds whole tensors, so any number of processes can read it, sharded or not.
"""

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from mixers.models import LanguageModel
from runners.c4.config import Config
from runners.c4.corpus.tokenizer import load_tokenizer
from runners.c4.model import build
from runners.files import load_info, load_tensors, save_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEPT = 2
"""Number of newest checkpoints that are kept."""
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
RANDOM = "random"
"""Name of the tensor that holds the state of the random number generator."""
MODEL = "model"
"""Attribute of the trained module that holds the language model."""


class DiskFullError(OSError):
    """There is no space for a checkpoint."""


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder; None if it has none."""
    return max(_all(folder), default=None)


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, info: dict[str, Any], first: bool
) -> None:
    """Write the state after ``step`` steps, and delete old checkpoints. All processes must call this.

    Args:
        folder: folder of the run.
        step: number of steps done.
        model: the trained module.
        optimizer: its optimizer.
        info: description of the run.
        first: whether this process writes.

    Raises:
        DiskFullError: the disk is full; the earlier checkpoints are untouched.
    """
    weights, moments = _state(model, optimizer, WHOLE)  # empty in all processes but the first
    if not first:
        return

    # Flat names for all tensors.
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
    """Load a checkpoint into a model and its optimizer.

    Args:
        path: checkpoint file.
        model: the module to train.
        optimizer: its optimizer.

    Returns:
        The description of the run, and ``step``.

    Raises:
        DamagedFileError: the file cannot be read.
        ValueError: the file belongs to another model.
    """
    tensors, info = load_tensors(path)
    weights, moments = _state(model, optimizer, None)

    # Weights, which must fit the model.
    found: dict[str, Any] = {name.removeprefix("model."): y for name, y in tensors.items() if name.startswith("model.")}
    if {name: y.shape for name, y in found.items()} != {name: y.shape for name, y in weights.items()}:
        raise ValueError(f"{path} is a checkpoint of another model: give the configuration it was trained with")

    # Moments, by parameter and kind.
    state: dict[str, dict[str, Tensor]] = {}
    for name, y in tensors.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            state.setdefault(parameter, {})[key] = y
    moments["state"] = state

    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=moments, options=WHOLE)
    torch.set_rng_state(tensors[RANDOM])
    return info


def load_model(path: Path | str) -> tuple[LanguageModel, "Tokenizer"]:
    """Load a trained model, on the CPU and in evaluation mode, and its tokenizer.

    Args:
        path: folder of a run, of which the newest checkpoint is read, or a checkpoint file.

    Raises:
        DamagedFileError: the file cannot be read.
        ValueError: there is no checkpoint, or it belongs to another version or another model.
    """
    file = _find(Path(path))
    tensors, info = load_tensors(file)
    config = _read_config(info, file)

    tokenizer = file.parent.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"no {tokenizer}: keep {file.name} in the folder of its run, which has the tokenizer")

    prefix = f"model.{MODEL}."
    try:
        model = build(config, info["mixer_options"], info["corpus"]["vocab_size"])
        model.load_state_dict({n.removeprefix(prefix): y for n, y in tensors.items() if n.startswith(prefix)})
    except (KeyError, TypeError, RuntimeError) as error:
        raise _other_version(file) from error
    return model.eval(), load_tokenizer(str(tokenizer))


def load_config(path: Path | str) -> Config:
    """Load the configuration of a run; arguments and errors are those of ``load_model``."""
    file = _find(Path(path))
    return _read_config(load_info(file), file)


def clear_leftovers(folder: Path) -> None:
    """Delete temporary files of killed processes from a run's folder; no other process may be writing there."""
    for leftover in (*folder.glob(".*-*"), *(folder / "checkpoints").glob(".*")):  # the lock has no "-"
        leftover.unlink()


def _find(path: Path) -> Path:
    """Return ``path`` if it is a file, or the newest checkpoint in the folder ``path``.

    Raises:
        ValueError: there is no such file.
    """
    file = newest(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise ValueError(f"no checkpoint at {path}: give a run's folder (results/c4/...) or a step-*.safetensors file")
    return file


def _read_config(info: dict[str, Any], file: Path) -> Config:
    """Return the configuration in the description of a run, which was read from ``file``.

    Raises:
        ValueError: the file is not a checkpoint, or it was written by another version.
    """
    if "corpus" not in info:
        raise ValueError(f"{file} is no checkpoint of python -m runners.c4: give a run's folder (results/c4/...)")

    try:
        values = info["config"]
        return Config(**{**values, "data": tuple(values["data"]), "out": Path(values["out"])})
    except (KeyError, TypeError) as error:
        raise _other_version(file) from error


def _other_version(file: Path) -> ValueError:
    """Return the error for a checkpoint that does not fit this code."""
    return ValueError(
        f"{file} is of another version of this project, or of another model: use the version that trained it"
    )


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights by name, and the optimizer's state by parameter name with its groups."""
    return get_state_dict(model, optimizer, options=options)


def _all(folder: Path) -> list[Path]:
    """Return all checkpoints in a run's folder."""
    return list((folder / "checkpoints").glob("step-*.safetensors"))
