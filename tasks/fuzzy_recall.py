"""Fuzzy in-context recall: keys and values are motifs of several tokens.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
Dimensions: S sequences, T positions, P slots that each hold one key motif with its value motif, M tokens of a motif.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Floats, Ladder, Mask, Task, Tokens, require
from tasks.recall import SWEEPS
from tasks.slots import choose, first_occurrence, shown_so_far

LONGEST_KEYS = "longest keys"


class FuzzyInContextRecall(Task):
    """Key motifs and value motifs of 1 to ``max_motif`` tokens alternate; values of keys shown before are predicted.

    Key tokens are ``[0, K)`` with K = (V-1)//2, value tokens ``[K, V-1)``. The padding ``V-1`` stands at the left. The
    tokens of a motif differ. Key and value tokens are disjoint, so a motif is a maximal run of tokens of one kind. In
    each sequence, all keys with the same first token have the same length, so no key is the beginning of another, and
    the end of a key that was shown before is known. The last key of a sequence was always shown before.

    For a key shown before, these positions are scored: that of its last token (target: first token of the value) and
    those of all value tokens but the last (target: the next one). Every next token is a target; padding and the last
    position have none.

    The extrapolation set "longest keys" holds only keys of ``max_motif`` tokens, as the evaluation in the source does.

    Example, first sequence of the test split of
    ``Config(vocab_size=9, length=16, max_motif=2, data_seed=4, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   8 3 5 0 3 7 6 2 4 5 3 5 0 3 7 6
        targets  _ 5 0 3 7 6 2 4 5 3 5 0 3 7 6 _
        scored   . . . . . . . . . . ^ . . ^ ^ .

    Source: Poli et al. 2024 (arXiv:2403.17844), "fuzzy in-context recall".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_fuzzy_in_context_recall_instance``), with its option ``multi_query``.

        - tokens: in a sequence, keys with the same first token have the same length, so that none begins another;
          theirs are drawn independently, so that the end of a key is not known from what has been read.
        - sequences: the last key was always shown before; in theirs the key that is asked last may never have been.
        - training: theirs has about 13 answers in a sequence, ours 25.7, since fewer keys are possible; padding is a
          target in theirs.
        - evaluation: keys of 1 to ``max_motif`` tokens, as in training, with 25.7 answers in a sequence; theirs has the
          longest keys alone, with 4.4, which is the extrapolation set "longest keys" here.
        - left out: noise; a single query behind a copy token (``multi_query`` off).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of fuzzy in-context recall.

        Attributes:
            vocab_size: key tokens, value tokens and the padding token together.
            length: tokens in a sequence, padding included.
            max_motif: most tokens in a key or value motif.
        """

        vocab_size: int = 16
        length: int = 128
        max_motif: int = 3

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.max_motif >= 1, f"max_motif is {self.max_motif}: use at least 1")

            # Tokens.
            smallest = max(5, 2 * self.max_motif + 1)
            require(
                self.vocab_size >= smallest,
                f"vocab_size is {self.vocab_size}: motifs of {self.max_motif} different tokens need {smallest} or more",
            )
            require(
                ((self.vocab_size + 1) // 2) ** self.max_motif * self.length < 2**62,
                f"max_motif is {self.max_motif}: too many motifs to number, use a smaller one",
            )

            # Positions.
            shortest = 4 * self.max_motif
            require(
                self.length >= shortest,
                f"length is {self.length}: two pairs of motifs of {self.max_motif} tokens need {shortest} or more",
            )

    name = "fuzzy-in-context-recall"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = SWEEPS
    ladder = Ladder(
        axis="tokens of a motif",
        rungs={longest: {"max_motif": longest, "length": 64 if longest < 4 else 128} for longest in range(1, 7)},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def key_tokens(self) -> int:
        """Number K of tokens that keys are made of."""
        return (self.config.vocab_size - 1) // 2

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size - 1 - self.key_tokens

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        return (LONGEST_KEYS,)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        longest = self.config.max_motif
        key_tokens = self.key_tokens

        # The last pair, which asks for a key that the others have shown, may need the tokens beyond this room.
        room = self.config.length - 2 * longest
        slots = room // 2 + 1

        # Keys; those with the same first token have the same length.
        shortest = longest if split == LONGEST_KEYS else 1
        lengths_SK = rng.integers(shortest, longest + 1, size=(n, key_tokens))
        keys_SPM = draw_motifs(rng, (n, slots), key_tokens, longest)
        key_lengths_SP = np.take_along_axis(lengths_SK, keys_SPM[:, :, 0], axis=1)

        # Even with values of one token, no sequence fills more slots than these.
        slots = int((np.cumsum(key_lengths_SP + 1, axis=1) <= room).sum(axis=1).max()) + 1
        keys_SPM, key_lengths_SP = keys_SPM[:, :slots], key_lengths_SP[:, :slots]

        # Values; a slot has the value of the first slot with its key.
        values_SPM = key_tokens + draw_motifs(rng, (n, slots), self.answer_count, longest)
        drawn_lengths_SP = rng.integers(1, longest + 1, size=(n, slots))
        first_SP = first_occurrence(number_motifs(keys_SPM, key_lengths_SP, key_tokens))
        value_lengths_SP = np.take_along_axis(drawn_lengths_SP, first_SP, axis=1)

        # Slots that fit, and behind them one that repeats the slot of a key shown before.
        slot_P = np.arange(slots)
        shown_SP = np.cumsum(key_lengths_SP + value_lengths_SP, axis=1) <= room
        asked_S = choose(rng, shown_SP & (first_SP == slot_P))
        last_SP = slot_P == shown_SP.sum(axis=1, keepdims=True)
        source_SP = np.where(last_SP, asked_S[:, None], slot_P)[:, : int(shown_SP.sum(axis=1).max()) + 1]
        used_SP = (shown_SP | last_SP)[:, : source_SP.shape[1]]
        first_of_source_SP = np.take_along_axis(first_SP, source_SP, axis=1)

        return self._lay_out(
            keys_SPM=np.take_along_axis(keys_SPM, source_SP[:, :, None], axis=1),
            values_SPM=np.take_along_axis(values_SPM, first_of_source_SP[:, :, None], axis=1),
            key_lengths_SP=np.take_along_axis(key_lengths_SP, source_SP, axis=1) * used_SP,
            value_lengths_SP=np.take_along_axis(value_lengths_SP, source_SP, axis=1) * used_SP,
            asked_SP=first_of_source_SP != slot_P[: source_SP.shape[1]],
        )

    def _lay_out(
        self, *, keys_SPM: Tokens, values_SPM: Tokens, key_lengths_SP: Tokens, value_lengths_SP: Tokens, asked_SP: Mask
    ) -> Batch:
        """Write the motifs one behind the other, against the right edge.

        Args:
            keys_SPM: keys, each of at least its length.
            values_SPM: values, each of at least its length.
            key_lengths_SP: tokens of each key; 0 leaves the slot out.
            value_lengths_SP: tokens of each value; 0 leaves the slot out.
            asked_SP: slots whose values are scored.
        """
        pad = self.config.vocab_size - 1
        inputs_ST = np.full((len(keys_SPM), self.config.length), pad, dtype=np.int64)
        scored_ST = np.zeros(inputs_ST.shape, dtype=np.bool_)

        # Places of the motifs.
        ends_SP = np.cumsum(key_lengths_SP + value_lengths_SP, axis=1)
        ends_SP += self.config.length - ends_SP[:, -1:]
        value_starts_SP = ends_SP - value_lengths_SP
        key_starts_SP = value_starts_SP - key_lengths_SP

        # The motifs, token by token; the position before a token of an asked value is scored.
        for token in range(self.config.max_motif):
            rows, slots = np.nonzero(token < key_lengths_SP)
            inputs_ST[rows, key_starts_SP[rows, slots] + token] = keys_SPM[rows, slots, token]

            rows, slots = np.nonzero(token < value_lengths_SP)
            positions = value_starts_SP[rows, slots] + token
            inputs_ST[rows, positions] = values_SPM[rows, slots, token]
            scored_ST[rows, positions - 1] = asked_SP[rows, slots]

        # Every next token is a target, except behind padding.
        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, :-1] = np.where(inputs_ST[:, :-1] != pad, inputs_ST[:, 1:], IGNORE)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)

    def candidates(self, batch: Batch) -> Floats:
        return shown_so_far(batch, range(self.key_tokens, self.key_tokens + self.answer_count))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: the last token of a key shown before tells the key, whose value stands in the input."""
        return Accuracy(sequence=1.0, token=1.0)


