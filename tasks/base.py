"""Interface of a task: seeded splits of token sequences, the positions that count, the best and worst possible score.

Beside its splits a task may have extrapolation sets: evaluation sequences of settings that training does not show, such
as longer sequences or more pairs. They are read once, for the model that was chosen without them.

Dimensions: S sequences, T positions, V vocabulary.
"""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Target of a position that carries no training loss (the default ``ignore_index`` of torch's cross-entropy)."""

BLOCK = 1_280
"""Sequences drawn from one random stream. A split is made of whole blocks, so that a smaller split is a prefix."""

LONG = 10 * BLOCK
"""Sequences beyond which a training split is drawn for training alone; its first block stands for it before."""

FRESH = 102_400
"""Training sequences of a rung, too many to be learnt by heart: 80 blocks, 800 steps of 128 sequences."""

LENGTH_PREFIX = "length "
"""Start of the names of extrapolation sets that form a curve over the length: "length N" for N tokens."""

Split = Literal["train", "validation", "test"]
BackboneName = Literal["language-model", "autoencoder"]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]


class SplitOverlapError(ValueError):
    """Two splits of one dataset share a sequence."""


def switch(off: Any) -> Any:
    """Return a field of a ``Config`` with the default ``off``. With this value, it is not part of a result's identity.

    If a task gains such a field, earlier results stay comparable. (Layers have the same in ``mixers.options``.)
    """
    return field(default=off, metadata={"switch": True})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences with their targets, aligned: the target of position t is what the model must output at position t.

    Attributes:
        inputs_ST: tokens that the model reads, in ``[0, vocab_size)``.
        targets_ST: token that the model should output at each position, ``IGNORE`` where there is no training loss.
        scored_ST: positions that count in the accuracies; every one of them has a target.
    """

    inputs_ST: Tokens
    targets_ST: Tokens
    scored_ST: Mask

    def __len__(self) -> int:
        return len(self.inputs_ST)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Shares in [0, 1].

    Attributes:
        sequence: share of the sequences whose scored positions are all right.
        token: share of the scored positions that are right (micro average).
    """

    sequence: float
    token: float


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Settings of a task from easy to hard, in which one thing grows.

    Attributes:
        axis: what grows, in words.
        rungs: the settings of each rung by its value on the axis, in ascending order.
        shared: settings that all rungs share.
    """

    axis: str
    rungs: Mapping[float, Mapping[str, Any]]
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[float, dict[str, Any]]:
        """All settings of each rung, beside the defaults of the task's ``Config``."""
        return {value: {"train_examples": FRESH, **self.shared, **rung} for value, rung in self.rungs.items()}


