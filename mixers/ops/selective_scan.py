"""The selective scan of Mamba with the elementwise operations around it.

Dimensions beside those of ``mixers.base``: E channels, N states of a channel, K width of the map to time steps.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.native.recurrence import METHOD, runs_in_c
from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs
from mixers.ops.scan import linear_scan

BLOCK = 64
"""Channels that make a head in C."""


def selective_scan(
    u_BTE: Tensor,
    z_BTE: Tensor,
    low_BTK: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    A_EN: Tensor,
    skip_E: Tensor,
    dt_EK: Tensor,
    dt_bias_E: Tensor,
    negative: bool = False,
) -> Tensor:
    """Return ``(C_t h_t + skip u_t) silu(z_t)`` (B, T, E) for ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t``.

    Args:
        u_BTE: inputs.
        z_BTE: gates.
        low_BTK: inputs of the time steps ``dt_t = softplus(dt_EK low_t + dt_bias)``.
        B_BTN, C_BTN: input and output maps.
        A_EN: rates, all negative.
        skip_E: weights of the inputs that bypass the scan.
        dt_EK, dt_bias_E: map to the time steps.
        negative: decay by 2 exp(dt_t A) - 1, between -1 and 1, in place of exp(dt_t A).
    """
    if runs_fused(u_BTE):
        from mixers.ops.kernels.selective_scan import fits_selective_scan, selective_scan_method

        if fits_selective_scan(A_EN.shape[1]):
            raw_BTE = F.linear(low_BTK, dt_EK)
            rows = u_BTE, z_BTE, raw_BTE, B_BTN, C_BTN
            return over_runs(selective_scan_method(torch.bfloat16, negative), *rows, A_EN, skip_E, dt_bias_E)[0]

    dt_BTE = time_steps(low_BTK, dt_EK, dt_bias_E)
    y_BTE = unfused_scan(u_BTE, dt_BTE, A_EN, at_least_float32(B_BTN), at_least_float32(C_BTN), negative)
    return gated(y_BTE, u_BTE, z_BTE, skip_E)


def selective_scan_step(
    u_BE: Tensor,
    z_BE: Tensor,
    low_BK: Tensor,
    B_BN: Tensor,
    C_BN: Tensor,
    A_EN: Tensor,
    skip_E: Tensor,
    dt_EK: Tensor,
    dt_bias_E: Tensor,
    h_BEN: Tensor,
    negative: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return one position (B, E) of ``selective_scan``, and the next states."""
    dt_BE = time_steps(low_BK, dt_EK, dt_bias_E)
    decay_BEN, input_BEN = discretise(u_BE, dt_BE, A_EN, at_least_float32(B_BN), negative)
    h_BEN = decay_BEN * h_BEN + input_BEN
    y_BE = (h_BEN * at_least_float32(C_BN)[:, None]).sum(-1)
    return gated(y_BE, u_BE, z_BE, skip_E), h_BEN


def time_steps(low: Tensor, dt_EK: Tensor, dt_bias_E: Tensor) -> Tensor:
    """Return the time steps (..., E), at least float32."""
    return F.softplus(at_least_float32(F.linear(low, dt_EK, dt_bias_E)))


def discretise(u: Tensor, dt: Tensor, A_EN: Tensor, B: Tensor, negative: bool = False) -> tuple[Tensor, Tensor]:
    """Return decays exp(dt A) and inputs dt B u (..., E, N): zero-order hold of A, Euler's rule for B.

    The authors' code does the same. With ``negative``, decays are 2 exp(dt A) - 1.
    """
    return decays_of(dt[..., None], A_EN, negative), (dt * u)[..., None] * B[..., None, :]


def decays_of(dt: Tensor, A: Tensor, negative: bool) -> Tensor:
    """Return exp(dt A), or 2 exp(dt A) - 1."""
    decay = torch.exp(dt * A)
    return 2 * decay - 1 if negative else decay


def unfused_scan(
    u_BTE: Tensor, dt_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor, negative: bool = False
) -> Tensor:
    """Return the outputs (B, T, E) of ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t``, ``y_t = C_t h_t`` (algorithm 2)."""
    with no_autocast(u_BTE.device):
        # In C: the matrix recurrence with keys B, queries C, blocks of channels as heads, and a decay for each number.
        E = u_BTE.shape[2]
        blocks = E // BLOCK if E % BLOCK == 0 else 1
        q, k = (y[:, :, None].expand(-1, -1, blocks, -1) for y in (C_BTN, B_BTN))
        v, dt = (y.unflatten(-1, (blocks, -1)) for y in (dt_BTE * u_BTE, dt_BTE))
        if runs_in_c(q, k, v, None, None, None, None):
            rates = A_EN.unflatten(0, (blocks, -1)).mT
            w = decays_of(dt[..., None, :], rates, negative).flatten(-2)
            return over_runs(METHOD, q, k, v, w, None, None, None)[0].flatten(2)
        h_BTEN = linear_scan(*discretise(u_BTE, dt_BTE, A_EN, B_BTN, negative))
        return (h_BTEN @ C_BTN[..., None]).squeeze(-1)


def gated(y: Tensor, u: Tensor, z: Tensor, skip_E: Tensor) -> Tensor:
    """Return ``(y + skip u) silu(z)``."""
    return (y + skip_E * u) * F.silu(z)
