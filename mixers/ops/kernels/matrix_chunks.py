"""Kernels of the recurrence of linear-attention layers, as products of chunks of positions in tensor cores.

    S_t = exp(g_t) S_{t-1} + a_t u_t^T + k_t v_t^T,   u_t = S_{t-1}^T b_t          o_t = S_t^T q_t

With a bonus, o_t = S_{t-1}^T q_t + ((bonus k_t) . q_t) v_t. The delta rule has b, but no a, and a position may have N
pairs; see ``mixers.ops.linear_recurrence``, whose loop over positions is better where positions are few. Yang et al.
2024, arXiv:2406.06484 (section 3.2) and 2412.06464 (section 3.3), and Kimi Team 2025, arXiv:2510.26692 (section 3)
derive these forms.

A chunk has C pairs. Let S be the state before it and c_i the sums of g from its start to pair i. Rows x are those of a,
or those of k if there is no a; by the delta rule, b stands for -b. A product of two kinds of rows has the decays
between them, and only earlier rows on its right; those with queries have q_i . r_i, or its bonus, on their diagonal:

    (l r)_ij = sum over the channels of l_i r_j exp(c_i - c_j)    for j < i

    q_in = exp(c) q    b_in = exp(c) b    x_out = exp(c_C - c) x    k_out = exp(c_C - c) k
    X = (1 - (b x))^-1    W = X b_in    U = X V + W S    or    U = X (b k) V + W S    or, without b, U = V
    O = q_in S + (q x) U          S <- exp(c_C) S + x_out^T U          with a, + (q k) V and + k_out^T V

With a, the left rows b see the decays before their position: b exp(-g) stands for b, and with a bonus q exp(-g) for q.
With dS the gradient of the state after the chunk,

    dU = (q x)^T dO + x_out dS    dY = X^T dU    dS <- exp(c_C) dS + q_in^T dO + W^T dU
    dV = dY    or    dV = (b k)^T dY + (q k)^T dO + k_out dS    or, without b, dV = dU
    d(q x) = dO U^T    d(b x) = dY U^T    d(q k) = dO V^T    d(b k) = dY V^T
    dq_in = dO S^T    db_in = dY S^T    dx_out = U dS^T    dk_out = V dS^T

The gradient of g_t is the sum of q dq + b db - x dx - k dk over the later pairs of the chunk, and what goes through its
end: exp(c_C) S . dS, and the sums of x . dx_out and k . dk_out, without the exponentials.

With a decay per channel, no single pair of factors of l_i and r_j would be bounded. A chunk has blocks of M rows, and
the product of two blocks has the factors exp(c_i - m) and exp(m - c_j), where m is the sum before the later block. The
pairs (i, j) of one block fall into two levels. On level 1, i is in the second half and j in the first, and m is the sum
at the end of the first half. On level 0, both are in the same half, of NEAR rows, and m is the sum in its middle.
Factors are at most 1, and on level 0 at most exp(-STRONGEST NEAR / 2); stronger decays count as STRONGEST, which is
float32's epsilon. In the kernels, all logarithms are to base 2.

    name           shape                written by      read by
    q              (R, B, T, H, K)      caller          ends, products, rows_bwd
    k              (R, B, T N, H, K)    caller          ends, products, rows_bwd
    v              (R, B, T N, H, V)    caller          solve, states_fwd, outputs, products_bwd, rows_bwd
    g              (R, B, T, H, G)      caller          ends, products, rows_bwd       G = K or 1, float32
    a, b           (R, B, T N, H, K)    caller          ends, products, rows_bwd
    bonus          (R, H, K)            caller          products, rows_bwd             float32
    c              (tiles, C, G)        ends            products, states, rows_bwd     float32
    q_in           (tiles, C, K)        ends            outputs, states_bwd            these four with decays;
    b_in           (tiles, C, K)        ends            solve                          without, rows of the caller
    x_out          (tiles, C, K)        ends            states, products_bwd           stand for them
    k_out          (tiles, C, K)        ends            states_fwd, products_bwd       with a
    qx             (tiles, C, C)        products        outputs, states_bwd, products_bwd
    bx             (tiles, C, C)        products        solve                          with b; float32
    qk             (tiles, C, C)        products        outputs, products_bwd          with a
    bk             (tiles, C, C)        products        solve, products_bwd            with a
    inverse        (tiles, C, C)        solve           solve, products_bwd            X; with b; kept
    w              (tiles, C, K)        solve           states                         with b
    u              (tiles, C, V)        solve           states_fwd                     X V or X (b k) V; with b
                                        states_fwd      outputs, products_bwd, rows_bwd   U, in its place; kept
    S              (tiles, V, K)        states_fwd      outputs, rows_bwd              before a chunk; kept
    o              (R, B, T, H, V)      outputs         caller
    do             (R, B, T, H, V)      caller          states_bwd, products_bwd, rows_bwd
    dS             (tiles, V, K)        states_bwd      products_bwd, rows_bwd         after a chunk
    du             (tiles, C, V)        states_bwd      products_bwd                   with b
                                        products_bwd    rows_bwd                       dY, in its place
    dqx .. dbk     (tiles, C, C)        products_bwd    rows_bwd
    dv             (R, B, T N, H, V)    products_bwd    caller
    dq .. dbonus   like q .. bonus      rows_bwd        caller                         dbonus (tiles, K), dg of a block

A tile is a chunk of a head of a sequence. Only the states go from chunk to chunk, in programs of J of the V channels;
all else is computed for all chunks at once, in blocks of E channels. The backward pass is given what the forward pass
has kept, each part about as large as the values, and calls ``ends``, ``products`` and ``solve`` again for the others.

Without decays ``ends`` is not needed. Linear attention and the delta rule without decays need no ``products`` and no
``rows_bwd`` either: ``products_bwd``, which also reads q, k, b and S, writes dq, dk and db. The delta rule's qx is
written by ``solve``, which reads q, k and b; linear attention's is computed where it is read. bx and the gradients of
products stay on the chip. Queries may then be float32, as in ``mixers.ops.kernels.chunked_recurrence``.

Kernels with decays between rows have one warp and blocks of M rows: they hold few numbers at once, so that registers
suffice, warps need not wait for one another, and pairs of blocks of which the right one is later are left out. Programs
of one tile are neighbours, as they read the same rows.
Products of 64 rows have at least 64 columns: with fewer, compiled kernels were wrong on Hopper (see
``mixers.ops.kernels.chunked_recurrence``).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, contiguous, gpu_limits, kernels_take
from mixers.ops.kernels.path_attention import inverse
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = 64
BLOCK = 64
"""Channels of a block, E."""
ENDS: dict[str, Any] = {"num_warps": 4}
PRODUCTS: dict[str, Any] = {"num_stages": 1}
SOLVE: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
STATES: dict[str, Any] = {"J": 32, "num_warps": 4}
OUTPUTS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
PRODUCTS_BWD: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
ROWS_BWD: dict[str, Any] = {"E": 32, "num_warps": 1, "num_stages": 1}
"""Settings of the kernels. Those of states, outputs and products_bwd are the fastest of eight on an H200."""
MOST_CHANNELS = 256
"""Largest width of keys for which a block of the state fits into registers."""
M: tl.constexpr = tl.constexpr(16)
"""Rows of a block, as many as a product in tensor cores has."""
NEAR: tl.constexpr = tl.constexpr(8)
STRONGEST: tl.constexpr = tl.constexpr(-23.0)
"""Logarithm of the strongest decay: stronger ones leave less than float32's epsilon, and count as this one."""
BOUND: tl.constexpr = tl.constexpr(92.0)
"""Largest exponent of a factor, of NEAR / 2 decays. Larger ones belong to rows that a level does not pair."""


