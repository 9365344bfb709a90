"""Flip-flop: one bit to remember through instructions that do not concern it.

Source: Liu et al. 2023, "Exposing Attention Glitches with Flip-Flop Language Modeling" (arXiv:2306.00946).
Dimensions: S sequences, T positions, P instructions of a sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Ladder, Task, require

WRITE, READ, IGNORED = 2, 3, 4
"""Tokens of the instructions; 0 and 1 are the bits."""

IGNORE_PREFIX = "ignore "
"""Start of the names of the extrapolation sets: "ignore P" for the probability P of an instruction to ignore."""


class FlipFlop(Task):
    """Instructions ``w``, ``r`` and ``i`` that are each followed by a bit; at ``r`` the last written bit is predicted.

    ``w`` (write) stores its bit, the bit of ``i`` (ignore) means nothing, and that of ``r`` (read) is the stored one.
    The first instruction is ``w``, the last one ``r``; the others are ``i`` with probability ``ignore``, else ``w`` or
    ``r`` equally often. The bits of ``w`` and ``i`` are uniform. Only ``r`` has a target: the bit behind it.

    Tokens: the bits 0 and 1, ``w`` (2), ``r`` (3), ``i`` (4). The extrapolation sets "ignore 0.98" and "ignore 0.1"
    have these probabilities: bits that must be kept for long, and bits that change often.

    Example, first sequence of the test split of
    ``Config(length=16, ignore=0.4, train_examples=1, eval_examples=1)``; ``_`` is no target, ``^`` a scored position::

        inputs   w 1 r 1 i 0 r 1 r 1 r 1 i 1 r 1
        targets  _ _ 1 _ _ _ 1 _ 1 _ 1 _ _ _ 1 _
        scored   . . ^ . . . ^ . ^ . ^ . . . ^ .

    Source: Liu et al. 2023 (arXiv:2306.00946), FFL(0.8) with FFL(0.98) and FFL(0.1) for evaluation.

    Differs from the reference:
        Liu et al. 2023, arXiv:2306.00946, and the card of their data,
        https://huggingface.co/datasets/synthseq/flipflop. We found no training code of theirs.

        - targets: the bits of reads alone. Public repetitions call that the "clean" mode of theirs; not checked against
          the authors' text.
        - training: 12,800 sequences, each read 200 times; theirs publishes 1.6 million of the same length.
        - evaluation: 1,280 sequences in each set, too few to see errors that are rare; theirs has 16,000 of FFL(0.8),
          160,000 of FFL(0.98) and 4,000 of FFL(0.1).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of flip-flop.

        Attributes:
            length: tokens in a sequence, two for each instruction.
            ignore: probability that an instruction between the first and the last is to ignore, in [0, 1).
        """

        length: int = 512
        ignore: float = 0.8

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                self.length % 2 == 0 and self.length >= 4,
                f"length is {self.length}: use an even number from 4, instructions with their bits",
            )
            require(0 <= self.ignore < 1, f"ignore is {self.ignore}: use a value from 0 to below 1")

    name = "flip-flop"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"length": (128, 256, 1024), "ignore": (0.1, 0.9, 0.98)}
    ladder = Ladder(
        # About four writes and four reads at each length: a guess of the bit written most often scores the same on all.
        axis="length",
        rungs={length: {"length": length, "ignore": 1 - 16 / length} for length in (32, 64, 96, 128, 192, 256)},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return 5

    @property
    def answer_count(self) -> int:
        return 2

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        return (f"{IGNORE_PREFIX}0.98", f"{IGNORE_PREFIX}0.1")

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        instructions = self.config.length // 2
        ignore = float(split.removeprefix(IGNORE_PREFIX)) if split.startswith(IGNORE_PREFIX) else self.config.ignore

        # Instructions.
        drawn_SP = rng.random((n, instructions))
        drawn_SP = np.select([drawn_SP < ignore, drawn_SP < (1 + ignore) / 2], [IGNORED, WRITE], READ)
        drawn_SP[:, 0], drawn_SP[:, -1] = WRITE, READ

        # Each read has the bit of the last write before it.
        bits_SP = rng.integers(2, size=drawn_SP.shape)
        written_SP = np.maximum.accumulate(np.where(drawn_SP == WRITE, np.arange(instructions), 0), axis=1)
        is_read_SP = drawn_SP == READ
        bits_SP = np.where(is_read_SP, np.take_along_axis(bits_SP, written_SP, axis=1), bits_SP)

        inputs_ST = np.stack([drawn_SP, bits_SP], axis=2).reshape(n, -1)
        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, 0::2] = np.where(is_read_SP, bits_SP, IGNORE)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: the bit that was written last stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)
