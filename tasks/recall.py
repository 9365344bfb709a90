"""In-context recall and its noisy form: the value that followed a key before must be given back at the key.

Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (arXiv:2403.17844).
Dimensions: S sequences, T positions, P slots that each hold one key with its value (or two noise tokens).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Floats, Ladder, Task, require
from tasks.slots import choose, first_occurrence, shown_so_far

SWEEPS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (32, 64, 128),
    "length": (256, 512, 1024),
    "train_examples": (6400, 3200, 1600, 800),
}


class InContextRecall(Task):
    """Keys and values alternate; at every key that was shown before, its value must be predicted (multi-query).

    Keys are the tokens ``[0, V/2)``, values are ``[V/2, V)``. Each sequence draws its own map from keys to values. The
    last key of a sequence was always shown before. Every next token is a target; the last position has none.

    Example, first sequence of the test split of
    ``Config(vocab_size=8, length=12, data_seed=3, train_examples=1, eval_examples=1)``;
    ``_`` is no target, ``^`` a scored position::

        inputs   1 5 2 4 0 6 1 5 1 5 0 6
        targets  5 2 4 0 6 1 5 1 5 0 6 _
        scored   . . . . . . ^ . ^ . ^ .

    Source: Poli et al. 2024 (arXiv:2403.17844), "in-context recall".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_in_context_recall_instance``), with its option ``multi_query``.

        - sequences: ``length`` tokens; theirs ends at the last key, one token earlier.
        - left out: a single query behind a copy token (``multi_query`` off).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of in-context recall.

        Attributes:
            vocab_size: keys and values together, half of them keys.
            length: tokens in a sequence, two for each key with its value.
        """

        vocab_size: int = 16
        length: int = 128

        def __post_init__(self) -> None:
            super().__post_init__()
            even = self.vocab_size % 2 == 0 and self.vocab_size >= 4
            require(even, f"vocab_size is {self.vocab_size}: use an even number from 4, half keys and half values")
            check_length(self.length)

    name = "in-context-recall"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = SWEEPS
    ladder = Ladder(
        axis="vocabulary",
        rungs={
            size: {"vocab_size": size, "length": length}
            for size, length in {8: 64, 16: 64, 32: 64, 64: 64, 128: 128, 256: 128}.items()
        },
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return self.config.vocab_size // 2

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        return draw_recall(rng, n, self.config.length, self.answer_count)

    def candidates(self, batch: Batch) -> Floats:
        return shown_so_far(batch, range(self.answer_count, 2 * self.answer_count))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: the answer of every scored position stands behind an earlier occurrence of its key."""
        return Accuracy(sequence=1.0, token=1.0)


