"""Small folders of made-up records: reference results, studies of one's own, and language models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixers import MIXERS
from runners import records
from runners.records import LANGUAGE_MODEL, Record

RATES = (1e-3, 2e-3, 5e-3)
"""Grid of made-up cells; the middle one is the best."""
SHARED: dict[str, Any] = {
    "mixer_config": {},
    "width": 128,
    "mlp_width": 512,
    "layers": 1,
    "fingerprint": "0" * 64,
    "batch_size": 128,
    "steps": 100,
    "evaluations": 2,
    "optimizer": {"beta1": 0.9},
    "precision": "float32",
    "weight_decay": 0.0,
    "seconds": 6.0,
    "device": "cpu",
    "versions": {},
}


def cell(
    row: str, task: str, values: Sequence[float], mixer: str | None = None, best: float = RATES[1], **changes: Any
) -> list[Record]:
    """Return the records of a layer on a task.

    Args:
        row: label of the layer.
        task: name of the task.
        values: test accuracy by tokens of each seed of the best point; those by sequences are half of them.
        mixer: name of the layer, if it differs.
        best: the best learning rate.
        **changes: other fields of the records.
    """
    family = MIXERS[mixer or row].family if (mixer or row) in MIXERS else "own"
    preset = changes.get("preset", "full")
    limits = {"ceiling": {"sequence": 1.0, "token": 1.0}, "chance": {"sequence": 0.0, "token": 0.1}}
    costs = {"parameters": 1000, "state": {"128": 64, "1024": 512}, "flops_per_token": {"128": 4000}}
    found = []
    for lr in RATES:
        for seed, value in enumerate(values if lr == best else values[:1]):
            y = value if lr == best else value / 2
            figures = {"sequence_accuracy": y / 2, "token_accuracy": y}
            metrics: dict[str, dict[str, float | None]] = {"validation": {**figures, "loss": 1.0, "score": y}}
            curve: dict[str, list[Any]] = {}
            if lr == best:
                metrics["test"] = {**figures}
                curve = {"step": [50, 100], "sequence_accuracy": [0.0, y / 2], "token_accuracy": [0.1, y]}
            own = {"study": f"{row} {task} {preset}", "layer": row, "mixer": mixer or row, "family": family}
            run = {"task": task, "task_config": {}, "preset": preset, "lr": lr, "seed": seed}
            measured = {"metrics": metrics, "curve": curve}
            found.append(Record(**{**own, **run, **measured, **SHARED, **limits, **costs, **changes}))
    return found


def diverged(row: str, task: str) -> list[Record]:
    """Return the records of a layer whose runs all diverged."""
    runs = cell(row, task, [0.0])
    return [Record(**{**vars(run), "metrics": {}, "curve": {}, "diverged_step": 3}) for run in runs]


def write_cell(folder: Path, found: Sequence[Record]) -> Path:
    """Write records of a cell below a folder of results, as reference results are stored."""
    within = folder / "reference" if found[0].preset == "full" else folder / "reference" / found[0].preset
    file = within / found[0].layer / f"{found[0].task}.jsonl"
    records.write_all(file, found)
    return file


def write_study(folder: Path, found: Sequence[Record]) -> Path:
    """Write records of a study of one's own, a folder for each run; return the folder of the study."""
    study = folder / "studies" / found[0].study.replace(" ", "-")
    for run in found:
        records.write(study / f"lr{run.lr:g}-wd0-seed{run.seed}", run)
    return study


def bench(layers: Mapping[str, float], **at: int) -> dict[str, Any]:
    """Return a record of a benchmark of one run of layers, by name their milliseconds; ``at`` is the place of all."""
    facts = {"status": "timed", "peak_gib": 1.5, "setup_seconds": 9.0, "error": 0.01, "compiled": True}
    cells = [
        {"runs": 1, **at, "implementation": layer, "median_ms": ms, **facts, "methods": ["rms_norm", f"{layer} kernel"]}
        | {"relative": ms / layers["transformer"]}
        for layer, ms in layers.items()
    ]
    return {"benchmark": "layers", "command": "bench layers", "device": "cpu", "cells": cells}


def write_model(folder: Path, layer: str, loss: float, runs: int = 5, text: str = "a", **changes: Any) -> Path:
    """Write a language model whose two seeds have this mean loss at the best of its learning rates.

    Args:
        folder: folder of the models.
        layer: name of the layer.
        loss: mean validation loss.
        runs: number of the runs that are trained, of five.
        text: name of the text.
        **changes: other fields of the records.
    """
    places = ((1e-3, 0, 1.0), (3e-2, 0, 1.0), (3e-3, 0, -0.01), (1e-2, 0, 1.0), (3e-3, 1, 0.01))
    family = MIXERS[layer].family if layer in MIXERS else "own"
    corpus = {"name": text, "vocab_size": 8000, "train_tokens": 400}
    settings = {"seq_len": 512, "parametrisation": "paper", "parameters_without_embeddings": 3_000_000}
    found = []
    for lr, seed, more in places[:runs]:
        y = loss + more
        validation = {"loss": y, "recall_loss": 2 * y, "rest_loss": 5 - y, "bits_per_byte": y / 3}
        own = {"study": layer, "layer": layer, "mixer": layer, "family": family, "preset": "ranking"}
        run = {"task": LANGUAGE_MODEL, "task_config": corpus, "settings": settings, "lr": lr, "seed": seed}
        measured = {
            "metrics": {"validation": validation},
            "curve": {"step": [1, 50, 100], "loss": [9.0, y + 1, y], "train_loss": [9.0, y + 1, y]},
            "gradient": {"norm": [1.0, 0.5, 0.25], "half_width": [0.1, 0.1, 0.1]},
        }
        sizes = {"parameters": 5_000_000, "flops_per_token": {"512": 100}}
        found.append(Record(**{**own, **run, **measured, **sizes, **SHARED, **changes}))
    file = folder / f"{layer.replace(':', '.')}.jsonl"
    records.write_all(file, found)
    return file
