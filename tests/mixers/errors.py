"""How far a result is from its reference."""

from torch import Tensor


def error(y: Tensor, reference: Tensor) -> float:
    """Norm of the difference relative to that of the reference."""
    return float((y.double() - reference).norm() / reference.norm().clamp_min(1e-30))