class Task(ABC):
    """A diagnostic task. Subclasses hold a nested frozen ``Config`` whose defaults are the baseline setting.

    A subclass draws sequences in ``sample`` and states its ``ceiling`` and ``answer_count``. Splits, seeds, the overlap
    check and the chance floor are here.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings common to all tasks.

        Attributes:
            train_examples: sequences in the training split.
            eval_examples: sequences in each of the validation and test splits, and in each extrapolation set.
            data_seed: root of the seed streams of the three splits.
        """

        train_examples: int = 12_800
        eval_examples: int = 1_280
        data_seed: int = 0

        def __post_init__(self) -> None:
            """Reject impossible settings.

            Raises:
                ValueError: in one line, with what to change.
            """
            require(self.train_examples >= 1, f"train_examples is {self.train_examples}: use at least 1")
            require(self.eval_examples >= 1, f"eval_examples is {self.eval_examples}: use at least 1")
            require(self.data_seed >= 0, f"data_seed is {self.data_seed}: use 0 or more")

        @property
        def train_length(self) -> int:
            """Positions of a training sequence; a task whose ``Config`` has no ``length`` states them."""
            return int(vars(self)["length"])

        @property
        def longest_length(self) -> int:
            """Positions of the longest sequence of all splits and extrapolation sets."""
            return self.train_length

    name: ClassVar[str]
    """Key of the task in the registry; part of the seed of its streams."""
    backbone: ClassVar[BackboneName] = "language-model"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Config field -> the values that the difficulty sweep changes it to, one field at a time."""
    ladder: ClassVar[Ladder | None] = None
    """Six rungs of difficulty, at which the training, validation and test splits share no sequence."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Size V of the model's vocabulary: tokens and targets lie in ``[0, V)``."""

    @property
    @abstractmethod
    def answer_count(self) -> int:
        """Number of tokens that can be the answer at a scored position."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        """Draw sequences.

        Args:
            rng: the only source of randomness.
            n: number of sequences.
            split: name of a split or extrapolation set.
        """

    @abstractmethod
    def ceiling(self, split: str) -> Accuracy:
        """Return the best expected accuracy of a solver that sees only each input and the training split.

        Args:
            split: name of a split or extrapolation set.
        """

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        """Names of the extrapolation sets."""
        return ()

    @property
    def trained_length(self) -> int | None:
        """N of the longest training sequences, as in the names of sets called "length N"; None without such sets."""
        return None

    def split(self, name: Split) -> Batch:
        """Return one of the three splits, drawn once.

        The validation and test splits do not depend on ``train_examples``; a smaller split is a prefix of a larger one.

        Raises:
            SplitOverlapError: if it is the training split and shares an example with another split or an extrapolation
                set, or if these two splits share one.
            ValueError: if a token is not in ``[0, vocab_size)``, or a scored position has no target.
            KeyError: if ``name`` is not a split.
        """
        return self._train if name == "train" else self._others[name]

    def extrapolation_sets(self) -> Mapping[str, Batch]:
        """Return the extrapolation sets by name, drawn once.

        Raises:
            ValueError: as for splits.
        """
        return self._extrapolation_sets

    def batch(self, name: str) -> Batch:
        """Return the split or extrapolation set called ``name``.

        Raises:
            KeyError: if there is none.
        """
        return self._extrapolation_sets[name] if name in self.extrapolation_names else self.split(name)  # type: ignore[arg-type]

    def chance(self, split: str) -> Accuracy:
        """Return the expected accuracy of a solver that draws each answer uniformly from its ``candidates``.

        Args:
            split: name of a split or extrapolation set.
        """
        batch = self.batch(split)
        guessed_ST = 1 / np.where(batch.scored_ST, self.candidates(batch), 1)
        return Accuracy(sequence=float(guessed_ST.prod(axis=1).mean()), token=float(guessed_ST[batch.scored_ST].mean()))

    def candidates(self, batch: Batch) -> Floats:
        """Return the number of answers (S, T), at scored positions, among which chance draws: all that are possible.

        A task whose answers stand in the sequence returns the number of those that it has shown.
        """
        return np.full(batch.scored_ST.shape, float(self.answer_count))

    def fingerprint(self) -> str:
        """Return the SHA-256, in hexadecimal, over all splits and extrapolation sets; equal on every platform.

        Of a training split of more than ``LONG`` sequences it is over the first block.
        """
        digest = hashlib.sha256()
        for name in (*get_args(Split), *self.extrapolation_names):
            is_long = name == "train" and self.config.train_examples > LONG
            batch = self._draw(name, BLOCK) if is_long else self.batch(name)
            digest.update(f"{name} {batch.inputs_ST.shape}".encode())
            for array_ST in (batch.inputs_ST, batch.targets_ST, batch.scored_ST):
                digest.update(np.ascontiguousarray(array_ST, dtype="<i4").data)
        return digest.hexdigest()

    def stream(self, purpose: str, block: int = 0) -> np.random.Generator:
        """Return a random stream that depends on the data seed, the task's name and the arguments alone.

        Args:
            purpose: name of a split or extrapolation set, or of anything else that the task fixes once.
            block: number of the block within a split.
        """
        words = np.frombuffer(hashlib.sha256(f"{self.name}/{purpose}".encode()).digest(), dtype="<u4")
        entropy = [self.config.data_seed, *(int(word) for word in words)]
        return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(block,)))

    def examples(self, batch: Batch) -> set[bytes]:
        """Return what two splits must not share: the input sequences, unless a task packs several examples into one."""
        return {row.tobytes() for row in batch.inputs_ST.astype("<i4")}

    @cached_property
    def _others(self) -> dict[str, Batch]:
        return {name: self._draw(name, self.config.eval_examples) for name in get_args(Split) if name != "train"}

    @cached_property
    def _train(self) -> Batch:
        train = self._draw("train", self.config.train_examples)
        examples = {name: self.examples(batch) for name, batch in {"train": train, **self._others}.items()}
        for first, second in itertools.combinations(examples, 2):
            self._check_disjoint(first, examples[first], second, examples[second])
        for name, batch in self._extrapolation_sets.items():
            self._check_disjoint("train", examples["train"], name, self.examples(batch))
        return train

    @cached_property
    def _extrapolation_sets(self) -> dict[str, Batch]:
        return {name: self._draw(name, self.config.eval_examples) for name in self.extrapolation_names}

    def _draw(self, name: str, n: int) -> Batch:
        """Draw the first ``n`` sequences of a split or extrapolation set.

        Whole blocks are drawn, so that ``n`` changes none of the sequences.

        Raises:
            ValueError: if a token is not in ``[0, vocab_size)``, or a scored position has no target.
        """
        # One block after the other, while it is in the processor's cache.
        blocks: list[Batch] = []
        for block in range(-(-n // BLOCK)):
            batch = self.sample(self.stream(name, block), BLOCK, name)
            targeted_ST = batch.targets_ST != IGNORE
            tokens = np.concatenate([batch.inputs_ST.ravel(), batch.targets_ST[targeted_ST]])
            inside = tokens.min() >= 0 and tokens.max() < self.vocab_size
            require(
                inside,
                f"{self.name}: {name} has tokens outside of [0, {self.vocab_size}): correct sample or vocab_size",
            )
            unanswered = (batch.scored_ST & ~targeted_ST).any()
            require(not unanswered, f"{self.name}: {name} scores positions without a target: correct sample")
            blocks.append(batch)
        return Batch(
            inputs_ST=np.concatenate([block.inputs_ST for block in blocks])[:n],
            targets_ST=np.concatenate([block.targets_ST for block in blocks])[:n],
            scored_ST=np.concatenate([block.scored_ST for block in blocks])[:n],
        )

    def _check_disjoint(self, first: str, first_examples: set[bytes], second: str, second_examples: set[bytes]) -> None:
        shared = len(first_examples & second_examples)
        if shared:
            raise SplitOverlapError(
                f"{self.name}: {first} and {second} share {shared} examples: there are too few different ones; "
                "use longer sequences, a larger vocabulary or fewer examples"
            )


def require(condition: bool, message: str) -> None:
    """Reject a setting.

    Raises:
        ValueError: with ``message``, unless ``condition`` holds.
    """
    if not condition:
        raise ValueError(message)
