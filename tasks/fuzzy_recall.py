"""Fuzzy in-context recall: keys and values are motifs of several tokens.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
Dimensions: S sequences, T positions, P slots that each hold one key motif with its value motif, M tokens of a motif.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Mask, Task, Tokens, require
from tasks.recall import SWEEPS
from tasks.slots import choose, first_occurrence

LONGEST_KEYS = "longest keys"


class FuzzyInContextRecall(Task):
    """Key motifs and value motifs of 1 to ``max_motif`` tokens alternate; values of keys shown before are predicted.

    Key tokens are ``[0, K)`` with K = (V-1)//2, value tokens ``[K, V-1)``, padding ``V-1``, all at the left. The tokens
    of a motif differ. Key and value tokens are disjoint, so motifs are the runs of one kind. Where a key ends is known
    to whoever has seen it before: in each sequence, all keys with the same first token have the same length, so no key
    is the beginning of another. The last key of a sequence was always shown before.

    Scored are, for a key shown before, the position of its last token (target: first token of the value) and the
    positions of all value tokens but the last (target: the next one). Training loss on every next token; padding and
    the last position have none.

    The probe ``longest keys`` holds only keys of ``max_motif`` tokens, as the evaluation in the source does.

    Example, first sequence of the test split of
    ``Config(vocab_size=9, length=16, max_motif=2, data_seed=4, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   8 3 5 0 3 7 6 2 4 5 3 5 0 3 7 6
        targets  _ 5 0 3 7 6 2 4 5 3 5 0 3 7 6 _
        scored   . . . . . . . . . . ^ . . ^ ^ .

    Source: Poli et al. 2024 (arXiv:2403.17844), "fuzzy in-context recall".
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
            smallest = max(5, 2 * self.max_motif + 1)
            require(
                self.vocab_size >= smallest,
                f"vocab_size is {self.vocab_size}: motifs of {self.max_motif} different tokens need {smallest} or more",
            )
            require(
                ((self.vocab_size + 1) // 2) ** self.max_motif * self.length < 2**62,
                f"max_motif is {self.max_motif}: too many motifs to number, use a smaller one",
            )
            shortest = 4 * self.max_motif
            require(
                self.length >= shortest,
                f"length is {self.length}: two pairs of motifs of {self.max_motif} tokens need {shortest} or more",
            )

    name = "fuzzy-in-context-recall"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = SWEEPS
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
    def probe_names(self) -> tuple[str, ...]:
        return (LONGEST_KEYS,)

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        length, longest, key_tokens = self.config.length, self.config.max_motif, self.key_tokens
        room = length - 2 * longest  # left for the last pair, which asks for a key that the others have shown
        slots = room // 2 + 1
        shortest = longest if split == LONGEST_KEYS else 1
        lengths_SK = rng.integers(shortest, longest + 1, size=(n, key_tokens))
        keys_SPM = draw_motifs(rng, (n, slots), key_tokens, longest)
        key_lengths_SP = np.take_along_axis(lengths_SK, keys_SPM[:, :, 0], axis=1)
        # With values of one token, no sequence fills more slots than these.
        slots = int((np.cumsum(key_lengths_SP + 1, axis=1) <= room).sum(axis=1).max()) + 1
        keys_SPM, key_lengths_SP = keys_SPM[:, :slots], key_lengths_SP[:, :slots]
        values_SPM = key_tokens + draw_motifs(rng, (n, slots), self.answer_count, longest)
        value_lengths_SP = rng.integers(1, longest + 1, size=(n, slots))

        slot_P = np.arange(slots)
        first_SP = first_occurrence(number_motifs(keys_SPM, key_lengths_SP, key_tokens))
        value_lengths_SP = np.take_along_axis(value_lengths_SP, first_SP, axis=1)
        shown_SP = np.cumsum(key_lengths_SP + value_lengths_SP, axis=1) <= room
        asked_S = choose(rng, shown_SP & (first_SP == slot_P))
        last_SP = slot_P == shown_SP.sum(axis=1, keepdims=True)
        source_SP = np.where(last_SP, asked_S[:, None], slot_P)[:, : int(shown_SP.sum(axis=1).max()) + 1]
        used_SP = (shown_SP | last_SP)[:, : source_SP.shape[1]]
        first_SP = np.take_along_axis(first_SP, source_SP, axis=1)

        return self._lay_out(
            keys_SPM=np.take_along_axis(keys_SPM, source_SP[:, :, None], axis=1),
            values_SPM=np.take_along_axis(values_SPM, first_SP[:, :, None], axis=1),
            key_lengths_SP=np.take_along_axis(key_lengths_SP, source_SP, axis=1) * used_SP,
            value_lengths_SP=np.take_along_axis(value_lengths_SP, source_SP, axis=1) * used_SP,
            asked_SP=first_SP != slot_P[: source_SP.shape[1]],
        )

    def _lay_out(
        self, *, keys_SPM: Tokens, values_SPM: Tokens, key_lengths_SP: Tokens, value_lengths_SP: Tokens, asked_SP: Mask
    ) -> Batch:
        """Write the motifs one behind the other, against the right edge; a slot of length 0 is left out."""
        pad = self.config.vocab_size - 1
        inputs_ST = np.full((len(keys_SPM), self.config.length), pad, dtype=np.int64)
        scored_ST = np.zeros(inputs_ST.shape, dtype=np.bool_)
        ends_SP = np.cumsum(key_lengths_SP + value_lengths_SP, axis=1)
        ends_SP += self.config.length - ends_SP[:, -1:]
        value_starts_SP = ends_SP - value_lengths_SP
        key_starts_SP = value_starts_SP - key_lengths_SP
        for token in range(self.config.max_motif):
            rows, slots = np.nonzero(token < key_lengths_SP)
            inputs_ST[rows, key_starts_SP[rows, slots] + token] = keys_SPM[rows, slots, token]
            rows, slots = np.nonzero(token < value_lengths_SP)
            positions = value_starts_SP[rows, slots] + token
            inputs_ST[rows, positions] = values_SPM[rows, slots, token]
            scored_ST[rows, positions - 1] = asked_SP[rows, slots]

        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, :-1] = np.where(inputs_ST[:, :-1] != pad, inputs_ST[:, 1:], IGNORE)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)

    def ceiling(self, split: str) -> Accuracy:
        """1: a key shown before is recognised at its last token, and its value stands behind its first occurrence."""
        return Accuracy(sequence=1.0, token=1.0)


def draw_motifs(rng: np.random.Generator, shape: tuple[int, int], tokens: int, longest: int) -> Tokens:
    """Draw, for each entry of ``shape``, ``longest`` different tokens of ``[0, tokens)`` in random order."""
    motifs_SPM = np.empty((*shape, longest), dtype=np.int64)
    for position in range(longest):
        # The rank among the tokens not used yet becomes a token by stepping over the used ones, smallest first.
        motif_SP = rng.integers(tokens - position, size=shape)
        used_SPM = np.sort(motifs_SPM[:, :, :position], axis=2)
        for earlier in range(position):
            motif_SP += motif_SP >= used_SPM[:, :, earlier]
        motifs_SPM[:, :, position] = motif_SP
    return motifs_SPM


def number_motifs(motifs_SPM: Tokens, lengths_SP: Tokens, tokens: int) -> Tokens:
    """A number for each motif, cut to its length; different motifs of ``[0, tokens)`` have different numbers."""
    codes_SP = np.zeros_like(lengths_SP)
    for position in range(motifs_SPM.shape[2]):
        digit_SP = np.where(position < lengths_SP, motifs_SPM[:, :, position] + 1, 0)
        codes_SP = codes_SP * (tokens + 1) + digit_SP
    return codes_SP
