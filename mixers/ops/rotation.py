"""Keys and queries of all heads from one vector: a bias and a rotation for each head, as in Mamba-3.

Dimensions beside those of ``mixers.base``: M vectors of a position, N channels of a vector, A angles.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import at_least_float32, runs_fused
from mixers.ops.runs import over_runs


def biased_rotation(y_BTMN: Tensor, bias_MHN: Tensor, angle_BTHA: Tensor, *, late: bool = False) -> Tensor:
    """Return y + bias (B, T, M, H, N), of which channels i and i + A are turned by angle i; other channels stay.

    Args:
        y_BTMN: vectors that all heads share.
        bias_MHN: biases.
        angle_BTHA: angles, at most N/2, at least float32.
        late: return at each position what belongs to the one before it, and zeros at the first.
    """
    if runs_fused(y_BTMN):
        from mixers.ops.kernels.rotation import rotation_method

        method = rotation_method(torch.bfloat16, late)
        return over_runs(method, y_BTMN.bfloat16(), at_least_float32(bias_MHN), angle_BTHA)[0]

    turned_BTMHN = rotated(biased(y_BTMN, bias_MHN), angle_BTHA)
    return one_later(turned_BTMHN) if late else turned_BTMHN


def biased(y: Tensor, bias_MHN: Tensor) -> Tensor:
    """Return vectors of all heads (..., M, H, N) from those that they share (..., M, N), in at least float32."""
    return at_least_float32(y)[..., None, :] + at_least_float32(bias_MHN)


def rotated(y: Tensor, angle: Tensor) -> Tensor:
    """Return vectors (..., M, H, N), of which channels i and i + A are turned by the angle i (..., H, A)."""
    angles = angle.shape[-1]
    real, imaginary, still = y.split([angles, angles, y.shape[-1] - 2 * angles], dim=-1)
    cos, sin = angle.cos()[..., None, :, :], angle.sin()[..., None, :, :]
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos, still], dim=-1)


def one_later(y_BTX: Tensor) -> Tensor:
    """Return at each position what stood at the one before it; zeros at the first."""
    return F.pad(y_BTX[:, :-1], (*(0, 0) * (y_BTX.ndim - 2), 1, 0))
