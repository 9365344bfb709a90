"""Products of few rows with the maps of a layer, with what stands before and after them.

The library leaves most of a GPU idle where a product has few rows: its time is that of a launch and of a read of the
weights. Here a program takes all rows of a run and a tile of outputs, and reads its weights once. The norm of the rows
and what follows the product need no launches of their own.

    name        shape               written by    read by
    x           (R, rows, I)        caller        kernel     inputs
    gain        (R, I)              caller        kernel     float32; of the norm of x, if there is one
    w           (R, P, O, I)        caller        kernel     P maps of the inputs; BACKWARD: one map, (R, I, O)
    residual    (R, rows, O)        caller        kernel     is added to the product, if there is one
    hidden      (R, rows, O)        caller        kernel     the product is times the slope of its GELU, if there is one
    y           (R, P, rows, O)     kernel        caller     or parts of the sums over inputs, (parts, R, rows, O)
    g           (R, P, rows, O)     kernel        caller     GELU of y, if it is asked for
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import EPS, Settings, contiguous, gelu_slope, normal_cdf

MOST_ROWS = 64
"""Largest number of rows of a run; the sums of more would spill registers."""
SLICE_BYTES = 128
"""Inputs K of a slice, times bytes per element; float32 fits into shared memory, too."""
LEAST_PROGRAMS = 64
"""Number of programs that read weights about as fast as a GPU can."""
OUTPUTS = (32, 16)
"""Outputs N of a program: the first number with which there are ``LEAST_PROGRAMS``, or else the last."""
FEW_ROWS = {"S": 4, "num_warps": 4, "num_stages": 5}
"""Slices S that a program reads at a time; each warp takes one of them."""


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    w_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    y_ptr: tl.tensor,
    g_ptr: tl.tensor,
    rows: tl.tensor,
    I: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    BACKWARD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
):
    """N outputs of one map, or one of the PARTS of their sums, for all rows of a run, of which there are at most M.

    1. For each S slices of K inputs of the part: add gain x w to the slices' sums, and x^2 to their sums of squares.
    2. Add up the slices; divide by the root mean square of the row, if there is a gain.
    3. Multiply by the slope of the hidden layer's GELU, or add the residual; write y and its GELU.
    """
    # 1. Slices.
    run = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (O + N - 1) // N
    plane = run * P + tl.program_id(0) // tiles
    m = tl.arange(0, M)
    o = tl.program_id(0) % tiles * N + tl.arange(0, N)
    dtype = w_ptr.dtype.element_ty
    sum_SMN = tl.zeros([S, M, N], tl.float32)
    squares_SM = tl.zeros([S, M], tl.float32)
    x_ptr += run * rows * I + m[None, :, None] * I
    w_ptr += plane * O * I
    inputs: tl.constexpr = (I + PARTS * S * K - 1) // (PARTS * S * K) * S * K
    for first in range(0, inputs, S * K):
        i_SK = tl.program_id(2) * inputs + first + tl.arange(0, S)[:, None] * K + tl.arange(0, K)[None, :]
        x_SMK = tl.load(x_ptr + i_SK[:, None, :], (m < rows)[None, :, None] & (i_SK < I)[:, None, :], 0.0)
        if gain_ptr is not None:
            x_SMK = x_SMK.to(tl.float32)
            squares_SM += tl.sum(x_SMK * x_SMK, 2)
            x_SMK *= tl.load(gain_ptr + run * I + i_SK, i_SK < I, 0.0)[:, None, :]
        at_SKN = i_SK[:, :, None] * (O if BACKWARD else 1) + o[None, None, :] * (1 if BACKWARD else I)
        w_SKN = tl.load(w_ptr + at_SKN, (i_SK < I)[:, :, None] & (o < O)[None, None, :], 0.0)
        sum_SMN = tl.dot(x_SMK.to(dtype), w_SKN, sum_SMN, input_precision="ieee")

    # 2. Sums and norm.
    y_MN = tl.sum(sum_SMN, 0)
    if gain_ptr is not None:
        y_MN *= tl.rsqrt(tl.sum(squares_SM, 0) / I + EPS)[:, None]

    # 3. Outputs.
    here_MN = (m < rows)[:, None] & (o < O)[None, :]
    plane += tl.program_id(2) * tl.num_programs(1) * P
    at_MN = (plane * rows + m)[:, None] * O + o[None, :]
    if hidden_ptr is not None:
        h_MN = tl.load(hidden_ptr + at_MN, here_MN, 0.0).to(tl.float32)
        below_MN, bell_MN = normal_cdf(h_MN)
        y_MN *= gelu_slope(h_MN, below_MN, bell_MN)
    if residual_ptr is not None:
        y_MN += tl.load(residual_ptr + at_MN, here_MN, 0.0).to(tl.float32)
    low_MN = y_MN.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at_MN, low_MN, here_MN)
    if g_ptr is not None:
        h_MN = low_MN.to(tl.float32)
        below_MN, _ = normal_cdf(h_MN)
        tl.store(g_ptr + at_MN, h_MN * below_MN, here_MN)


def are_few(x: Tensor) -> bool:
    """Whether ``few_rows_product`` takes the rows (R, rows, I)."""
    return x.shape[1] <= MOST_ROWS


def few_rows_product(
    x: Tensor,
    w: Tensor,
    y: Tensor | None = None,
    *,
    gain: Tensor | None = None,
    residual: Tensor | None = None,
    hidden: Tensor | None = None,
    g: Tensor | None = None,
    backward: bool = False,
    parts: int = 1,
) -> Tensor:
    """``x w^T`` of few rows (R, rows, I), or backward ``x w``, with what the kernel does beside it.

    Args:
        w: maps (R, O, I) or (R, P, O, I) in the dtype of products, or backward (R, I, O).
        y: place of the result, which is (R, rows, O) or (R, P, rows, O), in the dtype of the residual or else of w.
        gain, residual, hidden: see above.
        g: place of the GELU of the result.
        parts: if there are several, the result is (parts, R, rows, O) in float32, nothing else is done, and programs
            are as many times more.
    """
    x, gain, w = contiguous(x, gain, w)
    R, rows, I = x.shape
    O = w.shape[-1] if backward else w.shape[-2]
    if parts > 1:
        y = x.new_empty(parts, R, rows, O, dtype=torch.float32)
    elif y is None:
        y = (w if residual is None else residual).new_empty(*w.shape[:-2], rows, O)
    P = w[0].numel() // (I * O)
    N = next((n for n in OUTPUTS if R * P * parts * triton.cdiv(O, n) >= LEAST_PROGRAMS), OUTPUTS[-1])
    settings: Settings = {"I": I, "O": O, "P": P, "BACKWARD": backward, "PARTS": parts, "N": N, **FEW_ROWS}
    settings |= {
        "M": max(16, triton.next_power_of_2(rows)),
        "K": SLICE_BYTES // max(x.element_size(), w.element_size()),
    }
    few_rows_kernel[P * triton.cdiv(O, N), R, parts](x, gain, w, residual, hidden, y, g, rows, **settings)
    return y
