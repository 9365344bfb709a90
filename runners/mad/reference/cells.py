"""One cell of the reference results: a layer on a task, trained under one protocol and stored in a small file.

There are two protocols: ``full``, the published one over the wide grid, and ``quick``, the preset of ``runners.mad``.
Their cells are in separate folders.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from rich.console import Console

from mixers.base import Shape
from mixers.costs import Costs
from runners.device import find_devices
from runners.files import DamagedFileError, damaged, read_json, rounded, validated, write_json
from runners.mad.diagnosis.outputs import UnreadableError, predict
from runners.mad.diagnosis.profile import along_the_sequence, profiles
from runners.mad.experiment import Experiment
from runners.mad.options import PRESETS, Options
from runners.mad.plan import plan_experiments
from runners.mad.reference.entries import Entry
from runners.mad.results.choice import Edge
from runners.mad.results.summary import Point, Summary
from runners.mad.search.identity import FIRST, Setting, Trajectory, rehearsal_length, trajectory
from runners.mad.studies import kept_model, kept_record, train_studies
from runners.mad.training.protocol import Protocol
from tasks.base import Accuracy

SHIPPED = Path(__file__).parents[3] / "results" / "reference"
FOLDER = SHIPPED if SHIPPED.is_dir() else Path("results/reference")
"""Folder in the checkout of this file; without a checkout, in the current folder."""
ProtocolName = Literal["full", "quick"]
PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)

Curve = list[tuple[int, float | None, float | None, float | None, float | None]]
"""Evaluations of a run: step, training loss, validation loss, sequence and token accuracy of each."""


@dataclass(frozen=True, kw_only=True)
class CellPoint:
    """A grid point. Figures have one value per seed; they are None if a seed diverged.

    Attributes:
        lr: peak learning rate.
        weight_decay: weight decay.
        seeds: seeds of its runs.
        validation_sequence_accuracy: share of the validation sequences whose tokens are all right.
        validation_token_accuracy: share of the tokens.
        validation_loss: mean cross-entropy in nats.
        test_sequence_accuracy: the same on the test split, for points alone that a grid has chosen.
        test_token_accuracy: likewise.
        diverged: step at which a seed diverged, by seed.
    """

    lr: float
    weight_decay: float
    seeds: list[int]
    validation_sequence_accuracy: list[float] | None = None
    validation_token_accuracy: list[float] | None = None
    validation_loss: list[float] | None = None
    test_sequence_accuracy: list[float] | None = None
    test_token_accuracy: list[float] | None = None
    diverged: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Accuracies on the test split, one per seed of the chosen point; none if every point diverged."""

    sequence_accuracy: list[float] = field(default_factory=list)
    token_accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Mean token accuracy along the sequences of the test split.

    Attributes:
        axis: ``position``, or ``answer`` if the positions of answers vary.
        index: position, or number of the answer in its sequence.
        accuracy: share of the tokens that are right there, rounded.
    """

    axis: str
    index: list[int]
    accuracy: list[float]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a stored cell and a user's study have in common.

    Attributes:
        task: registered name.
        task_config: settings of the task.
        protocol: length and settings of training.
        steps: optimizer steps of a run.
        points: the grid points.
        chosen: index of the point that validation chose; None if every point diverged.
        edge: end of the grid at which that point lies, unless it reaches the ceiling.
        test: its accuracies on the test split.
        probes: its accuracies on each of the task's extrapolation sets, one per seed.
        curves: evaluations of its seeds.
        positions: its accuracy along the sequence; None if it is not known.
        device: device of the training.
        seconds: training time of all runs.
    """

    task: str
    task_config: dict[str, Any]
    protocol: Protocol
    steps: int
    points: list[CellPoint]
    chosen: int | None
    edge: Edge | None
    test: Accuracies
    probes: dict[str, list[Accuracy]]
    curves: list[Curve]
    positions: Positions | None = None
    device: str
    seconds: float

    @property
    def chosen_point(self) -> CellPoint | None:
        """The point that validation chose; None if every point diverged."""
        return None if self.chosen is None else self.points[self.chosen]


