"""Tasks whose probes are longer than the sequences that they train on."""

from dataclasses import dataclass
from typing import Any

from tasks.base import LENGTH_PROBE, Batch, Task, require


class Extrapolation(Task):
    """Sequences of one length in the three splits; the probe "length N" holds longer ones, of N tokens.

    No probe sequence begins with a training sequence: up to there its answers would be known.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of lengths.

        Attributes:
            length: tokens in a sequence.
            probe_factors: lengths of the extrapolation probes, in multiples of ``length``.
        """

        length: int
        probe_factors: tuple[int, ...] = (2, 4)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(self.length >= 1, f"length is {self.length}: use at least 1")
            longer = all(factor >= 2 for factor in self.probe_factors)
            require(
                longer and len(set(self.probe_factors)) == len(self.probe_factors),
                f"probe_factors are {self.probe_factors}: use different whole numbers from 2",
            )

    config: Any

    @property
    def probe_names(self) -> tuple[str, ...]:
        return tuple(f"{LENGTH_PROBE}{factor * self.config.length}" for factor in self.config.probe_factors)

    def length_of(self, split: str) -> int:
        """Tokens in each sequence of a split or probe."""
        return int(split.removeprefix(LENGTH_PROBE) if split.startswith(LENGTH_PROBE) else self.config.length)

    def examples(self, batch: Batch) -> set[bytes]:
        """The sequences, longer ones up to the training length."""
        return {row.tobytes() for row in batch.inputs_ST[:, : self.config.length].astype("<i4")}
