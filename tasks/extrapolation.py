"""Tasks with extrapolation sets of longer sequences than those of the splits."""

from dataclasses import dataclass
from typing import Any

from tasks.base import LENGTH_PREFIX, Batch, Task, require


class Extrapolation(Task):
    """A task with sequences of one length in the three splits, and of N tokens in the extrapolation set "length N".

    No sequence of an extrapolation set begins with a training sequence, whose answers the model may know by heart.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of lengths.

        Attributes:
            length: tokens in a sequence.
            extrapolation_factors: lengths of the extrapolation sets, in multiples of ``length``.
        """

        length: int
        extrapolation_factors: tuple[int, ...] = (2, 4)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.length >= 1, f"length is {self.length}: use at least 1")

            longer = all(factor >= 2 for factor in self.extrapolation_factors)
            distinct = len(set(self.extrapolation_factors)) == len(self.extrapolation_factors)
            require(
                longer and distinct,
                f"extrapolation_factors are {self.extrapolation_factors}: use different whole numbers from 2",
            )

        @property
        def longest_length(self) -> int:
            return self.length * max(self.extrapolation_factors, default=1)

    config: Any

    @property
    def extrapolation_names(self) -> tuple[str, ...]:
        return tuple(f"{LENGTH_PREFIX}{factor * self.config.length}" for factor in self.config.extrapolation_factors)

    @property
    def trained_length(self) -> int:
        return int(self.config.length)

    def length_of(self, split: str) -> int:
        """Return the number of tokens in each sequence of a split or extrapolation set."""
        return int(split.removeprefix(LENGTH_PREFIX)) if split.startswith(LENGTH_PREFIX) else self.trained_length

    def examples(self, batch: Batch) -> set[bytes]:
        """Return the sequences, longer ones up to the training length."""
        return {row.tobytes() for row in batch.inputs_ST[:, : self.config.length].astype("<i4")}
