"""The trained language models in a folder: whether they can be compared, and which of them are stale."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from mixers.named import is_path
from runners.c4.reference.cells import Cell, cell_files, read_cell
from runners.c4.reference.experiments import EXPERIMENTS
from runners.c4.reference.staleness import is_stale


def read_models(folder: Path, alike: bool) -> dict[str, Cell]:
    """Return the models in a folder by name.

    Args:
        folder: folder of the models' files.
        alike: whether all models must have the same settings, apart from the layer.

    Raises:
        DamagedFileError: a file is damaged, or no model's.
        ValueError: two models read different texts, or have different settings.
    """
    cells = {file.stem: cell for file in cell_files(folder) if (cell := read_cell(file)) is not None}
    for one, other in pairwise(cells):
        where = f"{folder}: {one}.json and {other}.json"
        if cells[one].corpus.name != cells[other].corpus.name:
            raise ValueError(f"{where} are of different texts: move one of them elsewhere")
        if alike and cells[one].settings != cells[other].settings:
            raise ValueError(f"{where} have different settings: move one of them elsewhere")
    return cells


def is_stale_model(name: str, cell: Cell) -> bool:
    """Return whether the code of today trains a model differently.

    It returns False for a model that is in no experiment, and for a user's own layer that cannot be imported here.
    """
    for experiment in EXPERIMENTS.values():
        if name in experiment.rows:
            return is_stale(cell, experiment.config(name), dict(experiment.rows[name].options))
        if experiment.takes_own and is_path(cell.layer):
            with suppress(ValueError):
                return is_stale(cell, experiment.config(cell.layer), {})
    return False
