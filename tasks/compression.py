"""Compression: a whole sequence must be given back from one vector.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, BackboneName, Batch, Ladder, Task, require


class Compression(Task):
    """Random tokens of ``[0, V-1)``, then the constant compression token ``V-1``; every data token must be output.

    The task is made for the autoencoder backbone, which computes the logits of all positions from the encoder's vector
    at the last position and a position code. Inputs and targets are not shifted: position t asks for token t. The
    compression token is constant, so its position has no target and is not scored.

    Example, first sequence of the test split of ``Config(vocab_size=8, length=8, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   4 2 5 3 4 2 2 7
        targets  4 2 5 3 4 2 2 _
        scored   ^ ^ ^ ^ ^ ^ ^ .

    Source: Poli et al. 2024 (arXiv:2403.17844), "compression".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_compression_instance``).

        - scoring: 31 of 32 tokens; theirs also scores the compression token, which is always the same.
        - left out: noise, whose tokens are targets in theirs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of compression.

        Attributes:
            vocab_size: data tokens and the compression token together.
            length: tokens in a sequence, the compression token included.
        """

        vocab_size: int = 16
        length: int = 32

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                self.vocab_size >= 3, f"vocab_size is {self.vocab_size}: two data tokens and the last need 3 or more"
            )
            require(self.length >= 2, f"length is {self.length}: a data token and the compression token need 2 or more")

    name = "compression"
    backbone: ClassVar[BackboneName] = "autoencoder"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        "vocab_size": (32, 64, 128),
        "length": (64, 128, 256),
        "train_examples": (6400, 3200, 1600, 800),
    }
    ladder = Ladder(
        # Below 10 tokens there are too few sequences for a test split that training does not show.
        axis="tokens",
        rungs={count: {"length": count + 1} for count in (10, 15, 23, 31, 47, 63)},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size - 1

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        compression_token = self.config.vocab_size - 1
        inputs_ST = rng.integers(compression_token, size=(n, self.config.length))
        inputs_ST[:, -1] = compression_token

        targets_ST = np.where(inputs_ST == compression_token, IGNORE, inputs_ST)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every answer stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)
