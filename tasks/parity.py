"""Parity of the number of ones so far.

Sources: Delétang et al. 2023, "Neural Networks and the Chomsky Hierarchy" (arXiv:2207.02098); Liu et al. 2023,
"Transformers Learn Shortcuts to Automata" (arXiv:2210.10749).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import Ladder, Tokens
from tasks.running_product import RunningProduct


class Parity(RunningProduct):
    """Uniform random bits; at every position the sum of the bits so far, modulo 2, must be output.

    This is the smallest state to track: one bit, which each 1 flips. Inputs and targets are not shifted. Every position
    has a target and is scored, so a sequence asks for the parity of all its beginnings. Delétang et al. also train at
    lengths of at most 40 and evaluate on longer sequences.

    Softmax attention that knows relative positions only, at any depth, gives equal tokens equal outputs. So it answers
    ``1`` and ``1 1`` alike, and can be right on three quarters of the sequences, those that do not begin with two ones.

    Example, first sequence of the test split of ``Config(length=12, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   0 1 0 0 1 1 0 0 0 0 0 1
        targets  0 1 1 1 0 1 1 1 1 1 1 0
        scored   ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^ ^

    Source: Delétang et al. 2023 (arXiv:2207.02098), "parity check", asked at every position as in Liu et al. 2023
    (arXiv:2210.10749).

    Differs from the reference:
        Delétang et al. 2023 and https://github.com/google-deepmind/neural_networks_chomsky_hierarchy,
        tasks/regular/parity_check.py.

        - targets: the parity so far at every position, as in Liu et al. 2023; theirs is asked once, at an empty token
          behind the string. Grazzi et al. 2025 (arXiv:2411.12537) ask at the last bit, an option here (``last_only``).
        - training: 12,800 strings of 40 bits, each read 200 times; theirs draws new strings of 1 to 40 bits, of one
          length in a batch. Shorter strings are an option here (``min_length``); Grazzi et al. (code of xLSTM) have 3
          to 40 tokens, the answer among them, so 2 to 39 bits.
        - evaluation: 40, 80 and 160 bits; theirs has all lengths from 41 to 500.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RunningProduct.Config):
        """Settings of parity.

        Attributes:
            length: bits in a sequence.
        """

        length: int = 40

    name = "parity"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        "length": (80, 160),
        "train_examples": (6400, 3200, 1600, 800),
    }
    ladder = Ladder(
        # Below 40 bits there are too few sequences for a test split that training does not show.
        axis="length",
        rungs={length: {"length": length} for length in (40, 64, 96, 128, 192, 256)},
        shared={"extrapolation_factors": ()},
    )
    config: Config

    @property
    def products_GG(self) -> Tokens:
        """Sum of two bits modulo 2, shape (2, 2)."""
        return np.array([[0, 1], [1, 0]])
