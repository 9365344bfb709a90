"""The files of a run: its curve, and its checkpoints, of which the newest intact one is used.

The folder of a run holds

- ``run.json``: configuration and corpus,
- ``tokenizer.json``,
- ``checkpoints/step-*.safetensors``,
- ``curve.csv``: one row per step, as far as the newest checkpoint, which holds the rows, too,
- ``record.json``, when the run is finished (``runners.records``).

A checkpoint is complete or absent. It holds whole tensors, so any number of processes can read it, sharded or not.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from mixers.models import LanguageModel
from runners.c4.config import config_of
from runners.c4.data.tokenizer import Tokenizer, load_tokenizer
from runners.c4.model import build, fold
from runners.files import DamagedFileError, checksum, damaged, load_info, load_tensors, save_tensors, write_atomically

KEPT = 2
"""Number of checkpoints that are kept: the newest ones."""
CURVE = "curve"
"""Name of the tensor that holds the rows of the curve."""
MODEL = "model"
"""Attribute of the trained module that holds the language model."""
TRAIN_AGAIN = "delete it and the record.json of its run, and run the command of the training again"
"""Remedy for a damaged file of a finished run: training continues from an earlier checkpoint, or begins again."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One optimizer step.

    Attributes:
        step: number of steps done.
        tokens: target tokens read so far by all processes together.
        loss: mean cross-entropy of the step's batch, in nats per token.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tokens_per_second: speed of all processes together.
        mfu: the model's operations per second as a share of the GPUs' peak; None if the peak is not known.
        memory_gib: largest GPU memory that this process has held, in GiB.
        seconds: wall time of all training steps so far, including those before an interruption.
        validation_loss: validation cross-entropy in nats per token; None if it was not measured at this step.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float | None
    memory_gib: float
    seconds: float
    validation_loss: float | None = None


COLUMNS = [field.name for field in fields(StepRow)]


def rows_of(tensors: dict[str, Tensor]) -> list[StepRow]:
    """Return the rows in a checkpoint, one for each step before it."""
    rows = []
    for values in tensors[CURVE].tolist():
        numbers: dict[str, Any] = {name: None if math.isnan(y) else y for name, y in zip(COLUMNS, values, strict=True)}
        rows.append(StepRow(**{**numbers, "step": int(values[0]), "tokens": int(values[1])}))
    return rows


def write_curve(folder: Path, rows: Sequence[StepRow]) -> None:
    """Write the rows of a run for its user."""
    write_atomically(folder / "curve.csv", partial(pd.DataFrame(rows, columns=COLUMNS).to_csv, index=False))


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, the newest first; a user's copy of one, say, is none."""
    files = (folder / "checkpoints").glob("step-*.safetensors")
    return sorted((path for path in files if path.stem.removeprefix("step-").isdecimal()), reverse=True)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder; None if it has none."""
    return next(iter(checkpoints_of(folder)), None)


def load_newest(folder: Path, speaks: bool = True) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest intact checkpoint in a run's folder; print a line if a damaged one is skipped.

    Args:
        folder: folder of the run.
        speaks: whether this process prints.

    Returns:
        Its file, its tensors and the description of the run; None if there is no checkpoint.

    Raises:
        DamagedFileError: all are damaged.
    """
    paths = checkpoints_of(folder)
    for path, earlier in zip_longest(paths, paths[1:]):
        try:
            return path, *load_tensors(path)
        except DamagedFileError as error:
            if earlier is None:
                raise
            if speaks:
                reason = str(error).rpartition(": ")[0]
                print(f"{reason}: the earlier checkpoint {earlier.name} is used", file=sys.stderr)
    return None


