"""The cells in ``results/reference``: today's code still trains as the code that made them."""

import json
from pathlib import Path

import pytest

from runners.mad.options import PRESETS
from runners.mad.reference.cells import Cell, experiment_of, read_cell
from runners.mad.reference.entries import ENTRIES
from runners.mad.reference.staleness import check
from tasks import TASKS

FOLDER = Path(__file__).parents[4] / "results" / "reference"
CELLS = [read_cell(path) for name in ENTRIES for path in sorted(FOLDER.glob(f"{name}/*.json"))]
QUICK = [read_cell(path) for path in sorted(FOLDER.glob("quick/*/*.json"))]
TRIED = {
    f"{protocol} {getattr(cell, kind)}": cell
    for protocol, cells in (("full", CELLS), ("quick", QUICK))
    for kind in ("layer", "task")
    for cell in cells
}
"""A cell of each layer and of each task: a rehearsal depends on the layer, and on the task's vocabulary and model."""


@pytest.mark.parametrize("name", TRIED)
def test_today_s_code_trains_as_that_of_the_cell(name: str) -> None:
    cell = TRIED[name]
    assert check([cell]) == [False], f"{cell.layer} on {cell.task}: train it again"


@pytest.mark.parametrize("cell", CELLS, ids=[f"{cell.layer}-{cell.task}" for cell in CELLS])
def test_a_cell_is_of_the_whole_protocol(cell: Cell) -> None:
    """No cell of fewer steps, points or seeds stands among the others."""
    examples = TASKS[cell.task].Config().train_examples
    assert cell.task_config == json.loads(json.dumps(vars(TASKS[cell.task].Config())))
    assert cell.steps == 200 * -(-examples // 128)
    assert cell.grid == [1e-4, 5e-4, 1e-3, 2e-3, 5e-3]
    assert len(cell.points) == 10
    assert cell.seeds == [0, 1, 2, 3, 4]
    for values in (cell.test.sequence_accuracy, cell.test.token_accuracy):
        assert len(values) == 5
        assert all(0 <= value <= 1 for value in values)


def test_quick_cells_are_of_the_preset() -> None:
    options = PRESETS["quick"][0]
    for cell in QUICK:
        experiment = experiment_of(cell)
        assert cell.preset == experiment.preset == "quick"
        assert cell.task_config == json.loads(json.dumps(vars(experiment.task_config)))
        assert (cell.steps, cell.grid) == (options.steps, sorted(options.lr))
        assert cell.seeds == list(range(options.seeds))
