"""How far results are from their references."""

from torch import Tensor


def error(y: Tensor, reference: Tensor) -> float:
    """Norm of the difference relative to that of the reference."""
    return float((y.double() - reference).norm() / reference.norm().clamp_min(1e-30))


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Relative errors; absolute ones where nothing should be left, such as the gradient of a softmax of one entry."""
    return [
        float((a.double() - b).norm() / b.norm().clamp_min(0.1 * b.numel() ** 0.5))
        for a, b in zip(got, want, strict=True)
    ]
