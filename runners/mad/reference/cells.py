"""One cell of the reference results: a layer on a task, trained under one protocol and stored in a small file.

There are two protocols: ``full``, the published one over the wide grid, and ``quick``, the preset of ``runners.mad``.
Their cells are in separate folders.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from rich.console import Console

from mixers.base import Shape
from runners.device import find_devices
from runners.files import DamagedFileError, check_entries, read_json, write_json
from runners.mad.diagnosis.outputs import UnreadableError, predict
from runners.mad.diagnosis.profile import along_the_sequence, profiles
from runners.mad.experiment import Experiment
from runners.mad.options import PRESETS, Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.entries import Entry
from runners.mad.results.summary import Point, Summary
from runners.mad.search.identity import trajectory
from runners.mad.studies import kept_model, kept_record, train_studies

SHIPPED = Path(__file__).parents[3] / "results" / "reference"
FOLDER = SHIPPED if SHIPPED.is_dir() else Path("results/reference")
"""Folder in the checkout of this file; without a checkout, in the current folder."""
ProtocolName = Literal["full", "quick"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)
DIGITS = 5
"""Significant digits of figures in the curves."""


def protocol_folder(folder: Path, protocol: ProtocolName) -> Path:
    """Return the folder of a protocol's cells, given the folder of all cells."""
    return folder if protocol == "full" else folder / protocol


def cell_file(folder: Path, entry: Entry, task: str) -> Path:
    """Return the file of a cell, in the folder of its protocol."""
    return folder / entry.name / f"{task}.json"


def options_of(entry: Entry, task: str, protocol: ProtocolName = "full", **changes: Any) -> Options:
    """Return the options with which a cell is trained.

    Args:
        entry: the row.
        task: registered name.
        protocol: name of the preset.
        changes: options that differ from the protocol's.
    """
    options, _ = PRESETS[protocol]
    return replace(options, **{"layers": entry.layers, **changes, "mixer": (entry.mixer,), "task": (task,)})


def train_cell(entry: Entry, task: str, options: Options, console: Console) -> dict[str, Any]:
    """Train a cell, reusing runs in the results folder of ``options``; return its content."""
    experiments = plan_experiments(options, dict(entry.options), {})
    ((experiment, summary),) = train_studies(
        experiments, options.runs, options.settings, console, more_seeds=options.more_seeds
    )
    return to_cell(entry, experiment, summary, options.out)


def to_cell(entry: Entry, experiment: Experiment, summary: Summary, out: Path) -> dict[str, Any]:
    """Return the content of a cell.

    Args:
        entry: the row.
        experiment: the experiment that was trained.
        summary: its results.
        out: results folder, which holds the curves.
    """
    chosen = summary.chosen_point
    values = (chosen and chosen.values) or {}
    extrapolation = chosen.extrapolation if chosen else {}
    config = summary.config
    return {
        "layer": entry.name,
        "mixer": entry.mixer,
        "options": dict(entry.options),
        "layers": entry.layers,
        "shape": config["shape"],
        "family": summary.family,
        "remark": summary.remark,
        "task": config["task"],
        "task_config": config["task_config"],
        "preset": config.get("preset"),
        "protocol": config["protocol"],
        "precision": config["precision"],
        "steps": experiment.protocol.total_steps(experiment.task_config.train_examples),
        "grid": sorted({point.lr for point in summary.points}),
        "points": [cell_point(point) for point in summary.points],
        "chosen": summary.chosen,
        "edge": summary.edge,
        "near_best": summary.near_best,
        "other_choices": summary.other_choices,
        "seeds": chosen.seeds if chosen else [],
        "test": {name: values.get(f"test_{name}", []) for name in ("sequence_accuracy", "token_accuracy")},
        "probes": {name: [asdict(a) for a in found] for name, found in extrapolation.items()},
        "curves": curves_of(experiment, chosen, out),
        "positions": positions_of(experiment, chosen, out),
        "ceiling": asdict(summary.ceiling),
        "chance": asdict(summary.chance),
        "costs": asdict(summary.costs),
        "versions": summary.versions,
        "device": summary.device,
        "seconds": round(summary.seconds, 1),
        "fingerprint": summary.fingerprint,
        "code": experiment.code,
        "trajectory": trajectory(experiment),
        "sharp_trajectory": trajectory(experiment, torch.float64),
    }


