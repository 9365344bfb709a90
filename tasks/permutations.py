"""Permutations: the running product in a symmetric group.

Sources: Merrill et al. 2024, "The Illusion of State in State-Space Models" (arXiv:2404.08819); Liu et al. 2023,
"Transformers Learn Shortcuts to Automata" (arXiv:2210.10749).
Dimensions: S sequences, T positions, G permutations (the group's elements), O objects that they permute.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, ClassVar

import numpy as np

from tasks.base import Ladder, Tokens, require
from tasks.running_product import RunningProduct


class Permutations(RunningProduct):
    """Uniform random permutations; at every position the product of all so far must be output (the word problem).

    A token is a permutation of the objects 0, 1, ...: its rank among the tuples of the objects' images in
    lexicographic order, so 0 is the identity. The permutation that is read first acts first. Given all tokens but one,
    a target is uniform over the group. Inputs and targets are not shifted; every position has a target and is scored.

    The word problem of S5 is complete for NC1: a model that computes in TC0, as Transformers and many state-space
    models of fixed depth do, solves it at all lengths only if TC0 = NC1. S3 and S4 (degrees 3 and 4) are solvable
    groups, whose word problem lies in TC0.

    Example, first sequence of the test split of ``Config(degree=3, length=8, train_examples=1, eval_examples=1)``,
    whose tokens 0-5 are 012, 021, 102, 120, 201, 210; ``_`` is no target, ``^`` a scored position::

        inputs   2 1 3 4 2 0 2 4
        targets  2 4 0 4 5 5 4 3
        scored   ^ ^ ^ ^ ^ ^ ^ ^

    Source: Merrill et al. 2024 (arXiv:2404.08819), word problem of S5, on which Grazzi et al. 2025 train
    (arXiv:2411.12537, section 5.2); Liu et al. 2023 (arXiv:2210.10749).

    Differs from the reference:
        Merrill et al. 2024, section 6, and https://github.com/jopetty/word-problem, src/generate_data.py and
        src/main.py.

        - tokens: the permutation that is read first acts first; in theirs the last one does (package abstract_algebra).
          Where permutations have the names of their inverses, that is the same task. Both number them in lexicographic
          order. Theirs begins with a token, at which the token itself is asked for; with such a token here (``begin``)
          it is the neutral element.
        - training: 12,800 sequences of 16 permutations; theirs has 80% of a data set of each length, up to about a
          million to judge by its size, and with them all pairs of elements.
        - evaluation: also 32 and 64 permutations; theirs has the lengths of training, up to about 20.
        - left out: A5, A4 x Z5 and Z60, on which they train (``group-words`` has them). S5 stands in their proofs and
          data; Grazzi et al. train on 1.6 million sequences of 32 and test up to 500.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RunningProduct.Config):
        """Settings of permutations.

        Attributes:
            length: permutations in a sequence.
            degree: objects that are permuted, 3 to 5; the group has 6, 24 or 120 elements.
        """

        length: int = 16
        degree: int = 5

        def __post_init__(self) -> None:
            super().__post_init__()
            require(3 <= self.degree <= 5, f"degree is {self.degree}: use 3, 4 or 5")

    name = "s5-permutations"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"degree": (3, 4), "length": (8, 32, 64)}
    ladder = Ladder(
        # S3, the smallest group that does not commute: of S5 three layers learned no more than the first element in the
        # steps of a profile. Below 12 permutations there are too few sequences for a test split that training lacks.
        axis="length",
        rungs={length: {"length": length} for length in (12, 24, 48, 96, 160, 256)},
        shared={"degree": 3, "extrapolation_factors": ()},
    )
    config: Config

    @cached_property
    def products_GG(self) -> Tokens:
        """Token of the product of two tokens, shape (G, G); the row's permutation acts first."""
        return products_of(all_permutations(self.config.degree))


def all_permutations(degree: int) -> Tokens:
    """Return the images of the objects under all permutations, in lexicographic order, shape (G, O)."""
    return np.array(list(permutations(range(degree))))


def products_of(images_GO: Tokens) -> Tokens:
    """Return the number of the product of two permutations of a group, shape (G, G); the row's acts first.

    Args:
        images_GO: images of the objects under all permutations of the group, in lexicographic order.
    """
    # Numbers whose digits are the images ascend as the permutations do.
    degree = images_GO.shape[1]
    weights_O = degree ** np.arange(degree)[::-1]
    codes_G = images_GO @ weights_O
    return np.searchsorted(codes_G, images_GO[:, images_GO] @ weights_O).T
