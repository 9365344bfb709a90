"""The scan of complex states with constant decays, stored as pairs: all real parts, then all imaginary parts.

Dimensions beside those of ``mixers.base``: N states, P = 2 N.
"""

import torch
from torch import Tensor

from mixers.ops.numerics import at_least_float32, runs_fused
from mixers.ops.runs import over_runs
from mixers.ops.scan import linear_scan


def diagonal_scan(x_BTP: Tensor, decay_N: Tensor, gain_N: Tensor) -> Tensor:
    """Return the pairs (B, T, P) of ``h_t = decay h_{t-1} + gain x_t`` from the pairs of x.

    Args:
        x_BTP: inputs.
        decay_N: complex decays.
        gain_N: gains, complex or real.
    """
    if runs_fused(x_BTP):
        from mixers.ops.kernels.diagonal_scan import diagonal_scan_method

        gain_N = gain_N.to(decay_N.dtype)
        dynamics_4N = torch.stack([decay_N.real, decay_N.imag, gain_N.real, gain_N.imag])
        return over_runs(diagonal_scan_method(torch.bfloat16), x_BTP, dynamics_4N)[0]

    decay_BTN = decay_N.expand(1, x_BTP.shape[1], -1)
    return to_pairs(linear_scan(decay_BTN, gain_N * from_pairs(x_BTP)))


def diagonal_step(x_BP: Tensor, decay_N: Tensor, gain_N: Tensor, h_BN: Tensor) -> Tensor:
    """Return the complex states after one position of ``diagonal_scan``, from those before it."""
    return decay_N * h_BN + gain_N * from_pairs(x_BP)


def from_pairs(x: Tensor) -> Tensor:
    """Return complex numbers (..., N), at least complex64, from their pairs (..., P)."""
    return torch.complex(*at_least_float32(x).chunk(2, dim=-1))


def to_pairs(h: Tensor) -> Tensor:
    """Return the pairs (..., P) of complex numbers (..., N)."""
    return torch.cat([h.real, h.imag], dim=-1)
