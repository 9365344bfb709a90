"""One cell of the reference results: a layer on a task, trained under the full protocol and stored in a small file."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from runners.files import read_json, write_json
from runners.mad.experiment import Experiment, run_folder
from runners.mad.options import Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.entries import Entry
from runners.mad.results.summary import Point, Summary
from runners.mad.search.identity import agree, trajectory
from runners.mad.studies import train_studies
from runners.mad.training.protocol import Run

FOLDER = Path("results/reference")
SEEDS = 5
DIGITS = 5
"""Significant digits of the curves."""


def cell_file(folder: Path, entry: Entry, task: str) -> Path:
    """File of a cell."""
    return folder / entry.name / f"{task}.json"


def options_of(entry: Entry, task: str, **changes: Any) -> Options:
    """The protocol of a cell: 200 epochs, the wide grid with one seed, five seeds of the chosen point."""
    protocol: dict[str, Any] = {"grid": "wide", "seeds": SEEDS, "seeds_of": "chosen", "layers": entry.layers}
    return Options(**{**protocol, **changes, "mixer": (entry.mixer,), "task": (task,)})


def train_cell(entry: Entry, task: str, options: Options, console: Console) -> dict[str, Any]:
    """Train a cell, or read what is trained of it in the results folder of ``options``; return its content."""
    experiments = plan_experiments(options, dict(entry.options), {})
    ((experiment, summary),) = train_studies(
        experiments, options.runs, options.settings, console, more_seeds=options.more_seeds
    )
    return to_cell(entry, experiment, summary, options.out)


def to_cell(entry: Entry, experiment: Experiment, summary: Summary, out: Path) -> dict[str, Any]:
    """Content of a cell.

    Args:
        entry: the row.
        experiment: what was trained.
        summary: what it reached.
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
        "family": summary.family,
        "remark": summary.remark,
        "task": config["task"],
        "task_config": config["task_config"],
        "protocol": config["protocol"],
        "precision": config["precision"],
        "steps": experiment.protocol.total_steps(experiment.task_config.train_examples),
        "grid": sorted({point.lr for point in summary.points}),
        "points": [_point(point) for point in summary.points],
        "chosen": summary.chosen,
        "edge": summary.edge,
        "near_best": summary.near_best,
        "other_choices": summary.other_choices,
        "seeds": chosen.seeds if chosen else [],
        "test": {name: values.get(f"test_{name}", []) for name in ("sequence_accuracy", "token_accuracy")},
        "probes": {name: [asdict(a) for a in found] for name, found in extrapolation.items()},
        "curves": curves_of(experiment, chosen, out),
        "ceiling": asdict(summary.ceiling),
        "chance": asdict(summary.chance),
        "costs": asdict(summary.costs),
        "versions": summary.versions,
        "device": summary.device,
        "seconds": round(summary.seconds, 1),
        "fingerprint": summary.fingerprint,
        "trajectory": trajectory(experiment),
    }


def curves_of(experiment: Experiment, point: Point | None, out: Path) -> list[list[list[float | None]]]:
    """For each seed of a point its evaluations: step, training loss, validation loss, sequence and token accuracy."""
    curves = []
    for seed in point.seeds if point else []:
        run = Run(lr=point.lr, weight_decay=point.weight_decay, seed=seed)  # type: ignore[union-attr]
        record = read_json(run_folder(out.resolve(), experiment, run) / "config.json")
        rows = []
        for at in record["curve"]:
            validation = at["validation"] or {}
            figures = [at["train_loss"], *map(validation.get, ("loss", "sequence_accuracy", "token_accuracy"))]
            rows.append([at["step"], *(None if y is None else float(f"{y:.{DIGITS}g}") for y in figures)])
        curves.append(rows)
    return curves


def experiment_of(cell: Mapping[str, Any]) -> Experiment:
    """What the command of a cell would train today, in the precision that the cell was trained in."""
    entry = Entry(name=cell["layer"], mixer=cell["mixer"], options=cell["options"], layers=cell["layers"])
    (experiment,) = plan_experiments(options_of(entry, cell["task"]), dict(entry.options), {})
    return replace(experiment, precision=cell["precision"])


def is_stale(cell: Mapping[str, Any], experiment: Experiment) -> bool:
    """Return whether a cell was trained on other data, or by code that trains otherwise than today's.

    Args:
        cell: content of the cell's file.
        experiment: what the cell's command would train today (``experiment_of``).
    """
    if cell["fingerprint"] != experiment.fingerprint:
        return True
    then, now = cell["trajectory"], trajectory(experiment)
    return then is None or now is None or not agree(then, now)


def write_cell(folder: Path, entry: Entry, task: str, cell: Mapping[str, Any]) -> Path:
    """Write the file of a cell."""
    path = cell_file(folder, entry, task)
    write_json(path, cell)
    return path


def _point(point: Point) -> dict[str, Any]:
    """Figures of a grid point: one value a seed."""
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
