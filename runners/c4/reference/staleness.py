"""Whether the runs in a model's file can stand beside those that today's command trains."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runners.c4.config import Config
from runners.c4.identity import run_code
from runners.c4.model import layer_of
from runners.c4.reference.cells import Cell, settings_of
from runners.c4.rehearsal import agree, trajectory, unrehearsed_code
from runners.provenance import code_version, sha256_of
from runners.verdicts import remembered_verdicts


def check_cell(cell: Cell, config: Config, options: dict[str, Any], corpus: str, file: Path) -> None:
    """Check that the runs of a file can stand beside those of today's command.

    Args:
        cell: content of the file.
        config: configuration that the model's runs share.
        options: options of the layer that differ from its defaults.
        corpus: name of the corpus.
        file: the file, for messages.

    Raises:
        ValueError: the corpus or the settings differ, or runs are missing and the code trains differently; the message
            says what to do.
    """
    check_terms(cell, config, options, corpus, file)
    if not cell.complete and is_stale(cell, config, options):
        raise ValueError(
            f"{file} is unfinished, and its runs were trained by code that trains differently: delete it to train the "
            "model again"
        )


def check_terms(cell: Cell, config: Config, options: dict[str, Any], corpus: str, file: Path) -> None:
    """Check that the runs of a file have the text and the settings of today's; arguments as for ``check_cell``.

    Raises:
        ValueError: the corpus or the settings differ; the message says what to do.
    """
    same_text = cell.corpus.name == corpus
    layer, layer_config = layer_of(config, options)
    earlier = cell.settings, asdict(layer.Config()) | cell.options
    if not same_text or earlier != (settings_of(config), asdict(layer_config)):
        what = "of other settings" if same_text else "of another text"
        raise ValueError(f"{file} is {what}: give another --folder, or delete it to train the model again")


def is_stale(cell: Cell, config: Config, options: dict[str, Any]) -> bool:
    """Return whether the code of any run of a model trains or evaluates differently from today's code.

    Each edit of an ``UNREHEARSED`` module counts as different; edits of other modules do so only if the rehearsal has
    other losses. Runs of earlier versions do not name the code of these modules, and are stale.
    """
    unrehearsed = unrehearsed_code()
    if any(run.unrehearsed_code != unrehearsed for run in cell.runs):
        return True

    code = run_code(config)
    others = [run.trajectory for run in cell.runs if run.code != code]
    if not others:
        return False

    def find(_: Sequence[int]) -> list[bool]:
        now = trajectory(config, options)
        return [not all(agree(then, now) for then in others)]

    # A rehearsal takes up to 5 seconds.
    libraries = torch.__version__, code_version(alone=("runners.c4.rehearsal",))
    facts = [code, libraries, config.mixer, settings_of(config), options, others]
    (stale,) = remembered_verdicts([sha256_of(json.dumps(facts, sort_keys=True))], find)
    return stale