@dataclass(frozen=True, kw_only=True)
class Cell(Content):
    """A layer on a task, as it is stored.

    Attributes:
        layer: name of the row.
        mixer: registered name of the layer.
        options: settings of the layer that differ from its defaults.
        layers: stacked layers.
        shape: widths and number of layers.
        family: family of the layer.
        remark: remark in tables; None for none.
        preset: preset of the training; None in files of earlier versions.
        precision: dtype of the matrix products.
        grid: learning rates of the grid.
        near_best: share of the points that are nearly as good as the best one (``runners.mad.results.choice``).
        other_choices: by grid, the index of the point that it would choose.
        seeds: seeds of the chosen point.
        ceiling: accuracies that a perfect solver reaches on the test split.
        chance: accuracies of guessing.
        costs: costs of one layer.
        versions: versions of libraries.
        fingerprint: hash of settings and data.
        code: hash of the code that trained it; None in files of earlier versions.
        trajectory: in files of earlier versions, figures of its rehearsal in float32 (``runners.mad.search.identity``).
        sharp_trajectory: the same in float64; None in the first of these files.
        rehearsed_positions: length of the sequences of its rehearsal.
    """

    layer: str
    mixer: str
    options: dict[str, Any]
    layers: int
    shape: Shape
    family: str
    remark: str | None = None
    preset: str | None = None
    precision: str
    grid: list[float]
    near_best: float | None
    other_choices: dict[str, int]
    seeds: list[int]
    ceiling: Accuracy
    chance: Accuracy
    costs: Costs
    versions: dict[str, str | None]
    fingerprint: str
    code: str | None = None
    trajectory: Trajectory | None = None
    sharp_trajectory: Trajectory | None = None
    rehearsed_positions: int = FIRST.positions


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


def train_cell(entry: Entry, task: str, options: Options, console: Console) -> Cell:
    """Train a cell, reusing runs in the results folder of ``options``; return its content."""
    experiments = plan_experiments(options, dict(entry.options), {})
    ((experiment, summary),) = train_studies(
        experiments, options.runs, options.settings, console, more_seeds=options.more_seeds
    )
    return to_cell(entry, experiment, summary, options.out)


def to_cell(entry: Entry, experiment: Experiment, summary: Summary, out: Path) -> Cell:
    """Return a trained cell.

    Args:
        entry: the row.
        experiment: the experiment that was trained.
        summary: its results.
        out: results folder, which holds the curves.
    """
    chosen, length = summary.chosen_point, rehearsal_length(experiment)
    return Cell(
        layer=entry.name,
        mixer=entry.mixer,
        options=dict(entry.options),
        layers=entry.layers,
        shape=experiment.shape,
        family=summary.family,
        remark=summary.remark,
        task=experiment.task,
        task_config=summary.config.task_config,
        preset=summary.config.preset,
        protocol=experiment.protocol,
        precision=experiment.precision,
        steps=experiment.protocol.total_steps(experiment.task_config.train_examples),
        grid=sorted({point.lr for point in summary.points}),
        points=[cell_point(point) for point in summary.points],
        chosen=summary.chosen,
        edge=summary.edge,
        near_best=summary.near_best,
        other_choices=summary.other_choices,
        seeds=chosen.seeds if chosen else [],
        test=test_of(chosen),
        probes=chosen.extrapolation if chosen else {},
        curves=curves_of(experiment, chosen, out),
        positions=positions_of(experiment, chosen, out),
        ceiling=summary.ceiling,
        chance=summary.chance,
        costs=summary.costs,
        versions=summary.versions,
        device=summary.device,
        seconds=round(summary.seconds, 1),
        fingerprint=summary.fingerprint,
        code=experiment.code,
        sharp_trajectory=trajectory(experiment, Setting(length, torch.float64)),
        rehearsed_positions=length,
    )


