"""Small runs on the CPU, and watchers that interrupt them."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runners.c4 import checkpoints
from runners.c4.config import Config
from runners.c4.curve import Row, read_curve
from runners.c4.data.corpus import Corpus
from runners.c4.data.prepare import prepare
from runners.c4.distributed import World
from runners.c4.identity import run_folder
from runners.c4.train import train
from runners.c4.watchers import Watcher
from runners.files import load_tensors

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
        "width": 16,
        "mlp_width": 32,
        "heads": 2,
        "layers": 2,
        "mixer": "transformer",
        "seq_len": 12,
        "batch_size": 4,
        "steps": 8,
        "lr": 1e-2,
        "validation_tokens": 48,
        "evaluations": 3,
        "checkpoint_every": 3,
        "tokenizer": str(texts / "tokenizer" / "tokenizer.json"),
        "data": (str(texts),),
        "device": "cpu",
        "out": out,
    }
    return Config(**{**values, **changes})


def corpus_of(config: Config) -> Corpus:
    tokens = config.steps * config.batch_size * config.seq_len + 1
    return prepare(config.out, config.data, config.tokenizer, tokens, config.validation_tokens + 1, Console(quiet=True))


def run(config: Config, watchers: Sequence[Watcher] = ()) -> dict[str, Any]:
    return train(config, {}, corpus_of(config), ALONE, watchers)


def folder_of(config: Config) -> Path:
    return run_folder(config, {}, corpus_of(config).folder.name)


def losses(config: Config) -> list[float]:
    return [row.loss for row in read_curve(folder_of(config))]


def last_tensors(config: Config) -> dict[str, torch.Tensor]:
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    return load_tensors(path)[0]


class Interruption(BaseException):
    """Ends a run as a kill does: no program handles it."""


class At:
    """Does something when a step is done."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None: ...

    def stepped(self, row: Row) -> None:
        if row.step == self.step:
            self.act()

    def evaluating(self, name: str, number: int, sets: int) -> None: ...

    def finished(self, result: dict[str, Any]) -> None: ...


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write files of more bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interrupt() -> None:
    raise Interruption
