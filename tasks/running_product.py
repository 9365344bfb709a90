"""Tasks that ask at every position for the product of all elements of a group so far (the group's word problem).

Dimensions: S sequences, T positions, G elements of the group.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Floats, Tokens, require, switch
from tasks.extrapolation import Extrapolation


class RunningProduct(Extrapolation):
    """Uniform random elements of a group; at every position the product of all so far must be output.

    A subclass states the group by its multiplication table ``products_GG``, whose first element is neutral. Given all
    tokens but one, a target is uniform over the group. Inputs and targets are not shifted; every position has a target
    and is scored.

    Other people's settings are options. With ``min_length``, training sequences have lengths of their own, and one more
    token, the last of the vocabulary, stands behind them; so it does before all sequences with ``begin``.
    ``min_length`` and ``last_only`` are for Grazzi et al. 2025 (arXiv:2411.12537, appendix E.1), whose lengths count
    the answer; ``begin`` is for Merrill et al. 2024 and Siems et al. 2025, who ask for the token itself at its place.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Extrapolation.Config):
        """Settings of running products.

        Attributes:
            min_length: tokens of the shortest training sequence, if their lengths are uniform up to ``length``; 0 if
                all have ``length``, as all others do.
            last_only: ask at the last token of a sequence alone.
            begin: begin with a token of its own, one of the ``length``, at which the neutral element is asked for.
        """

        min_length: int = switch(0)
        last_only: bool = switch(False)
        begin: bool = switch(False)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                0 <= self.min_length <= self.length,
                f"min_length is {self.min_length}: use 0 for one length, and at most length, {self.length}",
            )

    @property
    @abstractmethod
    def products_GG(self) -> Tokens:
        """Number of the product of two elements by their numbers, shape (G, G); the row's element comes first."""

    @property
    def tokens_per_element(self) -> int:
        """Number of tokens that stand for the same element."""
        return 1

    @property
    def vocab_size(self) -> int:
        return self.answer_count * self.tokens_per_element + (self.config.begin or self.config.min_length > 0)

    @property
    def answer_count(self) -> int:
        return len(self.products_GG)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        length, elements = self.length_of(split), self.answer_count * self.tokens_per_element
        inputs_ST = rng.integers(elements, size=(n, length))

        # Products; the token at the start is neutral.
        products_GG = self.products_GG
        targets_ST = inputs_ST % len(products_GG)
        if self.config.begin:
            inputs_ST[:, 0], targets_ST[:, 0] = elements, 0
        for t in range(1, length):
            targets_ST[:, t] = products_GG[targets_ST[:, t - 1], targets_ST[:, t]]

        # Lengths.
        ends_S1 = np.full((n, 1), length)
        if self.config.min_length and split == "train":
            ends_S1 = rng.integers(self.config.min_length, length + 1, size=(n, 1))
        position_T = np.arange(length)
        scored_ST = position_T == ends_S1 - 1 if self.config.last_only else position_T < ends_S1
        inputs_ST = np.where(position_T < ends_S1, inputs_ST, elements)
        return Batch(inputs_ST=inputs_ST, targets_ST=np.where(scored_ST, targets_ST, IGNORE), scored_ST=scored_ST)

    def candidates(self, batch: Batch) -> Floats:
        """The first element is its own product."""
        candidates_ST = super().candidates(batch)
        candidates_ST[:, 0] = 1
        return candidates_ST

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every answer is the product of elements that stand in the input up to its position."""
        return Accuracy(sequence=1.0, token=1.0)
