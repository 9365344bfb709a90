"""Fused kernels of maps of blocks of channels, each by a matrix of its own.

    name         shape                       written by    read by
    c, x         (R, rows, D)                caller        both kernels
    blocks       (R, 3, D, I)                caller        both kernels    matrices one below the other
    q, k, v      (R, rows, D)                maps_fwd      caller          maps of c, of c and of x
    dq, dk, dv   (R, rows, D)                caller        maps_bwd
    dc, dx       (R, rows, D)                maps_bwd      caller
    dblocks      (R, groups, 3, D, I)        maps_bwd      group_sum       float32

A program takes W channels, of whole blocks, whose maps are one matrix (W, W) with the blocks on its diagonal: tensor
cores multiply by its zeros faster than others by the blocks alone. Groups are those of GROUP rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import contiguous, kernels_take, rows_of
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

WIDTHS = 64, 32, 16
"""Channels of a program; tensor cores take 16 at least."""
GROUP = 512
FORWARD = {"M": 128, "num_warps": 4}
BACKWARD = {"M": 64, "num_warps": 4}
"""Settings of the launches; M rows are multiplied at a time."""


@triton.jit
def _at_blocks(set: tl.tensor, D: tl.constexpr, I: tl.constexpr, W: tl.constexpr):
    """Places of the numbers of a program's matrix (outputs, inputs) of the first of three maps, and which exist."""
    o, i = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    return (set * 3 * D + tl.program_id(1) * W + o) * I + i % I, o // I == i // I


@triton.jit
def _matrices(ptrs: tl.tensor, here_WW: tl.tensor, dtype: tl.constexpr, D: tl.constexpr, I: tl.constexpr):
    """Matrices of the maps to queries, keys and values."""
    w_q_WW = tl.load(ptrs, here_WW, 0.0).to(dtype)
    w_k_WW = tl.load(ptrs + D * I, here_WW, 0.0).to(dtype)
    w_v_WW = tl.load(ptrs + 2 * D * I, here_WW, 0.0).to(dtype)
    return w_q_WW, w_k_WW, w_v_WW


@triton.jit
def _rows(m_M: tl.tensor, rows: tl.tensor, D: tl.constexpr, W: tl.constexpr):
    """Places of a program's channels of rows of its run, and whether there are such rows."""
    d_W = tl.program_id(1) * W + tl.arange(0, W)
    return (tl.program_id(2).to(tl.int64) * rows + m_M)[:, None] * D + d_W[None, :], (m_M < rows)[:, None]


@triton.jit(do_not_specialize=["rows"])
def maps_fwd_kernel(
    c_ptr: tl.tensor,
    x_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    I: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
):
    """Write queries, keys and values of M rows."""
    at_MW, here_M1 = _rows(tl.program_id(0) * M + tl.arange(0, M), rows, D, W)
    c_MW, x_MW = tl.load(c_ptr + at_MW, here_M1, 0.0), tl.load(x_ptr + at_MW, here_M1, 0.0)
    at_WW, here_WW = _at_blocks(tl.program_id(2).to(tl.int64), D, I, W)
    w_q_WW, w_k_WW, w_v_WW = _matrices(blocks_ptr + at_WW, here_WW, c_MW.dtype, D, I)
    tl.store(q_ptr + at_MW, tl.dot(c_MW, tl.trans(w_q_WW), input_precision="ieee"), here_M1)
    tl.store(k_ptr + at_MW, tl.dot(c_MW, tl.trans(w_k_WW), input_precision="ieee"), here_M1)
    tl.store(v_ptr + at_MW, tl.dot(x_MW, tl.trans(w_v_WW), input_precision="ieee"), here_M1)


