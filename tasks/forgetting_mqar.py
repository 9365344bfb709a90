"""Forgetting recall: key-value pairs of which some are written again, then each key once more.

Source: "forgetting MQAR" of HazyResearch/zoology, the code of Arora et al. 2023 (arXiv:2312.04927).
Dimensions: S sequences, T positions, P keys of a sequence, U keys that are written again, W pairs written.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import Accuracy, Batch, Floats, Ladder, Task, require
from tasks.mqar import ask, asked_values, draw_distinct


class ForgettingRecall(Task):
    """Pairs of a key and its value, new values for some of the keys, then every key: its newest value is predicted.

    As in ``mqar`` the filler is token 0, keys are ``[1, V/2)`` and values ``[V/2, V)``, the keys of a sequence are
    different, and each key returns once, among fillers, at a place that follows the power law. Between pairs and
    queries, ``updates`` of the keys, in random order, stand with a new value; if these are more than the keys, all keys
    stand once more before one returns again. All values of a sequence are different. Only the queries have targets.

    Example, first sequence of the test split of
    ``Config(vocab_size=12, length=20, pairs=3, updates=2, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs    1 11  3  7  2 10  2  6  3  8  0  0  3  0  2  0  0  0  1  0
        targets   _  _  _  _  _  _  _  _  _  _  _  _  8  _  6  _  _  _ 11  _
        scored    .  .  .  .  .  .  .  .  .  .  .  .  ^  .  ^  .  .  .  ^  .

    Source: https://github.com/HazyResearch/zoology, ``forgetting_mqar.py``.

    Differs from the reference:
        https://github.com/HazyResearch/zoology, zoology/data/forgetting_mqar.py and
        zoology/experiments/mqar_example_configs/forgetting_configs.py.

        - tokens: a vocabulary of 256; theirs has 8,192.
        - sequences: all values differ; theirs draws a new value that differs from the value of one key, but not always
          of the key that is written again (``original_values[i, j]``), which so may keep its value. A key can be
          written again several times; in theirs at most once. Token 0 stands where nothing is asked; theirs has random
          tokens there, keys and values among them (``random_non_queries``). ``alpha`` is 0.1; theirs is 0.01
          (``power_a``), so that queries come sooner.
        - training: 12,800 sequences of 128 tokens with 16 pairs and 8 updates; theirs has 180,000 of 64 to 256 tokens
          with 4 to 36 pairs and always 4 updates.
        - evaluation: sequences like those of training; theirs has up to 2,048 tokens with 256 pairs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of forgetting recall.

        Attributes:
            vocab_size: the filler, keys and values together; half are values.
            length: tokens in a sequence, four for each key and two for each update, or more.
            pairs: keys in a sequence, and queries.
            updates: how many times any of the keys is written again.
            alpha: exponent of the power law of the queries' places: near 0 most come soon, 1 is uniform.
        """

        vocab_size: int = 256
        length: int = 128
        pairs: int = 16
        updates: int = 8
        alpha: float = 0.1

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.pairs >= 1, f"pairs is {self.pairs}: use at least 1")
            require(self.updates >= 0, f"updates is {self.updates}: use 0 or more")

            smallest = 2 * (self.pairs + max(1, self.updates))
            require(
                self.vocab_size % 2 == 0 and self.vocab_size >= smallest,
                f"vocab_size is {self.vocab_size}: a filler, {self.pairs} different keys and "
                f"{self.pairs + self.updates} different values need an even number from {smallest}",
            )
            shortest = 4 * self.pairs + 2 * self.updates
            require(
                self.length >= shortest,
                f"length is {self.length}: {self.pairs} pairs, {self.updates} updates and the queries need {shortest} "
                "or more",
            )
            require(0 < self.alpha <= 1, f"alpha is {self.alpha}: use a value above 0, at most 1")

    name = "forgetting-mqar"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"updates": (0, 4, 16), "vocab_size": (512, 2048, 8192)}
    ladder = Ladder(
        axis="new values of keys",
        rungs={
            updates: {"updates": updates, "length": 32 + 2 * updates, "vocab_size": max(64, 16 + 2 * updates)}
            for updates in (0, 4, 8, 16, 32, 64)
        },
        shared={"pairs": 8},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size // 2

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        pairs, half = self.config.pairs, self.config.vocab_size // 2
        keys_SP = 1 + draw_distinct(rng, n, pairs, np.ones(half - 1))
        values_SW = half + draw_distinct(rng, n, pairs + self.config.updates, np.ones(half))

        # What is written: all keys, then some of them again.
        rounds = [draw_distinct(rng, n, pairs, np.ones(pairs)) for _ in range(0, max(1, self.config.updates), pairs)]
        updated_SU = np.concatenate(rounds, axis=1)[:, : self.config.updates]
        keys_SW = np.concatenate([keys_SP, np.take_along_axis(keys_SP, updated_SU, axis=1)], axis=1)
        shown_ST = np.stack([keys_SW, values_SW], axis=2).reshape(n, -1)

        answers_SP = values_SW[:, :pairs].copy()
        for first in range(0, self.config.updates, pairs):  # round by round, as a key's last value counts
            of_round = slice(first, first + pairs)
            np.put_along_axis(answers_SP, updated_SU[:, of_round], values_SW[:, pairs:][:, of_round], axis=1)
        return ask(rng, shown_ST, keys_SP[:, :, None], answers_SP, self.config.length, self.config.alpha)

    def candidates(self, batch: Batch) -> Floats:
        return asked_values(batch)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every key behind what is written is a query, and its newest value stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)
