"""Rehearsals: a few training steps on the CPU in float64, whose losses and accuracies are stored.

    python -m tests.golden.rehearsal    # compute all stored trajectories again, after a wanted change of the numbers

``diagnostics.json`` holds a rehearsal of each layer on random tokens and of each task on its own data;
``language_models.json`` holds one of each layer as a language model. Sequences span more than two parts of the layer:
segments, windows, chunks or blocks.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mixers import MIXERS
from mixers.base import Shape
from mixers.models import BACKBONES, LanguageModel
from runners.c4.config import Config
from runners.c4.distributed import World
from runners.c4.model import build, mean_loss
from runners.c4.step import ModelStepper, learning_rate
from runners.mad.training.loop import CurvePoint
from runners.mad.training.protocol import Optimizer, Protocol, Run
from tasks import TASKS
from tasks.base import IGNORE, Batch, Split
from tests.runners.mad.training.whole import train

FOLDER = Path(__file__).parent
TOLERANCE = 1e-5
"""Largest relative difference of two figures: constants of layers and the loss are rounded to float32."""
SEQUENCES = 4
STEPS = 4
"""Steps of the schedule."""
TAKEN = 2
"""Steps that are taken: the second has moments of the first, and the rate of another place of the schedule."""
CLIP = 0.1
"""Largest gradient norm, small enough that clipping happens."""
RUNS = (Run(lr=1e-2, weight_decay=0.0, seed=0), Run(lr=5e-3, weight_decay=1.0, seed=1))
VOCABULARY = 50
"""Tokens of the language models."""
CPU = torch.device("cpu")

Entry = Mapping[str, Any]
"""Settings of a rehearsal, and its ``trajectory``: figures in order, None after a run has diverged."""


class RandomTokens:
    """Random sequences in place of a task's: every second position has a target, every fourth is scored."""

    def __init__(self, vocab_size: int, positions: int) -> None:
        self.vocab_size = vocab_size
        self.positions = positions

    def split(self, name: Split) -> Batch:
        """Return the sequences, which are those of all splits."""
        random = np.random.default_rng(0)
        inputs_ST, targets_ST = random.integers(0, self.vocab_size, (2, SEQUENCES, self.positions))
        position_T = np.arange(self.positions)
        targets_ST[:, position_T % 2 == 0] = IGNORE
        scored_ST = np.broadcast_to(position_T % 4 == 1, inputs_ST.shape).copy()
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)


class EnoughError(Exception):
    """The steps of a rehearsal are taken."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the dtype of new tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def diagnostic(entry: Entry) -> list[float | None]:
    """Return the losses and accuracies of two small models that are trained on random tokens, or on a task."""
    layer = MIXERS[entry["mixer"]]
    config, shape = layer.Config(**entry["options"]), Shape(**entry["shape"])
    task: Any
    if "task" in entry:
        kind = TASKS[entry["task"]]
        task, backbone = kind(kind.Config(**entry["task_config"])), kind.backbone
    else:
        task, backbone = RandomTokens(entry["vocab_size"], entry["positions"]), "language-model"

    protocol = Protocol(batch_size=SEQUENCES, steps=STEPS, evaluations=STEPS, optimizer=Optimizer(clip=CLIP))
    curves: list[list[float | None]] = [[] for _ in RUNS]

    def listen(step: int, points: list[CurvePoint]) -> None:
        for figures, point in zip(curves, points, strict=True):
            measured = point.validation
            figures += [point.train_loss, measured and measured.loss, measured and measured.token_accuracy]
        if step == TAKEN:
            raise EnoughError

    with in_float64(), suppress(EnoughError):
        train(lambda: BACKBONES[backbone](layer, config, shape, task.vocab_size), task, protocol, RUNS, CPU, (), listen)
    return [y for figures in curves for y in figures]


def language_model(entry: Entry) -> list[float | None]:
    """Return the loss of each step of a language model, and of the next one before it is taken."""
    config = Config(batch_size=SEQUENCES, steps=STEPS, lr=1e-2, clip=CLIP, **entry["settings"])
    with in_float64():
        return [*pretrain(config, entry["options"], TAKEN)[1]]


def pretrain(config: Config, options: dict[str, Any], steps: int) -> tuple[LanguageModel, list[float]]:
    """Take steps of a language model on random tokens; return it with the losses of ``language_model``."""
    model = build(config, options, VOCABULARY)
    stepper = ModelStepper(model, config, World(rank=0, size=1, device=CPU))
    stepper.keep_gradients()

    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps + 1):
        tokens_BT = torch.randint(VOCABULARY, (config.batch_size, config.seq_len + 1), generator=generator)
        if step == steps:
            break
        for group in stepper.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        losses.append(stepper.step(tokens_BT)[0].item())

    with torch.no_grad():
        return model, [*losses, mean_loss(model, tokens_BT).item()]


REHEARSALS: dict[str, Callable[[Entry], list[float | None]]] = {
    "diagnostics": diagnostic,
    "language_models": language_model,
}
"""What rehearses the entries of a file."""


def stored(name: str) -> dict[str, Entry]:
    """Return the entries of a file by name."""
    entries: dict[str, Entry] = json.loads((FOLDER / f"{name}.json").read_text())
    return entries


def agree(one: list[float | None], other: list[float | None]) -> bool:
    """Return whether two trajectories are those of code that trains in the same way."""
    figures = [[math.inf if y is None else y for y in trajectory] for trajectory in (one, other)]
    return len(one) == len(other) and all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(*figures, strict=True))


if __name__ == "__main__":
    for name, rehearse in REHEARSALS.items():
        entries = {key: {**entry, "trajectory": rehearse(entry)} for key, entry in stored(name).items()}
        (FOLDER / f"{name}.json").write_text(json.dumps(entries, indent=1) + "\n")
