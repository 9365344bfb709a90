from dataclasses import dataclass

import numpy as np

from tasks.base import Accuracy, Batch
from tasks.extrapolation import Extrapolation


class CountMod(Extrapolation):
    """Random bits; at every position the number of ones so far, modulo ``modulus``, must be output."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Extrapolation.Config):
        length: int = 40
        modulus: int = 3

    name = "count-mod"  # decides the random numbers, together with --task.data-seed

    @property
    def vocab_size(self) -> int:
        return max(2, self.config.modulus)  # inputs and targets are below it

    @property
    def answer_count(self) -> int:
        return self.config.modulus  # decides what guessing reaches

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        inputs_ST = rng.integers(2, size=(n, self.length_of(split)))
        targets_ST = inputs_ST.cumsum(axis=1) % self.config.modulus
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=np.full(inputs_ST.shape, True))

    def ceiling(self, split: str) -> Accuracy:
        return Accuracy(sequence=1.0, token=1.0)


if __name__ == "__main__":  # a solver of another kind answers the test sequences
    batch = CountMod(CountMod.Config(modulus=4)).batch("length 80")
    for inputs, targets in zip(batch.inputs_ST.tolist(), batch.targets_ST.tolist(), strict=True):
        assert targets == [sum(inputs[: t + 1]) % 4 for t in range(len(inputs))]
