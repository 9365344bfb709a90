"""Export a trained model for use elsewhere: its weights, a readable configuration, and its tokenizer.

    python -m runners.c4 export results/c4/<run> my_model

``runners.c4.load_model("my_model")``, ``generate`` and ``lm_eval`` accept the folder in place of a run.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from runners.c4.checkpoints import find_checkpoint, load_model
from runners.c4.exported import TOKENIZER, write_exported
from runners.cli import check_out, cli, shown_as
from runners.ending import user_errors


@dataclass(frozen=True, kw_only=True)
class Options:
    """Export a trained model: weights, configuration and tokenizer, without the state of the training.

    Attributes:
        checkpoint: folder of a run, whose newest checkpoint is read, or a checkpoint file.
        folder: folder to write, which must not exist.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], shown_as("MODEL")]
    folder: Annotated[tyro.conf.Positional[Path], shown_as("FOLDER")]


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        default = Options(checkpoint=tyro.MISSING, folder=tyro.MISSING)
        options = cli(Options, default, arguments, "export")
        export(options.checkpoint, options.folder)
        print(f"exported: {options.folder}")
        print(f"generate: python -m runners.c4 generate {shlex.quote(str(options.folder))} --prompt ...")


def export(checkpoint: Path | str, folder: Path | str) -> None:
    """Write the model of a checkpoint into a new folder.

    Args:
        checkpoint: folder of a run, whose newest intact checkpoint is read, or a checkpoint file.
        folder: folder to write.

    Raises:
        DamagedFileError: a file of the run is damaged.
        ValueError: there is no checkpoint, or ``folder`` exists.
        OSError: ``folder`` cannot be written.
    """
    if not Path(folder).exists():  # ``write_exported`` says what to do if it does
        check_out(Path(folder), "FOLDER")
    file, info = find_checkpoint(checkpoint)
    model, _ = load_model(file)
    tokenizer = (file.parent.parent / TOKENIZER).read_bytes()
    write_exported(Path(folder), model, tokenizer, info)
