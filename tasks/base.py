"""What a task is: seeded splits of token sequences, the positions that count, and the best and worst possible score.

Dimensions: S sequences, T positions, V vocabulary.
"""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""Target of a position that carries no training loss (the default ``ignore_index`` of torch's cross-entropy)."""

BLOCK = 1_280
"""Sequences drawn from one random stream; a split is as many blocks as it needs, so a smaller one is a prefix."""

LENGTH_PROBE = "length "
"""What the name of a probe begins with that is a point of a curve over the length: "length N" for N tokens."""

Split = Literal["train", "validation", "test"]
Backbone = Literal["language-model", "autoencoder"]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]


class SplitOverlapError(ValueError):
    """Two splits of one dataset share a sequence."""


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
    """Shares in [0, 1]: of sequences whose scored positions are all right, and of scored positions (micro average)."""

    sequence: float
    token: float


class Task(ABC):
    """A diagnostic task. Subclasses hold a nested frozen ``Config`` whose defaults are the baseline setting.

    A subclass draws sequences in ``sample`` and states its ``ceiling`` and ``answer_count``; splits, seeds, the overlap
    check and the chance floor are here.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings common to all tasks.

        Attributes:
            train_examples: sequences in the training split.
            eval_examples: sequences in each of the validation and test splits, and in each probe.
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

    name: ClassVar[str]
    """Key of the task in the registry; part of the seed of its streams."""
    backbone: ClassVar[Backbone] = "language-model"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Config field -> the values that the difficulty sweep changes it to, one field at a time."""

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
        """Draw ``n`` sequences of a split or probe from ``rng`` alone (no other source of randomness)."""

    @abstractmethod
    def ceiling(self, split: str) -> Accuracy:
        """Best expected accuracy, on a split or probe, of a solver that sees only each input and the training split."""

    @property
    def probe_names(self) -> tuple[str, ...]:
        """Names of the further evaluation sets."""
        return ()

    def split(self, name: Split) -> Batch:
        """One of the three splits, drawn once.

        The validation and test splits do not depend on ``train_examples``; a smaller split is a prefix of a larger one.

        Raises:
            SplitOverlapError: if any two of the splits share an example.
            ValueError: if a token is not in ``[0, vocab_size)``, or a scored position has no target.
            KeyError: if ``name`` is not a split.
        """
        return self._splits[name]

    def probes(self) -> Mapping[str, Batch]:
        """Further named evaluation sets, read once for the chosen model (length extrapolation, variants).

        Raises:
            SplitOverlapError: if a probe shares an example with the training split.
            ValueError: as for splits.
        """
        return self._probes

    def chance(self, split: str) -> Accuracy:
        """Expected accuracy of a solver that draws each answer uniformly from the tokens that can be an answer.

        A sequence with k scored positions is all right with probability ``answer_count ** -k``; the sequence accuracy
        is the mean of that over the sequences of the split or probe.
        """
        scored_S = self.batch(split).scored_ST.sum(axis=1)
        return Accuracy(sequence=float(np.mean(float(self.answer_count) ** -scored_S)), token=1 / self.answer_count)

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over the arrays of all splits and probes; equal on every platform."""
        digest = hashlib.sha256()
        for name in (*get_args(Split), *self.probe_names):
            batch = self.batch(name)
            digest.update(f"{name} {batch.inputs_ST.shape}".encode())
            for array_ST in (batch.inputs_ST, batch.targets_ST, batch.scored_ST):
                digest.update(np.ascontiguousarray(array_ST, dtype="<i4").data)
        return digest.hexdigest()

    def batch(self, name: str) -> Batch:
        """The split or probe called ``name``.

        Raises:
            KeyError: if there is none.
        """
        return self._probes[name] if name in self.probe_names else self._splits[name]

    def stream(self, purpose: str, block: int = 0) -> np.random.Generator:
        """Random stream that depends on the data seed, the task's name, the purpose and the block, and on nothing else.

        Args:
            purpose: name of a split or probe, or of anything else that the task fixes once.
            block: number of the block within a split.
        """
        words = np.frombuffer(hashlib.sha256(f"{self.name}/{purpose}".encode()).digest(), dtype="<u4")
        entropy = [self.config.data_seed, *(int(word) for word in words)]
        return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=(block,)))

    def examples(self, batch: Batch) -> set[bytes]:
        """What two splits must not share: the input sequences, unless a task packs several examples into one."""
        return {row.tobytes() for row in batch.inputs_ST.astype("<i4")}

    @cached_property
    def _splits(self) -> dict[str, Batch]:
        counts = {"train": self.config.train_examples}
        splits = {name: self._draw(name, counts.get(name, self.config.eval_examples)) for name in get_args(Split)}
        examples = {name: self.examples(batch) for name, batch in splits.items()}
        for first, second in itertools.combinations(splits, 2):
            self._check_disjoint(first, examples[first], second, examples[second])
        return splits

    @cached_property
    def _probes(self) -> dict[str, Batch]:
        probes = {name: self._draw(name, self.config.eval_examples) for name in self.probe_names}
        train = self.examples(self.split("train")) if probes else set()
        for name, batch in probes.items():
            self._check_disjoint("train", train, name, self.examples(batch))
        return probes

    def _draw(self, name: str, n: int) -> Batch:
        """First ``n`` sequences of a split or probe; whole blocks are drawn so that ``n`` changes none of them."""
        blocks = [self.sample(self.stream(name, block), BLOCK, name) for block in range(-(-n // BLOCK))]
        batch = Batch(
            inputs_ST=np.concatenate([block.inputs_ST for block in blocks])[:n],
            targets_ST=np.concatenate([block.targets_ST for block in blocks])[:n],
            scored_ST=np.concatenate([block.scored_ST for block in blocks])[:n],
        )
        targeted_ST = batch.targets_ST != IGNORE
        tokens = np.concatenate([batch.inputs_ST.ravel(), batch.targets_ST[targeted_ST]])
        inside = tokens.min() >= 0 and tokens.max() < self.vocab_size
        require(
            inside, f"{self.name}: {name} has tokens outside of [0, {self.vocab_size}): correct sample or vocab_size"
        )
        unanswered = (batch.scored_ST & ~targeted_ST).any()
        require(not unanswered, f"{self.name}: {name} scores positions without a target: correct sample")
        return batch

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
