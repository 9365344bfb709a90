"""What can be trained on, its copy on the device, and the order in which runs see it."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tasks.base import Batch, Split


class Splits(Protocol):
    """What training needs of a task."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""

    def split(self, name: Split) -> Batch:
        """One of the three splits."""


class Resident(NamedTuple):
    """A split on the device."""

    inputs_ST: Tensor
    targets_ST: Tensor
    scored_ST: Tensor

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "Resident":
        """Copy a split to a device."""
        arrays = (batch.inputs_ST, batch.targets_ST, batch.scored_ST)
        return Resident(*(torch.from_numpy(array).to(device) for array in arrays))


def data_order(seed: int, epoch: int, examples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order in which a run with ``seed`` sees its examples in ``epoch``; the same on every device."""
    return np.random.default_rng([seed, epoch]).permutation(examples)