def save(
    folder: Path,
    rows: Sequence[StepRow],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    info: dict[str, Any],
    first: bool,
) -> None:
    """Write the state after the steps of ``rows``, and delete old checkpoints. All processes must call this.

    Args:
        folder: folder of the run.
        rows: the steps done.
        model: the trained module.
        optimizer: its optimizer.
        info: description of the run.
        first: whether this process writes.

    Raises:
        OSError: it cannot be written; the earlier checkpoints are untouched.
    """
    weights, moments = _state(model, optimizer, whole=True)  # empty in all processes but the first
    if not first:
        return

    # Flat names for all tensors.
    tensors: dict[str, Tensor] = {f"model.{name}": y for name, y in weights.items()}
    for name, values in moments["state"].items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(y) for key, y in values.items()}
    numbers = [[math.nan if y is None else y for y in vars(row).values()] for row in rows]
    tensors[CURVE] = torch.tensor(numbers, dtype=torch.float64)

    step = len(rows)
    save_tensors(folder / "checkpoints" / f"step-{step:08}.safetensors", apart(tensors), {**info, "step": step})
    write_curve(folder, rows)
    for old in checkpoints_of(folder)[KEPT:]:
        old.unlink()


def restore(folder: Path, tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the tensors of a checkpoint into a model and its optimizer.

    Args:
        folder: folder of the run, for messages.
        tensors: tensors of the checkpoint.
        model: the module to train.
        optimizer: its optimizer.

    Raises:
        ValueError: they belong to another model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict  # takes a second to import

    weights, moments = _state(model, optimizer, whole=False)

    # Weights, which must fit the model.
    stored: dict[str, Any] = {
        name.removeprefix("model."): y for name, y in tensors.items() if name.startswith("model.")
    }
    if {name: y.shape for name, y in stored.items()} != {name: y.shape for name, y in weights.items()}:
        raise ValueError(f"{folder} has a checkpoint of another model: give the configuration it was trained with")

    # Moments, by parameter and kind.
    state: dict[str, dict[str, Tensor]] = {}
    for name, y in tensors.items():
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            state.setdefault(parameter, {})[key] = y
    moments["state"] = state

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_state_dict(model, optimizer, model_state_dict=stored, optim_state_dict=moments, options=options)


def load_run(path: Path) -> tuple[LanguageModel, Tokenizer]:
    """Load the model of a run, on the CPU and in evaluation mode, and its tokenizer.

    The parameters are the weights as the layers use them; a parametrisation is folded in.

    Args:
        path: folder of a run, whose newest intact checkpoint is read; or a checkpoint file.

    Raises:
        DamagedFileError: a file is damaged.
        ValueError: there is no checkpoint, or it belongs to another version or another model.
    """
    file, info = find_checkpoint(path)
    tensors, _ = load_tensors(file)
    tokenizer = file.parent.parent / "tokenizer.json"
    if not tokenizer.is_file():
        raise ValueError(f"no {tokenizer}: keep {file.name} in the folder of its run, which has the tokenizer")
    if info["corpus"]["tokenizer_checksum"] != checksum(tokenizer.read_bytes()):
        raise damaged(tokenizer, "its checksum does not fit", TRAIN_AGAIN)

    prefix = f"model.{MODEL}."
    try:
        model = build(config_of(info), info["mixer_options"], info["corpus"]["vocab_size"])
        model.load_state_dict({n.removeprefix(prefix): y for n, y in tensors.items() if n.startswith(prefix)})
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{file} is of another version of this project: use the version that trained it") from error
    fold(model)
    return model.eval(), load_tokenizer(str(tokenizer))


def find_checkpoint(path: Path | str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint file and its description of the run; arguments and errors are those of ``load_run``."""
    file, info = Path(path), None
    if file.is_dir() and (newest := load_newest(file)) is not None:
        file, _, info = newest
    elif file.is_file() and file.suffix == ".safetensors":
        info = load_info(file)
    if info is None:
        raise ValueError(f"no checkpoint at {path}: give a run's folder (results/c4/...) or a step-*.safetensors file")
    if "corpus" not in info or "tokenizer_checksum" not in info["corpus"]:
        raise ValueError(f"{file} is no checkpoint of this version: give a run's folder (results/c4/...)")
    return file, info


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as tied parameters do; safetensors stores no others."""
    separate: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return separate


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
