"""A small folder of results: two tasks, a few layers with made-up accuracies, and one study of one's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runners.mad.reference import rows
from runners.report import __main__ as report
from runners.report import cells as report_cells

STORED = Path(__file__).parents[3] / "results" / "reference"
ACCURACIES = {
    ("rt", "parity"): [1.0, 1.0],
    ("transformer", "parity"): [0.6, 0.62],
    ("deltanet", "parity"): [0.9, 0.98],
    ("rt", "memorization"): [1.0, 1.0],
    ("transformer", "memorization"): [0.99, 0.97],
    ("deltanet", "memorization"): [0.5, 0.4],
    ("rt", "copying"): [0.9, 0.95],
}
"""Token accuracies of the seeds by row and task."""


@pytest.fixture
def make_cell(tmp_path: Path) -> Callable[..., Path]:
    """Write a cell of a folder of reference results: a stored one of RT under another name."""

    def make(row: str, task: str, values: list[float], mixer: str | None = None, **changes: Any) -> Path:
        cell = json.loads((STORED / "rt" / f"{task}.json").read_text())
        del cell["curves"][len(values) :]
        test = {"sequence_accuracy": [v / 2 for v in values], "token_accuracy": values}
        cell |= {"layer": row, "mixer": mixer or row, "test": test, "seeds": [*range(len(values))], **changes}
        cell.pop("checksum", None)
        file = tmp_path / "results" / "reference" / row / f"{task}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(cell))
        return file

    return make


@pytest.fixture
def results(tmp_path: Path, make_cell: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results in place of the repository's, whose cells are not stale."""
    folder = tmp_path / "results"
    for (row, task), values in ACCURACIES.items():
        make_cell(row, task, values)
    monkeypatch.setattr(report, "FOLDER", folder / "reference")
    monkeypatch.setattr(rows, "experiment_of", lambda cell: None)
    monkeypatch.setattr(rows, "is_stale", lambda cell, experiment: cell["layer"] == "deltanet")
    monkeypatch.setattr(report_cells, "_positions", lambda task, config: 40)
    return folder
