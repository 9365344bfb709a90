"""Tasks that ask at every position for the product of all elements of a group so far (the group's word problem).

Dimensions: S sequences, T positions, G elements of the group.
"""

from abc import abstractmethod

import numpy as np

from tasks.base import Accuracy, Batch, Tokens
from tasks.extrapolation import Extrapolation


class RunningProduct(Extrapolation):
    """Uniform random elements of a group; at every position the product of all so far must be output.

    A subclass states the group by its multiplication table ``products_GG``. Given all tokens but one, a target is
    uniform over the group. Inputs and targets are not shifted; every position has a target and is scored.
    """

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
        return self.answer_count * self.tokens_per_element

    @property
    def answer_count(self) -> int:
        return len(self.products_GG)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        inputs_ST = rng.integers(self.vocab_size, size=(n, self.length_of(split)))
        products_GG = self.products_GG
        targets_ST = inputs_ST % len(products_GG)
        for t in range(1, inputs_ST.shape[1]):
            targets_ST[:, t] = products_GG[targets_ST[:, t - 1], targets_ST[:, t]]
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=np.ones_like(inputs_ST, dtype=np.bool_))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every answer is the product of elements that stand in the input up to its position."""
        return Accuracy(sequence=1.0, token=1.0)
