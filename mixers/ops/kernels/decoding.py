"""Kernels of a decoding step: products of few rows with matrices, and attention to a static key-value cache.

At batch 1 a step reads every weight once, and little else takes time but launches. Hence a launch computes all maps of
one input, with the norm before them and the GELU or the residual addition after them.

At batch 1, launches are also EARLY, where the GPU can do so (CUDA's programmatic dependent launch): a kernel begins
while the one before it still runs, reads its first weights, or the first pairs of the cache, and only then waits. What
it reads before it waits was written before the step; a step begins with launches that are not early.

Dimensions beside those of ``mixers.base``: I inputs and O outputs of a map, W maps of one input, J positions of the
cache. C is the head dim padded to a power of two, E the width padded to a power of two. Activations and sums are in
float32, or in float64 in tests; weights and cache may have 16 bits. Logits are in units of log2.

name        shape          written by                read by
x           (B, I)         caller                    row_product, row_products
gain        (I,)           caller                    row_product, row_products
w           (O, I) each    caller                    row_product, row_products
residual    (B, O)         caller                    row_product, row_products
y           (W, B, O)      row_product(s)            caller
q           (B, D)         caller                    cached_attention
kept        (2, B, D)      caller                    cached_attention    the pair that the cache lacks
temporary   (2, B, D)      caller                    cached_attention    the pair of the position itself, or None
cache       (2, B, J, D)   cached_attention          cached_attention    keys, values
position    (1,)           caller                    cached_attention    integer: number of positions before this one
a           (B, D)         cached_attention          caller
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import EPS, LOG2E, MASKED, Settings, contiguous, launches_early

MOST_ROWS = 8
"""Rows of ``row_products``; for more, products on tensor cores are faster."""
ROW_TILE = 4096
"""Inputs of a tile of ``row_product``, which has two outputs."""
ROWS_TILE = 1024
"""Inputs of a tile of ``row_products`` over the rows; with its four outputs, a thread holds 32 sums."""
FEW_PAIRS_TILE = 65536
"""Bytes of keys that ``cached_attention`` reads at a time for a single sequence, whose programs do not fill a GPU."""
PAIRS_TILE = 8192
"""Positions times padded channels of a head that it reads at a time for several sequences."""


@triton.jit
def row_product_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    w0_ptr: tl.tensor,
    w1_ptr: tl.tensor,
    w2_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scale: tl.constexpr,
    GELU: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    EARLY: tl.constexpr,
):
    """N outputs of one map for a single row.

    1. Read the first tile of weights, times their gains. An EARLY launch then waits for the one before it.
    2. For each tile of M inputs: add x w to the sums, and x^2 to the sum of squares.
    3. Add up the tile, and divide by the root mean square of the row, if there is a gain.
    4. Apply GELU, scale, add the residual, and write.

    Inputs and gains are read once for each output. They are then spread over threads as weights are; else they would go
    through shared memory.
    """
    if EARLY:
        gdc_launch_dependents()

    which = tl.program_id(1)
    w_ptr = _map(which, w0_ptr, w1_ptr, w2_ptr)
    o = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.arange(0, M)
    sum_NM = tl.zeros([N, M], x_ptr.dtype.element_ty)
    squares_NM = tl.zeros([N, M], x_ptr.dtype.element_ty)

    # 1. First weights.
    first_w_NM = _gained_weights(w_ptr, gain_ptr, o, m, x_ptr.dtype.element_ty, I, O)
    if EARLY:
        gdc_wait()

    # 2. Tiles of inputs. The loop is unrolled, so that many loads are under way.
    for first in tl.static_range(0, I, M):
        w_NM = first_w_NM
        if first > 0:
            w_NM = _gained_weights(w_ptr, gain_ptr, o, first + m, x_ptr.dtype.element_ty, I, O)
        i_NM = _repeated(first + m, N)
        x_NM = tl.load(x_ptr + i_NM, i_NM < I, 0.0)
        sum_NM += x_NM * w_NM
        if gain_ptr is not None:
            squares_NM += x_NM * x_NM

    # 3. Sums and norm.
    y_N = tl.sum(sum_NM, 1)
    if gain_ptr is not None:
        y_N *= tl.rsqrt(tl.sum(squares_NM, 1) / I + EPS)

    # 4. Outputs.
    _write_outputs(y_N, o, o < O, residual_ptr, y_ptr + which * O, scale, GELU)


@triton.jit
def row_products_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    w0_ptr: tl.tensor,
    w1_ptr: tl.tensor,
    w2_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    scale: tl.constexpr,
    GELU: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """N outputs of one map for all rows, of which there are at most B.

    1. For each tile of M inputs: add gain x w to the sums, and x^2 to the sum of squares.
    2. Add up the tile, and divide by the root mean square of the row, if there is a gain.
    3. Apply GELU, scale, add the residual, and write.
    """
    which = tl.program_id(1)
    w_ptr = _map(which, w0_ptr, w1_ptr, w2_ptr)
    b = tl.arange(0, B)
    o = tl.program_id(0) * N + tl.arange(0, N)
    sum_BNM = tl.zeros([B, N, M], x_ptr.dtype.element_ty)
    squares_BM = tl.zeros([B, M], x_ptr.dtype.element_ty)

    # 1. Tiles of inputs. The loop is unrolled, so that many loads are under way.
    for first in tl.static_range(0, I, M):
        i = first + tl.arange(0, M)
        w_NM = tl.load(w_ptr + o.to(tl.int64)[:, None] * I + i[None, :], (o < O)[:, None] & (i < I)[None, :], 0.0)
        x_BM = tl.load(x_ptr + b[:, None] * I + i[None, :], (b < rows)[:, None] & (i < I)[None, :], 0.0)
        if gain_ptr is not None:
            squares_BM += x_BM * x_BM
            x_BM *= tl.load(gain_ptr + i, i < I, 0.0).to(x_BM.dtype)[None, :]
        sum_BNM += x_BM[:, None, :] * w_NM.to(x_BM.dtype)[None, :, :]

    # 2. Sums and norm.
    y_BN = tl.sum(sum_BNM, 2)
    if gain_ptr is not None:
        y_BN *= tl.rsqrt(tl.sum(squares_BM, 1) / I + EPS)[:, None]

    # 3. Outputs.
    at_BN = b[:, None] * O + o[None, :]
    here_BN = (b < rows)[:, None] & (o < O)[None, :]
    _write_outputs(y_BN, at_BN, here_BN, residual_ptr, y_ptr + which * rows * O, scale, GELU)


@triton.jit
def _map(which: tl.tensor, w0_ptr: tl.tensor, w1_ptr: tl.tensor, w2_ptr: tl.tensor):
    """Weights of map 0, 1 or 2."""
    w_ptr = w0_ptr
    if w1_ptr is not None:
        w_ptr = tl.where(which == 1, w1_ptr, w_ptr)
    if w2_ptr is not None:
        w_ptr = tl.where(which == 2, w2_ptr, w_ptr)
    return w_ptr


@triton.jit
def _repeated(i: tl.tensor, N: tl.constexpr):
    """N rows, each of them the numbers i."""
    return i[None, :] + tl.zeros([N, 1], tl.int32)


@triton.jit
def _gained_weights(
    w_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    o: tl.tensor,
    i: tl.tensor,
    dtype: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
):
    """Weights (N, M) from inputs i to outputs o, times the gains of the inputs, if there are any."""
    here_NM = (o < O)[:, None] & (i < I)[None, :]
    w_NM = tl.load(w_ptr + o.to(tl.int64)[:, None] * I + i[None, :], here_NM, 0.0).to(dtype)
    if gain_ptr is not None:
        i_NM = _repeated(i, o.shape[0])
        w_NM *= tl.load(gain_ptr + i_NM, i_NM < I, 0.0).to(dtype)
    return w_NM


@triton.jit
def _write_outputs(
    y: tl.tensor,
    at: tl.tensor,
    here: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scale: tl.constexpr,
    GELU: tl.constexpr,
):
    """Write ``residual + scale act(y)``, where act is the GELU or the identity."""
    if GELU:
        y *= 0.5 + 0.5 * tl.erf(y * 0.7071067811865476)
    y *= scale
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, here, 0.0)
    tl.store(y_ptr + at, y, here)


@triton.jit
def cached_attention_kernel(
    q_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    temporary_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    position_ptr: tl.tensor,
    a_ptr: tl.tensor,
    batch: tl.tensor,
    capacity: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention of one head of one sequence at the newest position.

    1. In an EARLY launch, read the first J positions of the cache, then wait for the launch before this one.
    2. Read the query, normed and scaled, and the slope.
    3. Begin the softmax with the temporary pair, if there is one.
    4. Write the kept pair into the cache, at the newest position or, beside a temporary pair, the one before; go on
       with it. At position 0 there is no position before.
    5. For each J positions of the cache before the kept pair: go on with their pairs.
    6. Write the quotient.
    """
    if EARLY:
        gdc_launch_dependents()

    head, b = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr)
    newest = position
    if temporary_ptr is not None:
        newest -= 1

    c = tl.arange(0, C)
    row = b * D
    channel_C = head * K + c
    one = tl.arange(0, 1)
    k_ptr = cache_ptr + b.to(tl.int64) * capacity * D
    v_ptr = cache_ptr + (b + batch).to(tl.int64) * capacity * D

    # 1. First positions of the cache, which earlier steps wrote.
    if EARLY:
        first_j = tl.arange(0, J)
        first_k_JC = _cached_rows(k_ptr, first_j, newest, head, K, C, D)
        first_v_JC = _cached_rows(v_ptr, first_j, newest, head, K, C, D)
        gdc_wait()

    # 2. Query and slope.
    q_C = _head_of_row(q_ptr + row, q_gain_ptr, head, K, C, D, E) * (LOG2E * K**-0.5)
    slope = tl.load(slopes_ptr + head).to(q_C.dtype) * LOG2E

    # 3. Temporary pair.
    top = tl.full([], MASKED, q_C.dtype)
    total = tl.full([], 0.0, q_C.dtype)
    sum_C = tl.zeros([C], q_C.dtype)
    if temporary_ptr is not None:
        k_C = _head_of_row(temporary_ptr + row, k_gain_ptr, head, K, C, D, E)
        v_C = tl.load(temporary_ptr + batch * D + row + channel_C, c < K, 0.0)
        distance_1 = one.to(q_C.dtype)
        top, total, sum_C = _go_on(q_C, k_C[None, :], v_C[None, :], slope, distance_1, one == 0, top, total, sum_C)

    # 4. Kept pair.
    exists_C = (c < K) & (newest >= 0)
    k_C = tl.where(newest >= 0, _head_of_row(kept_ptr + row, k_gain_ptr, head, K, C, D, E), 0.0)
    v_C = tl.load(kept_ptr + batch * D + row + channel_C, exists_C, 0.0)
    at_C = newest.to(tl.int64) * D + channel_C
    tl.store(k_ptr + at_C, k_C, exists_C)
    tl.store(v_ptr + at_C, v_C, exists_C)
    distance_1 = (one + position - newest).to(q_C.dtype)
    seen_1 = (one + newest) >= 0
    top, total, sum_C = _go_on(q_C, k_C[None, :], v_C[None, :], slope, distance_1, seen_1, top, total, sum_C)

    # 5. Cache.
    if EARLY:
        distance_J = (position - first_j).to(q_C.dtype)
        k_JC, v_JC = first_k_JC.to(q_C.dtype), first_v_JC.to(q_C.dtype)
        top, total, sum_C = _go_on(q_C, k_JC, v_JC, slope, distance_J, first_j < newest, top, total, sum_C)

    for first in tl.range(J if EARLY else 0, newest, J, num_stages=STAGES):
        j = first + tl.arange(0, J)
        k_JC = _cached_rows(k_ptr, j, newest, head, K, C, D).to(q_C.dtype)
        v_JC = _cached_rows(v_ptr, j, newest, head, K, C, D).to(q_C.dtype)
        distance_J = (position - j).to(q_C.dtype)
        top, total, sum_C = _go_on(q_C, k_JC, v_JC, slope, distance_J, j < newest, top, total, sum_C)

    # 6. Quotient.
    tl.store(a_ptr + row + channel_C, sum_C / total, c < K)


