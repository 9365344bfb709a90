"""Kernels of vectors that all heads share, with a bias and a rotation for each head.

name      shape                     written by          read by
y         (R, B, T, M, N)           caller              both kernels
bias      (R, M, H, N)              caller              both kernels        float32
angle     (R, B, T, H, A)           caller              both kernels        float32
out       (R, B, T, M, H, N)        rotation_fwd        caller
dout      (R, B, T, M, H, N)        caller              rotation_bwd
dy        (R, B, T, M, N)           rotation_bwd        caller
dbias     (R, B, M, H, N)           rotation_bwd        caller              of one sequence, float32
dangle    (R, B, T, M, H, A)        rotation_bwd        caller              of one vector of a position, float32

A program takes vector m of all positions of a sequence, L positions at a time, with all heads. Channels i and i + A are
a complex number, which the angle turns; S channels come after these and stay. The gradient of an angle is the gradient
of the number before its rotation, times the number turned by π/2; neither sines nor cosines are stored.

Rows go to LATE positions after their own. Sizes of tiles: G heads, P angles and Q channels that stay, padded to powers
of two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import contiguous
from mixers.ops.method import Method, Optionals, Tensors

TILE = 2048
"""Numbers of a tile of positions, heads and channels."""


@triton.jit
def _vectors(
    y_ptr: tl.tensor,
    row_L: tl.tensor,
    live_L: tl.tensor,
    bias_ptr: tl.tensor,
    rows_G: tl.tensor,
    c: tl.tensor,
    first: tl.constexpr,
    channels: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
):
    """Sums of vectors and biases (L, G, C), for channels first + c of which there are so many."""
    y_LC = tl.load(y_ptr + row_L[:, None] * N + first + c[None, :], live_L[:, None] & (c < channels)[None, :], 0.0)
    bias_GC = tl.load(bias_ptr + rows_G[:, None] * N + first + c[None, :], (c < channels)[None, :], 0.0)
    return y_LC.to(tl.float32)[:, None, :] + bias_GC[None, :, :]


@triton.jit
def _turns(
    angle_ptr: tl.tensor,
    row_L: tl.tensor,
    live_L: tl.tensor,
    g: tl.tensor,
    p: tl.tensor,
    H: tl.constexpr,
    A: tl.constexpr,
):
    """Cosines and sines (L, G, P) of the angles."""
    at_LGP = (row_L[:, None, None] * H + g[None, :, None]) * A + p[None, None, :]
    live_LGP = live_L[:, None, None] & (g < H)[None, :, None] & (p < A)[None, None, :]
    angle_LGP = tl.load(angle_ptr + at_LGP, live_LGP, 0.0)
    return tl.cos(angle_LGP), tl.sin(angle_LGP)


@triton.jit
def _place(
    row_L: tl.tensor,
    live_L: tl.tensor,
    g: tl.tensor,
    c: tl.tensor,
    first: tl.constexpr,
    channels: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
):
    """Where channels first + c of all heads stand in rows (H, N), and which of them there are (L, G, C)."""
    at_LGC = (row_L[:, None, None] * H + g[None, :, None]) * N + first + c[None, None, :]
    return at_LGC, live_L[:, None, None] & (g < H)[None, :, None] & (c < channels)[None, None, :]


@triton.jit(do_not_specialize=["T"])
def rotation_fwd_kernel(
    y_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    angle_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    M: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    LATE: tl.constexpr,
):
    """Rows of vector m of all positions of a sequence.

    For each tile of positions:
    1. read vectors, biases and angles;
    2. write the turned channels;
    3. write those that stay.
    """
    m = tl.program_id(0) % M
    sequence = (tl.program_id(0) // M).to(tl.int64)
    g = tl.arange(0, G)
    p = tl.arange(0, P)
    q = tl.arange(0, Q)
    heads_G = (sequence // sequences * M + m) * H + tl.minimum(g, H - 1)

    for start in range(0, T, L):
        # 1. Vectors, biases and angles.
        t = start + tl.arange(0, L)
        live_L = (t >= LATE) & (t < T)
        position_L = sequence * T + t - LATE
        row_L = position_L * M + m
        real = _vectors(y_ptr, row_L, live_L, bias_ptr, heads_G, p, 0, A, H, N)
        imaginary = _vectors(y_ptr, row_L, live_L, bias_ptr, heads_G, p, A, A, H, N)
        cos, sin = _turns(angle_ptr, position_L, live_L, g, p, H, A)

        # 2. Turned channels, and zeros where nothing is before.
        to_L = (sequence * T + t) * M + m
        at_LGP, there_LGP = _place(to_L, t < T, g, p, 0, A, H, N)
        before_LGP = live_L[:, None, None]
        tl.store(out_ptr + at_LGP, tl.where(before_LGP, real * cos - imaginary * sin, 0.0), there_LGP)
        tl.store(out_ptr + at_LGP + A, tl.where(before_LGP, real * sin + imaginary * cos, 0.0), there_LGP)

        # 3. Other channels.
        if S > 0:
            still = _vectors(y_ptr, row_L, live_L, bias_ptr, heads_G, q, 2 * A, S, H, N)
            at_LGQ, there_LGQ = _place(to_L, t < T, g, q, 2 * A, S, H, N)
            tl.store(out_ptr + at_LGQ, tl.where(live_L[:, None, None], still, 0.0), there_LGQ)


@triton.jit(do_not_specialize=["T"])
def rotation_bwd_kernel(
    y_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    angle_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    dangle_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    M: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    LATE: tl.constexpr,
):
    """Gradients of vector m of all positions of a sequence.

    1. For each tile of positions:
       a. read vectors, biases, angles, and the gradients of the rows that they went to;
       b. turn the gradients back, and write the gradients of the angles;
       c. write dy, sums over heads, and add sums over positions to the gradients of the biases;
       d. do the same for channels that stay.
    2. Write the gradients of the biases.
    """
    m = tl.program_id(0) % M
    sequence = (tl.program_id(0) // M).to(tl.int64)
    g = tl.arange(0, G)
    p = tl.arange(0, P)
    q = tl.arange(0, Q)
    heads_G = (sequence // sequences * M + m) * H + tl.minimum(g, H - 1)
    dreal_GP = tl.zeros([G, P], tl.float32)
    dimaginary_GP = tl.zeros([G, P], tl.float32)
    dstill_GQ = tl.zeros([G, Q], tl.float32)

    for start in range(0, T, L):
        # 1a. Vectors, biases, angles, and gradients.
        t = start + tl.arange(0, L)
        here_L = t < T
        position_L = sequence * T + t
        row_L = position_L * M + m
        real = _vectors(y_ptr, row_L, here_L, bias_ptr, heads_G, p, 0, A, H, N)
        imaginary = _vectors(y_ptr, row_L, here_L, bias_ptr, heads_G, p, A, A, H, N)
        cos, sin = _turns(angle_ptr, position_L, here_L, g, p, H, A)
        to_L = (position_L + LATE) * M + m
        at_LGP, there_LGP = _place(to_L, t + LATE < T, g, p, 0, A, H, N)
        gone_real = tl.load(dout_ptr + at_LGP, there_LGP, 0.0).to(tl.float32)
        gone_imaginary = tl.load(dout_ptr + at_LGP + A, there_LGP, 0.0).to(tl.float32)

        # 1b. Back through the rotation.
        dreal = gone_real * cos + gone_imaginary * sin
        dimaginary = gone_imaginary * cos - gone_real * sin
        at_LGA = (row_L[:, None, None] * H + g[None, :, None]) * A + p[None, None, :]
        here_LGA = here_L[:, None, None] & (g < H)[None, :, None] & (p < A)[None, None, :]
        tl.store(dangle_ptr + at_LGA, dimaginary * real - dreal * imaginary, here_LGA)

        # 1c. Vectors and biases.
        at_LP = row_L[:, None] * N + p[None, :]
        here_LP = here_L[:, None] & (p < A)[None, :]
        tl.store(dy_ptr + at_LP, tl.sum(dreal, 1), here_LP)
        tl.store(dy_ptr + at_LP + A, tl.sum(dimaginary, 1), here_LP)
        dreal_GP += tl.sum(dreal, 0)
        dimaginary_GP += tl.sum(dimaginary, 0)

        # 1d. Other channels.
        if S > 0:
            at_LGQ, there_LGQ = _place(to_L, t + LATE < T, g, q, 2 * A, S, H, N)
            dstill = tl.load(dout_ptr + at_LGQ, there_LGQ, 0.0).to(tl.float32)
            here_LQ = here_L[:, None] & (q < S)[None, :]
            tl.store(dy_ptr + row_L[:, None] * N + 2 * A + q[None, :], tl.sum(dstill, 1), here_LQ)
            dstill_GQ += tl.sum(dstill, 0)

    # 2. Biases.
    at_GP = (((sequence * M + m) * H) + g)[:, None] * N + p[None, :]
    there_GP = (g < H)[:, None] & (p < A)[None, :]
    tl.store(dbias_ptr + at_GP, dreal_GP, there_GP)
    tl.store(dbias_ptr + at_GP + A, dimaginary_GP, there_GP)
    if S > 0:
        at_GQ = (((sequence * M + m) * H) + g)[:, None] * N + 2 * A + q[None, :]
        tl.store(dbias_ptr + at_GQ, dstill_GQ, (g < H)[:, None] & (q < S)[None, :])


def rotation_method(dtype: torch.dtype, late: bool) -> Method:
    """``mixers.ops.rotation.biased_rotation`` with outputs in ``dtype``.

    Tensors: y (R, B, T, M, N) of any width, bias (R, M, H, N) float32, angle (R, B, T, H, A) float32.
    """

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        y, bias, angle = contiguous(*tensors)
        out = torch.empty(*y.shape[:-1], *bias.shape[-2:], dtype=dtype, device=y.device)
        grid, settings = _launch(y, bias, angle, late)
        rotation_fwd_kernel[grid](y, bias, angle, out, **settings)
        return (out,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        y, bias, angle, dout = contiguous(*tensors, *gradients)
        grid, settings = _launch(y, bias, angle, late)
        dy = torch.empty_like(y)
        dbias = bias.new_empty(*y.shape[:2], *bias.shape[1:])
        dangle = angle.new_empty(*y.shape[:-1], *angle.shape[-2:])
        rotation_bwd_kernel[grid](y, bias, angle, dout, dy, dbias, dangle, **settings)
        return dy, dbias.sum(1), dangle.squeeze(3) if dangle.shape[3] == 1 else dangle.sum(3)

    return Method(forward, backward)


def _launch(y: Tensor, bias: Tensor, angle: Tensor, late: bool) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the settings that both kernels share."""
    R, B, T, M, N = y.shape
    H, A = angle.shape[-2:]
    S = N - 2 * A
    G, P, Q = (triton.next_power_of_2(max(size, 1)) for size in (H, A, S))
    settings = {
        "T": T,
        "sequences": B,
        "M": M,
        "H": H,
        "N": N,
        "A": A,
        "S": S,
        "G": G,
        "P": P,
        "Q": Q,
        "L": max(1, TILE // (G * max(P, Q))),
        "LATE": int(late),
    }
    return (R * B * M,), settings
