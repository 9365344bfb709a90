"""Made-up records of diagnostic runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from scipy import stats
from scipy.special import expit, logit

from mixers import MIXERS
from runners.records import Record, table_of

Scores = Mapping[tuple[float, float, int], float | None]
"""Token accuracy of each run by learning rate, weight decay and seed; None for one that diverged."""


def record(accuracy: float | None = 0.5, *, layer: str = "rt", task: str = "parity", **changes: Any) -> Record:
    """A run whose token accuracy on both splits is ``accuracy``, None for one that diverged at step 3.

    Its sequence accuracy is half of that, and ``tested=False`` leaves out the figures of the test split.
    """
    figures = {} if accuracy is None else {"sequence_accuracy": accuracy / 2, "token_accuracy": accuracy, "loss": 1.0}
    metrics: dict[str, Any] = {"validation": {**figures, "score": accuracy}, "test": figures} if figures else {}
    if not changes.pop("tested", True):
        metrics.pop("test", None)
    metrics |= changes.pop("metrics", {})

    difficulty, preset = changes.pop("difficulty", "baseline"), changes.pop("preset", "grid")
    values: dict[str, Any] = {
        "study": changes.pop("study", f"{layer} {task} {difficulty}"),
        "layer": layer,
        "mixer": layer if layer in MIXERS else f"my_module:{layer}",
        "family": MIXERS[layer].family if layer in MIXERS else "other",
        "mixer_config": {},
        "width": 128,
        "mlp_width": 512,
        "layers": 1,
        "task": task,
        "difficulty": difficulty,
        "task_config": {"length": 40, "eval_examples": 1280},
        "preset": preset,
        "fingerprint": "0123456789abcdef",
        "batch_size": 128,
        "steps": 20_000,
        "evaluations": 40,
        "optimizer": {"beta1": 0.9, "beta2": 0.98},
        "precision": "float32",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "seed": 0,
        "diverged_step": 3 if accuracy is None else None,
        "metrics": metrics,
        "ceiling": {"sequence": 1.0, "token": 1.0},
        "chance": {"sequence": 0.25, "token": 0.5},
        "parameters": 1234,
        "state": {"128": 5, "1024": 5},
        "flops_per_token": {"128": 77},
        "seconds": 60.0,
        "together": 6,
        "device": "CPU",
        "versions": {"torch": "2.11"},
    }
    return Record(**{**values, **changes})


def table(*found: Record) -> pd.DataFrame:
    """The table of records, as ``records.load`` returns it."""
    return table_of([(Path("made-up.jsonl"), one) for one in found])


def study(scores: Scores, **changes: Any) -> list[Record]:
    """The records of one study."""
    return [
        record(score, lr=lr, weight_decay=weight_decay, seed=seed, **changes)
        for (lr, weight_decay, seed), score in scores.items()
    ]


def layer(name: str, accuracies: Sequence[float | None], **changes: Any) -> list[Record]:
    """The records of a layer at one grid point, with a seed for each accuracy."""
    return [record(accuracy, layer=name, seed=seed, **changes) for seed, accuracy in enumerate(accuracies)]


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of accuracies and the ends of its interval: SciPy's t on the logit of the mean."""
    mean, error = fmean(values), stats.sem(values)
    if error == 0:
        return mean, mean, mean
    with_ends = stats.t.interval(0.95, len(values) - 1, loc=logit(mean), scale=error / (mean * (1 - mean)))
    low, high = map(float, expit(with_ends))
    return mean, low if min(values) > 0 else 0.0, high if max(values) < 1 else 1.0


def as_shown(values: Sequence[float], digits: int = 3) -> str:
    """An accuracy with its interval as tables show it."""
    mean, low, high = (f"{y:.{digits}f}" for y in interval_of(values))
    return f"{mean} ({low}–{high})"