@triton.jit
def _cached_rows(
    cache_ptr: tl.tensor,
    j: tl.tensor,
    newest: tl.tensor,
    head: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
):
    """Keys or values (J, C) of a head at those of the positions j that are before ``newest``; zeros at the others."""
    c = tl.arange(0, C)
    at_JC = j.to(tl.int64)[:, None] * D + (head * K + c)[None, :]
    return tl.load(cache_ptr + at_JC, (j < newest)[:, None] & (c < K)[None, :], 0.0)


@triton.jit
def _head_of_row(
    y_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    head: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Channels (C) of a head in a row (D); normed over the full width, if there is a gain."""
    c = tl.arange(0, C)
    y_C = tl.load(y_ptr + head * K + c, c < K, 0.0)
    if gain_ptr is not None:
        e = tl.arange(0, E)
        y_E = tl.load(y_ptr + e, e < D, 0.0)
        gain_C = tl.load(gain_ptr + head * K + c, c < K, 0.0).to(y_C.dtype)
        y_C *= gain_C * tl.rsqrt(tl.sum(y_E * y_E, 0) / D + EPS)
    return y_C


@triton.jit
def _go_on(
    q_C: tl.tensor,
    k_JC: tl.tensor,
    v_JC: tl.tensor,
    slope: tl.tensor,
    distance_J: tl.tensor,
    seen_J: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    sum_C: tl.tensor,
):
    """Largest logit, sum of weights and weighted sum of values after J further pairs (online softmax)."""
    logits_J = tl.sum(q_C[None, :] * k_JC, 1) - slope * distance_J
    logits_J = tl.where(seen_J, logits_J, -float("inf"))
    next_top = tl.maximum(top, tl.max(logits_J, 0))
    decay = tl.exp2(top - next_top)
    weights_J = tl.exp2(logits_J - next_top)
    return next_top, total * decay + tl.sum(weights_J, 0), sum_C * decay + tl.sum(weights_J[:, None] * v_JC, 0)


def row_products(
    x_BI: Tensor,
    weights_OI: Sequence[Tensor],
    gain_I: Tensor | None,
    gelu: bool,
    residual_BO: Tensor | None,
    scale: float,
    y_WBO: Tensor,
) -> None:
    """Write ``mixers.ops.decoding.row_products`` of at most ``MOST_ROWS`` rows and three maps into ``y_WBO``."""
    # An early launch does not wait for copies of weights.
    copied = any(not y.is_contiguous() for y in (gain_I, *weights_OI) if y is not None)
    x_BI, gain_I, residual_BO, *weights_OI = contiguous(x_BI, gain_I, residual_BO, *weights_OI)
    (rows, inputs), outputs = x_BI.shape, len(weights_OI[0])
    tensors = (x_BI, gain_I, *(*weights_OI, None, None)[:3], residual_BO, y_WBO)
    sizes: Settings = {"scale": scale, "GELU": gelu, "I": inputs, "O": outputs}
    most = triton.next_power_of_2(inputs)

    if rows == 1:
        N, M = 2, min(most, ROW_TILE)
        early = not copied and launches_early(x_BI.device)
        launch = row_product_kernel[triton.cdiv(outputs, N), len(weights_OI)]
        launch(*tensors, **sizes, N=N, M=M, EARLY=early, launch_pdl=early, num_warps=8 if M > 2048 else 4)
        return

    B = triton.next_power_of_2(rows)
    N, M = 4, min(most, ROWS_TILE // B)
    row_products_kernel[triton.cdiv(outputs, N), len(weights_OI)](*tensors, rows, **sizes, B=B, N=N, M=M)


def cached_attention(
    q_BD: Tensor,
    kept_2BD: Tensor,
    temporary_2BD: Tensor | None,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    slopes_H: Tensor,
    cache_2BJD: Tensor,
    position: Tensor,
) -> Tensor:
    """Return ``mixers.ops.decoding.cached_attention``."""
    q_BD, kept_2BD, temporary_2BD, q_gain_D, k_gain_D = contiguous(q_BD, kept_2BD, temporary_2BD, q_gain_D, k_gain_D)
    _, batch, capacity, width = cache_2BJD.shape
    heads = len(slopes_H)
    channels = triton.next_power_of_2(width // heads)
    a_BD = torch.empty_like(q_BD)

    early = batch == 1 and launches_early(q_BD.device)
    pairs, warps, stages = PAIRS_TILE, 8, 2
    if batch == 1:
        pairs, warps, stages = FEW_PAIRS_TILE // cache_2BJD.element_size(), 16, 1
    cached_attention_kernel[heads, batch](
        q_BD,
        kept_2BD,
        temporary_2BD,
        q_gain_D,
        k_gain_D,
        slopes_H,
        cache_2BJD,
        position,
        a_BD,
        batch,
        capacity,
        K=width // heads,
        C=channels,
        D=width,
        E=triton.next_power_of_2(width),
        J=max(1, pairs // channels),
        STAGES=stages,
        EARLY=early,
        launch_pdl=early,
        num_warps=warps,
    )
    return a_BD