def positions_of(experiment: Experiment, point: Point | None, out: Path) -> dict[str, Any] | None:
    """Return the mean token accuracy of a point's seeds along the sequences of the test split, rounded.

    ``axis`` is ``position``, or ``answer`` if the positions of answers vary; the index is then the number of the answer
    in its sequence. None if every point diverged, or a model is missing or cannot be read.
    """
    batch, device = experiment.instance.split("test"), find_devices("auto")[0]
    try:
        models = [kept_model(experiment, run, out).to(device) for run in (point.runs if point else [])]
        right = [predict(model, batch)[0] == batch.targets_ST for model in models]
    except (DamagedFileError, UnreadableError):
        return None
    if not right:
        return None
    axis, profile = along_the_sequence(*profiles(np.mean(right, axis=0), batch.scored_ST))
    return {"axis": axis, "index": profile.index, "accuracy": [round(share, 4) for share in profile.accuracy]}


def curves_of(experiment: Experiment, point: Point | None, out: Path) -> list[list[list[float | None]]]:
    """Return the evaluations of each seed of a point; ``curve_rows`` describes them."""
    return [curve_rows(kept_record(experiment, run, out)) for run in (point.runs if point else [])]


def curve_rows(record: Mapping[str, Any]) -> list[list[float | None]]:
    """Return the evaluations in a run's record: step, training loss, validation loss, sequence and token accuracy."""
    rows = []
    for at in record["curve"]:
        validation = at["validation"] or {}
        figures = [at["train_loss"], *map(validation.get, ("loss", "sequence_accuracy", "token_accuracy"))]
        rows.append([at["step"], *(None if y is None else float(f"{y:.{DIGITS}g}") for y in figures)])
    return rows


def experiment_of(cell: Mapping[str, Any]) -> Experiment:
    """Return the experiment that the command of a cell would train today, in the precision of the cell."""
    entry = Entry(name=cell["layer"], mixer=cell["mixer"], options=cell["options"], layers=cell["layers"])
    protocol: ProtocolName = "quick" if cell["preset"] == "quick" else "full"
    (experiment,) = plan_experiments(options_of(entry, cell["task"], protocol), dict(entry.options), {})
    return replace(experiment, precision=cell["precision"])


KINDS: dict[str, Any] = {
    **dict.fromkeys(("layer", "mixer", "family", "task", "precision", "fingerprint", "device"), str),
    **dict.fromkeys(("options", "task_config", "protocol", "ceiling", "chance", "costs"), dict),
    **dict.fromkeys(("other_choices", "probes", "versions"), dict),
    **dict.fromkeys(("seeds", "trajectory", "points", "grid", "curves"), list),
    **dict.fromkeys(("layers", "steps"), int),
    "seconds": float | int,
    "chosen": int | None,
    "test": dict | None,
}
"""Types of the entries of a cell's file that every version has, by name."""
KINDS_OF_POINT: dict[str, Any] = {**dict.fromkeys(("lr", "weight_decay"), float | int), "seeds": list}
REMEDY = "move it elsewhere, or delete it to train the cell again"


def read_cell(path: Path) -> dict[str, Any]:
    """Return the content of a cell's file; fields that earlier files lack get default values.

    Raises:
        DamagedFileError: the file is damaged, or no cell's.
    """
    cell = read_json(path, REMEDY)
    check_entries(path, cell, KINDS, REMEDY)
    for point in cell["points"]:
        check_entries(path, point, KINDS_OF_POINT, REMEDY)
    first = {
        "shape": asdict(Shape(layers=cell["layers"])),
        "preset": None,
        "remark": None,
        "code": None,
        "positions": None,
        "sharp_trajectory": None,
    }
    return {**first, **cell}


def read_cells(folder: Path, entries: Iterable[Entry], task: str) -> list[dict[str, Any]]:
    """Return the existing cells of a task, in the order of ``entries``.

    Raises:
        DamagedFileError: as ``read_cell``.
    """
    files = [cell_file(folder, entry, task) for entry in entries]
    return [read_cell(file) for file in files if file.exists()]


def write_cell(folder: Path, entry: Entry, task: str, cell: Mapping[str, Any]) -> Path:
    """Write the file of a cell and return its path."""
    path = cell_file(folder, entry, task)
    write_json(path, cell)
    return path


def cell_point(point: Point) -> dict[str, Any]:
    """Return the figures of a grid point as a cell stores them: one value per seed."""
    names = ("validation_sequence_accuracy", "validation_token_accuracy", "validation_loss")
    tested = ("test_sequence_accuracy", "test_token_accuracy")
    values = point.values or {}
    found = {name: values[name] for name in (*names, *tested) if name in values}
    return {
        "lr": point.lr,
        "weight_decay": point.weight_decay,
        "seeds": point.seeds,
        **found,
        "diverged": point.diverged,
    }
