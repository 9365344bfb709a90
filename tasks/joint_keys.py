"""Joint keys: values that only two keys together tell.

Source: "compositional MQAR" of HazyResearch/zoology, the code of Arora et al. 2023 (arXiv:2312.04927).
Dimensions: S sequences, T positions, G keys of each kind in a sequence (the side of the grid), P = G·G pairs of keys.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import Accuracy, Batch, Floats, Ladder, Task, require
from tasks.mqar import ask, asked_values, draw_distinct


class JointKeys(Task):
    """All pairs of a first and a second key, each with a value; where a pair returns, its value must be predicted.

    With K = V // 3 the filler is token 0, first keys are ``[1, K)``, second keys ``[K, 2K)`` and values ``[2K, V)``. A
    sequence has ``grid`` first and ``grid`` second keys, which form a grid: every pair stands once with its value, in
    random order, so neither key alone tells a value. All values of a sequence are different. Then every pair returns
    once, among fillers. Its place is a multiple of three positions behind what is shown and follows the power law of
    ``mqar``. Only the second keys there have targets.

    Example, first sequence of the test split of
    ``Config(vocab_size=12, length=24, grid=2, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs    2  5  8  3  4 10  2  4 11  3  5  9  2  5  0  3  4  0  3  5  0  2  4  0
        targets   _  _  _  _  _  _  _  _  _  _  _  _  _  8  _  _ 10  _  _  9  _  _ 11  _
        scored    .  .  .  .  .  .  .  .  .  .  .  .  .  ^  .  .  ^  .  .  ^  .  .  ^  .

    Source: https://github.com/HazyResearch/zoology, ``compositional_ar.py``.

    Differs from the reference:
        https://github.com/HazyResearch/zoology, zoology/data/compositional_ar.py and
        zoology/experiments/mqar_example_configs/composition_configs.py.

        - tokens: a vocabulary of 192; theirs has 8,192.
        - sequences: token 0 stands where nothing is asked, as in one of their settings
          (composition_configs_random_false.py); their default has random tokens there, keys and values among them
          (``random_non_queries``). ``alpha`` is 0.1; theirs is 0.01 (``power_a``), so that queries come sooner.
        - training: 12,800 sequences of 128 tokens with a grid of 4 by 4; theirs has 180,000 of 64 to 256 tokens with
          grids of 2 by 2 to 6 by 6.
        - evaluation: sequences like those of training; theirs has up to 2,048 tokens with a grid of 16 by 16.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of joint keys.

        Attributes:
            vocab_size: the filler, first keys, second keys and values together, about a third each.
            length: tokens in a sequence, six for each pair of keys or more.
            grid: first keys of a sequence, and second keys; their pairs are the grid.
            alpha: exponent of the power law of the queries' places: near 0 most come soon, 1 is uniform.
        """

        vocab_size: int = 192
        length: int = 128
        grid: int = 4
        alpha: float = 0.1

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.grid >= 1, f"grid is {self.grid}: use at least 1")

            pairs = self.grid**2
            third = self.vocab_size // 3
            require(
                third > self.grid and self.vocab_size - 2 * third >= pairs,
                f"vocab_size is {self.vocab_size}: a third must hold a filler and {self.grid} different keys, and "
                f"{pairs} different values",
            )
            require(
                self.length >= 6 * pairs,
                f"length is {self.length}: {pairs} pairs of keys and their queries need {6 * pairs} or more",
            )
            require(0 < self.alpha <= 1, f"alpha is {self.alpha}: use a value above 0, at most 1")

    name = "joint-keys"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"grid": (2, 3), "vocab_size": (384, 1536, 6144)}
    ladder = Ladder(
        axis="keys of each kind",
        rungs={
            grid: {"grid": grid, "length": length, "vocab_size": max(48, 3 * grid**2)}
            for grid, length in {2: 32, 3: 64, 4: 96, 5: 160, 6: 216, 7: 296}.items()
        },
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size - 2 * (self.config.vocab_size // 3)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        grid, third = self.config.grid, self.config.vocab_size // 3

        # The keys of each kind, and the cells of the grid in random order.
        first_SG = 1 + draw_distinct(rng, n, grid, np.ones(third - 1))
        second_SG = third + draw_distinct(rng, n, grid, np.ones(third))
        cells_SP = draw_distinct(rng, n, grid**2, np.ones(grid**2))
        keys_SP2 = np.stack(
            [
                np.take_along_axis(first_SG, cells_SP // grid, axis=1),
                np.take_along_axis(second_SG, cells_SP % grid, axis=1),
            ],
            axis=2,
        )

        values_SP = 2 * third + draw_distinct(rng, n, grid**2, np.ones(self.answer_count))
        shown_ST = np.concatenate([keys_SP2, values_SP[:, :, None]], axis=2).reshape(n, -1)
        return ask(rng, shown_ST, keys_SP2, values_SP, self.config.length, self.config.alpha)

    def candidates(self, batch: Batch) -> Floats:
        return asked_values(batch)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every pair of keys behind those shown is a query, and its value stands behind it in the input."""
        return Accuracy(sequence=1.0, token=1.0)
