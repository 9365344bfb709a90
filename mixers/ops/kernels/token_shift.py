"""Fused kernels of token shifts.

    name      shape                  written by    read by
    x         (R, B, T, D)           caller        both kernels
    shift     (R, N, D)              caller        both kernels    float32
    change    (N, R, B, T, D)        caller        both kernels    what positions add to the shifts, if anything
    mixed     (N, R, B, T, D)        shift_fwd     caller
    dmixed    (N, R, B, T, D)        caller        shift_bwd
    dx        (R, B, T, D)           shift_bwd     caller
    dshift    (R, tiles, N, D)       shift_bwd     group_sum       float32
    dchange   (N, R, B, T, D)        shift_bwd     caller

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
    """Rows, channels, offsets from the first row of a run, whether they exist; inputs, and the step to the row before.

    Before the first row of a sequence there are zeros.
    """
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.program_id(1) * W + tl.arange(0, W)
    at_MW, here_MW = m.to(tl.int64)[:, None] * D + d[None, :], (m < rows)[:, None] & (d < D)[None, :]
    x_ptr += run * rows * D
    x_MW = tl.load(x_ptr + at_MW, here_MW, 0.0).to(tl.float32)
    step_MW = tl.load(x_ptr + at_MW - D, here_MW & (m % T > 0)[:, None], 0.0).to(tl.float32) - x_MW
    return m, d, at_MW, here_MW, x_MW, step_MW


@triton.jit(do_not_specialize=["rows", "T"])
def shift_fwd_kernel(
    x_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    change_ptr: tl.tensor,
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
    _, d, at_MW, here_MW, x_MW, step_MW = _tile(x_ptr, rows, T, run, D, W, M)
    for n in tl.static_range(N):
        first = (n * tl.num_programs(2) + run) * rows * D
        shift_MW = tl.load(shift_ptr + (run * N + n) * D + d, d < D, 0.0)[None, :]
        if change_ptr is not None:
            shift_MW += tl.load(change_ptr + first + at_MW, here_MW, 0.0).to(tl.float32)
        tl.store(mixed_ptr + first + at_MW, x_MW + step_MW * shift_MW, here_MW)


@triton.jit(do_not_specialize=["rows", "T"])
def shift_bwd_kernel(
    x_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    change_ptr: tl.tensor,
    dmixed_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dshift_ptr: tl.tensor,
    dchange_ptr: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of rows, which are part of the mixtures there and at the rows after, and their sums for the shifts."""
    run = tl.program_id(2).to(tl.int64)
    m, d, at_MW, here_MW, _, step_MW = _tile(x_ptr, rows, T, run, D, W, M)
    followed_MW = here_MW & (m % T < T - 1)[:, None]
    dx_MW = tl.zeros([M, W], tl.float32)
    for n in tl.static_range(N):
        first = (n * tl.num_programs(2) + run) * rows * D
        shift_W = tl.load(shift_ptr + (run * N + n) * D + d, d < D, 0.0)
        dy_MW = tl.load(dmixed_ptr + first + at_MW, here_MW, 0.0).to(tl.float32)
        after_MW = tl.load(dmixed_ptr + first + at_MW + D, followed_MW, 0.0).to(tl.float32)
        dx_MW += dy_MW + (after_MW - dy_MW) * shift_W[None, :]
        if change_ptr is not None:
            change_MW = tl.load(change_ptr + first + at_MW, here_MW, 0.0).to(tl.float32)
            next_MW = tl.load(change_ptr + first + at_MW + D, followed_MW, 0.0).to(tl.float32)
            dx_MW += after_MW * next_MW - dy_MW * change_MW
            tl.store(dchange_ptr + first + at_MW, dy_MW * step_MW, here_MW)
        to_ptr = dshift_ptr + ((run * tl.num_programs(0) + tl.program_id(0)) * N + n) * D
        tl.store(to_ptr + d, tl.sum(dy_MW * step_MW, 0), d < D)
    tl.store(dx_ptr + run * rows * D + at_MW, dx_MW, here_MW)


def token_shifts_method(count: int, dtype: torch.dtype) -> Method:
    """``count`` mixtures (R, B, T, D) in ``dtype``.

    Tensors: x (R, B, T, D), shift (R, N, D) float32, and, if positions change the shifts, changes (R, B, T, D) of each.
    """

    def forward(x: Tensor, shift: Tensor, *changes: Tensor) -> tuple[Tensors, Tensors]:
        mixed = torch.empty(count, *x.shape, dtype=dtype, device=x.device)
        change = torch.stack(changes) if changes else None
        grid, settings = _launch(x)
        shift_fwd_kernel[grid](x.contiguous(), shift.contiguous(), change, mixed, N=count, **settings)
        return mixed.unbind(0), () if change is None else (change,)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, shift = (y.contiguous() for y in tensors[:2])
        change, dchange = (saved[0], torch.empty_like(saved[0])) if saved else (None, None)
        grid, settings = _launch(x)
        dx, dshift = torch.empty_like(x), torch.empty(len(x), grid[0], *shift.shape[1:], device=x.device)
        dmixed = torch.stack([*gradients])
        shift_bwd_kernel[grid](x, shift, change, dmixed, dx, dshift, dchange, N=count, **settings)
        return dx, group_sum(dshift), *(() if dchange is None else dchange.unbind(0))

    return Method(forward, backward, outputs=count)


def _launch(x: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Programs, and arguments of both kernels."""
    R, B, T, D = x.shape
    W = min(triton.next_power_of_2(D), 128)
    M = 2048 // W
    return (triton.cdiv(B * T, M), triton.cdiv(D, W), R), {"rows": B * T, "T": T, "D": D, "W": W, "M": M}
