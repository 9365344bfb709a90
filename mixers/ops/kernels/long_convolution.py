"""Fused kernels of the gated long convolution: a product with a Toeplitz matrix for each channel.

    name       shape                      written by      read by
    v, gate    (R, B, T, D)               caller          all kernels            rows may be apart
    h          (R, T, D)                  caller          fwd, input_bwd         filters
    y          (R, B, T, D)               fwd             caller                 h * (gate v)
    dy         (R, B, T, D)               caller          both backward kernels
    dv         (R, B, T, D)               input_bwd       caller
    dgate      (R, B, T, D)               input_bwd       caller
    parts      (R, groups, 2, tiles N, D) filter_bwd      group_sum              gradient of h, float32

Tensors without "float32" have the dtype of the products.

A program computes C channels at once as a batch of matrix products, because the channels of a row are adjacent in
memory. Its tiles have N positions and M sequences. The Toeplitz matrix is read from the filters in tiles of N x N;
tiles above the diagonal are zero and are left out. Up to ``LONGEST`` positions this is faster than an FFT, which passes
over memory several times.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

LONGEST = 1024
"""Largest length that the kernels take, because their work grows with the square of the length."""
PROGRAMS = 264
"""Number of programs of ``filter_bwd_kernel`` that fills a GPU: two per multiprocessor of an H200."""
TILE = {"C": 16, "N": 32, "M": 32, "num_warps": 8, "num_stages": 1}


@triton.jit
def _sequences(B: tl.tensor, T: tl.tensor, M: tl.constexpr):
    """Run, first row of the program's sequences, their numbers from there on, and whether they are in the batch."""
    run = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * M
    b = tl.arange(0, M)
    return run, (run * B + first) * T, b, first + b < B


@triton.jit
def _gated(v_ptr: tl.tensor, gate_ptr: tl.tensor, at: tl.tensor, here: tl.tensor):
    """gate v, in their dtype."""
    v = tl.load(v_ptr + at, here, 0.0)
    return (v.to(tl.float32) * tl.load(gate_ptr + at, here, 0.0).to(tl.float32)).to(v.dtype)


@triton.jit
def _toeplitz(h_ptr: tl.tensor, t: tl.tensor, s: tl.tensor, c: tl.tensor, T: tl.tensor, D: tl.constexpr):
    """Tile (t, s, c) of the matrices: h at distance t - s, zeros where that is negative."""
    k_TS1 = (t[:, None] - s[None, :])[:, :, None]
    here_TSC = (k_TS1 >= 0) & (k_TS1 < T) & (c < D)[None, None, :]
    return tl.load(h_ptr + k_TS1 * D + c[None, None, :], here_TSC, 0.0)


