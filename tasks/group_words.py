"""Group words: the running product in a group of one's choice.

Sources: Merrill et al. 2024, "The Illusion of State in State-Space Models" (arXiv:2404.08819); Siems et al. 2025,
"DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products" (arXiv:2502.10297).
Dimensions: G elements of a group, H elements of another one, O objects that are permuted.
"""

import re
from dataclasses import dataclass
from functools import cached_property, reduce
from math import factorial, prod
from typing import Any, ClassVar

import numpy as np

from tasks.base import Ladder, Tokens, require
from tasks.permutations import all_permutations, products_of
from tasks.running_product import RunningProduct

LADDER = ("Z2", "S3", "A4", "S4", "A5", "S5")
"""Groups of the ladder."""


def order(group: str) -> int:
    """Return the number of elements of a group ``Z<n>``, ``S<n>`` or ``A<n>``."""
    kind, n = group[0], int(group[1:])
    return {"Z": n, "S": factorial(n), "A": max(1, factorial(n) // 2)}[kind]


class GroupWords(RunningProduct):
    """Uniform random elements of a group; at every position the product of all so far must be output.

    ``group`` names the group: ``Z<n>`` the integers modulo n under addition, ``S<n>`` all permutations of n objects,
    ``A<n>`` the even ones, or a direct product of these, such as ``A4xZ5``. Elements of Z are numbered by themselves,
    permutations in lexicographic order, pairs of a direct product by the first element, then the second. The element
    that is read first comes first in the product; of permutations it acts first. Another group is a subclass of
    ``tasks.running_product.RunningProduct`` with its multiplication table.

    Token t stands for the element ``t mod G``. With more tokens for each element (``copies``), groups of different size
    have the same vocabulary and equally many sequences. So only the group differs, and the short sequences of small
    groups are too many to be learnt by heart.

    Example, first sequence of the test split of
    ``Config(group="S3", copies=2, length=8, train_examples=1, eval_examples=1)``; ``_`` is no target, ``^`` a scored
    position::

        inputs    4  6  3  4 11 10  1  8
        targets   4  4  0  4  1  5  3  1
        scored    ^  ^  ^  ^  ^  ^  ^  ^

    Source: Merrill et al. 2024 (arXiv:2404.08819), whose groups of 60 elements are ``Z60``, ``A4xZ5`` and ``A5``. Siems
    et al. 2025 (arXiv:2502.10297) train on 128 elements of ``S3``, ``S4``, ``A5`` and ``S5`` and test on 512 (S3 from
    their README, the others at second hand). The tasks ``parity`` (Z2) and ``s5-permutations`` are words of the same
    kind, in streams of their own.

    Differs from the reference:
        Merrill et al. 2024, section 6, and https://github.com/jopetty/word-problem, src/generate_data.py and
        src/main.py.

        - tokens: the permutation that is read first acts first; in theirs the last one does (package abstract_algebra).
          Where permutations have the names of their inverses, that is the same task. Both number them in lexicographic
          order. Theirs begins with a token, at which the token itself is asked for; with such a token here (``begin``)
          it is the neutral element.
        - training: 12,800 sequences of 16 elements; theirs has 80% of a data set of each length, up to about a million
          to judge by its size, and with them all pairs of elements.
        - evaluation: also 32 and 64 elements; theirs has the lengths of training, up to about 20.
        - added: several tokens for each element (``copies``).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(RunningProduct.Config):
        """Settings of group words.

        Attributes:
            group: name of the group: Z<n>, S<n>, A<n>, or a direct product such as A4xZ5.
            copies: tokens that stand for the same element.
            length: elements in a sequence.
        """

        group: str = "A5"
        copies: int = 1
        length: int = 16

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.copies >= 1, f"copies is {self.copies}: use at least 1")

            parts = self.group.split("x")
            known = all(re.fullmatch(r"[ZSA][1-9]\d{0,2}", part) for part in parts)
            require(
                known and 2 <= prod(map(order, parts)) <= 1_000,
                f"group is {self.group}: use Z<n>, S<n>, A<n>, or a product such as A4xZ5, with 2 to 1,000 elements",
            )

    name = "group-words"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        "group": ("Z2", "Z60", "S3", "A4", "S4", "A4xZ5", "S5"),
        "length": (8, 32, 64),
    }
    ladder = Ladder(
        # The first group commutes, the next three are solvable, the last two are not. All rungs have 120 tokens.
        axis="elements of the group",
        rungs={order(group): {"group": group, "copies": 120 // order(group)} for group in LADDER},
        shared={"extrapolation_factors": ()},
    )
    config: Config

    @property
    def tokens_per_element(self) -> int:
        return self.config.copies

    @cached_property
    def products_GG(self) -> Tokens:
        """Number of the product of two elements by their numbers, shape (G, G); the row's element comes first."""
        return reduce(direct_product, map(multiplication_table, self.config.group.split("x")))


def multiplication_table(group: str) -> Tokens:
    """Return the products of a group ``Z<n>``, ``S<n>`` or ``A<n>``, shape (G, G)."""
    kind, n = group[0], int(group[1:])
    if kind == "Z":
        return np.add.outer(np.arange(n), np.arange(n)) % n

    images_GO = all_permutations(n)
    if kind == "A":
        inversions_G = sum(images_GO[:, i] > images_GO[:, j] for j in range(n) for i in range(j))
        images_GO = images_GO[np.broadcast_to(inversions_G, len(images_GO)) % 2 == 0]
    return products_of(images_GO)


def direct_product(products_GG: Tokens, products_HH: Tokens) -> Tokens:
    """Return the products of pairs of elements of two groups, shape (G·H, G·H)."""
    size = len(products_GG) * len(products_HH)
    pairs_GHGH = products_GG[:, None, :, None] * len(products_HH) + products_HH[None, :, None, :]
    return pairs_GHGH.reshape(size, size)
