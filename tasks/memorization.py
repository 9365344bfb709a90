"""Memorization: a fixed map from keys to values that only the training split shows.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
Dimensions: S sequences, T positions, K keys (of the map, or of a sequence), P tokens of a key.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Ladder, Mask, Task, Tokens, require, switch


class Memorization(Task):
    """Keys alternate with an insert token, at which the key's value must be predicted from memory.

    With K = (V-1)//2, keys are ``[0, K)``, values ``[K, 2K)`` and the insert token is ``V-1`` (for even V, the token
    before it never occurs). The map is one-to-one, the same for all splits, and depends on the data seed alone. A value
    never stands in the input. Only the insert tokens have targets.

    With ``key_pairs``, that many pairs of key tokens are the keys, all different, and each has a value drawn uniformly.
    Keys of one token lie in the embedding; pairs have to be joined, and fill the layer's own parameters.

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
        - added: keys of two tokens (``key_pairs``).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of memorization.

        Attributes:
            vocab_size: keys, as many values, and the insert token together.
            length: tokens in a sequence, a key and an insert token in turn.
            train_examples: sequences in the training split; keys that none of them shows cannot be known.
            key_pairs: keys of two tokens; 0 for keys of one token.
        """

        vocab_size: int = 256
        length: int = 32
        train_examples: int = 256
        key_pairs: int = switch(0)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.vocab_size >= 5, f"vocab_size is {self.vocab_size}: two keys and two values need 5 or more")
            most = ((self.vocab_size - 1) // 2) ** 2
            require(
                0 <= self.key_pairs <= most,
                f"key_pairs is {self.key_pairs}: use 0 for keys of one token, and at most {most} pairs",
            )
            period = self.key_tokens + 1
            require(
                self.length % period == 0 and self.length >= period,
                f"length is {self.length}: use a multiple of {period}, keys and insert tokens in turn",
            )

        @property
        def key_tokens(self) -> int:
            """Tokens of a key."""
            return 2 if self.key_pairs else 1

    name = "memorization"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"vocab_size": (512, 1024, 2048, 4096, 8192)}
    ladder = Ladder(
        # Keys of one token, up to 16,384 of them, are known to each of three layers, the Transformer included.
        axis="keys",
        rungs={keys: {"key_pairs": keys} for keys in (512, 1024, 2048, 4096, 8192, 16384)},
        shared={"vocab_size": 257, "length": 15},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return (self.config.vocab_size - 1) // 2

    @cached_property
    def keys_KP(self) -> Tokens:
        """Tokens of each key, shape (K, P)."""
        if not self.config.key_pairs:
            return np.arange(self.answer_count)[:, None]
        drawn_K = self.stream("keys").choice(self.answer_count**2, self.config.key_pairs, replace=False)
        return np.stack(np.divmod(drawn_K, self.answer_count), axis=1)

    @cached_property
    def values_K(self) -> Tokens:
        """Value of each key, shape (K,)."""
        stream = self.stream("map")
        if self.config.key_pairs:
            return self.answer_count + stream.integers(self.answer_count, size=self.config.key_pairs)
        return self.answer_count + stream.permutation(self.answer_count)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        (count, parts), insert = self.keys_KP.shape, self.config.vocab_size - 1
        keys_SK = rng.integers(count, size=(n, self.config.length // (parts + 1)))
        tokens_SKP = np.pad(self.keys_KP[keys_SK], ((0, 0), (0, 0), (0, 1)), constant_values=insert)

        targets_ST = np.full((n, self.config.length), IGNORE)
        targets_ST[:, parts :: parts + 1] = self.values_K[keys_SK]
        return Batch(inputs_ST=tokens_SKP.reshape(n, -1), targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def ceiling(self, split: str) -> Accuracy:
        """Return the accuracy of a solver that knows all keys of the training split and guesses the values of others.

        With u unknown keys of one token there are u unused values. A guess is right with probability 1/u, and m
        different unknown keys of one sequence, guessed without repetition, are all right with probability
        1 / (u (u-1) ... (u-m+1)). The value of a pair may be any.
        """
        known_K = self.known_keys()
        unknown = int(np.sum(~known_K))

        # Unknown keys of each sequence, and which of them stand there for the first time in ascending order.
        keys_SK = np.sort(self._keys_of(split), axis=1)
        unknown_SK = ~known_K[keys_SK]
        new_SK = np.column_stack([unknown_SK[:, :1], unknown_SK[:, 1:] & (keys_SK[:, 1:] != keys_SK[:, :-1])])

        # Sequences: the values left for each further unknown key.
        values = self.answer_count if self.config.key_pairs else unknown
        left_SK = values - (0 if self.config.key_pairs else np.cumsum(new_SK, axis=1) - new_SK)
        all_right_S = np.prod(1 / np.where(new_SK, left_SK, 1), axis=1)

        # Positions.
        share_unknown = float(unknown_SK.mean())
        guessed = share_unknown / values if unknown else 0.0
        return Accuracy(sequence=float(all_right_S.mean()), token=1 - share_unknown + guessed)

    def known_keys(self) -> Mask:
        """Return whether the training split shows each key, shape (K,)."""
        known_K = np.zeros(len(self.keys_KP), dtype=np.bool_)
        known_K[self._keys_of("train")] = True
        return known_K

    def _keys_of(self, split: str) -> Tokens:
        """Return the numbers of the keys of each sequence, shape (S, K)."""
        inputs_ST, parts = self.batch(split).inputs_ST, self.config.key_tokens
        codes_K = self.keys_KP @ self.answer_count ** np.arange(parts)[::-1]
        codes_SK = sum(inputs_ST[:, i :: parts + 1] * self.answer_count ** (parts - 1 - i) for i in range(parts))
        order_K = np.argsort(codes_K)
        return order_K[np.searchsorted(codes_K[order_K], codes_SK)]
