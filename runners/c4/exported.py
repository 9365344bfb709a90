"""A trained model in its own folder, for use elsewhere: weights, configuration and tokenizer.

- ``model.safetensors``: the weights as the layers use them, in float32, by the names of ``LanguageModel``,
- ``config.json``: layer, shape and training of the model,
- ``tokenizer.json``.

Many libraries read these formats. ``runners.c4.load_model`` builds the model from them.
"""

import errno
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mixers.models import LanguageModel
from runners import __version__
from runners.c4.config import Config
from runners.c4.corpus.tokenizer import load_tokenizer
from runners.c4.identity import INCIDENTAL, run_code
from runners.c4.model import build, layer_of
from runners.files import (
    DamagedFileError,
    checksum,
    damaged,
    load_tensors,
    read_json,
    rounded,
    save_tensors,
    write_json,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
PROBED, LONGEST = 16, 512
"""Number of logits that show whether the code computes what it did, and largest length of the sequence before them."""
TOLERANCE = 1e-3
"""Difference of these logits that counts as rounding, relative to the largest."""
EXPORT_AGAIN = "export the run again"


def is_exported(path: Path) -> bool:
    """Return whether ``path`` is a folder written by ``write_exported``."""
    return (path / CONFIG).is_file()


def write_exported(folder: Path, model: LanguageModel, tokenizer: bytes, info: Mapping[str, Any]) -> None:
    """Write an exported model; after an error the folder does not exist.

    Args:
        folder: a folder that does not exist.
        model: the model, on the CPU and in evaluation mode.
        tokenizer: content of ``tokenizer.json``.
        info: description of the run in a checkpoint.

    Raises:
        ValueError: the folder exists, or the disk is full.
        OSError: it cannot be written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder")

    # Leave out paths, which mean nothing elsewhere. Write all options of the layer, because defaults may change.
    values = {name: value for name, value in info["config"].items() if name not in INCIDENTAL}
    config = Config(**values)
    if config.width is not None:
        del values["size"]  # which has no effect beside a width
    description = {
        "program": f"recurrent-transformer-diagnostics {__version__}",
        "config": values,
        "shape": asdict(config.shape()),
        "mixer_options": asdict(layer_of(config, info["mixer_options"])[1]),
        "vocab_size": info["corpus"]["vocab_size"],
        "step": info["step"],
        "tokenizer_checksum": checksum(tokenizer),
        "code": run_code(config),
        "probe": _probe(model, config),
    }

    folder.parent.mkdir(parents=True, exist_ok=True)
    with _space_for(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        save_tensors(made / WEIGHTS, apart(model.state_dict()), {})
        (made / TOKENIZER).write_bytes(tokenizer)
        write_json(made / CONFIG, description)
        made.rename(folder)


@contextmanager
def _space_for(folder: Path) -> Iterator[None]:
    """Name the folder in the error of a full disk, and not the temporary one, which is deleted."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ValueError(f"no space for {folder}: free some and run the same command again") from error


def load_exported(folder: Path) -> tuple[LanguageModel, "Tokenizer"]:
    """Load an exported model, on the CPU and in evaluation mode, and its tokenizer.

    A line on standard error says if the code has changed since the export and computes other outputs.

    Raises:
        DamagedFileError: a file is damaged.
        ValueError: a file is missing, or the model belongs to another version of this project.
    """
    for name in (WEIGHTS, TOKENIZER):
        if not (folder / name).is_file():
            raise ValueError(f"no {folder / name}: {EXPORT_AGAIN}")

    config = replace(load_exported_config(folder), parametrisation="paper")  # exported weights are folded
    description = exported_description(folder)
    if description.get("tokenizer_checksum") != checksum((folder / TOKENIZER).read_bytes()):
        raise damaged(folder / TOKENIZER, "its checksum does not fit", EXPORT_AGAIN)

    try:
        weights, _ = load_tensors(folder / WEIGHTS)
    except DamagedFileError as error:
        raise damaged(folder / WEIGHTS, error.__cause__, EXPORT_AGAIN) from error

    try:
        model = build(config, description["mixer_options"], description["vocab_size"])
        model.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _other_version(folder) from error

    then = description.get("probe")
    if then is not None and description["code"] != run_code(config):
        now = _probe(model.eval(), config)
        if now is not None and not _agree(then, now):
            print(
                f"{folder} computed other outputs when it was exported: the code of {config.mixer} has changed since",
                file=sys.stderr,
            )
    return model.eval(), load_tokenizer(str(folder / TOKENIZER))


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as tied parameters do; safetensors stores no others."""
    found: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found


def _probe(model: LanguageModel, config: Config) -> list[float] | None:
    """Return the first logits at the end of a fixed sequence, as long as in training unless that is long.

    None if the layer cannot compute them here.
    """
    tokens_T = torch.arange(min(config.seq_len, LONGEST)) % len(model.embedding.weight)
    try:
        with torch.no_grad():
            logits_V = model(tokens_T[None])[0, -1]
    except Exception:  # a user's layer may need a GPU, or other lengths
        return None
    found: list[float] = logits_V[:PROBED].float().tolist()
    return [rounded(y) for y in found] if all(map(math.isfinite, found)) else None


def _agree(then: list[float], now: list[float]) -> bool:
    """Return whether two probes are equal but for rounding, which differs between machines."""
    allowed = TOLERANCE * max(map(abs, then))
    return len(then) == len(now) and all(abs(a - b) <= allowed for a, b in zip(then, now, strict=True))


def load_exported_config(folder: Path) -> Config:
    """Load the configuration of an exported model; its paths are the defaults.

    Raises:
        ValueError: ``config.json`` is damaged, or belongs to another version of this project or to another program.
    """
    try:
        return Config(**exported_description(folder)["config"])
    except TypeError as error:
        raise _other_version(folder) from error


def exported_description(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json`` of an exported model; errors are those of ``load_exported_config``."""
    description = read_json(folder / CONFIG, EXPORT_AGAIN)
    if not (isinstance(description, dict) and {"config", "mixer_options"} <= description.keys()):
        raise _other_version(folder)
    return description


def _other_version(folder: Path) -> ValueError:
    """Return the error for a folder that does not fit this code."""
    return ValueError(f"{folder} is no export of this version of the project: {EXPORT_AGAIN}, with this version")
