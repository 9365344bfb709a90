"""Copying of letter strings, whole or from a queried n-gram on.

Source: Jelassi et al. 2024, "Repeat After Me: Transformers are Better than State Space Models at Copying"
(arXiv:2402.01032).
Dimensions: S sequences, T positions, E examples packed into a sequence, N examples, C characters of an example.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.base import IGNORE, LENGTH_PREFIX, Accuracy, Batch, Floats, Ladder, Mask, Task, Tokens, require
from tasks.slots import shown_so_far
from tasks.strings import LETTERS, draw_with_repeated_ngram, draw_with_unique_ngram

BEGIN, SEPARATOR, END, PAD = range(LETTERS, LETTERS + 4)
ALPHABET = "abcdefghijklmnopqrstuvwxyz$|.*"
"""Character of each token."""

Variant = Literal["copy", "prefix-ngram", "suffix-ngram"]
DUPLICATE_NGRAM = "duplicate-ngram"


class Copying(Task):
    """A string of random letters must be repeated, or its part behind a queried n-gram.

    Tokens: a-z (0-25), ``$`` begin (26), ``|`` separator (27), ``.`` end (28), ``*`` padding (29). An example is

    - ``copy``: ``$x|x.``;
    - ``prefix-ngram``: ``$q|x|answer.``, where the n-gram q occurs once in x and the answer is the rest of x behind it;
    - ``suffix-ngram``: ``$x|q answer.`` without the space.

    A training sequence packs independent examples into ``context`` tokens. Only the answer and its ``.`` are targets; a
    last example that the context cuts off has none. Validation and test sequences hold one example each, padded on the
    right, with a string of ``eval_length`` letters. Answer letters are scored; the ``.`` behind them is trained but not
    scored. The model reads the correct answer up to each position.

    The extrapolation set "length N" holds strings of N letters, for each N of ``extrapolation_lengths``. For ``copy``
    the set "duplicate-ngram" holds strings of ``eval_length`` in which one n-gram occurs twice.

    Example, first sequence of the test split of
    ``Config(min_length=3, max_length=4, context=11, eval_length=6, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   $ i x x w g r | i x x w g r .
        targets  _ _ _ _ _ _ _ i x x w g r . _
        scored   . . . . . . . ^ ^ ^ ^ ^ ^ . .

    Source: Jelassi et al. 2024 (arXiv:2402.01032).

    Differs from the reference:
        Jelassi et al. 2024 and https://github.com/sjelassi/transformers_ssm_copy, synthetic_exps/data_utils.py.

        - sequences: an n-gram that is asked for occurs once in the string; theirs is drawn among all n-grams of a
          string that has a unique one, its last ones left out. In "duplicate-ngram" one n-gram occurs twice; theirs
          replaces every occurrence of one by another.
        - scoring: letters alone; theirs also scores the ``.`` behind them.
        - training: 12,800 packed sequences, each read 200 times; theirs draws new ones for every batch.
        - evaluation: strings of one length in each set; theirs draws lengths from a range.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of copying.

        Attributes:
            variant: what is asked for: the whole string, or what follows an n-gram given before or behind the string.
            min_length: letters in the shortest training string.
            max_length: letters in the longest training string.
            context: tokens in a training sequence.
            eval_length: letters in each validation and test string.
            extrapolation_lengths: letters in the strings of each extrapolation set.
            ngram: letters in a queried n-gram, and in the repeated one of the set "duplicate-ngram".
        """

        variant: Variant = "copy"
        min_length: int = 5
        max_length: int = 20
        context: int = 220
        eval_length: int = 20
        extrapolation_lengths: tuple[int, ...] = (30, 40, 50, 60, 70, 80, 90, 100)
        ngram: int = 3

        def __post_init__(self) -> None:
            super().__post_init__()
            require(1 <= self.ngram <= 10, f"ngram is {self.ngram}: use 1 to 10")

            # Training strings; an n-gram needs a letter behind it to ask for.
            least = 1 if self.variant == "copy" else self.ngram + 1
            require(
                self.min_length >= least, f"min_length is {self.min_length}: {self.variant} needs {least} or more here"
            )
            require(
                self.max_length >= self.min_length,
                f"max_length is {self.max_length}: use at least min_length, {self.min_length}",
            )

            # Training sequences.
            longest = example_length(self.variant, self.max_length)
            require(
                self.context >= longest,
                f"context is {self.context}: the longest example takes {longest} tokens, use at least that many",
            )

            # Evaluation strings.
            least = 2 * self.ngram if self.variant == "copy" else least
            require(
                self.eval_length >= least,
                f"eval_length is {self.eval_length}: with {self.ngram}-grams {self.variant} needs {least} or more",
            )

            # Extrapolation sets.
            beyond = all(length > self.eval_length for length in self.extrapolation_lengths)
            distinct = len(set(self.extrapolation_lengths)) == len(self.extrapolation_lengths)
            require(
                beyond and distinct,
                f"extrapolation_lengths are {self.extrapolation_lengths}: use different lengths above eval_length, "
                f"{self.eval_length}",
            )

        @property
        def train_length(self) -> int:
            return self.context

        @property
        def longest_length(self) -> int:
            letters = max(self.eval_length, *self.extrapolation_lengths, 0)
            return max(self.context, example_length(self.variant, letters))

    name = "copying"
    ladder = Ladder(
        # Below 8 letters there are too few strings for a test split that training does not show.
        axis="letters",
        rungs={
            letters: {"min_length": letters // 2, "max_length": letters, "eval_length": letters, "context": context}
            for letters, context in {8: 64, 12: 64, 16: 64, 24: 64, 40: 96, 60: 128}.items()
        },
        shared={"extrapolation_lengths": ()},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return len(ALPHABET)

    @property
    def answer_count(self) -> int:
        return LETTERS

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        lengths = tuple(f"{LENGTH_PREFIX}{length}" for length in self.config.extrapolation_lengths)
        return (*lengths, DUPLICATE_NGRAM) if self.config.variant == "copy" else lengths

    @property
    def trained_length(self) -> int:
        return self.config.max_length

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        if split == "train":
            return self._pack(rng, n)

        length = self.config.eval_length
        if split == DUPLICATE_NGRAM:
            letters_NC = draw_with_repeated_ngram(rng, n, length, self.config.ngram)
            start_N = np.zeros(n, dtype=np.int64)
            return _with_targets(*self._spell(letters_NC, np.full(n, length), start_N))

        if split in self.extrapolation_names:
            length = int(split.removeprefix(LENGTH_PREFIX))
        return _with_targets(*self._draw_examples(rng, np.full(n, length)))

    def _pack(self, rng: np.random.Generator, n: int) -> Batch:
        """Fill each of ``n`` contexts with examples, until one reaches its end."""
        context, ngram = self.config.context, self.config.ngram

        # Strings for as many examples as a context may need. An example has its least length if its query is the last
        # possible one. One that begins behind the context even if those before it have theirs is not drawn.
        extra = {"copy": 3, "prefix-ngram": ngram + 5, "suffix-ngram": ngram + 4}[self.config.variant]
        per_letter = 2 if self.config.variant == "copy" else 1
        per_row = -(-context // (per_letter * self.config.min_length + extra))
        lengths_SE = rng.integers(self.config.min_length, self.config.max_length + 1, size=(n, per_row))
        least_SE = per_letter * lengths_SE + extra
        drawn_SE = np.cumsum(least_SE, axis=1) - least_SE < context
        examples_NC, ends_N, answers_N = self._draw_examples(rng, lengths_SE[drawn_SE])

        # Keep the examples that begin within the context.
        ends_SE = np.zeros_like(lengths_SE)
        ends_SE[drawn_SE] = ends_N
        starts_N = (np.cumsum(ends_SE, axis=1) - ends_SE)[drawn_SE]
        begun_N = np.flatnonzero(starts_N < context)
        starts_N = starts_N[begun_N]
        batch = _with_targets(examples_NC[begun_N], ends_N[begun_N], answers_N[begun_N])

        # An example that the context cuts off has no targets.
        whole_N = starts_N + ends_N[begun_N] <= context
        inside_NC = np.arange(examples_NC.shape[1]) < np.minimum(ends_N[begun_N], context - starts_N)[:, None]

        # The examples of a row leave no gap, so their tokens in order are the rows in order.
        return Batch(
            inputs_ST=batch.inputs_ST[inside_NC].reshape(n, context),
            targets_ST=np.where(whole_N[:, None], batch.targets_ST, IGNORE)[inside_NC].reshape(n, context),
            scored_ST=(batch.scored_ST & whole_N[:, None])[inside_NC].reshape(n, context),
        )

    def _draw_examples(self, rng: np.random.Generator, lengths_N: Tokens) -> tuple[Tokens, Tokens, Tokens]:
        """Draw one example for each string length; see ``_spell``."""
        if self.config.variant == "copy":
            letters_NC = rng.integers(LETTERS, size=(len(lengths_N), int(lengths_N.max())))
            return self._spell(letters_NC, lengths_N, np.zeros_like(lengths_N))

        letters_NC, start_N = draw_with_unique_ngram(rng, lengths_N, self.config.ngram)
        return self._spell(letters_NC, lengths_N, start_N)

    def _spell(self, letters_NC: Tokens, lengths_N: Tokens, query_N: Tokens) -> tuple[Tokens, Tokens, Tokens]:
        """Write strings as examples of the variant.

        Args:
            letters_NC: the strings.
            lengths_N: their lengths.
            query_N: where the queried n-gram starts; not used by ``copy``.

        Returns:
            The tokens of each example, padded on the right to the most that a string of C letters may take, whatever
            was drawn; its length; the length of its answer.
        """
        longest = letters_NC.shape[1]
        width = example_length(self.config.variant, longest)
        character_C = np.arange(longest)

        # Parts of an example: tokens, and which of them belong to it.
        string = (letters_NC, character_C < lengths_N[:, None])
        query = (letters_NC, (character_C >= query_N[:, None]) & (character_C < query_N[:, None] + self.config.ngram))
        begin, separator, end = (
            (np.full((len(letters_NC), 1), token), np.ones((len(letters_NC), 1), dtype=np.bool_))
            for token in (BEGIN, SEPARATOR, END)
        )

        if self.config.variant == "copy":
            return (*_join(width, begin, string, separator, string, end), lengths_N)

        # The answer is the rest of the string behind the query.
        answers_N = lengths_N - query_N - self.config.ngram
        rest = (letters_NC, string[1] & (character_C >= (lengths_N - answers_N)[:, None]))
        if self.config.variant == "prefix-ngram":
            return (*_join(width, begin, query, separator, string, separator, rest, end), answers_N)
        return (*_join(width, begin, string, separator, query, rest, end), answers_N)

    def examples(self, batch: Batch) -> set[bytes]:
        """Return the complete examples of all sequences, whether packed or alone."""
        text = batch.inputs_ST.astype(np.uint8).tobytes()
        pieces = (piece.partition(bytes([END])) for piece in text.split(bytes([BEGIN])))
        return {example for example, end, _ in pieces if end}

    def candidates(self, batch: Batch) -> Floats:
        return shown_so_far(batch, range(LETTERS))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: every answer stands in the input, and the queried n-gram occurs once."""
        return Accuracy(sequence=1.0, token=1.0)


def example_length(variant: Variant, letters: int) -> int:
    """Return the most tokens that an example takes whose string has ``letters`` letters."""
    return 2 * letters + (4 if variant == "prefix-ngram" else 3)


def _join(width: int, *parts: tuple[Tokens, Mask]) -> tuple[Tokens, Tokens]:
    """Join the parts of each row.

    Args:
        width: tokens of a joined row, padding included.
        *parts: tokens (N, ...) and a mask of those that are joined.

    Returns:
        The joined tokens (N, width), padded on the right, and their number in each row (N,).
    """
    tokens_NC = np.concatenate([tokens for tokens, _ in parts], axis=1)
    kept_NC = np.concatenate([kept for _, kept in parts], axis=1)
    ends_N = kept_NC.sum(axis=1)

    joined_NC = np.full((len(ends_N), width), PAD, dtype=np.int64)
    joined_NC[np.arange(width) < ends_N[:, None]] = tokens_NC[kept_NC]
    return joined_NC, ends_N


def _with_targets(examples_NC: Tokens, ends_N: Tokens, answers_N: Tokens) -> Batch:
    """Return examples, one per sequence, with their targets: the answer, which ends before the ``.``, and that ``.``.

    Args:
        examples_NC: tokens of the examples, padded on the right.
        ends_N: length of each example.
        answers_N: length of each answer.
    """
    position_C = np.arange(examples_NC.shape[1])
    dot_N1 = ends_N[:, None] - 2
    target_NC = (position_C >= dot_N1 - answers_N[:, None]) & (position_C <= dot_N1)
    next_NC = np.roll(examples_NC, -1, axis=1)

    return Batch(
        inputs_ST=examples_NC,
        targets_ST=np.where(target_NC, next_NC, IGNORE),
        scored_ST=target_NC & (position_C < dot_N1),
    )