@triton.jit(do_not_specialize=["B", "T"])
def long_convolution_fwd_kernel(
    v_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    h_ptr: tl.tensor,
    y_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    apart: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Outputs of C channels at N positions of M sequences; rows of v and gate are ``apart`` elements apart.

    1. Find the positions, the channels and the sequences; late positions, which take the longest, come first.
    2. For N inputs at a time, up to the last position of the program: y += Toeplitz(h) (gate v).
    3. Write y.
    """
    # 1. Positions, channels and sequences.
    tiles = tl.cdiv(T, N)
    start = (tiles - 1 - tl.program_id(0) % tiles) * N
    t = start + tl.arange(0, N)
    c = tl.program_id(0) // tiles * C + tl.arange(0, C)
    run, row, b, live_B = _sequences(B, T, M)
    h_ptr += run * T * D
    v_ptr += row * apart
    gate_ptr += row * apart

    # 2. Products.
    y_CTB = tl.zeros([C, N, M], tl.float32)
    for first in range(0, start + N, N):
        s = first + tl.arange(0, N)
        here_BSC = (live_B[:, None] & (s < T)[None, :])[:, :, None] & (c < D)[None, None, :]
        at_BSC = ((b[:, None] * T + s[None, :]) * apart)[:, :, None] + c[None, None, :]
        u_BSC = _gated(v_ptr, gate_ptr, at_BSC, here_BSC)
        h_TSC = _toeplitz(h_ptr, t, s, c, T, D)
        y_CTB = tl.dot(tl.permute(h_TSC, [2, 0, 1]), tl.permute(u_BSC, [2, 1, 0]), y_CTB, input_precision="ieee")

    # 3. Outputs.
    y_BTC = tl.permute(y_CTB, [2, 1, 0])
    here_BTC = (live_B[:, None] & (t < T)[None, :])[:, :, None] & (c < D)[None, None, :]
    to_BTC = ((b[:, None] * T + t[None, :]) * D)[:, :, None] + c[None, None, :]
    tl.store(y_ptr + row * D + to_BTC, y_BTC, here_BTC)


@triton.jit(do_not_specialize=["B", "T"])
def long_convolution_input_bwd_kernel(
    v_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    h_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    apart: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of C channels of v and gate at N positions of M sequences.

    1. Find the positions, the channels and the sequences; early positions, which take the longest, come first.
    2. For N outputs at a time, from the first position of the program on: du += Toeplitz(h)^T dy.
    3. Write dv = gate du and dgate = v du.
    """
    # 1. Positions, channels and sequences.
    tiles = tl.cdiv(T, N)
    start = tl.program_id(0) % tiles * N
    s = start + tl.arange(0, N)
    c = tl.program_id(0) // tiles * C + tl.arange(0, C)
    run, row, b, live_B = _sequences(B, T, M)
    h_ptr += run * T * D
    dy_ptr += row * D

    # 2. Products.
    du_CSB = tl.zeros([C, N, M], tl.float32)
    for first in range(start, T, N):
        t = first + tl.arange(0, N)
        here_BTC = (live_B[:, None] & (t < T)[None, :])[:, :, None] & (c < D)[None, None, :]
        at_BTC = ((b[:, None] * T + t[None, :]) * D)[:, :, None] + c[None, None, :]
        dy_BTC = tl.load(dy_ptr + at_BTC, here_BTC, 0.0)
        h_TSC = _toeplitz(h_ptr, t, s, c, T, D)
        du_CSB = tl.dot(tl.permute(h_TSC, [2, 1, 0]), tl.permute(dy_BTC, [2, 1, 0]), du_CSB, input_precision="ieee")

    # 3. Gradients.
    du_BSC = tl.permute(du_CSB, [2, 1, 0])
    here_BSC = (live_B[:, None] & (s < T)[None, :])[:, :, None] & (c < D)[None, None, :]
    row_BS1 = (b[:, None] * T + s[None, :])[:, :, None]
    at_BSC = row_BS1 * apart + c[None, None, :]
    to_BSC = row_BS1 * D + c[None, None, :]
    gate_BSC = tl.load(gate_ptr + row * apart + at_BSC, here_BSC, 0.0).to(tl.float32)
    tl.store(dv_ptr + row * D + to_BSC, gate_BSC * du_BSC, here_BSC)
    v_BSC = tl.load(v_ptr + row * apart + at_BSC, here_BSC, 0.0).to(tl.float32)
    tl.store(dgate_ptr + row * D + to_BSC, v_BSC * du_BSC, here_BSC)


@triton.jit(do_not_specialize=["B", "T"])
def long_convolution_filter_bwd_kernel(
    v_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    apart: tl.tensor,
    D: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of C channels of the filters, from tiles of outputs and inputs that are ``far`` tiles apart.

    1. Find the channels, the distance and the group of sequences.
    2. For all such pairs of tiles, and M sequences of the group at a time: dmatrix += dy (gate v)^T.
    3. Sum dmatrix over its diagonals, t - s = k + far N. Each row is turned by its number t, so that column k holds
       diagonal k of rows t >= k and diagonal k - N of the others.
    4. Write the sums of the diagonals k, and those of k - N, which belong to the distance before.
    """
    # 1. Channels, distance and sequences.
    tiles = tl.cdiv(T, N)
    far = tl.program_id(0) % tiles
    c = tl.program_id(0) // tiles * C + tl.arange(0, C)
    n = tl.arange(0, N)
    b = tl.arange(0, M)
    run = tl.program_id(2).to(tl.int64)

    # 2. Products.
    dmatrix_CTS = tl.zeros([C, N, N], tl.float32)
    for first in range(tl.program_id(1) * M, B, tl.num_programs(1) * M):
        row = (run * B + first) * T
        live_B = first + b < B
        for start in range(far * N, T, N):
            t = start + n
            s = t - far * N
            here_TBC = ((t < T)[:, None] & live_B[None, :])[:, :, None] & (c < D)[None, None, :]
            at_TBC = ((b[None, :] * T + t[:, None]) * D)[:, :, None] + c[None, None, :]
            dy_TBC = tl.load(dy_ptr + row * D + at_TBC, here_TBC, 0.0)
            here_SBC = ((s < T)[:, None] & live_B[None, :])[:, :, None] & (c < D)[None, None, :]
            at_SBC = ((b[None, :] * T + s[:, None]) * apart)[:, :, None] + c[None, None, :]
            u_SBC = _gated(v_ptr + row * apart, gate_ptr + row * apart, at_SBC, here_SBC)
            dy_CTB = tl.permute(dy_TBC, [2, 0, 1])
            dmatrix_CTS = tl.dot(dy_CTB, tl.permute(u_SBC, [2, 1, 0]), dmatrix_CTS, input_precision="ieee")

    # 3. Diagonals.
    turned_NK = (n[:, None] - n[None, :] + N) % N
    turned_CNK = tl.gather(dmatrix_CTS, tl.broadcast_to(turned_NK[None, :, :], [C, N, N]), 2)
    below_1NK = (n[:, None] >= n[None, :])[None, :, :]
    near_CK = tl.sum(tl.where(below_1NK, turned_CNK, 0.0), 1)
    before_CK = tl.sum(tl.where(below_1NK, 0.0, turned_CNK), 1)

    # 4. Sums. Before distance 0 are inputs that come later; nothing is farther than the last tile.
    parts_ptr += (run * tl.num_programs(1) + tl.program_id(1)) * 2 * tiles * N * D
    at_CK = n[None, :] * D + c[:, None]
    here_C1 = (c < D)[:, None]
    other_ptr = parts_ptr + tiles * N * D
    tl.store(parts_ptr + far * N * D + at_CK, near_CK, here_C1)
    tl.store(other_ptr + (far + tiles - 1) % tiles * N * D + at_CK, tl.where(far > 0, before_CK, 0.0), here_C1)


def fits_gated_convolution(T: int) -> bool:
    """Whether ``gated_convolution_method`` takes this length."""
    return T <= LONGEST


def gated_convolution_method(dtype: torch.dtype) -> Method:
    """``sum_s h_{t-s} gate_s v_s`` (R, B, T, D) in ``dtype``. Tensors: v and gate (R, B, T, D), h (R, T, D)."""

    def rows(v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """v and gate in ``dtype``, and the elements between two rows; both may be slices of wider rows."""
        v, gate = v.to(dtype), gate.to(dtype)
        _, B, T, _ = v.shape
        apart = v.stride(2)
        even = B * T * apart, T * apart, apart, 1
        if v.stride() == gate.stride() == even:
            return v, gate, apart
        return v.contiguous(), gate.contiguous(), v.shape[-1]

    def forward(v: Tensor, gate: Tensor, h: Tensor) -> tuple[Tensors, Tensors]:
        v, gate, apart = rows(v, gate)
        R, B, T, D = v.shape
        y = v.new_empty(R, B, T, D)
        programs = triton.cdiv(T, TILE["N"]) * triton.cdiv(D, TILE["C"]), triton.cdiv(B, TILE["M"]), R
        long_convolution_fwd_kernel[programs](v, gate, h.to(dtype).contiguous(), y, B, T, apart, D=D, **TILE)
        return (y,), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        v, gate, h = tensors
        v, gate, apart = rows(v, gate)
        dy = gradients[0].contiguous()
        R, B, T, D = v.shape
        tiles, sequences = triton.cdiv(T, TILE["N"]), triton.cdiv(B, TILE["M"])
        programs = tiles * triton.cdiv(D, TILE["C"])

        # Inputs.
        dv, dgate = (v.new_empty(R, B, T, D) for _ in range(2))
        inputs = v, gate, h.to(dtype).contiguous(), dy
        long_convolution_input_bwd_kernel[programs, sequences, R](*inputs, dv, dgate, B, T, apart, D=D, **TILE)

        # Filters.
        groups = min(sequences, triton.cdiv(PROGRAMS, programs * R))
        parts = v.new_empty(R, groups * 2, tiles * TILE["N"], D, dtype=torch.float32)
        long_convolution_filter_bwd_kernel[programs, groups, R](v, gate, dy, parts, B, T, apart, D=D, **TILE)
        return dv, dgate, group_sum(parts)[:, :T]

    return Method(forward, backward)
