"""Fused kernels of RMS normalisation.

name      shape                  written by           read by
x         (R, rows, D)           caller               both kernels
gain      (R, D)                 caller               both kernels         float32
y         (R, rows, D)           norm_fwd             caller
dy        (R, rows, D)           caller               norm_bwd
rest      (R, rows, D)           caller               norm_bwd             further gradient of x, where there is one
dx        (R, rows, D)           norm_bwd             caller
dgain     (R, programs, D)       norm_bwd             group_sum            float32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors


@triton.jit
def norm_fwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Normalise M rows.

    1. Read the rows and the gain.
    2. Write y = gain x / rms(x).
    """
    # 1. Rows and gain.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here_ME = (m < rows)[:, None] & (e < D)[None, :]
    at_ME = (run * rows + m)[:, None] * D + e[None, :]
    x_ME = tl.load(x_ptr + at_ME, here_ME, 0.0).to(tl.float32)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)

    # 2. Outputs.
    tl.store(y_ptr + at_ME, x_ME * rms(x_ME, D)[:, None] * gain_E[None, :], here_ME)


@triton.jit
def norm_bwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of every n-th tile of M rows, for n programs, and their sum for the gain.

    1. For each tile of the program:
       a. read x and dy;
       b. normalise again: n = x / rms(x);
       c. add dy n to the gradient of the gain;
       d. write dx, the gradient of gain dy through the norm, plus the rest.
    2. Write the sum.
    """
    run = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, E)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    dgain_E = tl.zeros([E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        # 1a. Rows.
        m = first + tl.arange(0, M)
        here_ME = (m < rows)[:, None] & (e < D)[None, :]
        at_ME = (run * rows + m)[:, None] * D + e[None, :]
        x_ME = tl.load(x_ptr + at_ME, here_ME, 0.0).to(tl.float32)
        dy_ME = tl.load(dy_ptr + at_ME, here_ME, 0.0).to(tl.float32)

        # 1b. Norm.
        r_M = rms(x_ME, D)
        n_ME = x_ME * r_M[:, None]

        # 1c, 1d. Gradients.
        dgain_E += tl.sum(dy_ME * n_ME, 0)
        dx_ME = rms_bwd(dy_ME * gain_E[None, :], n_ME, r_M, D)
        if rest_ptr is not None:
            dx_ME += tl.load(rest_ptr + at_ME, here_ME, 0.0).to(tl.float32)
        tl.store(dx_ptr + at_ME, dx_ME, here_ME)

    # 2. Sum of the program.
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + e, dgain_E, e < D)


def rms_norm_method(dtype: torch.dtype, branching: bool = False) -> Method:
    """``gain * x / rms(x)`` in ``dtype``. Tensors: x (R, ..., D) of any width, gain (R, D) float32.

    A branching method also returns x. Then the backward kernel adds both gradients of x: through the norm and past it.
    """

    def forward(x: Tensor, gain: Tensor) -> tuple[Tensors, Tensors]:
        x = x.contiguous()
        y = normed(x, gain, dtype)
        return (y, x) if branching else (y,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dx, dgain = norm_gradients(*tensors, *gradients)
        return dx, group_sum(dgain)

    return Method(forward, backward, outputs=2 if branching else 1)


def normed(x: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """``gain * x / rms(x)`` in ``dtype``."""
    x, gain = x.contiguous(), gain.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    rows, tile = rows_of(x), _tile(x.shape[-1])
    norm_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](x, gain, y, rows, **tile)
    return y


def norm_gradients(x: Tensor, gain: Tensor, dy: Tensor, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x, plus the rest, and of the gain; the latter are parts (R, programs, D) of a sum."""
    x, gain, dy = (y.contiguous() for y in (x, gain, dy))
    rest = rest if rest is None else rest.contiguous()
    rows, tile = rows_of(x), _tile(x.shape[-1])
    programs = min(triton.cdiv(rows, tile["M"]), triton.cdiv(1024, len(x)))
    dx = torch.empty_like(x)
    dgain = gain.new_empty(len(x), programs, x.shape[-1])
    norm_bwd_kernel[programs, len(x)](x, gain, dy, rest, dx, dgain, rows, **tile)
    return dx, dgain


def _tile(D: int) -> dict[str, int]:
    """Compile-time settings for rows of width D."""
    E = triton.next_power_of_2(D)
    return {"D": D, "E": E, "M": max(1, 4096 // E)}
