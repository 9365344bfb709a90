"""The smallest setting in which reference language models are trained, and what its commands leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from runners.c4.config import Config
from runners.files import read_json
from tests.runners.c4 import runs

TINY: dict[str, Any] = {**runs.TINY, "evaluations": 2, "checkpoint_every": 2}


def cell_of(tmp_path: Path, layer: str) -> dict[str, Any]:
    """Read the file of a layer."""
    return read_json(tmp_path / "cells" / f"{layer}.json")


def store(tmp_path: Path, cell: dict[str, Any]) -> Path:
    """Write the file of a layer, as an earlier command or another process has left it, and return its path."""
    file = tmp_path / "cells" / f"{cell['layer']}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(cell))
    return file


def begun_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Learning rate and seed of each run whose training begins from now on."""
    from runners.c4.loop import Loop  # which needs the extra pretraining

    begun: list[tuple[float, int]] = []

    def begin(folder: Path, config: Config, *others: Any) -> Loop:
        begun.append((config.lr, config.seed))
        return Loop(folder, config, *others)

    monkeypatch.setattr("runners.c4.train.Loop", begin)
    return begun
