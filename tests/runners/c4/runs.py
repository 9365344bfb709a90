"""Small runs on the CPU, and what interrupts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runners.c4 import checkpoints
from runners.c4.checkpoints import StepRow, rows_of
from runners.c4.config import Config, identity
from runners.c4.data.corpus import Corpus
from runners.c4.data.prepare import prepare
from runners.c4.distributed import World
from runners.c4.progress import Progress
from runners.c4.train import train
from runners.files import load_tensors
from runners.records import Record

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TINY: dict[str, Any] = {
    "width": 16,
    "heads": 2,
    "layers": 2,
    "seq_len": 12,
    "batch_size": 4,
    "steps": 4,
    "validation_tokens": 48,
    "device": "cpu",
}
"""A setting that trains in a moment."""


def configured(texts: Path, out: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        **TINY,
        "mlp_width": 32,
        "mixer": "transformer",
        "steps": 8,
        "lr": 1e-2,
        "evaluations": 3,
        "checkpoint_every": 3,
        "tokenizer": str(texts / "tokenizer" / "tokenizer.json"),
        "data": (str(texts),),
        "out": out,
    }
    return Config(**{**values, **changes})


def words_of(config: Config) -> list[str]:
    """The command line of a configuration."""
    names = (
        "width",
        "mlp_width",
        "heads",
        "layers",
        "mixer",
        "parametrisation",
        "seq_len",
        "batch_size",
        "steps",
        "lr",
    )
    names += ("validation_tokens", "evaluations", "checkpoint_every", "tokenizer", "device", "out")
    words = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]
    return [*words, "--data", *config.data]


def corpus_of(config: Config) -> Corpus:
    needed = config.tokens + 1, config.validation_tokens + 1
    return prepare(config.out, config.data, str(config.tokenizer), *needed, Console(quiet=True))


def run(config: Config, watch: Callable[[StepRow], object] | None = None, world: World = ALONE) -> Record:
    progress = Progress(Console(quiet=True), config)
    progress.after_step = watch
    return train(config, {}, corpus_of(config), world, progress)


def folder_of(config: Config) -> Path:
    return identity(config, {}, corpus_of(config).folder.name).folder


def newest_of(config: Config) -> Path:
    """The newest checkpoint."""
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    return path


def rows(config: Config) -> list[StepRow]:
    return rows_of(load_tensors(newest_of(config))[0])


def losses(config: Config) -> list[float]:
    return [row.loss for row in rows(config)]


def last_tensors(config: Config) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint, without the curve, in which times stand."""
    return {name: y for name, y in load_tensors(newest_of(config))[0].items() if name != checkpoints.CURVE}


class Interruption(BaseException):
    """Ends a run as a kill does: no program handles it."""


class At:
    """Does something when a step is done."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def __call__(self, row: StepRow) -> None:
        if row.step == self.step:
            self.act()


def interrupt() -> None:
    raise Interruption
