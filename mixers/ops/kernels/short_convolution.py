# ruff: noqa: RUF005  (Triton takes sums of tuples, but no starred ones)
# mypy: disable-error-code="assignment"
"""Fused kernels of the short causal convolution, with or without SiLU.

name       shape                     written by          read by
x          (R, B, T, D)              caller              both kernels        rows at equal distances
weight     (R, D, W)                 caller              both kernels        float32
bias       (R, D)                    caller              both kernels        float32; absent: any tensor
y          (R, B, T, D)              convolve_fwd        caller
dy         (R, B, T, D)              caller              convolve_bwd
dx         (R, B, T, D)              convolve_bwd        caller
dsums      (R, parts, W + 1, D)      convolve_bwd        group_sum           of weight and bias, float32

A program loops over L positions of a sequence with C channels. The W newest inputs, and the gradients of the W newest
outputs, stay in its registers, so that each is read once. If outputs are in parts, a launch computes
D of the channels, and rows of dx are X numbers apart.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import evenly_spaced, sigmoid
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

CONVOLVE = {"L": 32, "C": 128, "num_warps": 1}


@triton.jit
def _weights(weight_ptr: tl.tensor, c: tl.tensor, D: tl.constexpr, W: tl.constexpr):
    """Weights of each tap; the tap of the oldest input is first."""
    weights = ()
    for w in tl.static_range(W):
        weights = weights + (tl.load(weight_ptr + c * W + w, c < D, 0.0),)
    return weights


@triton.jit
def _row(ptr: tl.tensor, t: tl.tensor, T: tl.tensor, distance: tl.tensor, c: tl.tensor, D: tl.constexpr):
    """Row t of a sequence as it is in memory; zeros outside the sequence."""
    at_C = t * distance + c
    return tl.load(ptr + at_C, (at_C >= 0) & (at_C < T * distance) & (c < D), 0.0)


@triton.jit
def _rows_before(
    ptr: tl.tensor, t: tl.tensor, T: tl.tensor, distance: tl.tensor, c: tl.tensor, D: tl.constexpr, W: tl.constexpr
):
    """The W rows before row t, oldest first, in float32."""
    rows = ()
    for w in tl.static_range(W):
        rows = rows + (_row(ptr, t - W + w, T, distance, c, D).to(tl.float32),)
    return rows


@triton.jit
def _zeros(C: tl.constexpr, W: tl.constexpr):
    """W rows of zeros."""
    rows = ()
    for _ in tl.static_range(W):
        rows = rows + (tl.zeros([C], tl.float32),)
    return rows


@triton.jit
def _add_products(sums, row_C: tl.tensor, rows, W: tl.constexpr):
    """Sums plus the products of one row with each row of ``rows``."""
    added = ()
    for w in tl.static_range(W):
        added = added + (sums[w] + row_C * rows[w],)
    return added


@triton.jit
def _weighted(weights, rows, W: tl.constexpr):
    """Sum of weights times rows."""
    y_C = weights[0] * rows[0]
    for w in tl.static_range(1, W):
        y_C += weights[w] * rows[w]
    return y_C


@triton.jit
def convolve_fwd_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    distance: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
):
    """Walk through L positions with C channels.

    1. Read the weights, and the W inputs before the first position.
    2. For each position:
       a. put its input in the place of the oldest one, and read the next input;
       b. y = bias + sum of weight x;
       c. write y, or with SILU y sigmoid(y).
    """
    # 1. Weights and inputs.
    sequence = tl.program_id(0).to(tl.int64)
    run = sequence // B
    start = tl.program_id(1) * L
    c = tl.program_id(2) * C + tl.arange(0, C)
    weights = _weights(weight_ptr + run * D * W, c, D, W)
    if BIAS:
        bias_C = tl.load(bias_ptr + run * D + c, c < D, 0.0)

    x_ptr += sequence * T * distance
    y_ptr += sequence * T * D
    window = _rows_before(x_ptr, start, T, distance, c, D, W)
    ahead_C = _row(x_ptr, start, T, distance, c, D)
    for t in range(start, tl.minimum(start + L, T)):
        # 2a. Inputs.
        window = window[1:] + (ahead_C.to(tl.float32),)
        ahead_C = _row(x_ptr, t + 1, T, distance, c, D)

        # 2b. Sum.
        y_C = _weighted(weights, window, W)
        if BIAS:
            y_C += bias_C

        # 2c. Output.
        if SILU:
            y_C *= sigmoid(y_C)
        tl.store(y_ptr + t * D + c, y_C, c < D)


@triton.jit
def convolve_bwd_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dsums_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    distance: tl.tensor,
    D: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of L positions with C channels, and their sums for weights and bias.

    1. Read the weights, and the W inputs before the first position.
    2. For each position, and W - 1 positions after them, whose outputs saw the last inputs:
       a. put its input in the place of the oldest one, and read what the next position needs;
       b. with SILU, compute y before its SiLU again, and multiply its gradient dy by the slope;
       c. among the L positions, add dy x to the sum for each tap, and dy to that for the bias;
       d. all W outputs that saw the oldest input are known: write its gradient, the sum of weight dy.
    3. Write the sums.
    """
    # 1. Weights and inputs.
    sequence = tl.program_id(0).to(tl.int64)
    run = sequence // B
    start = tl.program_id(1) * L
    stop = tl.minimum(start + L, T)
    c = tl.program_id(2) * C + tl.arange(0, C)
    weights = _weights(weight_ptr + run * D * W, c, D, W)
    if BIAS:
        bias_C = tl.load(bias_ptr + run * D + c, c < D, 0.0)

    x_ptr += sequence * T * distance
    dy_ptr += sequence * T * D
    dx_ptr += sequence * T * X
    window = _rows_before(x_ptr, start, T, distance, c, D, W)
    x_ahead_C = _row(x_ptr, start, T, distance, c, D)
    dy_ahead_C = _row(dy_ptr, start, T, D, c, D)
    grads = _zeros(C, W)
    dweights = _zeros(C, W)
    dbias_C = tl.zeros([C], tl.float32)
    for t in range(start, stop + W - 1):
        # 2a. Inputs.
        window = window[1:] + (x_ahead_C.to(tl.float32),)
        dy_C = dy_ahead_C.to(tl.float32)
        x_ahead_C = _row(x_ptr, t + 1, T, distance, c, D)
        dy_ahead_C = _row(dy_ptr, t + 1, T, D, c, D)

        # 2b. SiLU.
        if SILU:
            y_C = _weighted(weights, window, W)
            if BIAS:
                y_C += bias_C
            open_C = sigmoid(y_C)
            dy_C *= open_C * (1.0 + y_C * (1.0 - open_C))
        grads = (dy_C,) + grads[: W - 1]

        # 2c. Weights and bias.
        own_C = tl.where(t < stop, dy_C, 0.0)
        dbias_C += own_C
        dweights = _add_products(dweights, own_C, window, W)

        # 2d. Oldest input.
        at_C = (t - W + 1) * X + c
        tl.store(dx_ptr + at_C, _weighted(weights, grads, W), (at_C >= start * X) & (c < D))

    # 3. Sums of the program.
    part = sequence * tl.num_programs(1) + tl.program_id(1)
    dsums_ptr += part * (W + 1) * D
    for w in tl.static_range(W):
        tl.store(dsums_ptr + w * D + c, dweights[w], c < D)
    tl.store(dsums_ptr + W * D + c, dbias_C, c < D)


