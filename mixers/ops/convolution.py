"""Causal convolutions over positions, separately for each channel: short ones of few taps, and long ones of any length.

Dimensions beside those of ``mixers.base``: W taps.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import at_least_float32, no_autocast, runs_fused
from mixers.ops.runs import over_runs

DIRECT = 64
"""Largest length for which a matrix product is used, which is causal to the last bit; longer sequences use the FFT."""


def short_convolution(x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None = None, *, silu: bool = False) -> Tensor:
    """Return ``y_t = bias + sum_w weight_w x_{t-W+1+w}`` (B, T, D), with zeros before the first position.

    With ``silu``, return ``silu(y_t)``.
    """
    if runs_fused(x_BTD):
        from mixers.ops.kernels.short_convolution import fits_short_convolution, short_convolution_method

        if fits_short_convolution(weight_DW.shape[1]):
            return over_runs(short_convolution_method(torch.bfloat16, silu), x_BTD, weight_DW, bias_D)[0]

    return _filter(F.pad(x_BTD, (0, 0, weight_DW.shape[1] - 1, 0)), weight_DW, bias_D, silu)


def split_convolution(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, shapes: Sequence[tuple[int, ...]], *, silu: bool = False
) -> tuple[Tensor, ...]:
    """Return ``short_convolution`` in parts with channels of these shapes, which kernels write without gaps.

    Kernels give parts their shapes themselves: with views, a compiler would not fuse what comes before their gradients.
    """
    if runs_fused(x_BTD):
        from mixers.ops.kernels.short_convolution import fits_short_convolution, short_convolution_method

        if fits_short_convolution(weight_DW.shape[1]):
            method = short_convolution_method(torch.bfloat16, silu, tuple(shapes))
            return over_runs(method, x_BTD, weight_DW, bias_D)

    return in_parts(short_convolution(x_BTD, weight_DW, bias_D, silu=silu), shapes)


def in_parts(y: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return the parts of channels (..., D) that have these shapes."""
    parts = y.split([prod(shape) for shape in shapes], dim=-1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))


def short_convolution_step(
    x_BD: Tensor, newest_BWD: Tensor, weight_DW: Tensor, bias_D: Tensor | None = None, *, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute one position of ``short_convolution``.

    Args:
        x_BD: input at the position.
        newest_BWD: the W - 1 inputs before it (B, W-1, D), oldest first.
        weight_DW: weights.
        bias_D: bias, if any.
        silu: whether a SiLU follows.

    Returns:
        The output (B, D), and the W - 1 newest inputs.
    """
    window_BWD = torch.cat([newest_BWD, x_BD[:, None]], dim=1)
    return _filter(window_BWD, weight_DW, bias_D, silu)[:, 0], window_BWD[:, 1:]


def _filter(padded_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, silu: bool) -> Tensor:
    """Return the outputs at all positions with at least W - 1 positions before them."""
    size = weight_DW.shape[1]
    length = padded_BTD.shape[1] - size + 1

    taps = [weight_DW[:, w] * padded_BTD[:, w : w + length] for w in range(size)]
    y_BTD = sum(taps[1:], taps[0])
    y_BTD = y_BTD if bias_D is None else y_BTD + bias_D
    return F.silu(y_BTD) if silu else y_BTD


def gated_convolution(v_BTD: Tensor, gate_BTD: Tensor, h_TD: Tensor, skip_D: Tensor) -> Tensor:
    """Return ``long_convolution(u, h) + skip u`` with ``u = gate v``; in bfloat16 if kernels compute it."""
    if runs_fused(v_BTD):
        from mixers.ops.kernels.long_convolution import fits_gated_convolution, gated_convolution_method

        if fits_gated_convolution(len(h_TD)):
            skipping_TD = torch.cat([h_TD[:1] + skip_D, h_TD[1:]])
            return over_runs(gated_convolution_method(torch.bfloat16), v_BTD, gate_BTD, skipping_TD)[0]

    u_BTD = at_least_float32(gate_BTD) * at_least_float32(v_BTD)
    return long_convolution(u_BTD, h_TD) + skip_D * u_BTD


def long_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """Return ``y_t = sum_s h_{t-s} x_s`` over s <= t, separately for each channel, in at least float32."""
    convolve = direct_convolution if len(h_TD) <= DIRECT else fft_convolution
    with no_autocast(x_BTD.device):
        return convolve(at_least_float32(x_BTD), at_least_float32(h_TD))


def direct_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """Convolve by windows of the filter, padded with zeros: O(T^2)."""
    length = len(h_TD)
    windows_TDS = F.pad(h_TD, (0, 0, length - 1, 0)).unfold(0, length, 1)
    return torch.einsum("tds,bsd->btd", windows_TDS, x_BTD.flip(1))


def fft_convolution(x_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """Convolve by an FFT of twice the length, to avoid circular wrap-around: O(T log T); causal up to rounding."""
    length = len(h_TD)
    product = torch.fft.rfft(x_BTD, 2 * length, dim=1) * torch.fft.rfft(h_TD, 2 * length, dim=0)
    return torch.fft.irfft(product, 2 * length, dim=1)[:, :length]
