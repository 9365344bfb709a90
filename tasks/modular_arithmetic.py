"""Modular arithmetic: the value of an expression, with and without brackets.

Sources: Delétang et al. 2023, "Neural Networks and the Chomsky Hierarchy" (arXiv:2207.02098); Grazzi et al. 2025,
"Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv:2411.12537).
Dimensions: S sequences, T positions, P digits of a sequence, N parts of all expressions at one depth of brackets.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Ladder, Tokens, require
from tasks.extrapolation import Extrapolation

PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, PAD = range(7)
"""Tokens beside the digits, counted from the modulus."""


class ModularArithmetic(Extrapolation):
    """Digits joined by ``+``, ``-`` and ``*``, then ``=``, at which the value modulo ``modulus`` must be output.

    Tokens: the digits ``[0, M)`` and, from the modulus M on, ``+ - * ( ) =`` and the padding behind ``=``. Without
    brackets ``*`` binds first, and of ``+`` and ``-`` the left one. With them, an expression of 5 symbols or more is
    ``(a+b)``, ``(a-b)`` or ``(a*b)``, where the length of a is uniform; shorter ones are ``d``, ``-d``, ``(d)`` and
    ``(-d)``. Digits and operators are uniform. Only ``=`` has a target.

    Training sequences hold expressions of different lengths, uniform from ``min_length`` to ``length``, ``=`` included.
    All others have the full length: of the splits ``length``, of the extrapolation sets "length N" N tokens. With
    several ``expressions`` a sequence has as many parts of equal length, each with one of them.

    With brackets, an answer of always 0 is right for 29% of the expressions of 40 tokens, because products are often 0.
    Without them, values are uniform.

    Example, first sequence of the test split of
    ``Config(brackets=True, length=14, train_examples=1, eval_examples=1)``; ``_`` is no target, ``^`` a scored
    position::

        inputs   ( - 4 * ( ( - 1 ) - 4 ) ) =
        targets  _ _ _ _ _ _ _ _ _ _ _ _ _ 0
        scored   . . . . . . . . . . . . . ^

    Source: Delétang et al. 2023 (arXiv:2207.02098), "modular arithmetic (simple)" and "modular arithmetic"; ``=`` and
    the scored position of Grazzi et al. 2025 (arXiv:2411.12537).

    Differs from the reference:
        Delétang et al. 2023 and https://github.com/google-deepmind/neural_networks_chomsky_hierarchy,
        tasks/regular/modular_arithmetic.py, tasks/dcf/modular_arithmetic_brackets.py and training/; Grazzi et al. 2025,
        appendix E.1, https://github.com/NX-AI/xlstm, experiments/data/formal_language, which they extend, and a copy of
        their code, https://github.com/adankow/unlocking_state_tracking.

        - tokens: ``=`` ends an expression, as in Grazzi et al.; Delétang et al. ask at an empty token behind it.
        - training: 12,800 expressions of 4 to 40 tokens with their ``=``, each read 200 times. Delétang et al. draw new
          ones of 1 to 40 symbols, of one length in a batch; Grazzi et al. too, of 3 to 40 tokens, the answer among them
          and, with brackets, a token of padding.
        - evaluation: 40, 80 and 160 tokens; Delétang et al. have all lengths from 41 to 500, Grazzi et al. 8,192
          expressions of 40 to 256 tokens.
        - left out: brackets without ``*``, the default of both generators (``mult``). Delétang et al. switch it on
          (training/constants.py); Grazzi et al. have both (table 5).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Extrapolation.Config):
        """Settings of modular arithmetic.

        Attributes:
            modulus: number of digits, modulo which an expression is computed.
            brackets: whether expressions are nested in brackets.
            min_length: tokens of the shortest training expression with its ``=``.
            length: tokens in a sequence; without brackets, an even number for each of its expressions.
            expressions: expressions in a sequence; they share its length equally.
        """

        modulus: int = 5
        brackets: bool = False
        min_length: int = 4
        length: int = 40
        expressions: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            require(2 <= self.modulus <= 10, f"modulus is {self.modulus}: use 2 to 10")
            require(
                self.expressions >= 1 and self.length % self.expressions == 0,
                f"expressions is {self.expressions}: use a number of equal parts of length, {self.length}",
            )
            most = self.length // self.expressions
            require(
                2 <= self.min_length <= most,
                f"min_length is {self.min_length}: use 2 or more, and at most length / expressions, {most}",
            )
            require(
                self.brackets or self.min_length % 2 == most % 2 == 0,
                f"min_length, length / expressions are {self.min_length}, {most}: without brackets use even numbers, "
                "digits and operators in turn and =",
            )

    name = "modular-arithmetic"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"brackets": (True,), "length": (80, 160)}
    ladder = Ladder(
        # With one expression a sequence, no layer learns more than its last digits in the steps of a profile.
        axis="length of an expression",
        rungs={
            length: {"length": length * count, "expressions": count}
            for length, count in {4: 16, 6: 10, 8: 8, 12: 5, 20: 3, 32: 2}.items()
        },
        shared={"extrapolation_factors": ()},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.modulus + PAD + 1

    @property
    def answer_count(self) -> int:
        return self.config.modulus

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        modulus, count = self.config.modulus, self.config.expressions
        length = self.length_of(split) // count

        # Lengths of all expressions, one sequence after the other.
        shortest, step = (self.config.min_length if split == "train" else length), (1 if self.config.brackets else 2)
        lengths_S = shortest + step * rng.integers((length - shortest) // step + 1, size=n * count)

        # Expressions, and behind them "=" and padding.
        draw = draw_nested if self.config.brackets else draw_flat
        inputs_ST, values_S = draw(rng, lengths_S - 1, length, modulus)
        position_T, ends_S1 = np.arange(length), lengths_S[:, None] - 1
        inputs_ST = np.where(position_T < ends_S1, inputs_ST, modulus + PAD)
        inputs_ST[position_T == ends_S1] = modulus + EQUALS

        targets_ST = np.where(position_T == ends_S1, values_S[:, None], IGNORE)
        inputs_ST, targets_ST = inputs_ST.reshape(n, -1), targets_ST.reshape(n, -1)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: the expression stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)


def draw_flat(rng: np.random.Generator, lengths_S: Tokens, width: int, modulus: int) -> tuple[Tokens, Tokens]:
    """Draw expressions without brackets.

    Args:
        rng: source of randomness.
        lengths_S: symbols of each expression, odd.
        width: even number T above all of them.
        modulus: number of digits.

    Returns:
        The symbols, shape (S, T), those behind an expression without meaning; and the values, shape (S,).
    """
    digits_SP = rng.integers(modulus, size=(len(lengths_S), width // 2))
    operators_SP = rng.integers(3, size=digits_SP.shape)
    symbols_ST = np.stack([digits_SP, modulus + operators_SP], axis=2).reshape(-1, width)

    # The sum of the products that are over, and the product that is not; the values of all beginnings.
    sum_S, product_S = np.zeros_like(lengths_S), digits_SP[:, 0]
    values_SP = digits_SP.copy()
    for place in range(1, width // 2):
        operator_S, digit_S = operators_SP[:, place - 1], digits_SP[:, place]
        sum_S = np.where(operator_S == TIMES, sum_S, sum_S + product_S)
        factor_S = np.where(operator_S == TIMES, product_S, np.where(operator_S == MINUS, -1, 1))
        product_S = factor_S * digit_S % modulus
        values_SP[:, place] = (sum_S + product_S) % modulus
    return symbols_ST, np.take_along_axis(values_SP, lengths_S[:, None] // 2, axis=1)[:, 0]


def draw_nested(rng: np.random.Generator, lengths_S: Tokens, width: int, modulus: int) -> tuple[Tokens, Tokens]:
    """Draw expressions with brackets; see ``draw_flat``, but for the lengths, which may be even.

    All parts at one depth are drawn together: leaves, and brackets around two parts of the next depth.
    """
    symbols_ST = np.zeros((len(lengths_S), width), dtype=np.int64)
    rows_N, starts_N, sizes_N = np.arange(len(lengths_S)), np.zeros_like(lengths_S), lengths_S
    depths: list[tuple[Tokens, Tokens, Tokens]] = []

    while len(rows_N):
        # Brackets; leaves are d, -d, (d) and (-d).
        inner_N, negative_N, bracketed_N = sizes_N > 4, (sizes_N == 2) | (sizes_N == 4), sizes_N > 2
        last_N = starts_N + sizes_N - 1
        digits_N = rng.integers(modulus, size=len(rows_N))
        symbols_ST[rows_N, last_N - bracketed_N] = digits_N
        symbols_ST[rows_N[negative_N], (starts_N + bracketed_N)[negative_N]] = modulus + MINUS
        symbols_ST[rows_N[bracketed_N], starts_N[bracketed_N]] = modulus + OPEN
        symbols_ST[rows_N[bracketed_N], last_N[bracketed_N]] = modulus + CLOSE

        # The operator between the left and the right part, which overwrite the digit of what is no leaf.
        rows_N, starts_N, sizes_N = rows_N[inner_N], starts_N[inner_N] + 1, sizes_N[inner_N] - 3
        left_N, operators_N = rng.integers(1, sizes_N), rng.integers(3, size=len(rows_N))
        symbols_ST[rows_N, starts_N + left_N] = modulus + operators_N
        depths.append((np.where(negative_N, -digits_N, digits_N), np.flatnonzero(inner_N), operators_N))

        rows_N = np.concatenate([rows_N, rows_N])
        starts_N = np.concatenate([starts_N, starts_N + left_N + 1])
        sizes_N = np.concatenate([left_N, sizes_N - left_N])

    # Values, from the deepest parts to the whole.
    values_N = np.zeros(0, dtype=np.int64)
    for own_N, places_N, operators_N in reversed(depths):
        left_N, right_N = np.split(values_N, 2)
        own_N[places_N] = np.choose(operators_N, [left_N + right_N, left_N - right_N, left_N * right_N])
        values_N = own_N % modulus
    return symbols_ST, values_N
