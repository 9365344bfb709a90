"""The outcome of a numerical check, and how errors are measured."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

BOUND = 1e-10
"""Largest error that a check in float64 may have."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outcome of one check.

    Attributes:
        check: the statement.
        setting: the sizes or matrices for which it was checked.
        error: largest error, as a share of the largest expected value. With NaN the check does not hold.
        bound: largest error with which the check holds.
    """

    check: str
    setting: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. An error that is not finite becomes None."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None, "holds": self.holds}


def scaled_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def largest(errors: Sequence[float]) -> float:
    """Return the largest error; NaN if one of them is NaN."""
    return float(np.max(errors))