@triton.jit(do_not_specialize=["rows"])
def maps_bwd_kernel(
    c_ptr: tl.tensor,
    x_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dc_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dblocks_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    I: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the gradients of a group's rows, M at a time, then its share of those of the blocks."""
    run = tl.program_id(2).to(tl.int64)
    at_WW, here_WW = _at_blocks(run, D, I, W)
    w_q_WW, w_k_WW, w_v_WW = _matrices(blocks_ptr + at_WW, here_WW, c_ptr.dtype.element_ty, D, I)
    dw_q_WW, dw_k_WW, dw_v_WW = tl.zeros([W, W], tl.float32), tl.zeros([W, W], tl.float32), tl.zeros([W, W], tl.float32)

    # Rows.
    for first in range(0, GROUP, M):
        at_MW, here_M1 = _rows(tl.program_id(0) * GROUP + first + tl.arange(0, M), rows, D, W)
        c_MW, x_MW = tl.load(c_ptr + at_MW, here_M1, 0.0), tl.load(x_ptr + at_MW, here_M1, 0.0)
        dq_MW, dk_MW = tl.load(dq_ptr + at_MW, here_M1, 0.0), tl.load(dk_ptr + at_MW, here_M1, 0.0)
        dv_MW = tl.load(dv_ptr + at_MW, here_M1, 0.0)
        dc_MW = tl.dot(dk_MW, w_k_WW, tl.dot(dq_MW, w_q_WW, input_precision="ieee"), input_precision="ieee")
        tl.store(dc_ptr + at_MW, dc_MW, here_M1)
        tl.store(dx_ptr + at_MW, tl.dot(dv_MW, w_v_WW, input_precision="ieee"), here_M1)
        dw_q_WW = tl.dot(tl.trans(dq_MW), c_MW, dw_q_WW, input_precision="ieee")
        dw_k_WW = tl.dot(tl.trans(dk_MW), c_MW, dw_k_WW, input_precision="ieee")
        dw_v_WW = tl.dot(tl.trans(dv_MW), x_MW, dw_v_WW, input_precision="ieee")

    # Blocks.
    at_WW, here_WW = _at_blocks(run * tl.num_programs(0) + tl.program_id(0), D, I, W)
    tl.store(dblocks_ptr + at_WW, dw_q_WW, here_WW)
    tl.store(dblocks_ptr + D * I + at_WW, dw_k_WW, here_WW)
    tl.store(dblocks_ptr + 2 * D * I + at_WW, dw_v_WW, here_WW)


def _channels(D: int, I: int) -> int:
    """Channels of a program; 0 if no number fits."""
    return next((W for W in WIDTHS if D % W == 0 and W % I == 0), 0)


@kernels_take("maps of blocks", "widths that 16 divides, and blocks of 1, 2, 4, 8 or 16 channels")
def fits_block_maps(D: int, I: int) -> bool:
    """Whether ``block_maps_method`` takes D channels in blocks of I."""
    return _channels(D, I) > 0


def block_maps_method() -> Method:
    """Queries, keys and values like c.

    Tensors: c and x (R, ..., D) in bfloat16 or float32; blocks (R, 3, D / I, I, I).
    """

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        c, x, blocks = contiguous(*tensors)
        found = tuple(torch.empty_like(c) for _ in range(3))
        rows, D, I = rows_of(c), c.shape[-1], blocks.shape[-1]
        W = _channels(D, I)
        grid = triton.cdiv(rows, FORWARD["M"]), D // W, len(c)
        maps_fwd_kernel[grid](c, x, blocks, *found, rows, D, I, W, **FORWARD)
        return found, ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        c, x, blocks, *given = contiguous(*tensors, *gradients)
        rows, D, I = rows_of(c), c.shape[-1], blocks.shape[-1]
        W = _channels(D, I)
        grid = triton.cdiv(rows, GROUP), D // W, len(c)
        dc, dx = torch.empty_like(c), torch.empty_like(x)
        dblocks = blocks.new_empty(len(c), grid[0], *blocks.shape[1:], dtype=torch.float32)
        maps_bwd_kernel[grid](c, x, blocks, *given, dc, dx, dblocks, rows, D, I, W, GROUP=GROUP, **BACKWARD)
        return dc, dx, group_sum(dblocks)

    return Method(forward, backward, outputs=3)
