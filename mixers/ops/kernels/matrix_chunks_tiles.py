"""The common part of the kernels of ``mixers.ops.kernels.matrix_chunks``: rows of tiles, and decays; math: there."""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED

M: tl.constexpr = tl.constexpr(16)
"""Rows of a block, as many as a product in tensor cores has."""
NEAR: tl.constexpr = tl.constexpr(8)
"""Rows of half a block, within which factors are relative to its middle."""
STRONGEST: tl.constexpr = tl.constexpr(-23.0)
"""Logarithm of the strongest decay: stronger ones leave less than float32's epsilon, and count as this one."""
BOUND: tl.constexpr = tl.constexpr(92.0)
"""Largest exponent of a factor, of NEAR / 2 decays. Larger ones belong to rows that a level does not pair."""


@triton.jit
def dot(x: tl.tensor, y: tl.tensor):
    """x y, of float32 in tensor cores as well: exact products of 64 rows would not fit into the registers."""
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def tile_rows(tile: tl.tensor, t_C: tl.tensor, T: tl.tensor, H: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Rows in memory of a tile's rows t: of positions and of pairs; which are pairs, have a query, and have a decay."""
    chunks = tl.cdiv(T * N, C)
    head = tile // chunks % H
    sequence = (tile // chunks // H).to(tl.int64)
    p_C = tile % chunks * C + t_C
    live_C = p_C < T * N
    row_C = (sequence * T + p_C // N) * H + head
    pair_C = (sequence * T * N + p_C) * H + head
    return row_C, pair_C, live_C, live_C & (p_C % N == N - 1), live_C & (p_C % N == 0)


@triton.jit
def load(pointer: tl.tensor, row_C: tl.tensor, live_C: tl.tensor, first: int, K: tl.constexpr, E: tl.constexpr):
    """E channels of rows of K; zeros for other rows and channels."""
    e = first + tl.arange(0, E)
    return tl.load(pointer + row_C[:, None] * K + e[None, :], live_C[:, None] & (e < K)[None, :], 0.0)


@triton.jit
def store(
    pointer: tl.tensor,
    row_C: tl.tensor,
    live_C: tl.tensor,
    y_CE: tl.tensor,
    first: int,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """Write E channels of rows of K, as ``load`` reads them."""
    e = first + tl.arange(0, E)
    tl.store(pointer + row_C[:, None] * K + e[None, :], y_CE, live_C[:, None] & (e < K)[None, :])


@triton.jit
def load_tile(
    pointer: tl.tensor,
    tile: tl.tensor,
    t_C: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """E channels of rows t of a tile; zeros for other channels."""
    e = first + tl.arange(0, E)
    at_CE = t_C[:, None] * K + e[None, :]
    return tl.load(pointer + tile.to(tl.int64) * (C * K) + at_CE, (e < K)[None, :], 0.0)


@triton.jit
def load_part(
    pointer: tl.tensor,
    tile: tl.tensor,
    t_C: tl.tensor,
    row_C: tl.tensor,
    live_C: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """E channels of rows of a tile that ``ends`` has written; without decays these are the caller's."""
    return load(pointer, row_C, live_C, first, K, E) if G == 0 else load_tile(pointer, tile, t_C, first, C, K, E)


@triton.jit
def store_tile(
    pointer: tl.tensor,
    tile: tl.tensor,
    t_C: tl.tensor,
    y_CE: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """Write E channels of rows t of a tile."""
    e = first + tl.arange(0, E)
    at_CE = t_C[:, None] * K + e[None, :]
    tl.store(pointer + tile.to(tl.int64) * (C * K) + at_CE, y_CE, (e < K)[None, :])


@triton.jit
def load_state(
    S_ptr: tl.tensor, tile: tl.tensor, j: int, first: int, K: tl.constexpr, V: tl.constexpr, E: tl.constexpr
):
    """Block of a state, from value channel j and key channel ``first``."""
    j_E = j + tl.arange(0, E)
    return load(S_ptr, tile.to(tl.int64) * V + j_E, j_E < V, first, K, E)


@triton.jit
def load_g(
    g_ptr: tl.tensor,
    row_C: tl.tensor,
    live_C: tl.tensor,
    first: int,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Logarithms of decays to base 2, at least STRONGEST: (C, E) of channels, (C, 1) of the head, or zeros (C, 1)."""
    if G > 1:
        g_CE = load(g_ptr, row_C, live_C, first, K, E)
    elif G == 1:
        g_CE = tl.load(g_ptr + row_C, live_C, 0.0)[:, None]
    else:
        g_CE = (row_C * 0).to(tl.float32)[:, None]
    return tl.maximum(g_CE * LOG2E, STRONGEST)


@triton.jit
def load_bonus(
    bonus_ptr: tl.tensor,
    sequence_head: tl.tensor,
    sequences: tl.tensor,
    first: int,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    """Weight of a position's own pair (1, E): the bonus, if any, or one."""
    bonus_E = tl.full([E], 1.0, tl.float32)
    if bonus_ptr is not None:
        e = first + tl.arange(0, E)
        head = sequence_head // (sequences * H) * H + sequence_head % H
        bonus_E = tl.load(bonus_ptr + head * K + e, e < K, 0.0)
    return bonus_E[None, :]


@triton.jit
def load_left(
    q_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    place: tl.tuple,
    first: int,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Left rows q and b in float32, with what stands for them; b is q if there is none."""
    row_C, pair_C, live_C, query_C, decay_C = place
    q_CE = load(q_ptr, row_C, query_C, first, K, E).to(tl.float32)
    before_CE = tl.exp2(-load_g(g_ptr, row_C, decay_C, first, K, G, E))
    if bonus_ptr is not None:
        q_CE *= before_CE
    b_CE = q_CE
    if b_ptr is not None:
        b_CE = load(b_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        b_CE *= -1.0 if a_ptr is None else before_CE
    return q_CE, b_CE


@triton.jit
def plain_products(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    row_C: tl.tensor,
    pair_C: tl.tensor,
    live_C: tl.tensor,
    t: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Products (C, C) of a chunk's queries with keys up to their own, in the type of the keys."""
    qk_CC = tl.zeros([C, C], tl.float32)
    for first in range(0, K, E):
        q_CE = load(q_ptr, row_C, live_C, first, K, E).to(k_ptr.dtype.element_ty)
        qk_CC += dot(q_CE, tl.trans(load(k_ptr, pair_C, live_C, first, K, E)))
    return tl.where(t[:, None] >= t[None, :], qk_CC, 0.0).to(k_ptr.dtype.element_ty)


@triton.jit
def sums_at(
    c_ptr: tl.tensor,
    tile: tl.tensor,
    row_C: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Running sums at rows of a tile: (rows, E) of channels, (rows, 1) of the head, or zeros (rows, 1)."""
    if G > 1:
        c_CE = load_tile(c_ptr, tile, row_C, first, C, K, E)
    elif G == 1:
        c_CE = load_tile(c_ptr, tile, row_C, 0, C, 1, 1)
    else:
        c_CE = (row_C * 0).to(tl.float32)[:, None]
    return c_CE


@triton.jit
def load_sum(
    c_ptr: tl.tensor,
    tile: tl.tensor,
    t: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Running sums at row t of a tile (E)."""
    row = tile.to(tl.int64) * C + t
    sum_E = tl.zeros([E], tl.float32)
    if G > 1:
        e = first + tl.arange(0, E)
        sum_E = tl.load(c_ptr + row * K + e, e < K, 0.0)
    elif G == 1:
        sum_E += tl.load(c_ptr + row)
    return sum_E


@triton.jit
def between(
    c_ptr: tl.tensor,
    tile: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    level: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Factors of left and right rows, weights of pairs, and which pairs are on a level, from the rows' running sums.

    The left rows begin at i, the right ones at j. On levels 0 and 1, they are the same; on level -1, j is earlier.
    Rows are compared by their numbers in the chunk: LLVM (in Triton 3.6) takes comparisons of numbers of threads alone
    together in vectors, and mixes up their entries.
    """
    t = tl.arange(0, M)
    i_M1, j_1M = (i + t)[:, None], (j + t)[None, :]
    left_ME = sums_at(c_ptr, tile, i + t, first, C, K, G, E)
    right_ME = sums_at(c_ptr, tile, j + t, first, C, K, G, E)
    seen_MM = i_M1 > j_1M
    if G > 1:
        seen_MM &= ((i_M1 ^ j_1M) // NEAR == level) | (level < 0)
        middle = i - 1 + tl.where(level < 0, 0, NEAR // 2 << tl.maximum(level, 0))
        middle_ME = load_sum(c_ptr, tile, middle, first, C, K, G, E)[None, :]
        other_ME = load_sum(c_ptr, tile, middle + tl.where(level == 0, NEAR, 0), first, C, K, G, E)[None, :]
        middle_ME = tl.where(t[:, None] < NEAR, middle_ME, other_ME)
        left_ME = tl.exp2(tl.minimum(left_ME - middle_ME, BOUND))
        right_ME = tl.exp2(tl.minimum(middle_ME - right_ME, BOUND))
        weight_MM = 1.0
    else:
        weight_MM = tl.exp2(tl.where(seen_MM, left_ME - tl.trans(right_ME), MASKED))
        left_ME, right_ME = 1.0, 1.0
    return left_ME, right_ME, weight_MM, seen_MM


@triton.jit
def scaled(y_ME: tl.tensor, factor_ME: tl.tensor, like: tl.tensor):
    """y times factors, in the type of what a pointer points at."""
    return (y_ME.to(tl.float32) * factor_ME).to(like.dtype.element_ty)
