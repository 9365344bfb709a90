"""Fused kernels of RMS normalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import norm_tile, rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum
from mixers.ops.runs import Method, Optionals, Tensors


@triton.jit
def norm_fwd_kernel(x_ptr, gain_ptr, y_ptr, rows, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """RMS norm of M rows; E is the power of two from D on."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here = (m < rows)[:, None] & (e < D)[None, :]
    at_ME = (run * rows + m)[:, None] * D + e[None, :]
    x_ME = tl.load(x_ptr + at_ME, here, 0.0).to(tl.float32)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    tl.store(y_ptr + at_ME, x_ME * rms(x_ME, D)[:, None] * gain_E[None, :], here)


@triton.jit
def norm_bwd_kernel(
    x_ptr, gain_ptr, dy_ptr, dx_ptr, dgain_ptr, rows, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Gradient of the rows; that of the gain leaves as one row of sums a program."""
    run = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, E)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    dgain_E = tl.zeros([E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        m = first + tl.arange(0, M)
        here = (m < rows)[:, None] & (e < D)[None, :]
        at_ME = (run * rows + m)[:, None] * D + e[None, :]
        x_ME = tl.load(x_ptr + at_ME, here, 0.0).to(tl.float32)
        dy_ME = tl.load(dy_ptr + at_ME, here, 0.0).to(tl.float32)
        r_M = rms(x_ME, D)
        x_ME *= r_M[:, None]
        dgain_E += tl.sum(dy_ME * x_ME, 0)
        tl.store(dx_ptr + at_ME, rms_bwd(dy_ME * gain_E[None, :], x_ME, r_M, D), here)
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + e, dgain_E, e < D)


def rms_norm_method(dtype: torch.dtype) -> Method:
    """``gain * x / rms(x)`` in ``dtype``. Tensors: x (R, ..., D) of any width, gain (R, D) float32."""

    def forward(x: Tensor, gain: Tensor) -> tuple[Tensors, Tensors]:
        x, gain = x.contiguous(), gain.contiguous()
        y, rows, tile = torch.empty_like(x, dtype=dtype), rows_of(x), norm_tile(x.shape[-1])
        norm_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](x, gain, y, rows, **tile)
        return (y,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dy, x, gain = (y.contiguous() for y in (*gradients, *tensors))
        rows, tile = rows_of(x), norm_tile(x.shape[-1])
        programs = min(triton.cdiv(rows, tile["M"]), triton.cdiv(1024, len(x)))
        dx, dgain = torch.empty_like(x), gain.new_empty(len(x), programs, x.shape[-1])
        norm_bwd_kernel[programs, len(x)](x, gain, dy, dx, dgain, rows, **tile)
        return dx, group_sum(dgain)

    return Method(forward, backward)
