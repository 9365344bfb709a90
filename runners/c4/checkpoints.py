"""Checkpoints of a pretraining run: one safetensors file each, complete or absent. The newest intact one is used.

The folder of a run holds

- ``run.json``: configuration and corpus,
- ``tokenizer.json``,
- ``checkpoints/step-*.safetensors``,
- ``curve.csv``: one row per step,
- ``result.json``, when the run is finished,
- ``downstream.json``, when the run was evaluated on downstream sets.

A checkpoint holds whole tensors, so any number of processes can read it, sharded or not.
"""

import errno
import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mixers.models import LanguageModel
from runners.c4.config import Config
from runners.c4.curve import read_curve
from runners.c4.data.tokenizer import load_tokenizer
from runners.c4.errors import DiskFullError
from runners.c4.identity import config_of, run_code
from runners.c4.model import build
from runners.c4.parametrisation import fold
from runners.c4.records import REHEARSAL, read_record
from runners.files import DamagedFileError, checksum, damaged, load_info, load_tensors, save_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")
KEPT = 2
"""Number of checkpoints that are kept: the newest ones."""
RANDOM = "random"
"""Name of the tensor that holds the state of the random number generator."""
MODEL = "model"
"""Attribute of the trained module that holds the language model."""
TRAIN_AGAIN = "delete it and the result.json of its run, and run the command of the training again"
"""Remedy for a damaged file of a finished run: training continues from an earlier checkpoint, or begins again."""
TOKENIZER_CHECKSUM = "tokenizer_checksum"
"""Key in the description of a run's corpus; other programs would refuse a checksum in ``tokenizer.json`` itself."""


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder; None if it has none."""
    return max(_all(folder), default=None)


def steps_done(folder: Path) -> int:
    """Return the step from which the training of a run would continue; 0 if no checkpoint in its folder is intact."""

    def load(path: Path) -> int:
        _, info = load_tensors(path)
        return len(read_curve(folder, info["step"]))

    try:
        return load_newest(folder, load, first=False) or 0
    except (DamagedFileError, FileNotFoundError):  # a process that trains the run may delete a checkpoint meanwhile
        return 0


def load_newest(folder: Path, load: Callable[[Path], T], first: bool = True) -> T | None:
    """Load the newest intact checkpoint in a run's folder; print a line if a damaged one is skipped.

    Args:
        folder: folder of the run.
        load: loads a checkpoint; raises DamagedFileError if the run cannot continue from it.
        first: whether this process prints.

    Returns:
        The result of ``load``; None if there is no checkpoint.

    Raises:
        DamagedFileError: ``load`` raised it for all checkpoints.
    """
    paths = sorted(_all(folder), reverse=True)
    for path, earlier in zip_longest(paths, paths[1:]):
        try:
            return load(path)
        except DamagedFileError as error:
            if earlier is None:
                raise
            if first:
                print(f"{_reason(error)}: the earlier checkpoint {earlier.name} is used", file=sys.stderr)
    return None


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
    weights, moments = _state(model, optimizer, whole=True)  # empty in all processes but the first
    if not first:
        return

    # Flat names for all tensors.
    tensors: dict[str, Tensor] = {f"model.{name}": y for name, y in weights.items()}
    for name, values in moments["state"].items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(y) for key, y in values.items()}
    tensors[RANDOM] = torch.get_rng_state()

    path = folder / "checkpoints" / f"step-{step:08}.safetensors"
    try:
        save_tensors(path, apart(tensors), {**info, "step": step})
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFullError(
                f"no space for {path}: free some and run the same command again; the last checkpoint is "
                f"{newest(folder) or 'none yet'}"
            ) from error
        raise

    for old in sorted(_all(folder))[:-KEPT]:
        old.unlink()


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as tied parameters do; safetensors stores no others."""
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


def discard(folder: Path) -> None:
    """Delete the folder of a finished run, whose lock the caller holds.

    The result goes first, because a run that has a result but no model would neither be trained nor be evaluated.
    """
    (folder / "result.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def restore(path: Path, tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the tensors of a checkpoint into a model and its optimizer.

    Args:
        path: checkpoint file, for messages.
        tensors: tensors of the checkpoint.
        model: the module to train.
        optimizer: its optimizer.

    Raises:
        ValueError: the file belongs to another model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict  # takes a second to import

    weights, moments = _state(model, optimizer, whole=False)

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

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=moments, options=options)
    torch.set_rng_state(tensors[RANDOM])


