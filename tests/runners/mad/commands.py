"""What command lines of ``runners.mad`` ask for, and small studies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from mixers.base import Shape
from mixers.transformer import Transformer
from runners.mad.experiment import Experiment, plan
from runners.mad.options import Options, read_options
from runners.mad.search import train_studies
from runners.mad.training.protocol import Protocol
from tasks.recall import InContextRecall

TINY = [
    *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--evaluations", "3", "--steps", "6"),
]
"""A small task and a small layer on a CPU."""
HEADS = ["--mixer.heads", "2"]
OPTIONS = Options(device="cpu", reference="none")
"""The published grid."""


def planned(
    arguments: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> tuple[Options, list[Experiment]]:
    """Options and experiments of a command line."""
    options, mixer_options, task_options = read_options(arguments)
    return options, plan(options, mixer_options, task_options, say)


def experiment(**changes: Any) -> Experiment:
    """A small Transformer on a small recall, with some values changed."""
    values: dict[str, Any] = {
        "mixer": "transformer",
        "mixer_config": Transformer.Config(heads=2),
        "task": "in-context-recall",
        "task_config": InContextRecall.Config(length=16, train_examples=40, eval_examples=30),
        "difficulty": "custom",
        "shape": Shape(width=16, mlp_width=32),
        "protocol": Protocol(batch_size=16, steps=6, evaluations=3),
        "precision": "float32",
    }
    return Experiment(**{**values, **changes})


def trained(out: Path, of: Experiment | None = None, **changes: Any) -> pd.DataFrame:
    """Train what is missing of an experiment; return the table of its records."""
    options = replace(OPTIONS, out=out, **changes)
    ((_, table),) = train_studies([of or experiment()], options, Console(quiet=True))
    return table
