"""Fused kernels of token shifts.

    name      shape                  written by    read by
    x         (R, B, T, D)           caller        both kernels
    shift     (R, N, D)              caller        both kernels    float32
    mixed     (N, R, B, T, D)        shift_fwd     caller
    dmixed    (N, R, B, T, D)        caller        shift_bwd
    dx        (R, B, T, D)           shift_bwd     caller
    dshift    (R, tiles, N, D)       shift_bwd     group_sum       float32

A program takes M rows, positions of any sequence, with W channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors


@triton.jit
def _tile(
    x_ptr: tl.tensor, rows: tl.tensor, T: tl.tensor, run: tl.tensor, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr
):
    """Rows, channels, offsets from the first row of a run, whether they exist; inputs, and the row before minus them.

    Before the first row of a sequence there are zeros.
    """
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.program_id(1) * W + tl.arange(0, W)
    at_MW, here_MW = m.to(tl.int64)[:, None] * D + d[None, :], (m < rows)[:, None] & (d < D)[None, :]
    x_ptr += run * rows * D
    x_MW = tl.load(x_ptr + at_MW, here_MW, 0.0).to(tl.float32)
    change_MW = tl.load(x_ptr + at_MW - D, here_MW & (m % T > 0)[:, None], 0.0).to(tl.float32) - x_MW
    return m, d, at_MW, here_MW, x_MW, change_MW


@triton.jit(do_not_specialize=["rows", "T"])
def shift_fwd_kernel(
    x_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
):
    """Write all mixtures of rows."""
    run = tl.program_id(2).to(tl.int64)
    _, d, at_MW, here_MW, x_MW, change_MW = _tile(x_ptr, rows, T, run, D, W, M)
    for n in tl.static_range(N):
        shift_W = tl.load(shift_ptr + (run * N + n) * D + d, d < D, 0.0)
        to_ptr = mixed_ptr + (n * tl.num_programs(2) + run) * rows * D
        tl.store(to_ptr + at_MW, x_MW + change_MW * shift_W[None, :], here_MW)


@triton.jit(do_not_specialize=["rows", "T"])
def shift_bwd_kernel(
    x_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    dmixed_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dshift_ptr: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of rows, which are part of the mixtures there and at the rows after, and their sums for the shifts."""
    run = tl.program_id(2).to(tl.int64)
    m, d, at_MW, here_MW, _, change_MW = _tile(x_ptr, rows, T, run, D, W, M)
    dx_MW = tl.zeros([M, W], tl.float32)
    for n in tl.static_range(N):
        shift_W = tl.load(shift_ptr + (run * N + n) * D + d, d < D, 0.0)
        from_ptr = dmixed_ptr + (n * tl.num_programs(2) + run) * rows * D
        dy_MW = tl.load(from_ptr + at_MW, here_MW, 0.0).to(tl.float32)
        after_MW = tl.load(from_ptr + at_MW + D, here_MW & (m % T < T - 1)[:, None], 0.0).to(tl.float32)
        dx_MW += dy_MW + (after_MW - dy_MW) * shift_W[None, :]
        to_ptr = dshift_ptr + ((run * tl.num_programs(0) + tl.program_id(0)) * N + n) * D
        tl.store(to_ptr + d, tl.sum(dy_MW * change_MW, 0), d < D)
    tl.store(dx_ptr + run * rows * D + at_MW, dx_MW, here_MW)


def token_shifts_method(count: int, dtype: torch.dtype) -> Method:
    """``count`` mixtures (R, B, T, D) in ``dtype``. Tensors: x (R, B, T, D), shift (R, N, D) float32."""

    def forward(x: Tensor, shift: Tensor) -> tuple[Tensors, Tensors]:
        mixed = torch.empty(count, *x.shape, dtype=dtype, device=x.device)
        grid, settings = _launch(x)
        shift_fwd_kernel[grid](x.contiguous(), shift.contiguous(), mixed, N=count, **settings)
        return mixed.unbind(0), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, shift = (y.contiguous() for y in tensors)
        grid, settings = _launch(x)
        dx, dshift = torch.empty_like(x), torch.empty(len(x), grid[0], *shift.shape[1:], device=x.device)
        shift_bwd_kernel[grid](x, shift, torch.stack([*gradients]), dx, dshift, N=count, **settings)
        return dx, group_sum(dshift)

    return Method(forward, backward, outputs=count)


def _launch(x: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Programs, and arguments of both kernels."""
    R, B, T, D = x.shape
    W = min(triton.next_power_of_2(D), 128)
    M = 2048 // W
    return (triton.cdiv(B * T, M), triton.cdiv(D, W), R), {"rows": B * T, "T": T, "D": D, "W": W, "M": M}
