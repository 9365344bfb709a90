"""Small folders of results, with made-up accuracies: cells of reference results, and a study of one's own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runners.mad.results.summary import Estimate, Point, summarise, write_summary

from runners.c4.reference.cells import Cell as Model
from runners.c4.reference.cells import ConvergedRun, DivergedRun, Text
from runners.files import write_json
from runners.mad.experiment import run_folder, study_folder
from runners.mad.reference import rows
from runners.report import __main__ as report
from runners.report import cells as report_cells
from runners.report.language import LanguageModel
from tests.runners.mad.commands import planned

STORED = Path(__file__).parents[3] / "results" / "reference"
ACCURACIES: Mapping[tuple[str, str], Sequence[float]] = {
    ("rt", "parity"): [1.0, 1.0],
    ("transformer", "parity"): [0.6, 0.62],
    ("deltanet", "parity"): [0.9, 0.98],
    ("rt", "memorization"): [1.0, 1.0],
    ("transformer", "memorization"): [0.99, 0.97],
    ("deltanet", "memorization"): [0.5, 0.4],
    ("rt", "copying"): [0.9, 0.95],
}
"""Token accuracies of the seeds by row and task; those of sequences are half of them."""

LANGUAGE_MODEL = Model(
    layer="rt",
    family="attention",
    options={},
    config={},
    corpus=Text(
        name="a",
        vocab_size=8000,
        train_tokens=400,
        tokenizer="",
        sources={},
        validation_tokens=100,
        recall_share=0.1,
        rare=6,
    ),
    tokens=1000,
    parameters=5_000_000,
    parameters_without_embeddings=3_000_000,
    flops_per_token=40_000_000,
    runs=[],
)
"""A language model without runs."""
_SHARED: Mapping[str, Any] = {"lr": 3e-3, "seed": 0, "device": "H200", "code": "", "trajectory": []}
LANGUAGE_RUN = ConvergedRun(
    **_SHARED,
    **dict.fromkeys(("validation_loss", "recall_loss", "rest_loss", "bits_per_byte"), 3.0),
    seconds=600.0,
    curve=[(1, 9.5, 9.0), (10, 3.0, 3.0)],
    tokens_per_second=1000,
    versions={},
)
DIVERGED_RUN = DivergedRun(**_SHARED, diverged_at=5)


def write_cell(
    folder: Path,
    row: str,
    task: str,
    values: Sequence[float],
    mixer: str | None = None,
    sequences: Sequence[float] | None = None,
) -> None:
    """Write a cell below a folder of results: a stored one of RT under another name.

    Args:
        folder: the folder of results.
        row: name of the row.
        task: name of the task.
        values: token accuracy of each seed.
        mixer: the row's mixer, if it has another name.
        sequences: sequence accuracy of each seed; half the token accuracy if it is not given.
    """
    cell = json.loads((STORED / "rt" / f"{task}.json").read_text())
    cell.pop("checksum", None)
    test = {"sequence_accuracy": [*(sequences or (v / 2 for v in values))], "token_accuracy": [*values]}
    cell |= {"layer": row, "mixer": mixer or row, "test": test, "seeds": [*range(len(values))]}
    cell["curves"] = cell["curves"][: len(values)]
    file = folder / "reference" / row / f"{task}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(cell))


def write_study(folder: Path, *arguments: str) -> Path:
    """Write a study of a command line, which has one point, two seeds and a diagnosis, below a folder of results."""
    options, (experiment,) = planned([*arguments, "--seeds", "2"])
    lr, weight_decay = options.runs[0].lr, options.runs[0].weight_decay
    splits = ("validation_sequence", "validation_token", "test_sequence", "test_token")
    values = {"validation_score": [0.5, 0.7], **{f"{name}_accuracy": [0.5, 0.7] for name in splits}}
    estimates = {name: Estimate.of(found) for name, found in values.items()}
    point = Point(lr=lr, weight_decay=weight_decay, seeds=[0, 1], values=values, estimates=estimates, diverged={})
    summary = replace(summarise(experiment, [], None, {}), points=[point], chosen=0, best_seed=0)
    study = study_folder(folder, experiment)
    write_summary(summary, study)

    # Curves and accuracies by position.
    validation = {"loss": 1.0, "sequence_accuracy": 0.5, "token_accuracy": 0.7}
    for run in point.runs:
        curve = [{"step": step, "train_loss": 1.0, "validation": validation} for step in (2, 4)]
        write_json(run_folder(folder, experiment, run) / "config.json", {"curve": curve})
    profile = {"index": [0, 1, 2], "accuracy": [1.0, 0.5, 0.25], "sequences": [9, 9, 9]}
    write_json(study / "diagnosis.json", {"title": "made up", "by_position": profile, "by_answer": profile})
    return study


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the report read a folder of results in place of the repository's; DeltaNet's cells alone are stale."""
    monkeypatch.setattr(report, "FOLDER", folder / "reference")
    monkeypatch.setattr(rows, "find_stale", lambda cells: [cell.layer == "deltanet" for cell in cells])
    monkeypatch.setattr(report_cells, "_positions", lambda task, config: 40)


def language_model(layer: str, loss: float, finished: bool = True) -> LanguageModel:
    """Return a language model whose two seeds have ``loss`` and 0.02 more."""
    return LanguageModel(
        layer=layer,
        family="attention",
        parameters=1,
        flops_per_token=1,
        setting="",
        lr=1e-3,
        edge=None,
        values={name: [loss, loss + 0.02] for name in ("total", "recall", "rest")},
        bits_per_byte=None,
        finished=finished,
        stale=False,
    )
