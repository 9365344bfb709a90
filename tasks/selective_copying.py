"""Selective copying: data tokens among blanks, to be given back in order.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Floats, Ladder, Task, require
from tasks.slots import shown_so_far


class SelectiveCopying(Task):
    """Data tokens scattered among blanks, a copy token, then blanks at which the data tokens must be output in order.

    Data tokens are ``[0, V-2)``, the blank is ``V-2`` and the copy token ``V-1``. The places of the data tokens before
    the copy token are drawn uniformly: any of them, the last included, may be a blank. The model reads only blanks
    while it answers (no teacher forcing). Only the answers have targets.

    Example, first sequence of the test split of
    ``Config(vocab_size=8, length=12, tokens_to_copy=3, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   5 6 6 0 6 6 6 0 7 6 6 6
        targets  _ _ _ _ _ _ _ _ _ 5 0 0
        scored   . . . . . . . . . ^ ^ ^

    Source: Poli et al. 2024 (arXiv:2403.17844), "selective copying".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_selective_copying_instance``).

        - sequences: the places of the data tokens are uniform; theirs inserts each blank before one of the data tokens,
          so that a data token always stands before the copy token.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of selective copying.

        Attributes:
            vocab_size: data tokens, the blank and the copy token together.
            length: tokens in a sequence, the answers' blanks included.
            tokens_to_copy: data tokens in a sequence.
        """

        vocab_size: int = 16
        length: int = 256
        tokens_to_copy: int = 16

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                self.vocab_size >= 4, f"vocab_size is {self.vocab_size}: two data tokens, blank and copy need 4 or more"
            )
            require(self.tokens_to_copy >= 1, f"tokens_to_copy is {self.tokens_to_copy}: use at least 1")

            shortest = 2 * self.tokens_to_copy + 2
            require(
                self.length >= shortest,
                f"length is {self.length}: {self.tokens_to_copy} tokens to copy, one blank among them, the copy token "
                f"and the answers need {shortest} or more",
            )

    name = "selective-copying"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        "vocab_size": (32, 64, 128),
        "length": (512, 1024),
        "train_examples": (6400, 3200, 1600, 800),
        "tokens_to_copy": (32, 64, 96),
    }
    ladder = Ladder(
        axis="tokens to copy",
        rungs={
            count: {"tokens_to_copy": count, "length": length}
            for count, length in {4: 64, 8: 64, 16: 64, 24: 96, 32: 128, 48: 128}.items()
        },
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size - 2

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        blank, copy = self.config.vocab_size - 2, self.config.vocab_size - 1
        count = self.config.tokens_to_copy
        places = self.config.length - count - 1

        # Data tokens and their places.
        data_SC = rng.integers(blank, size=(n, count))
        is_data_ST = np.zeros((n, self.config.length), dtype=np.bool_)
        is_data_ST[:, :count] = True
        is_data_ST[:, :places] = rng.permuted(is_data_ST[:, :places], axis=1)

        inputs_ST = np.full((n, self.config.length), blank, dtype=np.int64)
        inputs_ST[is_data_ST] = data_SC.ravel()
        inputs_ST[:, places] = copy

        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, places + 1 :] = data_SC
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def candidates(self, batch: Batch) -> Floats:
        return shown_so_far(batch, range(self.answer_count))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every answer stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)