def draw_motifs(rng: np.random.Generator, shape: tuple[int, int], tokens: int, longest: int) -> Tokens:
    """Draw, for each entry of ``shape``, ``longest`` different tokens of ``[0, tokens)`` in random order.

    Returns:
        The tokens, with shape ``(*shape, longest)``.
    """
    motifs_SPM = np.empty((*shape, longest), dtype=np.int64)
    used: list[Tokens] = []  # ascending
    for position in range(longest):
        motif_SP = rng.integers(tokens - position, size=shape)

        # The number drawn is a rank among the unused tokens; stepping over the used ones in order gives the token.
        for used_SP in used:
            motif_SP += motif_SP >= used_SP
        motifs_SPM[:, :, position] = motif_SP

        # Put in order one by one: np.sort of so few takes three times as long.
        for n, used_SP in enumerate(used):
            used[n], motif_SP = np.minimum(used_SP, motif_SP), np.maximum(used_SP, motif_SP)
        used.append(motif_SP)
    return motifs_SPM


def number_motifs(motifs_SPM: Tokens, lengths_SP: Tokens, tokens: int) -> Tokens:
    """Return a number for each motif, cut to its length; different motifs have different numbers.

    Args:
        motifs_SPM: motifs of the tokens ``[0, tokens)``.
        lengths_SP: length of each motif.
        tokens: number of tokens.
    """
    codes_SP = np.zeros_like(lengths_SP)
    for position in range(motifs_SPM.shape[2]):
        digit_SP = np.where(position < lengths_SP, motifs_SPM[:, :, position] + 1, 0)
        codes_SP = codes_SP * (tokens + 1) + digit_SP
    return codes_SP
