"""The record of a training, and the table of records that tables, charts and pages are made from.

    from runners import records
    table = records.load("results")      # a pandas.DataFrame with one row for each training

Every training writes one record: a run of the diagnostics, a reference result, a language model. A run keeps its record
as ``record.json`` in its folder. Results that are shipped are tables of records, ``.jsonl`` with a record in each line.
A file carries a checksum of each record, which is checked on reading.
"""

import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from runners.files import read_json, read_lines, validated, write_json, write_lines

FORMAT = 1
"""Version of the format; a change that old readers would misread raises it."""
REFERENCE = Path(__file__).parents[1] / "results" / "reference"
"""Folder of the reference results that come with this version, in a checkout and in an installation."""
TRAINED_REFERENCE = REFERENCE if (REFERENCE.parents[1] / "pyproject.toml").is_file() else Path("results/reference")
"""Where commands train reference results: in the checkout, or of an installation in the current folder."""
RECORD = "record.json"
"""Name of the file in the folder of a run."""
LANGUAGE_MODEL = "language-model"
"""The task of language models."""

Columns = dict[str, list[Any]]
"""A small table by its columns, from which ``pandas.DataFrame`` makes one."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished training: what was trained, with which settings, what came out, and what it took.

    Attributes:
        format: version of this format.
        study: name of the study; its trainings differ in learning rate, weight decay, beta2 and seed alone.
        layer: name of the layer in tables, with its options that differ from the defaults, such as ``rt-block-4``.
        mixer: registered name of the layer, ``package.module:Class``, or a stack of such names.
        family: kind of layer.
        mixer_config: all options of the layer; of a stack by member, ``transformer__heads``.
        width: model width D.
        mlp_width: hidden width of the MLP.
        layers: number of stacked layers L.
        short_convolution: positions that a convolution before each layer spans; 0 for none.
        task: registered name or import path of the task, or ``language-model``.
        difficulty: name of the task's setting.
        task_config: all settings of the task; of a language model, facts about its corpus.
        preset: name of the preset of the settings.
        fingerprint: SHA-256 of settings and data, and of the text of a user's module; equal for a whole study.
        batch_size: sequences in a step.
        steps: optimizer steps.
        evaluations: evaluations during training.
        optimizer: other settings of the optimizer and its schedule, by name.
        settings: other settings by name, such as those of a language model.
        precision: dtype of the matrix products.
        lr: peak learning rate.
        weight_decay: weight decay.
        seed: seed of the parameters and of the order of the data.
        diverged_step: step, from 1, at which loss or gradient was first not finite; None for a run that converged.
        best_step: step whose parameters were kept; None if that is the last one, or unknown.
        metrics: figures by split (``validation``, ``test``, names of extrapolation sets and of downstream sets) and
            name: ``sequence_accuracy`` and ``token_accuracy`` in [0, 1], ``loss`` in nats a token, and others. Test
            figures exist only for points that a choice on validation has selected.
        curve: evaluations in order: ``step``, ``train_loss``, and figures of the validation split by name.
        gradient: norm of the gradient at each distance, ``norm``, with half of its 95% interval, ``half_width``.
        ceiling: best possible accuracies on the test split, ``sequence`` and ``token``.
        chance: accuracies of guessing, likewise.
        parameters: parameters of all layers; of a language model, of the whole model.
        state: floats of their states by the number of positions; None if they cannot be counted.
        flops_per_token: FLOPs of a forward pass per token by the number of positions; None likewise.
        remark: remark in tables; None for none.
        seconds: time of training; runs that are trained together share it.
        steps_per_second: optimizer steps a second of all runs trained together; None if unknown.
        together: number of runs trained together.
        device: model of the GPU, or architecture of the processor.
        versions: versions of libraries by name.
        commit: commit of this project that trained it, for information; None if unknown.
    """

    format: int = FORMAT
    study: str
    layer: str
    mixer: str
    family: str
    mixer_config: dict[str, Any]
    width: int
    mlp_width: int
    layers: int
    short_convolution: int = 0
    task: str
    difficulty: str = "baseline"
    task_config: dict[str, Any]
    preset: str
    fingerprint: str
    batch_size: int
    steps: int
    evaluations: int
    optimizer: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    precision: str
    lr: float
    weight_decay: float
    seed: int
    diverged_step: int | None = None
    best_step: int | None = None
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    curve: Columns = field(default_factory=dict)
    gradient: Columns | None = None
    ceiling: dict[str, float] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    parameters: int
    state: dict[str, int] | None = None
    flops_per_token: dict[str, int] | None = None
    remark: str | None = None
    seconds: float
    steps_per_second: float | None = None
    together: int = 1
    device: str
    versions: dict[str, str | None]
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not the {FORMAT} of this version")


def write(folder: Path, record: Record) -> None:
    """Write the record of a run into its folder.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / RECORD, asdict(record))


def write_all(file: Path, found: Iterable[Record]) -> None:
    """Write a ``.jsonl`` table of records."""
    write_lines(file, map(asdict, found))


def read_all(*places: str | Path) -> list[tuple[Path, Record]]:
    """Return the records of files, and of all files below folders, each with the file that holds it.

    Raises:
        FileNotFoundError: there is no such place.
        DamagedFileError: a file is damaged.
    """
    files: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise FileNotFoundError(f"{place} is not there: name files or folders of records")
        files += sorted([*place.rglob(RECORD), *place.rglob("[!.]*.jsonl")]) if place.is_dir() else [place]

    found = []
    for file in dict.fromkeys(files):
        contents = read_lines(file) if file.suffix == ".jsonl" else [read_json(file)]
        found += [(file, validated(file, Record, content)) for content in contents]
    return found


def load(*places: str | Path) -> pd.DataFrame:
    """Return a table of the records in files, and in all files below folders.

    It has a row for each training, a column for each field of ``Record``, a column ``split.name`` for each figure, such
    as ``test.token_accuracy``, and the column ``file``.

    Raises:
        FileNotFoundError: there is no such place.
        DamagedFileError: a file is damaged.
    """
    return table_of(read_all(*places))


def table_of(found: Sequence[tuple[Path, Record]]) -> pd.DataFrame:
    """Return the table of records that were read; columns as ``load``."""
    rows = []
    for file, record in found:
        figures = {f"{split}.{name}": y for split, of_split in record.metrics.items() for name, y in of_split.items()}
        rows.append({"file": file, **vars(record), **figures})
    return pd.DataFrame(rows, columns=None if rows else ["file", *(entry.name for entry in fields(Record))])


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on; None for a library that is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "numpy": np.__version__,
        "optuna": version("optuna"),
    }


@cache
def commit() -> str | None:
    """Return the commit of the checkout that this file is in; None without one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
