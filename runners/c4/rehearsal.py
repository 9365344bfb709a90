"""Check whether today's code trains a language model in the same way as the code of a stored run.

The hash of a run's code changes with every edit. A *rehearsal* shows which edits of its layer and backbone matter: it
takes a few optimizer steps of a smaller model on random tokens, on the CPU in float64. Each run stores the losses of
its rehearsal, its *trajectory*. It does not show the order of the data, the loop around the steps, the numerics of a
GPU, or the evaluation. Each run stores a second hash, that of the modules which decide these.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from mixers.named import is_path
from runners.c4.config import Config
from runners.c4.distributed import World
from runners.c4.identity import DECIDING, run_code
from runners.c4.model import build, layer_of, mean_loss
from runners.c4.step import Stepper, learning_rate
from runners.provenance import code_version

SMALL: dict[str, Any] = {"layers": 2, "batch_size": 4, "steps": 4, "micro_batch_size": None, "lr": 1e-2}
"""Settings of a rehearsal that replace those of the run."""
SHORTEST = 20
"""Length of the sequences, unless parts of the layer need longer ones."""
VOCABULARY = 50
CLIP = 0.1
"""Largest gradient norm, small enough that clipping happens."""
TOLERANCE = 1e-5
"""Largest relative difference of two losses of the same code: processors differ in the last bits of constants."""
UNREHEARSED = (*DECIDING, "mixers.ops.numerics")
"""Modules that decide what a rehearsal does not show. Every edit of them counts, without those of their imports."""


def unrehearsed_code() -> str:
    """Return the hash of the code that decides what a rehearsal does not show."""
    return code_version(alone=UNREHEARSED)


def trajectory(config: Config, options: dict[str, Any]) -> list[float]:
    """Return the losses of a run's rehearsal: the loss of each step, then of the last batch again after the last step.

    All runs of a model share a rehearsal, which a process does once for the same code.

    Args:
        config: configuration of the run.
        options: options of the layer that differ from its defaults.
    """
    small = replace(config, **SMALL, seq_len=length(config, options), clip=CLIP, seed=0)
    return [*_losses(small, tuple(sorted(options.items())), run_code(config))]


def length(config: Config, options: dict[str, Any]) -> int:
    """Return the length of a rehearsal's sequences, which are longer than two parts of the layer.

    Parts are the segments, windows, chunks or blocks of some layers. ``Layer.remark`` tells sequences that are no
    longer than one part. Longer sequences than those of the run are not needed. The parts of a user's layer are not
    known, so it takes sequences as long as the run's. Arguments are those of ``trajectory``.
    """
    layer, layer_config = layer_of(config, options)
    if is_path(config.mixer):
        return max(SHORTEST, config.seq_len)
    lengths = range(SHORTEST, max(SHORTEST, config.seq_len) + 1)
    return next((n for n in lengths if layer.remark(layer_config, (n - 1) // 2) is None), lengths[-1])


@cache
def _losses(config: Config, options: tuple[tuple[str, Any], ...], _code: str) -> tuple[float, ...]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return tuple(_train(config, dict(options)))
    finally:
        torch.set_default_dtype(before)


def _train(config: Config, options: dict[str, Any]) -> list[float]:
    model = build(config, options, VOCABULARY)
    stepper = Stepper(model, config, World(rank=0, size=1, device=torch.device("cpu")))
    stepper.keep_gradients()
    generator = torch.Generator().manual_seed(0)

    losses = []
    for step in range(config.steps):
        tokens_BT = torch.randint(VOCABULARY, (config.batch_size, config.seq_len + 1), generator=generator)
        for group in stepper.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        losses.append(stepper.step(tokens_BT)[0].item())

    with torch.no_grad():
        return [*losses, mean_loss(model, tokens_BT).item()]


def agree(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two trajectories agree, so that their code trains in the same way."""
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(one, other, strict=True)
    )
