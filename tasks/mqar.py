"""Multi-query associative recall: key-value pairs first, then each key once more, among fillers.

Source: Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models" (arXiv:2312.04927).
Dimensions: S sequences, T positions, P pairs of a sequence, C choices, Q tokens of a query.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tasks.base import IGNORE, LENGTH_PREFIX, Accuracy, Batch, Floats, Ladder, Tokens, require, switch
from tasks.extrapolation import Extrapolation

PAIRS_PREFIX = "pairs "
"""Start of the name of the extrapolation set with more pairs: "pairs N" for N pairs."""


class MultiQueryRecall(Extrapolation):
    """Pairs of a key and its value, then every key once more; where a key returns, its value must be predicted.

    The filler is token 0, keys are ``[1, V/2)`` and values ``[V/2, V)``. The keys of a sequence are different, and so
    are its values. Behind the pairs, every second position (from the first) can hold a query. One key after the other
    gets one of these positions, the i-th with weight ``i ** (alpha - 1)``, without replacement; all other positions
    hold fillers. The value does not follow its query. Only the queries have targets.

    The extrapolation sets "length N" hold longer sequences with ``pairs`` pairs. The set "pairs N" holds sequences of
    ``length`` with the most pairs that fit, if those are more than ``pairs``. With a ``mixture``, each of its kinds has
    a set "pairs N" instead.

    Example, first sequence of the test split of
    ``Config(vocab_size=12, length=16, pairs=3, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs    5 11  2  7  3  8  0  0  0  0  5  0  3  0  2  0
        targets   _  _  _  _  _  _  _  _  _  _ 11  _  8  _  7  _
        scored    .  .  .  .  .  .  .  .  .  .  ^  .  ^  .  ^  .

    Source: Arora et al. 2023 (arXiv:2312.04927), "multi-query associative recall".

    Differs from the reference:
        Arora et al. 2023 and https://github.com/HazyResearch/zoology, zoology/data/multiquery_ar.py and
        zoology/experiments/paper/zoology_figure2.py.

        - tokens: a vocabulary of 256; theirs has 8,192.
        - sequences: ``alpha`` is 0.1; theirs is 0.01 (``power_a``), so that queries come sooner. Token 0 stands where
          nothing is asked, as in their figure 2; the default of their code, which later papers use, has random tokens
          there (``random_non_queries``), an option here (``random_filler``).
        - training: 12,800 sequences of 128 tokens with 16 pairs, each read 200 times; theirs has 100,000, each read 64
          times, in trainings of their own for 64, 128, 256 and 512 tokens with 4, 8, 16 and 64 pairs. Arora et al. 2024
          (arXiv:2402.18668; paper_configs/arxiv24_based_figure2/configs.py) train on a mixture of 180,000 with 4 to 64
          pairs, in batches of one length. That is an option here (``mixture``), in batches of all lengths.
        - evaluation: longer sequences and more pairs; theirs has 3,000 like those of training. Arora et al. 2024 have
          up to 1,024 tokens with 256 pairs.
        - left out: several passes over the pairs (``num_passes``).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Extrapolation.Config):
        """Settings of multi-query associative recall.

        Attributes:
            vocab_size: the filler, keys and values together; half are values.
            length: tokens in a sequence, four or more for each pair.
            pairs: keys with their values in a sequence, and queries.
            alpha: exponent of the power law of the queries' places: near 0 most come soon, 1 is uniform.
            random_filler: random tokens, keys and values among them, in place of the filler.
            mixture: kinds of sequences, each a length and a number of pairs, of which one is drawn for each sequence in
                place of ``length`` and ``pairs``; a kind that stands there twice comes twice as often. Fillers lengthen
                sequences to ``length``.
        """

        vocab_size: int = 256
        length: int = 128
        pairs: int = 16
        alpha: float = 0.1
        random_filler: bool = switch(False)
        mixture: tuple[tuple[int, int], ...] = switch(())

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.pairs >= 1, f"pairs is {self.pairs}: use at least 1")

            require(
                self.vocab_size % 2 == 0 and self.vocab_size >= 2 * self.pairs + 2,
                f"vocab_size is {self.vocab_size}: a filler, {self.pairs} different keys and as many values or more "
                f"need an even number from {2 * self.pairs + 2}",
            )
            require(
                self.length % 2 == 0 and self.length >= 4 * self.pairs,
                f"length is {self.length}: {self.pairs} pairs and their queries need an even number from "
                f"{4 * self.pairs}",
            )

            require(0 < self.alpha <= 1, f"alpha is {self.alpha}: use a value above 0, at most 1")

            for length, pairs in self.mixture:
                require(
                    length <= self.length and 1 <= pairs <= self.pairs and 4 * pairs <= length,
                    f"mixture has length {length} with {pairs} pairs: use at most length, {self.length}, and pairs, "
                    f"{self.pairs}, and four tokens or more for each pair",
                )

    name = "mqar"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        "vocab_size": (512, 2048, 8192),
        "length": (64, 256, 512),
        "pairs": (4, 8, 32),
    }
    ladder = Ladder(
        # Four tokens of the vocabulary for each pair, or 64: with 256 a layer needs far longer to begin to learn.
        axis="pairs",
        rungs={
            pairs: {"pairs": pairs, "length": length, "vocab_size": max(64, 4 * pairs)}
            for pairs, length in {3: 32, 5: 32, 8: 48, 16: 64, 32: 128, 64: 256}.items()
        },
        shared={"extrapolation_factors": ()},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size // 2

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        if self.config.mixture:
            return (*super().extrapolation_names, *dict.fromkeys(f"{PAIRS_PREFIX}{p}" for _, p in self.config.mixture))
        most = min(self.config.length // 4, self.config.vocab_size // 2 - 1)
        return (*super().extrapolation_names, *((f"{PAIRS_PREFIX}{most}",) if most > self.config.pairs else ()))

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        pairs = int(split.removeprefix(PAIRS_PREFIX)) if split.startswith(PAIRS_PREFIX) else self.config.pairs
        kinds = [(self.length_of(split), pairs)]
        if self.config.mixture and not split.startswith(LENGTH_PREFIX):
            kinds = [kind for kind in self.config.mixture if kind[1] == pairs or not split.startswith(PAIRS_PREFIX)]
        kind_S = rng.integers(len(kinds), size=n) if len(kinds) > 1 else np.zeros(n, dtype=np.int64)

        inputs_ST = np.zeros((n, self.length_of(split)), dtype=np.int64)
        targets_ST = np.full_like(inputs_ST, IGNORE)
        for number, kind in enumerate(kinds):
            here_S = np.flatnonzero(kind_S == number)
            batch = self._of_kind(rng, len(here_S), *kind)
            inputs_ST[here_S, : kind[0]], targets_ST[here_S, : kind[0]] = batch.inputs_ST, batch.targets_ST

        if self.config.random_filler:
            inputs_ST = np.where(inputs_ST == 0, rng.integers(self.config.vocab_size, size=inputs_ST.shape), inputs_ST)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def _of_kind(self, rng: np.random.Generator, n: int, length: int, pairs: int) -> Batch:
        """Draw sequences of one length with the same number of pairs."""
        half = self.config.vocab_size // 2
        keys_SP = 1 + draw_distinct(rng, n, pairs, np.ones(half - 1))
        values_SP = half + draw_distinct(rng, n, pairs, np.ones(half))
        shown_ST = np.stack([keys_SP, values_SP], axis=2).reshape(n, 2 * pairs)
        return ask(rng, shown_ST, keys_SP[:, :, None], values_SP, length, self.config.alpha)

    def candidates(self, batch: Batch) -> Floats:
        return asked_values(batch)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every key behind the pairs is a query, and its value stands in the one pair that has the key."""
        return Accuracy(sequence=1.0, token=1.0)


def asked_values(batch: Batch) -> Floats:
    """Return the number of values (S, T) that a sequence asks for, as many as queries: chance draws one of them."""
    scored_S1 = batch.scored_ST.sum(axis=1, keepdims=True)
    return np.broadcast_to(scored_S1.astype(np.float64), batch.scored_ST.shape)


def ask(
    rng: np.random.Generator, shown_ST: Tokens, queries_SPQ: Tokens, answers_SP: Tokens, length: int, alpha: float
) -> Batch:
    """Return sequences that show some tokens and then ask queries among fillers (token 0), each followed by a filler.

    Behind the shown tokens, every position whose distance from them is a multiple of Q + 1 can begin a query. One query
    after the other gets one of these places, the i-th with weight ``i ** (alpha - 1)``, without replacement.

    Args:
        rng: source of randomness.
        shown_ST: tokens at the start of each sequence.
        queries_SPQ: tokens of the queries.
        answers_SP: targets at the last token of each query, the only targets.
        length: tokens in a sequence.
        alpha: exponent of the power law.
    """
    (n, shown), (pairs, parts) = shown_ST.shape, queries_SPQ.shape[1:]
    place_C = np.arange(1.0, (length - shown) // (parts + 1) + 1)
    starts_SP = shown + (parts + 1) * draw_distinct(rng, n, pairs, place_C ** (alpha - 1))

    inputs_ST = np.zeros((n, length), dtype=np.int64)
    inputs_ST[:, :shown] = shown_ST
    for part in range(parts):
        np.put_along_axis(inputs_ST, starts_SP + part, queries_SPQ[:, :, part], axis=1)

    targets_ST = np.full_like(inputs_ST, IGNORE)
    np.put_along_axis(targets_ST, starts_SP + parts - 1, answers_SP, axis=1)
    return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)


def draw_distinct(rng: np.random.Generator, n: int, count: int, weights_C: NDArray[np.float64]) -> Tokens:
    """Draw, for each of ``n`` rows, ``count`` different indices one after the other, by their weights among those left.

    They are the first of exponential arrival times with the weights as rates.

    Args:
        rng: source of randomness.
        n: number of rows.
        count: number P of indices in a row.
        weights_C: weight of each index.

    Returns:
        The indices (n, P), in the order drawn.
    """
    arrival_SC = rng.standard_exponential((n, len(weights_C))) / weights_C
    first_SP = np.argpartition(arrival_SC, count - 1, axis=1)[:, :count]
    order_SP = np.argsort(np.take_along_axis(arrival_SC, first_SP, axis=1), axis=1)
    return np.take_along_axis(first_SP, order_SP, axis=1)
