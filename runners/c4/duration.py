"""How long a pretraining run takes on this machine, from timed steps."""

import time
from typing import Any

import torch

from runners.c4.config import Config
from runners.c4.distributed import World
from runners.c4.evaluation.evaluate import log_spaced
from runners.c4.model import build
from runners.c4.step import Stepper

BUDGET = 3.0
"""Seconds after which no larger step is timed on a CPU."""
LARGEST = 3e11
"""Operations of one sequence above which a CPU is not timed. A step of the paper's 300M model has 5e14 operations, and
takes more than an hour at 100 billion a second."""
STEPS = 3
"""Steps that are timed on a GPU, after a first one that is not."""
FORWARD = 1 / 3
"""Time of a token's forward pass, relative to that of its training: by their operations, not measured."""


def seconds_of_run(
    config: Config, options: dict[str, Any], vocab_size: int, flops_per_token: int, device: torch.device
) -> float | None:
    """Return how long one process takes to train and evaluate a run, without the preparation of its data.

    The parameters are new and the tokens random. A GPU takes whole steps, in the CUDA graphs of training. A CPU takes
    steps of 1, 2, 4, ... sequences until one takes ``BUDGET`` seconds. The time of a whole batch is then in proportion
    to its sequences. A model with more than ``LARGEST`` operations a sequence is not timed on a CPU: None.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        vocab_size: tokens of the tokenizer.
        flops_per_token: operations of training per target token.
        device: where to train.

    Raises:
        Exception: the layer's own error, or too little memory.
    """
    if device.type == "cpu" and flops_per_token * config.seq_len > LARGEST:
        return None
    step = _seconds_of_step(config, options, vocab_size, device)
    evaluated = len(log_spaced(config.steps, config.evaluations)) * config.validation_tokens
    return step * (config.steps + FORWARD * evaluated / (config.batch_size * config.seq_len))


def _seconds_of_step(config: Config, options: dict[str, Any], vocab_size: int, device: torch.device) -> float:
    """Return the seconds of an optimizer step; arguments and errors as ``seconds_of_run``."""
    torch.manual_seed(config.seed)
    model = build(config, options, vocab_size).to(device)
    stepper = Stepper(model, config, World(rank=0, size=1, device=device))
    stepper.keep_gradients()
    tokens_BT = torch.randint(vocab_size, (config.batch_size, config.seq_len + 1), device=device)

    def seconds(sequences: int) -> float:
        began = time.monotonic()
        stepper.step(tokens_BT[:sequences])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - began

    if device.type == "cuda":
        return min([seconds(config.batch_size) for _ in range(1 + STEPS)][1:])

    # The first step on a CPU may compile.
    seconds(1)
    sequences = 1
    while (taken := seconds(sequences)) < BUDGET and sequences < config.batch_size:
        sequences = min(2 * sequences, config.batch_size)
    return taken * config.batch_size / sequences