@triton.jit
def _dot(x: tl.tensor, y: tl.tensor):
    """x y, of float32 in tensor cores as well: exact products of 64 rows would not fit into the registers."""
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _place(tile: tl.tensor, t_C: tl.tensor, T: tl.tensor, H: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
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
def _load(pointer: tl.tensor, row_C: tl.tensor, live_C: tl.tensor, first: int, K: tl.constexpr, E: tl.constexpr):
    """E channels of rows of K; zeros for other rows and channels."""
    e = first + tl.arange(0, E)
    return tl.load(pointer + row_C[:, None] * K + e[None, :], live_C[:, None] & (e < K)[None, :], 0.0)


@triton.jit
def _store(
    pointer: tl.tensor,
    row_C: tl.tensor,
    live_C: tl.tensor,
    y_CE: tl.tensor,
    first: int,
    K: tl.constexpr,
    E: tl.constexpr,
):
    e = first + tl.arange(0, E)
    tl.store(pointer + row_C[:, None] * K + e[None, :], y_CE, live_C[:, None] & (e < K)[None, :])


@triton.jit
def _load_tile(
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
def _load_part(
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
    return _load(pointer, row_C, live_C, first, K, E) if G == 0 else _load_tile(pointer, tile, t_C, first, C, K, E)


@triton.jit
def _store_tile(
    pointer: tl.tensor,
    tile: tl.tensor,
    t_C: tl.tensor,
    y_CE: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    e = first + tl.arange(0, E)
    at_CE = t_C[:, None] * K + e[None, :]
    tl.store(pointer + tile.to(tl.int64) * (C * K) + at_CE, y_CE, (e < K)[None, :])


@triton.jit
def _sums_at(
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
        c_CE = _load_tile(c_ptr, tile, row_C, first, C, K, E)
    elif G == 1:
        c_CE = _load_tile(c_ptr, tile, row_C, 0, C, 1, 1)
    else:
        c_CE = (row_C * 0).to(tl.float32)[:, None]
    return c_CE


@triton.jit
def _load_sum(
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
def _load_g(
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
        g_CE = _load(g_ptr, row_C, live_C, first, K, E)
    elif G == 1:
        g_CE = tl.load(g_ptr + row_C, live_C, 0.0)[:, None]
    else:
        g_CE = (row_C * 0).to(tl.float32)[:, None]
    return tl.maximum(g_CE * LOG2E, STRONGEST)


@triton.jit
def _load_bonus(
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
def _between(
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
    left_ME = _sums_at(c_ptr, tile, i + t, first, C, K, G, E)
    right_ME = _sums_at(c_ptr, tile, j + t, first, C, K, G, E)
    seen_MM = i_M1 > j_1M
    if G > 1:
        seen_MM &= ((i_M1 ^ j_1M) // NEAR == level) | (level < 0)
        middle = i - 1 + tl.where(level < 0, 0, NEAR // 2 << tl.maximum(level, 0))
        middle_ME = _load_sum(c_ptr, tile, middle, first, C, K, G, E)[None, :]
        other_ME = _load_sum(c_ptr, tile, middle + tl.where(level == 0, NEAR, 0), first, C, K, G, E)[None, :]
        middle_ME = tl.where(t[:, None] < NEAR, middle_ME, other_ME)
        left_ME = tl.exp2(tl.minimum(left_ME - middle_ME, BOUND))
        right_ME = tl.exp2(tl.minimum(middle_ME - right_ME, BOUND))
        weight_MM = 1.0
    else:
        weight_MM = tl.exp2(tl.where(seen_MM, left_ME - tl.trans(right_ME), MASKED))
        left_ME, right_ME = 1.0, 1.0
    return left_ME, right_ME, weight_MM, seen_MM


@triton.jit
def _scaled(y_ME: tl.tensor, factor_ME: tl.tensor, like: tl.tensor):
    return (y_ME.to(tl.float32) * factor_ME).to(like.dtype.element_ty)


@triton.jit
def _load_left(
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
    q_CE = _load(q_ptr, row_C, query_C, first, K, E).to(tl.float32)
    before_CE = tl.exp2(-_load_g(g_ptr, row_C, decay_C, first, K, G, E))
    if bonus_ptr is not None:
        q_CE *= before_CE
    b_CE = q_CE
    if b_ptr is not None:
        b_CE = _load(b_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        b_CE *= -1.0 if a_ptr is None else before_CE
    return q_CE, b_CE


@triton.jit(do_not_specialize=["T"])
def chunks_ends_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    c_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    b_in_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Running sums of a chunk, and its rows decayed from its start and to its end: E of K channels."""
    tile = tl.program_id(0)
    t = tl.arange(0, C)
    place = _place(tile, t, T, H, C, N)
    row_C, pair_C, live_C, _, decay_C = place
    first = tl.program_id(1) * E

    # Running sums. Triton 3.6 does not compile those of a column; it does those of a vector.
    c_CE = _load_g(g_ptr, row_C, decay_C, first, K, G, E)
    if G > 1:
        c_CE = tl.cumsum(c_CE, 0)
        _store_tile(c_ptr, tile, t, c_CE, first, C, K, E)
    elif G == 1:
        c_CE = tl.cumsum(tl.sum(c_CE, 1), 0)[:, None]
        _store_tile(c_ptr, tile, t, c_CE, 0, C, 1, 1)
    to_end_CE = tl.exp2(tl.sum(tl.where(t[:, None] == C - 1, c_CE, 0.0), 0)[None, :] - c_CE)

    # Rows.
    q_CE, b_CE = _load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
    _store_tile(q_in_ptr, tile, t, q_CE * tl.exp2(c_CE), first, C, K, E)
    if b_ptr is not None:
        _store_tile(b_in_ptr, tile, t, b_CE * tl.exp2(c_CE), first, C, K, E)
    k_CE = _load(k_ptr, pair_C, live_C, first, K, E).to(tl.float32)
    if a_ptr is None:
        _store_tile(x_out_ptr, tile, t, k_CE * to_end_CE, first, C, K, E)
    else:
        _store_tile(k_out_ptr, tile, t, k_CE * to_end_CE, first, C, K, E)
        a_CE = _load(a_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        _store_tile(x_out_ptr, tile, t, a_CE * to_end_CE, first, C, K, E)


@triton.jit
def _product(left_ME: tl.tensor, right_ME: tl.tensor, weight_MM: tl.tensor, seen_MM: tl.tensor):
    return tl.where(seen_MM, _dot(left_ME, tl.trans(right_ME)) * weight_MM, 0.0)


@triton.jit(do_not_specialize=["T", "sequences"])
def chunks_products_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    c_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    bx_ptr: tl.tensor,
    qk_ptr: tl.tensor,
    bk_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Products of M rows of a chunk with all of its rows, in blocks of M rows and all K channels.

    1. Load the left rows.
    2. Write the products with rows of earlier blocks, and then of their own, level by level.
    3. Write zeros for later blocks.
    """
    tile = tl.program_id(0) // (C // M)
    i = tl.program_id(0) % (C // M) * M
    t = tl.arange(0, M)
    x_ptr = k_ptr if a_ptr is None else a_ptr

    # 1. Left rows, and what positions read of their own pairs.
    place = _place(tile, i + t, T, H, C, N)
    row_M, pair_M, live_M, query_M, _ = place
    bonus_1E = _load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, 0, H, K, E)
    asks_ME = _load(q_ptr, row_M, query_M, 0, K, E).to(tl.float32) * bonus_1E
    own_x_M, own_k_M = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    if a_ptr is not None:
        own_k_M += tl.sum(asks_ME * _load(k_ptr, pair_M, live_M, 0, K, E), 1)
    if (a_ptr is None) or (bonus_ptr is None):
        own_x_M += tl.sum(asks_ME * _load(x_ptr, pair_M, live_M, 0, K, E), 1)
    q_ME, b_ME = _load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, 0, K, G, E)
    q_ME, b_ME = q_ME.to(q_ptr.dtype.element_ty), b_ME.to(q_ptr.dtype.element_ty)

    # 2. Products. Levels of the block with itself add up.
    zero_MM = tl.zeros([M, M], tl.float32)
    qx_MM, bx_MM, qk_MM, bk_MM = zero_MM, zero_MM, zero_MM, zero_MM
    for step in range(i // M + LEVELS):
        j, level = tl.minimum(step * M, i), tl.maximum(step - i // M, -1)
        kept, own_MM = tl.where(level > 0, 1.0, 0.0), ((i + t)[:, None] == (j + t)[None, :]) & (level == 0)
        _, pair_M, live_M, _, _ = _place(tile, j + t, T, H, C, N)
        left_ME, right_ME, weight_MM, seen_MM = _between(c_ptr, tile, i, j, level, 0, C, K, G, E)
        q_left_ME, b_left_ME = _scaled(q_ME, left_ME, q_ptr), _scaled(b_ME, left_ME, q_ptr)
        x_right_ME = _scaled(_load(x_ptr, pair_M, live_M, 0, K, E), right_ME, q_ptr)
        qx_MM = kept * qx_MM + _product(q_left_ME, x_right_ME, weight_MM, seen_MM)
        qx_MM = tl.where(own_MM, own_x_M[:, None], qx_MM)
        _store_tile(qx_ptr, tile, i + t, qx_MM, j, C, C, M)
        if bx_ptr is not None:
            bx_MM = kept * bx_MM + _product(b_left_ME, x_right_ME, weight_MM, seen_MM)
            _store_tile(bx_ptr, tile, i + t, bx_MM, j, C, C, M)
        if a_ptr is not None:
            k_right_ME = _scaled(_load(k_ptr, pair_M, live_M, 0, K, E), right_ME, q_ptr)
            qk_MM = kept * qk_MM + _product(q_left_ME, k_right_ME, weight_MM, seen_MM)
            qk_MM = tl.where(own_MM, own_k_M[:, None], qk_MM)
            _store_tile(qk_ptr, tile, i + t, qk_MM, j, C, C, M)
            bk_MM = kept * bk_MM + _product(b_left_ME, k_right_ME, weight_MM, seen_MM)
            _store_tile(bk_ptr, tile, i + t, bk_MM, j, C, C, M)

    # 3. Zeros.
    for j in range(i + M, C, M):
        _store_tile(qx_ptr, tile, i + t, zero_MM, j, C, C, M)
        if bx_ptr is not None:
            _store_tile(bx_ptr, tile, i + t, zero_MM, j, C, C, M)
        if a_ptr is not None:
            _store_tile(qk_ptr, tile, i + t, zero_MM, j, C, C, M)
            _store_tile(bk_ptr, tile, i + t, zero_MM, j, C, C, M)


@triton.jit(do_not_specialize=["T"])
def chunks_solve_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    b_in_ptr: tl.tensor,
    bx_ptr: tl.tensor,
    bk_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    w_ptr: tl.tensor,
    u_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    SOLVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X of a chunk, W, and U for a state of zeros; SOLVED: X and U are there. With q also the products q x and b x."""
    tile = tl.program_id(0)
    t = tl.arange(0, C)
    row_C, pair_C, live_C, query_C, _ = _place(tile, t, T, H, C, N)

    # Products; without decays the caller's b stand for -b.
    m_CC = tl.zeros([C, C], tl.float32)
    if q_ptr is not None:
        qx_CC = m_CC
        for first in range(0, K, E):
            x_EC = tl.trans(_load(k_ptr, pair_C, live_C, first, K, E))
            qx_CC += _dot(_load(q_ptr, row_C, query_C, first, K, E).to(x_EC.dtype), x_EC)
            if not SOLVED:
                m_CC += _dot(_load(b_in_ptr, pair_C, live_C, first, K, E), x_EC)
        _store_tile(qx_ptr, tile, t, tl.where(t[:, None] >= t[None, :], qx_CC, 0.0), 0, C, C, C)
        m_CC = tl.where(t[:, None] > t[None, :], m_CC, 0.0)
    elif not SOLVED:
        m_CC -= _load_tile(bx_ptr, tile, t, 0, C, C, C)

    # X and W.
    if SOLVED:
        x_CC = _load_tile(inverse_ptr, tile, t, 0, C, C, C)
    else:
        x_CC = inverse(m_CC, C, PRECISION).to(v_ptr.dtype.element_ty)
        _store_tile(inverse_ptr, tile, t, x_CC, 0, C, C, C)
    for first in range(0, K, E):
        w_CE = _dot(x_CC, _load_part(b_in_ptr, tile, t, pair_C, live_C, first, C, K, G, E))
        if (G == 0) and (bk_ptr is None):
            w_CE = -w_CE
        _store_tile(w_ptr, tile, t, w_CE, first, C, K, E)

    # U.
    if not SOLVED:
        if bk_ptr is not None:
            x_CC = _dot(x_CC, _load_tile(bk_ptr, tile, t, 0, C, C, C)).to(x_CC.dtype)
        for first in range(0, V, E):
            u_CE = _dot(x_CC, _load(v_ptr, pair_C, live_C, first, V, E))
            _store_tile(u_ptr, tile, t, u_CE, first, C, V, E)


@triton.jit(do_not_specialize=["T"])
def chunks_states_fwd_kernel(
    v_ptr: tl.tensor,
    c_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    w_ptr: tl.tensor,
    u_ptr: tl.tensor,
    S_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
):
    """States before the chunks of one head of one sequence, transposed: J of their V channels.

    For each chunk, the oldest first:
    1. Write S.
    2. With b, write U.
    3. S <- exp(c_C) S + x_out^T U, with a + k_out^T V.
    """
    chunks = tl.cdiv(T * N, C)
    t = tl.arange(0, C)
    j = tl.program_id(1) * J
    j_J = j + tl.arange(0, J)
    S_JI = tl.zeros([J, I], tl.float32)

    for n in range(chunks):
        # 1. State.
        tile = tl.program_id(0) * chunks + n
        _, pair_C, live_C, _, _ = _place(tile, t, T, H, C, N)
        state_JI = S_JI.to(S_ptr.dtype.element_ty)
        _store(S_ptr, tile.to(tl.int64) * V + j_J, j_J < V, state_JI, 0, K, I)

        # 2. U.
        if w_ptr is None:
            u_JC = tl.trans(_load(v_ptr, pair_C, live_C, j, V, J))
        else:
            w_IC = tl.trans(_load_tile(w_ptr, tile, t, 0, C, K, I))
            u_JC = tl.trans(_load_tile(u_ptr, tile, t, j, C, V, J)).to(tl.float32)
            u_JC = (u_JC + _dot(state_JI, w_IC)).to(state_JI.dtype)
            _store_tile(u_ptr, tile, t, tl.trans(u_JC), j, C, V, J)

        # 3. Next state.
        S_JI *= tl.exp2(_load_sum(c_ptr, tile, C - 1, 0, C, K, G, I))[None, :]
        S_JI += _dot(u_JC, _load_part(x_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I))
        if k_out_ptr is not None:
            v_JC = tl.trans(_load(v_ptr, pair_C, live_C, j, V, J))
            S_JI += _dot(v_JC, _load_part(k_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I))


@triton.jit(do_not_specialize=["T"])
def chunks_outputs_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    qk_ptr: tl.tensor,
    u_ptr: tl.tensor,
    S_ptr: tl.tensor,
    o_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Outputs of a chunk, E of their V channels: O = q_in S + (q x) U, with a + (q k) V; without q x from q and k."""
    tile = tl.program_id(0)
    t = tl.arange(0, C)
    row_C, pair_C, live_C, query_C, _ = _place(tile, t, T, H, C, N)
    j = tl.program_id(1) * E

    u_CE = _load(v_ptr, pair_C, live_C, j, V, E) if u_ptr is None else _load_tile(u_ptr, tile, t, j, C, V, E)
    if qx_ptr is None:
        qx_CC = _plain_products(q_in_ptr, k_ptr, row_C, pair_C, live_C, t, K, C, E)
    else:
        qx_CC = _load_tile(qx_ptr, tile, t, 0, C, C, C)
    o_CE = _dot(qx_CC, u_CE)
    if qk_ptr is not None:
        o_CE += _dot(_load_tile(qk_ptr, tile, t, 0, C, C, C), _load(v_ptr, pair_C, live_C, j, V, E))
    for first in range(0, K, E):
        q_CE = _load_part(q_in_ptr, tile, t, row_C, query_C, first, C, K, G, E).to(S_ptr.dtype.element_ty)
        o_CE += _dot(q_CE, tl.trans(_load_state(S_ptr, tile, j, first, K, V, E)))
    _store(o_ptr, row_C, query_C, o_CE, j, V, E)


@triton.jit
def _plain_products(
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
        q_CE = _load(q_ptr, row_C, live_C, first, K, E).to(k_ptr.dtype.element_ty)
        qk_CC += _dot(q_CE, tl.trans(_load(k_ptr, pair_C, live_C, first, K, E)))
    return tl.where(t[:, None] >= t[None, :], qk_CC, 0.0).to(k_ptr.dtype.element_ty)


@triton.jit
def _load_state(
    S_ptr: tl.tensor, tile: tl.tensor, j: int, first: int, K: tl.constexpr, V: tl.constexpr, E: tl.constexpr
):
    """Block of a state, from value channel j and key channel ``first``."""
    j_E = j + tl.arange(0, E)
    return _load(S_ptr, tile.to(tl.int64) * V + j_E, j_E < V, first, K, E)


@triton.jit(do_not_specialize=["T"])
def chunks_states_bwd_kernel(
    do_ptr: tl.tensor,
    c_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    w_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dS_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
):
    """Gradients of the states after the chunks of one head of one sequence, transposed: J of their V channels.

    For each chunk, the newest first:
    1. Write dS.
    2. With b, write dU.
    3. dS <- exp(c_C) dS + q_in^T dO, with b + W^T dU.
    """
    chunks = tl.cdiv(T * N, C)
    t = tl.arange(0, C)
    j = tl.program_id(1) * J
    j_J = j + tl.arange(0, J)
    dS_JI = tl.zeros([J, I], tl.float32)

    for back in range(chunks):
        # 1. Gradient of the state.
        tile = tl.program_id(0) * chunks + chunks - 1 - back
        row_C, pair_C, live_C, query_C, _ = _place(tile, t, T, H, C, N)
        state_JI = dS_JI.to(dS_ptr.dtype.element_ty)
        _store(dS_ptr, tile.to(tl.int64) * V + j_J, j_J < V, state_JI, 0, K, I)

        # 2, 3. The gradients of U and of the state before.
        do_JC = tl.trans(_load(do_ptr, row_C, query_C, j, V, J)).to(state_JI.dtype)
        dS_JI *= tl.exp2(_load_sum(c_ptr, tile, C - 1, 0, C, K, G, I))[None, :]
        q_CI = _load_part(q_in_ptr, tile, t, row_C, query_C, 0, C, K, G, I)
        dS_JI += _dot(do_JC, q_CI.to(state_JI.dtype))
        if w_ptr is not None:
            du_JC = _dot(do_JC, _load_tile(qx_ptr, tile, t, 0, C, C, C))
            du_JC += _dot(state_JI, tl.trans(_load_part(x_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I)))
            du_JC = du_JC.to(state_JI.dtype)
            _store_tile(du_ptr, tile, t, tl.trans(du_JC), j, C, V, J)
            dS_JI += _dot(du_JC, _load_tile(w_ptr, tile, t, 0, C, K, I))


@triton.jit(do_not_specialize=["T"])
def chunks_products_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    b_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    qk_ptr: tl.tensor,
    bk_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    u_ptr: tl.tensor,
    S_ptr: tl.tensor,
    do_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dS_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    db_ptr: tl.tensor,
    dqx_ptr: tl.tensor,
    dbx_ptr: tl.tensor,
    dqk_ptr: tl.tensor,
    dbk_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Gradients of a chunk's values and products; with q also of its other rows, as ``rows_bwd`` writes them.

    1. For each block of value channels:
       a. with b, write dY in place of dU;
       b. write dV;
       c. add to the gradients of the products.
    2. Write these, or for each block of the channels of keys, what they and the states give to queries, keys and b.
    """
    tile = tl.program_id(0)
    t = tl.arange(0, C)
    row_C, pair_C, live_C, query_C, _ = _place(tile, t, T, H, C, N)
    dqx_CC = tl.zeros([C, C], tl.float32)
    dbx_CC, dqk_CC, dbk_CC = dqx_CC, dqx_CC, dqx_CC
    if qx_ptr is None:
        qx_CC = _plain_products(q_ptr, k_ptr, row_C, pair_C, live_C, t, K, C, E)
    elif u_ptr is None:
        qx_CC = _load_tile(qx_ptr, tile, t, 0, C, C, C)

    for first in range(0, V, E):
        do_CE = _load(do_ptr, row_C, query_C, first, V, E).to(dS_ptr.dtype.element_ty)
        if (bk_ptr is not None) or (u_ptr is None):
            v_CE = _load(v_ptr, pair_C, live_C, first, V, E)

        # 1a. dY.
        if u_ptr is None:
            u_CE = v_CE
        else:
            u_CE = _load_tile(u_ptr, tile, t, first, C, V, E)
            inverse_CC = tl.trans(_load_tile(inverse_ptr, tile, t, 0, C, C, C))
            dv_CE = _dot(inverse_CC, _load_tile(du_ptr, tile, t, first, C, V, E))
            dy_CE = dv_CE.to(u_CE.dtype)
            _store_tile(du_ptr, tile, t, dy_CE, first, C, V, E)

        # 1b. Values.
        if bk_ptr is not None:
            dv_CE = _dot(tl.trans(_load_tile(bk_ptr, tile, t, 0, C, C, C)), dy_CE)
            dv_CE += _dot(tl.trans(_load_tile(qk_ptr, tile, t, 0, C, C, C)), do_CE)
        elif u_ptr is None:
            dv_CE = _dot(tl.trans(qx_CC), do_CE)
        if (bk_ptr is not None) or (u_ptr is None):
            out_ptr = x_out_ptr if k_out_ptr is None else k_out_ptr
            for at in range(0, K, E):
                out_CE = _load_part(out_ptr, tile, t, pair_C, live_C, at, C, K, G, E)
                dv_CE += _dot(out_CE, tl.trans(_load_state(dS_ptr, tile, first, at, K, V, E)))
        _store(dv_ptr, pair_C, live_C, dv_CE, first, V, E)

        # 1c. Products.
        dqx_CC += _dot(do_CE, tl.trans(u_CE))
        if u_ptr is not None:
            dbx_CC += _dot(dy_CE, tl.trans(u_CE))
        if bk_ptr is not None:
            dqk_CC += _dot(do_CE, tl.trans(v_CE))
            dbk_CC += _dot(dy_CE, tl.trans(v_CE))

    # 2. Products or rows. Other threads of this program wrote dY, hence the barrier; the caller's b stand for -b.
    if q_ptr is not None:
        tl.debug_barrier()
        dqx_CC = tl.where(t[:, None] >= t[None, :], dqx_CC, 0.0).to(dS_ptr.dtype.element_ty)
        if b_ptr is not None:
            dbx_CC = tl.where(t[:, None] > t[None, :], dbx_CC, 0.0).to(dS_ptr.dtype.element_ty)
        for at in range(0, K, E):
            k_CE = _load(k_ptr, pair_C, live_C, at, K, E)
            dq_CE = _dot(dqx_CC, k_CE)
            dk_CE = _dot(tl.trans(dqx_CC), _load(q_ptr, row_C, query_C, at, K, E).to(dqx_CC.dtype))
            if b_ptr is not None:
                db_CE = _dot(dbx_CC, k_CE)
                dk_CE -= _dot(tl.trans(dbx_CC), _load(b_ptr, pair_C, live_C, at, K, E))
            for first in range(0, V, E):
                S_EE = _load_state(S_ptr, tile, first, at, K, V, E)
                dq_CE += _dot(_load(do_ptr, row_C, query_C, first, V, E).to(dS_ptr.dtype.element_ty), S_EE)
                dS_EE = _load_state(dS_ptr, tile, first, at, K, V, E)
                if u_ptr is None:
                    u_CE = _load(v_ptr, pair_C, live_C, first, V, E)
                else:
                    u_CE = _load_tile(u_ptr, tile, t, first, C, V, E)
                    db_CE += _dot(_load_tile(du_ptr, tile, t, first, C, V, E), S_EE)
                dk_CE += _dot(u_CE, dS_EE)
            _store(dq_ptr, row_C, query_C, dq_CE, at, K, E)
            _store(dk_ptr, pair_C, live_C, dk_CE, at, K, E)
            if b_ptr is not None:
                _store(db_ptr, pair_C, live_C, -db_CE, at, K, E)
    else:
        _store_tile(dqx_ptr, tile, t, dqx_CC, 0, C, C, C)
        if u_ptr is not None:
            _store_tile(dbx_ptr, tile, t, dbx_CC, 0, C, C, C)
        if bk_ptr is not None:
            _store_tile(dqk_ptr, tile, t, dqk_CC, 0, C, C, C)
            _store_tile(dbk_ptr, tile, t, dbk_CC, 0, C, C, C)


@triton.jit
def _gradient(
    pointer: tl.tensor,
    tile: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    weight_MM: tl.tensor,
    seen_MM: tl.tensor,
    C: tl.constexpr,
):
    """Gradient of the products of the left rows from i on with the right rows from j on, before their weights."""
    d_MM = _load_tile(pointer, tile, i + tl.arange(0, M), j, C, C, M)
    return tl.where(seen_MM, d_MM.to(tl.float32) * weight_MM, 0.0).to(d_MM.dtype)


@triton.jit
def _onward(row_M: tl.tensor, y_ME: tl.tensor, more_ME: tl.tensor, G: tl.constexpr, PRECISION: tl.constexpr):
    """Sums over the rows from each one on, and more, of each channel (M, E) or of all (M, 1).

    They are a product, which takes fewer registers than a scan.
    """
    onward_MM = (row_M[:, None] <= row_M[None, :]).to(tl.float32)
    sum_ME = tl.dot(onward_MM, y_ME, input_precision=PRECISION) + more_ME
    return sum_ME if G > 1 else tl.sum(sum_ME, 1)[:, None]


@triton.jit(do_not_specialize=["T", "sequences"])
def chunks_rows_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    c_ptr: tl.tensor,
    u_ptr: tl.tensor,
    S_ptr: tl.tensor,
    do_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dS_ptr: tl.tensor,
    dqx_ptr: tl.tensor,
    dbx_ptr: tl.tensor,
    dqk_ptr: tl.tensor,
    dbk_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dg_ptr: tl.tensor,
    da_ptr: tl.tensor,
    db_ptr: tl.tensor,
    dbonus_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a chunk's queries, keys, factors and decays, in one block of K channels.

    1. For each block of M right rows, the last one first:
       a. sum what the state after the chunk and left rows give them;
       b. write their gradients, and what they give to the gradients of decays.
    2. For each block of M left rows, the last one first:
       a. sum what the state before the chunk and right rows give them;
       b. write their gradients: undo the factors exp(-g), and add what positions read of their own pairs;
       c. add to the gradients of decays what they, and the end of the chunk, give.

    The two kinds of rows have loops of their own, so that their sums fit into the registers.
    """
    BLOCKS: tl.constexpr = (K + E - 1) // E
    D: tl.constexpr = E if G > 1 else 1
    WIDTH: tl.constexpr = K if G > 1 else BLOCKS
    tile = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    first = block * E
    t = tl.arange(0, M)
    x_ptr = k_ptr if a_ptr is None else a_ptr
    dx_ptr = dk_ptr if a_ptr is None else da_ptr
    bonus_1E = _load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, first, H, K, E)
    total_E = _load_sum(c_ptr, tile, C - 1, first, C, K, G, E)
    later_E = tl.zeros([E], tl.float32)
    through_E, dbonus_E = later_E, later_E

    for later in range(C // M):
        i = C - M - later * M
        row_M, pair_M, live_M, query_M, decay_M = _place(tile, i + t, T, H, C, N)
        c_ME = _sums_at(c_ptr, tile, i + t, first, C, K, G, E)

        # 1a. Sums of right rows.
        dx_ME = tl.zeros([M, E], tl.float32)
        dk_ME = dx_ME
        for at in range(0, V, E):
            dS_EE = _load_state(dS_ptr, tile, at, first, K, V, E)
            if b_ptr is not None:
                dx_ME += _dot(_load_tile(u_ptr, tile, i + t, at, C, V, E), dS_EE)
            if b_ptr is None:
                dx_ME += _dot(_load(v_ptr, pair_M, live_M, at, V, E), dS_EE)
            elif a_ptr is not None:
                dk_ME += _dot(_load(v_ptr, pair_M, live_M, at, V, E), dS_EE)
        dx_ME *= tl.exp2(total_E[None, :] - c_ME)
        dk_ME *= tl.exp2(total_E[None, :] - c_ME)
        end_ME = _load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32) * dx_ME
        if a_ptr is not None:
            end_ME += _load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32) * dk_ME
        through_E += tl.sum(end_ME, 0)
        for step in range(later + LEVELS):
            j, level = tl.maximum(C - M - step * M, i), tl.maximum(step - later, -1)
            place = _place(tile, j + t, T, H, C, N)
            left_ME, right_ME, weight_MM, seen_MM = _between(c_ptr, tile, j, i, level, first, C, K, G, E)
            q_ME, b_ME = _load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
            q_left_ME, b_left_ME = _scaled(q_ME, left_ME, q_ptr), _scaled(b_ME, left_ME, q_ptr)
            x_sum_ME = _dot(tl.trans(_gradient(dqx_ptr, tile, j, i, weight_MM, seen_MM, C)), q_left_ME)
            if b_ptr is not None:
                x_sum_ME += _dot(tl.trans(_gradient(dbx_ptr, tile, j, i, weight_MM, seen_MM, C)), b_left_ME)
            dx_ME += x_sum_ME * right_ME
            if a_ptr is not None:
                k_sum_ME = _dot(tl.trans(_gradient(dqk_ptr, tile, j, i, weight_MM, seen_MM, C)), q_left_ME)
                k_sum_ME += _dot(tl.trans(_gradient(dbk_ptr, tile, j, i, weight_MM, seen_MM, C)), b_left_ME)
                dk_ME += k_sum_ME * right_ME

        # 1b. Gradients of right rows.
        own_M = (tile.to(tl.int64) * C + i + t) * C + i + t
        asks_ME = _load(q_ptr, row_M, query_M, first, K, E).to(tl.float32)
        x_ME = _load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32)
        share_ME = -x_ME * dx_ME
        if a_ptr is not None:
            k_ME = _load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            share_ME -= k_ME * dk_ME
            own_ME = tl.load(dqk_ptr + own_M).to(tl.float32)[:, None] * asks_ME
            dk_ME += own_ME * bonus_1E
            if bonus_ptr is not None:
                dbonus_E += tl.sum(own_ME * k_ME, 0)
            _store(dk_ptr, pair_M, live_M, dk_ME, first, K, E)
        if (a_ptr is None) or (bonus_ptr is None):
            own_ME = tl.load(dqx_ptr + own_M).to(tl.float32)[:, None] * asks_ME
            dx_ME += own_ME * bonus_1E
            if bonus_ptr is not None:
                dbonus_E += tl.sum(own_ME * x_ME, 0)
        _store(dx_ptr, pair_M, live_M, dx_ME, first, K, E)
        if G > 0:
            dg_MD = _onward(i + t, share_ME, later_E[None, :], G, PRECISION)
            _store(dg_ptr, row_M, decay_M, dg_MD, block * D, WIDTH, D)
            later_E += tl.sum(share_ME, 0)

    # What goes through the end of the chunk belongs to the decays of all of its rows.
    later_E = tl.zeros([E], tl.float32)
    for at in range(0, V, E):
        S_EE = _load_state(S_ptr, tile, at, first, K, V, E).to(tl.float32)
        later_E += tl.sum(S_EE * _load_state(dS_ptr, tile, at, first, K, V, E).to(tl.float32), 0)
    later_E = through_E + later_E * tl.exp2(total_E)

    # Other threads of this program wrote what is read of the gradients of decays, hence the barrier.
    tl.debug_barrier()
    for later in range(C // M):
        i = C - M - later * M
        place = _place(tile, i + t, T, H, C, N)
        row_M, pair_M, live_M, query_M, decay_M = place
        c_ME = _sums_at(c_ptr, tile, i + t, first, C, K, G, E)

        # 2a. Sums of left rows.
        dq_ME = tl.zeros([M, E], tl.float32)
        db_ME = dq_ME
        for at in range(0, V, E):
            S_EE = _load_state(S_ptr, tile, at, first, K, V, E)
            dq_ME += _dot(_load(do_ptr, row_M, query_M, at, V, E).to(S_EE.dtype), S_EE)
            if b_ptr is not None:
                db_ME += _dot(_load_tile(dy_ptr, tile, i + t, at, C, V, E), S_EE)
        dq_ME *= tl.exp2(c_ME)
        db_ME *= tl.exp2(c_ME)
        for step in range(i // M + LEVELS):
            j, level = tl.minimum(step * M, i), tl.maximum(step - i // M, -1)
            _, pair_j_M, live_j_M, _, _ = _place(tile, j + t, T, H, C, N)
            left_ME, right_ME, weight_MM, seen_MM = _between(c_ptr, tile, i, j, level, first, C, K, G, E)
            x_right_ME = _scaled(_load(x_ptr, pair_j_M, live_j_M, first, K, E), right_ME, q_ptr)
            q_sum_ME = _dot(_gradient(dqx_ptr, tile, i, j, weight_MM, seen_MM, C), x_right_ME)
            if b_ptr is not None:
                b_sum_ME = _dot(_gradient(dbx_ptr, tile, i, j, weight_MM, seen_MM, C), x_right_ME)
            if a_ptr is not None:
                k_right_ME = _scaled(_load(k_ptr, pair_j_M, live_j_M, first, K, E), right_ME, q_ptr)
                q_sum_ME += _dot(_gradient(dqk_ptr, tile, i, j, weight_MM, seen_MM, C), k_right_ME)
                b_sum_ME += _dot(_gradient(dbk_ptr, tile, i, j, weight_MM, seen_MM, C), k_right_ME)
            dq_ME += q_sum_ME * left_ME
            if b_ptr is not None:
                db_ME += b_sum_ME * left_ME

        # 2b. Gradients of left rows.
        own_M = (tile.to(tl.int64) * C + i + t) * C + i + t
        q_ME, b_ME = _load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
        share_ME, behind_ME = q_ME * dq_ME, tl.zeros([M, E], tl.float32)
        if bonus_ptr is not None:
            behind_ME += share_ME
        if b_ptr is not None:
            share_ME += b_ME * db_ME
        if a_ptr is not None:
            behind_ME += b_ME * db_ME
        before_ME = tl.exp2(-_load_g(g_ptr, row_M, decay_M, first, K, G, E))
        if bonus_ptr is not None:
            dq_ME *= before_ME
        if a_ptr is not None:
            k_ME = _load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            dq_ME += tl.load(dqk_ptr + own_M).to(tl.float32)[:, None] * bonus_1E * k_ME
        if (a_ptr is None) or (bonus_ptr is None):
            x_ME = _load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            dq_ME += tl.load(dqx_ptr + own_M).to(tl.float32)[:, None] * bonus_1E * x_ME
        _store(dq_ptr, row_M, query_M, dq_ME, first, K, E)
        if b_ptr is not None:
            db_ME *= -1.0 if a_ptr is None else before_ME
            _store(db_ptr, pair_M, live_M, db_ME, first, K, E)

        # 2c. Decays.
        if G > 0:
            dg_MD = _onward(i + t, share_ME, later_E[None, :] - behind_ME, G, PRECISION)
            dg_MD += _load(dg_ptr, row_M, decay_M, block * D, WIDTH, D)
            g_MD = _load_g(g_ptr, row_M, decay_M, first, K, G, E)
            _store(dg_ptr, row_M, decay_M, tl.where(g_MD > STRONGEST, dg_MD, 0.0), block * D, WIDTH, D)
            later_E += tl.sum(share_ME, 0)

    if bonus_ptr is not None:
        e = first + tl.arange(0, E)
        tl.store(dbonus_ptr + tile.to(tl.int64) * K + e, dbonus_E, e < K)


def matrix_chunks_method(dtype: torch.dtype) -> Method:
    """``mixers.ops.linear_recurrence.matrix_recurrence`` with outputs in ``dtype``, for many positions.

    Tensors: q (R, B, T, H, K), k (R, B, T N, H, K), v (R, B, T N, H, V); g (R, B, T, H, K or 1) float32, a and b (R, B,
    T N, H, K), and the bonus (R, H, K) float32, each of which may be None. N is 1 but for the delta rule. Without g, a
    and the bonus, queries may be float32, which is the type of their gradient, too.
    """

    def forward(*tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        given = contiguous(*tensors)
        q, k, v = given[:3]
        sizes, _, parts = _parts(given)

        # States.
        tiles = _tiles(q, k)
        S = v.new_empty(tiles, v.shape[-1], q.shape[-1])
        grid, settings = _of_states(v, sizes)
        used = [parts[name] for name in ("c", "x_out", "k_out", "w", "u")]
        chunks_states_fwd_kernel[grid](v, *used, S, **settings)

        # Outputs.
        o = v.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
        settings = {**sizes, "E": BLOCK, **OUTPUTS}
        blocks = (tiles, triton.cdiv(v.shape[-1], BLOCK))
        used = [parts[name] for name in ("q_in", "qx", "qk", "u")]
        chunks_outputs_kernel[blocks](k, v, *used, S, o, **settings)
        return (o,), tuple(y for y in (parts["inverse"], parts["u"], S) if y is not None)

    def backward(gradients: Tensors, tensors: Sequence[Tensor | None], outputs: Tensors, saved: Tensors) -> Optionals:
        (do,), given = contiguous(*gradients), contiguous(*tensors)
        q, _, v, g, a, b, bonus = given
        *solved, S = saved
        sizes, levels, parts = _parts(given, *solved)
        tiles, K = S.shape[0], q.shape[-1]

        # States.
        dS, du = torch.empty_like(S), None if b is None else torch.empty_like(parts["u"])
        grid, settings = _of_states(v, sizes)
        used = [parts[name] for name in ("c", "q_in", "x_out", "qx", "w")]
        chunks_states_bwd_kernel[grid](do, *used, du, dS, **settings)

        # Values and products, and rows where there are no decays.
        found: list[Any] = [y if y is None else torch.empty_like(y) for y in given]
        is_plain = _is_plain(given)
        products = [None if is_plain or y is None else torch.empty_like(parts["qx"]) for y in (q, b, a, a)]
        rows = (q, given[1], v, b) if is_plain else (None, None, v, None)
        drows = (*found[:3], found[5]) if is_plain else (None, None, found[2], None)
        settings = {**sizes, "E": BLOCK, **PRODUCTS_BWD}
        used = [parts[name] for name in ("x_out", "k_out", "qx", "qk", "bk", "inverse", "u")]
        chunks_products_bwd_kernel[(tiles,)](*rows, *used, S, do, du, dS, *drows, *products, **settings)
        if is_plain:
            return found

        # Rows.
        settings = {**sizes, **levels, "sequences": q.shape[1], **ROWS_BWD}
        blocks = triton.cdiv(K, settings["E"])
        scalar = g is not None and g.shape[-1] == 1
        if scalar:
            found[3] = g.new_empty(*g.shape[:-1], blocks)
        if bonus is not None:
            found[6] = bonus.new_empty(tiles, K)
        written = *found[:2], *found[3:]
        chunks_rows_bwd_kernel[(tiles * blocks,)](
            *given, parts["c"], parts["u"], S, do, du, dS, *products, *written, **settings
        )

        # Sums over blocks, and over chunks and sequences.
        if scalar and blocks > 1:
            found[3] = found[3].sum(-1, keepdim=True)
        if bonus is not None:
            found[6] = found[6].view(*q.shape[:2], q.shape[3], -1, K).sum((1, 3))
        return found

    return Method(forward, backward)


def _parts(given: tuple[Any, ...], *solved: Tensor) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return sizes of all launches, settings of products, and the parts that are computed for all chunks at once.

    With b, the backward pass has ``solved`` two of them, X and U.
    """
    q, k, v, g, a, b, bonus = given
    _, B, T, H, K = q.shape
    V, N = v.shape[-1], v.shape[2] // T
    tiles = _tiles(q, k)
    G = 0 if g is None else g.shape[-1]
    sizes = {"T": T, "H": H, "K": K, "V": V, "G": G, "N": N, "C": CHUNK}
    precision = "tf32" if q.dtype == torch.bfloat16 else "tf32x3"
    levels = {"LEVELS": 2 if G > 1 else 1, "PRECISION": precision}

    # Parts of each chunk.
    widths = dict.fromkeys(("q_in", "b_in", "x_out", "k_out", "w"), K) | {"u": V}
    widths |= dict.fromkeys(("qx", "qk", "bk", "inverse"), CHUNK)
    absent = {"k_out", "qk", "bk"} if a is None else set()
    absent |= {"b_in", "inverse", "w", "u"} if b is None else {"inverse", "u"} if solved else set()
    absent |= {"q_in", "b_in", "x_out", "k_out"} if g is None else set()
    is_plain = _is_plain(given)
    absent |= {"qx"} if is_plain and b is None else set()
    parts = {
        "c": None if g is None else g.new_empty(tiles, CHUNK, G),
        "bx": None if b is None or solved or is_plain else v.new_empty(tiles, CHUNK, CHUNK, dtype=torch.float32),
        **{name: None if name in absent else v.new_empty(tiles, CHUNK, width) for name, width in widths.items()},
    }
    parts |= dict(zip(("inverse", "u"), solved, strict=False))

    # Kernels.
    settings = {"T": T, "H": H, "K": K, "G": G, "N": N, "C": CHUNK}
    if g is None:
        parts |= {"q_in": q, "b_in": b, "x_out": k if a is None else a, "k_out": None if a is None else k}
    else:
        used = [parts[name] for name in ("c", "q_in", "b_in", "x_out", "k_out")]
        blocks = (tiles, triton.cdiv(K, BLOCK))
        chunks_ends_kernel[blocks](q, k, g, a, b, bonus, *used, **settings, E=BLOCK, **ENDS)

    if not is_plain:
        used = [parts[name] for name in ("c", "qx", "bx", "qk", "bk")]
        E = max(M.value, triton.next_power_of_2(K))
        settings |= {"sequences": B, "E": E, "LEVELS": levels["LEVELS"], "num_warps": max(1, E // BLOCK), **PRODUCTS}
        chunks_products_kernel[(tiles * (CHUNK // M.value),)](q, k, g, a, b, bonus, *used, **settings)

    if b is not None:
        rows = (q, k) if is_plain else (None, None)
        used = [parts[name] for name in ("b_in", "bx", "bk", "qx", "inverse", "w", "u")]
        settings = {**sizes, "E": BLOCK, "SOLVED": bool(solved), "PRECISION": precision, **SOLVE}
        chunks_solve_kernel[(tiles,)](*rows, v, *used, **settings)
    return sizes, levels, parts


def _tiles(q: Tensor, k: Tensor) -> int:
    """Return the number of chunks of all heads."""
    return q.shape[:2].numel() * q.shape[3] * triton.cdiv(k.shape[2], CHUNK)


def _is_plain(given: tuple[Any, ...]) -> bool:
    """Whether this is linear attention or the delta rule without decays, whose rows need no factors."""
    _, _, _, g, a, _, bonus = given
    return g is None and a is None and bonus is None


def _of_states(v: Tensor, sizes: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and settings of the kernels that go from chunk to chunk.

    Rows in float32 leave no room to wait, and a GPU with less than 128 KiB for a program half of it.
    """
    I = max(BLOCK, triton.next_power_of_2(sizes["K"]))
    stages = 1 if v.dtype == torch.float32 else 4 if I == BLOCK else 2
    if stages > 1 and gpu_limits(v.device).memory < 131072:
        stages //= 2
    settings = {**sizes, "I": I, "num_stages": stages, **STATES}
    return (v.shape[:2].numel() * sizes["H"], triton.cdiv(sizes["V"], settings["J"])), settings


@kernels_take("linear recurrence", f"keys and values of up to {MOST_CHANNELS} channels a head")
def fits_chunks(key_channels: int, value_channels: int) -> bool:
    """Return whether the kernels take heads of these sizes."""
    return max(key_channels, value_channels) <= MOST_CHANNELS
