"""A trained model in its own folder, for use elsewhere: weights, configuration and tokenizer.

    python -m runners.c4 export results/c4/<run> my_model

- ``model.safetensors``: the weights as the layers use them, in float32, by the names of ``LanguageModel``,
- ``config.json``: layer, shape and training of the model,
- ``tokenizer.json``.

Many libraries read these formats. ``runners.c4.load_model("my_model")``, ``generate``, ``gradients`` and ``lm_eval``
accept the folder in place of a run.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from mixers.models import LanguageModel
from mixers.registry import variant_label
from runners import __version__
from runners.c4.checkpoints import apart, find_checkpoint, load_run
from runners.c4.config import INCIDENTAL, Config, config_of
from runners.c4.data.tokenizer import Tokenizer, load_tokenizer
from runners.c4.model import build, layer_of
from runners.ending import user_errors
from runners.files import checksum, damaged, load_tensors, new_folder, read_json, save_tensors, write_json
from runners.options import parse

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
EXPORT_AGAIN = "export the run again, with this version"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Export a trained model: weights, configuration and tokenizer, without the state of the training.

    Attributes:
        checkpoint: folder of a run, whose newest checkpoint is read, or a checkpoint file.
        folder: folder to write, which must not exist.
    """

    checkpoint: Positional[Path]
    folder: Positional[Path]


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)
        export(options.checkpoint, options.folder)
    print(f"exported: {options.folder}")
    print(f"generate: python -m runners.c4 generate {shlex.quote(str(options.folder))} --prompt ...")


def export(checkpoint: Path | str, folder: Path | str) -> None:
    """Write the model of a checkpoint into a new folder; after an error the folder does not exist.

    Args:
        checkpoint: folder of a run, whose newest intact checkpoint is read, or a checkpoint file.
        folder: folder to write.

    Raises:
        DamagedFileError: a file of the run is damaged.
        ValueError: there is no checkpoint, or ``folder`` exists.
        OSError: ``folder`` cannot be written.
    """
    file, info = find_checkpoint(checkpoint)
    model, _ = load_run(file)
    tokenizer = (file.parent.parent / TOKENIZER).read_bytes()

    # Leave out paths, which mean nothing elsewhere. Write all options of the layer, because defaults may change.
    values = {name: value for name, value in info["config"].items() if name not in INCIDENTAL}
    config = Config(**values)
    description = {
        "program": f"recurrent-transformer-diagnostics {__version__}",
        "config": values,
        "shape": asdict(config.shape()),
        "mixer_options": asdict(layer_of(config, info["mixer_options"])[1]),
        "vocab_size": info["corpus"]["vocab_size"],
        "step": info["step"],
        "tokenizer_checksum": checksum(tokenizer),
    }

    with new_folder(Path(folder)) as made:
        save_tensors(made / WEIGHTS, apart(model.state_dict()), {})
        (made / TOKENIZER).write_bytes(tokenizer)
        write_json(made / CONFIG, description)


def load_model(path: Path | str) -> tuple[LanguageModel, Tokenizer]:
    """Load a trained model, on the CPU and in evaluation mode, and its tokenizer.

    The parameters are the weights as the layers use them; a parametrisation is folded in.

    Args:
        path: folder of a run, whose newest intact checkpoint is read; a checkpoint file; or an exported folder.

    Raises:
        DamagedFileError: a file is damaged.
        ValueError: there is no checkpoint, or it belongs to another version or another model.
    """
    folder = Path(path)
    if (description := _exported(folder)) is None:
        return load_run(folder)

    if description.get("tokenizer_checksum") != checksum((folder / TOKENIZER).read_bytes()):
        raise damaged(folder / TOKENIZER, "its checksum does not fit", EXPORT_AGAIN)
    config = replace(load_config(folder), parametrisation="paper")  # exported weights are folded
    model = build(config, description["mixer_options"], description["vocab_size"])
    model.load_state_dict(load_tensors(folder / WEIGHTS)[0])
    return model.eval(), load_tokenizer(str(folder / TOKENIZER))


def load_config(path: Path | str) -> Config:
    """Load the configuration of a run; arguments and errors are those of ``load_model``."""
    description = _exported(Path(path))
    return config_of(find_checkpoint(path)[1]) if description is None else Config(**description["config"])


def load_settings(path: Path | str) -> dict[str, Any]:
    """Load the settings of a run for ``runners.c4.compare.labels_of``; arguments and errors as ``load_model``."""
    info = _exported(Path(path)) or find_checkpoint(path)[1]
    mixer = info["config"]["mixer"]
    _, by_size = layer_of(load_config(path), {})  # whose heads follow from the model's size
    own = {name: value for name, value in info["mixer_options"].items() if value != getattr(by_size, name)}
    settings = {name: value for name, value in info["config"].items() if name not in (*INCIDENTAL, "mixer")}
    return {"layer": variant_label(mixer, own, 1), **settings}


def _exported(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``config.json`` of an exported model; None if the folder is of a run.

    Raises:
        ValueError: ``config.json`` is damaged, or of another version of this project or another program.
    """
    if not (folder / CONFIG).is_file():
        return None
    try:
        description: dict[str, Any] = read_json(folder / CONFIG, EXPORT_AGAIN)
        layer_of(Config(**description["config"]), description["mixer_options"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no export of this version of the project: {EXPORT_AGAIN}") from error
    return description