def test_of(point: Point | None) -> Accuracies:
    """Return the accuracies of a chosen point on the test split."""
    values = (point and point.values) or {}
    return Accuracies(
        sequence_accuracy=values.get("test_sequence_accuracy", []), token_accuracy=values.get("test_token_accuracy", [])
    )


def positions_of(experiment: Experiment, point: Point | None, out: Path) -> Positions | None:
    """Return the mean token accuracy of a point's seeds along the sequences of the test split, rounded.

    None if every point diverged, or a model is missing or cannot be read.
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
    return Positions(axis=axis, index=profile.index, accuracy=[round(share, 4) for share in profile.accuracy])


def curves_of(experiment: Experiment, point: Point | None, out: Path) -> list[Curve]:
    """Return the evaluations of each seed of a point."""
    return [curve_rows(kept_record(experiment, run, out)) for run in (point.runs if point else [])]


def curve_rows(record: Mapping[str, Any]) -> Curve:
    """Return the evaluations in a run's record."""
    rows: Curve = []
    for at in record["curve"]:
        validation = at["validation"] or {}
        figures = [at["train_loss"], *map(validation.get, ("loss", "sequence_accuracy", "token_accuracy"))]
        loss, validation_loss, sequences, tokens = (None if y is None else rounded(y) for y in figures)
        rows.append((at["step"], loss, validation_loss, sequences, tokens))
    return rows


def experiment_of(cell: Cell) -> Experiment:
    """Return the experiment that the command of a cell would train today, in the precision of the cell."""
    entry = Entry(name=cell.layer, mixer=cell.mixer, options=cell.options, layers=cell.layers)
    protocol: ProtocolName = "quick" if cell.preset == "quick" else "full"
    (experiment,) = plan_experiments(options_of(entry, cell.task, protocol), dict(entry.options), {})
    return replace(experiment, precision=cell.precision)


REMEDY = "move it elsewhere, or delete it to train the cell again"


def read_cell(path: Path) -> Cell:
    """Return the cell in a file; fields that earlier files lack get default values.

    Raises:
        DamagedFileError: the file is damaged, or no cell's.
    """
    # Files of earlier versions do not name the shape.
    content = read_json(path, REMEDY)
    if isinstance(content, dict) and "layers" in content:
        content.setdefault("shape", {"layers": content["layers"]})
    cell = validated(path, Cell, content, REMEDY)

    # The figures of the chosen point are there.
    if cell.chosen is not None and cell.chosen not in range(len(cell.points)):
        raise damaged(path, f"chosen: there is no point {cell.chosen}", REMEDY)
    point, (sequences, tokens) = cell.chosen_point, (len(cell.test.sequence_accuracy), len(cell.test.token_accuracy))
    if sequences != tokens or (tokens == 0) != (point is None or bool(point.diverged)):
        raise damaged(path, f"test: {sequences} and {tokens} accuracies do not fit the chosen point", REMEDY)
    return cell


def read_cells(folder: Path, entries: Iterable[Entry], task: str) -> list[Cell]:
    """Return the existing cells of a task, in the order of ``entries``.

    Raises:
        DamagedFileError: as ``read_cell``.
    """
    files = [cell_file(folder, entry, task) for entry in entries]
    return [read_cell(file) for file in files if file.exists()]


def write_cell(folder: Path, entry: Entry, task: str, cell: Cell) -> Path:
    """Write the file of a cell and return its path."""
    path = cell_file(folder, entry, task)
    write_json(path, asdict(cell))
    return path


def cell_point(point: Point) -> CellPoint:
    """Return a grid point as a cell stores it."""
    names = ("validation_sequence_accuracy", "validation_token_accuracy", "validation_loss")
    tested = ("test_sequence_accuracy", "test_token_accuracy")
    return CellPoint(
        lr=point.lr,
        weight_decay=point.weight_decay,
        seeds=point.seeds,
        diverged=point.diverged,
        **{name: (point.values or {}).get(name) for name in (*names, *tested)},
    )
