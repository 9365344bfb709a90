"""Memorization: a fixed map from keys to values that only the training split shows.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
Dimensions: S sequences, T positions, P keys of a sequence.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Ladder, Mask, Task, Tokens, require


class Memorization(Task):
    """Keys alternate with an insert token, at which the key's value must be predicted from memory.

    With K = (V-1)//2, keys are ``[0, K)``, values ``[K, 2K)`` and the insert token is ``V-1`` (for even V, the token
    before it never occurs). The map is one-to-one, the same for all splits, and depends on the data seed alone. A value
    never stands in the input. Only the insert tokens have targets.

    Example, first sequence of the test split of ``Config(vocab_size=8, length=8, train_examples=4, eval_examples=1)``,
    whose map is 0-5, 1-3, 2-4; ``_`` is no target, ``^`` a scored position::

        inputs   2 7 0 7 2 7 0 7
        targets  _ 4 _ 5 _ 4 _ 5
        scored   . ^ . ^ . ^ . ^

    Source: Poli et al. 2024 (arXiv:2403.17844), "memorization".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_memorization_instance``).

        - tokens: the values are a permutation of K tokens; theirs draws them from K + 1.
        - evaluation: the ceiling counts the keys that no training sequence shows; theirs does not say that there are
          some.
        - left out: noise.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of memorization.

        Attributes:
            vocab_size: keys, as many values, and the insert token together.
            length: tokens in a sequence, a key and an insert token in turn.
            train_examples: sequences in the training split; keys that none of them shows cannot be known.
        """

        vocab_size: int = 256
        length: int = 32
        train_examples: int = 256

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.vocab_size >= 5, f"vocab_size is {self.vocab_size}: two keys and two values need 5 or more")
            require(
                self.length % 2 == 0 and self.length >= 2,
                f"length is {self.length}: use an even number from 2, keys and insert tokens in turn",
            )

    name = "memorization"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"vocab_size": (512, 1024, 2048, 4096, 8192)}
    ladder = Ladder(
        axis="keys",
        rungs={keys: {"vocab_size": 2 * keys + 1} for keys in (512, 1024, 2048, 4096, 8192, 16384)},
        shared={"length": 16},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return (self.config.vocab_size - 1) // 2

    @cached_property
    def values_K(self) -> Tokens:
        """Value of each key, shape (K,)."""
        return self.answer_count + self.stream("map").permutation(self.answer_count)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        keys_SP = rng.integers(self.answer_count, size=(n, self.config.length // 2))
        inputs_ST = np.full((n, self.config.length), self.config.vocab_size - 1, dtype=np.int64)
        inputs_ST[:, 0::2] = keys_SP

        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, 1::2] = self.values_K[keys_SP]
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def ceiling(self, split: str) -> Accuracy:
        """Return the accuracy of a solver that knows all keys of the training split and guesses the values of others.

        With u unknown keys there are u unused values. A guess is right with probability 1/u, and m different unknown
        keys of one sequence, guessed without repetition, are all right with probability 1 / (u (u-1) ... (u-m+1)).
        """
        known_K = self.known_keys()
        unknown = int(np.sum(~known_K))

        # Unknown keys of each sequence, and which of them stand there for the first time in ascending order.
        keys_SP = np.sort(self.batch(split).inputs_ST[:, 0::2], axis=1)
        unknown_SP = ~known_K[keys_SP]
        new_SP = np.column_stack([unknown_SP[:, :1], unknown_SP[:, 1:] & (keys_SP[:, 1:] != keys_SP[:, :-1])])

        # Sequences: the values left for each further unknown key.
        unused_SP = unknown - np.cumsum(new_SP, axis=1) + new_SP
        all_right_S = np.prod(1 / np.where(new_SP, unused_SP, 1), axis=1)

        # Positions.
        share_unknown = float(unknown_SP.mean())
        guessed = share_unknown / unknown if unknown else 0.0
        return Accuracy(sequence=float(all_right_S.mean()), token=1 - share_unknown + guessed)

    def known_keys(self) -> Mask:
        """Return whether the training split shows each key, shape (K,)."""
        known_K = np.zeros(self.answer_count, dtype=np.bool_)
        known_K[self.split("train").inputs_ST[:, 0::2]] = True
        return known_K