def load_model(path: Path | str) -> tuple[LanguageModel, "Tokenizer"]:
    """Load a trained model, on the CPU and in evaluation mode, and its tokenizer.

    The parameters are the weights as the layers use them; a parametrisation is folded in. A line on standard error
    says if the code has changed since a checkpoint was written, unless the run has been continued with this code.

    Args:
        path: folder of a run, whose newest intact checkpoint is read; or a checkpoint file.

    Raises:
        DamagedFileError: a file is damaged.
        ValueError: there is no checkpoint, or it belongs to another version or another model.
    """
    file, (tensors, info) = _load(Path(path), load_tensors)
    config = _read_config(info, file)

    tokenizer = file.parent.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"no {tokenizer}: keep {file.name} in the folder of its run, which has the tokenizer")
    check_tokenizer(tokenizer, info)

    prefix = f"model.{MODEL}."
    try:
        model = build(config, info["mixer_options"], info["corpus"]["vocab_size"])
        model.load_state_dict({n.removeprefix(prefix): y for n, y in tensors.items() if n.startswith(prefix)})
        fold(model)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _other_version(file) from error
    rehearsed = read_record(file.parent.parent / REHEARSAL) or {"codes": []}
    if run_code(config) not in (info.get("code"), *rehearsed["codes"]):
        print(
            f"the code of {config.mixer} or of its training has changed since {file} was written: results may differ",
            file=sys.stderr,
        )
    return model.eval(), load_tokenizer(str(tokenizer))


def load_config(path: Path | str) -> Config:
    """Load the configuration of a run; arguments and errors are those of ``load_model``."""
    file, info = _load(Path(path), load_info)
    return _read_config(info, file)


def find_checkpoint(path: Path | str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint file and its description of the run; arguments and errors are those of ``load_model``."""
    file, info = _load(Path(path), load_info)
    _read_config(info, file)
    return file, info


def check_tokenizer(path: Path, info: dict[str, Any]) -> None:
    """Compare the tokenizer of a run with the checksum in the run's description, which earlier versions lack.

    Raises:
        DamagedFileError: the file is damaged.
    """
    expected = info.get("corpus", {}).get(TOKENIZER_CHECKSUM)
    if expected not in (None, checksum(path.read_bytes())):
        raise damaged(path, "its checksum does not fit", TRAIN_AGAIN)


def _load(path: Path, load: Callable[[Path], T]) -> tuple[Path, T]:
    """Load the file ``path``, or the newest intact checkpoint in the folder ``path``; return it with its path.

    Raises:
        DamagedFileError: there is no intact file.
        ValueError: there is no such file.
    """
    found: tuple[Path, T] | None = None
    try:
        if path.is_dir():
            found = load_newest(path, lambda file: (file, load(file)))
        elif path.is_file() and path.suffix == ".safetensors":
            found = path, load(path)
    except DamagedFileError as error:
        raise DamagedFileError(f"{_reason(error)}: {TRAIN_AGAIN}") from error

    if found is None:
        raise ValueError(f"no checkpoint at {path}: give a run's folder (results/c4/...) or a step-*.safetensors file")
    return found


def _reason(error: DamagedFileError) -> str:
    """Return the message of an error without its remedy."""
    return str(error).rpartition(": ")[0]


def _read_config(info: dict[str, Any], file: Path) -> Config:
    """Return the configuration in the description of a run, which was read from ``file``.

    Raises:
        ValueError: the file is not a checkpoint, or it was written by another version.
    """
    if "corpus" not in info:
        raise ValueError(f"{file} is no checkpoint of python -m runners.c4: give a run's folder (results/c4/...)")

    try:
        return config_of(info)
    except (KeyError, TypeError) as error:
        raise _other_version(file) from error


def _other_version(file: Path) -> ValueError:
    """Return the error for a checkpoint that does not fit this code."""
    return ValueError(
        f"{file} is of another version of this project, or of another model: use the version that trained it"
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights by name, and the optimizer's state by parameter name with its groups.

    Args:
        model: the trained module.
        optimizer: optimizer of its parameters.
        whole: gather shards on the CPU of the first process; the other processes return nothing.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict  # takes a second to import

    options = StateDictOptions(full_state_dict=True, cpu_offload=True) if whole else None
    return get_state_dict(model, optimizer, options=options)


def _all(folder: Path) -> list[Path]:
    """Return all checkpoints in a run's folder; other files, such as a user's copy of one, are left alone."""
    found = (folder / "checkpoints").glob("step-*.safetensors")
    return [path for path in found if path.stem.removeprefix("step-").isdecimal()]