class NoisyInContextRecall(Task):
    """In-context recall in which some of the key-value slots hold two noise tokens instead.

    With N noise tokens, keys are ``[0, (V-N)/2)``, values ``[(V-N)/2, V-N)`` and noise ``[V-N, V)``. Each slot but the
    last is noise with probability ``noise_fraction``; at least one is not. Every next token is a target, noise
    tokens too, which cannot be predicted; the last position has none.

    Example, first sequence of the test split of
    ``Config(vocab_size=12, noise_vocab_size=4, noise_fraction=0.4, length=12, data_seed=3, train_examples=1,
    eval_examples=1)``; ``_`` is no target, ``^`` a scored position::

        inputs    2  7  0  4  9 10  0  4  0  4  0  4
        targets   7  0  4  9 10  0  4  0  4  0  4  _
        scored    .  .  .  .  .  .  ^  .  ^  .  ^  .

    Source: Poli et al. 2024 (arXiv:2403.17844), "noisy in-context recall".

    Differs from the reference:
        Poli et al. 2024 and https://github.com/athms/mad-lab, mad/data/instances.py
        (``generate_noisy_in_context_recall_instance``), with its option ``multi_query``.

        - sequences: ``length`` tokens; theirs ends at the last key, one token earlier.
        - left out: a single query behind a copy token (``multi_query`` off).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of noisy in-context recall.

        Attributes:
            vocab_size: keys, values and noise tokens together.
            noise_vocab_size: noise tokens among them; the rest is half keys and half values.
            noise_fraction: probability that a slot holds noise, in [0, 1).
            length: tokens in a sequence, two for each slot.
        """

        vocab_size: int = 32
        noise_vocab_size: int = 16
        noise_fraction: float = 0.2
        length: int = 128

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.noise_vocab_size >= 1, f"noise_vocab_size is {self.noise_vocab_size}: use at least 1")

            rest = self.vocab_size - self.noise_vocab_size
            require(
                rest % 2 == 0 and rest >= 4,
                f"vocab_size - noise_vocab_size is {rest}: use an even number from 4, half keys and half values",
            )
            require(
                0 <= self.noise_fraction < 1, f"noise_fraction is {self.noise_fraction}: use a value from 0 to below 1"
            )
            check_length(self.length)

    name = "noisy-in-context-recall"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SWEEPS,
        "vocab_size": (48, 80, 144),
        "noise_fraction": (0.4, 0.6, 0.8),
    }
    ladder = Ladder(
        # About 13 slots without noise in each sequence.
        axis="noise",
        rungs={
            noise: {"noise_fraction": noise, "length": length}
            for noise, length in {0.2: 32, 0.4: 42, 0.6: 64, 0.7: 86, 0.8: 128, 0.85: 172}.items()
        },
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def answer_count(self) -> int:
        return (self.config.vocab_size - self.config.noise_vocab_size) // 2

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        config = self.config
        noise = (config.noise_vocab_size, config.noise_fraction)
        return draw_recall(rng, n, config.length, self.answer_count, *noise)

    def candidates(self, batch: Batch) -> Floats:
        return shown_so_far(batch, range(self.answer_count, 2 * self.answer_count))

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: the answer of every scored position stands behind an earlier occurrence of its key."""
        return Accuracy(sequence=1.0, token=1.0)


def check_length(length: int) -> None:
    """Reject a length that does not hold whole key-value slots, at least one that shows a key and one that asks for it.

    Raises:
        ValueError: in one line, with what to change.
    """
    require(length % 2 == 0 and length >= 4, f"length is {length}: use an even number from 4, whole key-value pairs")


def draw_recall(
    rng: np.random.Generator, n: int, length: int, keys: int, noise_vocab: int = 0, noise_fraction: float = 0.0
) -> Batch:
    """Draw recall sequences.

    Args:
        rng: source of randomness.
        n: number of sequences.
        length: tokens in a sequence.
        keys: number of keys, and of values.
        noise_vocab: number of noise tokens.
        noise_fraction: probability that a slot holds noise.
    """
    # Slots that show keys, or noise; at least one shows a key.
    shown = length // 2 - 1
    keys_SP = rng.integers(keys, size=(n, shown))
    noise_SP = rng.random((n, shown)) < noise_fraction
    noise_SP[np.arange(n), rng.integers(shown, size=n)] = False

    # A code of its own keeps a noise slot from ever matching another slot.
    first_SP = first_occurrence(np.where(noise_SP, keys + np.arange(shown), keys_SP))

    # A last slot that asks for a key shown before.
    asked_S = choose(rng, ~noise_SP & (first_SP == np.arange(shown)))
    keys_SP = np.column_stack([keys_SP, keys_SP[np.arange(n), asked_S]])
    first_SP = np.column_stack([first_SP, asked_S])
    noise_SP = np.column_stack([noise_SP, np.zeros(n, dtype=np.bool_)])

    # Each key has the value of its first occurrence.
    values_SP = np.take_along_axis(rng.integers(keys, 2 * keys, size=first_SP.shape), first_SP, axis=1)
    slots_SP2 = np.stack([keys_SP, values_SP], axis=2)

    # Noise in place of keys and values.
    if noise_vocab:
        noise_tokens_SP2 = rng.integers(2 * keys, 2 * keys + noise_vocab, size=slots_SP2.shape)
        slots_SP2 = np.where(noise_SP[:, :, None], noise_tokens_SP2, slots_SP2)
    inputs_ST = slots_SP2.reshape(n, length)

    # Every next token is a target; values of keys shown before are scored.
    targets_ST = np.full((n, length), IGNORE, dtype=np.int64)
    targets_ST[:, :-1] = inputs_ST[:, 1:]
    scored_ST = np.zeros((n, length), dtype=np.bool_)
    scored_ST[:, 0::2] = first_SP != np.arange(shown + 1)
    return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=scored_ST)