def fits_short_convolution(taps: int) -> bool:
    """Whether ``short_convolution_method`` takes this number of taps."""
    return taps <= 8


def short_convolution_method(dtype: torch.dtype, silu: bool, shapes: tuple[tuple[int, ...], ...] = ()) -> Method:
    """``bias + sum_w weight_w x_{t-W+1+w}`` in ``dtype``, with ``silu`` times its sigmoid.

    Tensors: x (R, B, T, D) of any width, weight (R, D, W) and bias (R, D) float32, or None. With shapes, the outputs
    are parts with channels of these shapes, each without gaps in memory.
    """
    sizes = tuple(map(prod, shapes))

    def parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        numbers = sizes or x.shape[-1:]
        biases = [None] * len(numbers) if bias is None else bias.split(numbers, -1)
        return zip(x.split(numbers, -1), weight.split(numbers, 1), biases, strict=True)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensors, Tensors]:
        x, distance = evenly_spaced(x)
        outputs = []
        for (part, taps, own_bias), shape in zip(parts(x, weight, bias), shapes or [x.shape[3:]], strict=True):
            y = x.new_empty(*x.shape[:3], *shape, dtype=dtype)
            parameters, widths = _parameters(taps, own_bias)
            convolve_fwd_kernel[_grid(part)](
                part, *parameters, y, *x.shape[1:3], distance, **widths, SILU=silu, **CONVOLVE
            )
            outputs.append(y)
        return tuple(outputs), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, weight, bias = tensors
        x, distance = evenly_spaced(x)
        R, B, T, D = x.shape
        W = weight.shape[-1]

        dx = x.new_empty(x.shape)
        sums = []
        dparts = dx.split(sizes or D, -1)
        for (part, taps, own_bias), dy, dpart in zip(parts(x, weight, bias), gradients, dparts, strict=True):
            grid = _grid(part)
            dsums = weight.new_empty(R, B * grid[1], W + 1, part.shape[-1])
            parameters, widths = _parameters(taps, own_bias)
            convolve_bwd_kernel[grid](
                part, *parameters, dy.contiguous(), dpart, dsums, B, T, distance, X=D, **widths, SILU=silu, **CONVOLVE
            )
            sums.append(group_sum(dsums))

        dweight, dbias = (sums[0] if len(sums) == 1 else torch.cat(sums, -1)).split([W, 1], 1)
        return dx, dweight.mT, None if bias is None else dbias[:, 0]

    return Method(forward, backward, outputs=len(sizes) or 1)


def _grid(x: Tensor) -> tuple[int, int, int]:
    """Sequences of all runs, parts of a sequence, and parts of the channels."""
    R, B, T, D = x.shape
    return R * B, triton.cdiv(T, CONVOLVE["L"]), triton.cdiv(D, CONVOLVE["C"])


def _parameters(weight: Tensor, bias: Tensor | None) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
    """Weights and bias, or any tensor in the bias's absence; compile-time settings."""
    weight = weight.contiguous()
    sizes = {"D": weight.shape[1], "W": weight.shape[2], "BIAS": bias is not None}
    return (weight, weight if bias is None else bias.contiguous()), sizes
