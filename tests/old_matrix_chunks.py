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

With a decay per channel, no single pair of factors of l_i and r_j would be bounded. The pairs (i, j) fall into levels:
both in a block of NEAR positions, or in the two halves of a block of 2 NEAR, 4 NEAR, ..., C positions. On a level, the
factors are exp(c_i - m) and exp(m - c_j) with the sum m in the middle of the block. Between halves they are at most 1,
and within NEAR positions at most exp(-STRONGEST NEAR / 2); stronger decays count as STRONGEST, which is float32's
epsilon. Each level is a product of C rows.

    name           shape                written by      read by
    q              (R, B, T, H, K)      caller          within, rows
    k              (R, B, T N, H, K)    caller          within, rows
    v              (R, B, T N, H, V)    caller          all
    g              (R, B, T, H, G)      caller          within, rows                   G = K or 1, float32
    a, b           (R, B, T N, H, K)    caller          within, rows
    bonus          (R, H, K)            caller          within, rows                   float32
    c              (tiles, C, G)        within          within, states, rows           float32
    q_in           (tiles, C, K)        within          outputs, states_bwd
    x_out          (tiles, C, K)        within          states, products
    k_out          (tiles, C, K)        within          states_fwd, products           with a
    qx             (tiles, C, C)        within          outputs, states_bwd, products
    qk, bk         (tiles, C, C)        within          outputs, products              with a
    inverse        (tiles, C, C)        within          within, products               X; with b; kept
    w              (tiles, C, K)        within          states                         with b
    u              (tiles, C, V)        within          states_fwd                     X V or X (b k) V; with b
                                        states_fwd      outputs, products, rows        U, in its place; kept
    S              (tiles, V, K)        states_fwd      outputs, rows                  before a chunk; kept
    o              (R, B, T, H, V)      outputs         caller
    do             (R, B, T, H, V)      caller          states_bwd, products, rows
    dS             (tiles, V, K)        states_bwd      products, rows                 after a chunk
    du             (tiles, C, V)        states_bwd      products                       with b
                                        products        rows                           dY, in its place
    dqx .. dbk     (tiles, C, C)        products        rows
    dv             (R, B, T N, H, V)    products        caller
    dq .. dbonus   like q .. bonus      rows            caller                         dbonus (tiles, K), dg of a block

A tile is a chunk of a head of a sequence. Only the states go from chunk to chunk, in programs of J of the V channels;
all else is computed for all chunks at once, in blocks of E channels. The backward pass is given what the forward pass
has kept, each part about as large as the values, and calls ``within`` again for the others. ``products`` and ``rows``
are kernels of the backward pass. Products of 64 rows have at least 64 columns: with fewer, compiled kernels were wrong
on Hopper (see ``mixers.ops.kernels.chunked_recurrence``).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import MASKED, contiguous, kernels_take
from mixers.ops.kernels.path_attention import inverse
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = 64
BLOCK = 64
"""Channels of a block, E."""
WITHIN: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
STATES: dict[str, Any] = {"J": 32, "num_warps": 4}
OUTPUTS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
PRODUCTS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}
ROWS: dict[str, Any] = {"num_stages": 1}
"""Settings of the kernels, the fastest of eight on an H200 at 2,048 and 8,192 positions."""
MOST_CHANNELS = 256
"""Largest width of keys for which a block of the state fits into registers."""
NEAR: tl.constexpr = tl.constexpr(8)
STRONGEST: tl.constexpr = tl.constexpr(-16.0)
"""Logarithm of the strongest decay: stronger ones leave less than float32's epsilon, and count as this one."""
BOUND: tl.constexpr = tl.constexpr(64.0)
"""Largest exponent of a factor, of NEAR / 2 decays. Larger ones belong to rows that a level does not pair."""


@triton.jit
def _dot(x: tl.tensor, y: tl.tensor):
    """x y, of float32 in tensor cores as well: exact products of 64 rows would not fit into the registers."""
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _place(tile: tl.tensor, T: tl.tensor, H: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    """Rows of a tile's positions and pairs, and which of them are pairs, have a query, and have a decay."""
    chunks = tl.cdiv(T * N, C)
    head = tile // chunks % H
    sequence = (tile // chunks // H).to(tl.int64)
    p_C = tile % chunks * C + tl.arange(0, C)
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
def _load_tile(pointer: tl.tensor, tile: tl.tensor, first: int, C: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """E channels of the C rows of a tile; zeros for other channels."""
    e = first + tl.arange(0, E)
    at_CE = (tile.to(tl.int64) * C + tl.arange(0, C))[:, None] * K + e[None, :]
    return tl.load(pointer + at_CE, (e < K)[None, :], 0.0)


@triton.jit
def _store_tile(
    pointer: tl.tensor,
    tile: tl.tensor,
    y_CE: tl.tensor,
    first: int,
    C: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
):
    e = first + tl.arange(0, E)
    at_CE = (tile.to(tl.int64) * C + tl.arange(0, C))[:, None] * K + e[None, :]
    tl.store(pointer + at_CE, y_CE, (e < K)[None, :])


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
    at_C = tile.to(tl.int64) * C + row_C
    if G > 1:
        e = first + tl.arange(0, E)
        c_CE = tl.load(c_ptr + at_C[:, None] * K + e[None, :], (e < K)[None, :], 0.0)
    elif G == 1:
        c_CE = tl.load(c_ptr + at_C)[:, None]
    else:
        c_CE = (at_C * 0).to(tl.float32)[:, None]
    return c_CE


@triton.jit
def _load_total(
    c_ptr: tl.tensor, tile: tl.tensor, first: int, C: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr
):
    """Running sums at the end of a tile (E)."""
    last = tile.to(tl.int64) * C + C - 1
    total_E = tl.zeros([E], tl.float32)
    if G > 1:
        e = first + tl.arange(0, E)
        total_E = tl.load(c_ptr + last * K + e, e < K, 0.0)
    elif G == 1:
        total_E += tl.load(c_ptr + last)
    return total_E


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
    """Logarithms of decays, at least STRONGEST: (C, E) of channels, (C, 1) of the head, or zeros (C, 1)."""
    if G > 1:
        g_CE = _load(g_ptr, row_C, live_C, first, K, E)
    elif G == 1:
        g_CE = tl.load(g_ptr + row_C, live_C, 0.0)[:, None]
    else:
        g_CE = (row_C * 0).to(tl.float32)[:, None]
    return tl.maximum(g_CE, STRONGEST)


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
def _level(
    c_ptr: tl.tensor,
    c_CE: tl.tensor,
    tile: tl.tensor,
    first: int,
    level: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Factors of left and right rows, weights of pairs of rows, and which pairs are on the level."""
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    if G > 1:
        half = (NEAR // 2) << level
        gap_CE = c_CE - _sums_at(c_ptr, tile, (t // (2 * half)) * (2 * half) + half - 1, first, C, K, G, E)
        left_CE, right_CE = tl.exp(tl.minimum(gap_CE, BOUND)), tl.exp(tl.minimum(-gap_CE, BOUND))
        weight_CC = 1.0
        seen_CC = (i // (2 * half) == j // (2 * half)) & (i > j) & ((i // half > j // half) | (level == 0))
    else:
        left_CE, right_CE = 1.0, 1.0
        weight_CC = tl.exp(tl.where(i > j, c_CE - tl.trans(c_CE), MASKED))
        seen_CC = i > j
    return left_CE, right_CE, weight_CC, seen_CC


@triton.jit
def _scaled(y_CE: tl.tensor, factor_CE: tl.tensor, like: tl.tensor):
    return (y_CE.to(tl.float32) * factor_CE).to(like.dtype.element_ty)


@triton.jit(do_not_specialize=["T", "sequences"])
def chunks_within_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    c_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    qk_ptr: tl.tensor,
    bk_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    w_ptr: tl.tensor,
    u_ptr: tl.tensor,
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
    SOLVED: tl.constexpr,
):
    """What a chunk needs of its own rows alone.

    1. For each block of channels:
       a. write the running sums;
       b. write q_in, x_out and k_out;
       c. add to the products (q x), (b x), (q k) and (b k), level by level.
    2. Write the products.
    3. With b, write W, and unless they are there (SOLVED) X, and U for a state of zeros.
    """
    tile = tl.program_id(0)
    row_C, pair_C, live_C, query_C, decay_C = _place(tile, T, H, C, N)
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    x_ptr = k_ptr if a_ptr is None else a_ptr
    sign = -1.0 if a_ptr is None else 1.0
    qx_CC = tl.zeros([C, C], tl.float32)
    bx_CC, qk_CC, bk_CC = qx_CC, qx_CC, qx_CC
    if G == 1:
        g_C1 = _load_g(g_ptr, row_C, decay_C, 0, K, G, E)
        tl.store(c_ptr + tile.to(tl.int64) * C + t, tl.cumsum(tl.sum(g_C1, 1), 0))
        tl.debug_barrier()

    for first in range(0, K, E):
        # 1a. Running sums. Other threads of this program read them, hence the barrier.
        g_CE = _load_g(g_ptr, row_C, decay_C, first, K, G, E)
        if G > 1:
            _store_tile(c_ptr, tile, tl.cumsum(g_CE, 0), first, C, K, E)
            tl.debug_barrier()
        c_CE = _sums_at(c_ptr, tile, t, first, C, K, G, E)
        to_end_CE = tl.exp(_load_total(c_ptr, tile, first, C, K, G, E)[None, :] - c_CE)

        # 1b. Rows, decayed from the start and to the end of the chunk.
        q_CE = _load(q_ptr, row_C, query_C, first, K, E).to(tl.float32)
        x_CE = _load(x_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        bonus_1E = _load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, first, H, K, E)
        if a_ptr is not None:
            k_CE = _load(k_ptr, pair_C, live_C, first, K, E).to(tl.float32)
            _store_tile(k_out_ptr, tile, k_CE * to_end_CE, first, C, K, E)
            qk_CC += tl.where(i == j, tl.sum(q_CE * k_CE * bonus_1E, 1)[:, None], 0.0)
        if (a_ptr is None) or (bonus_ptr is None):
            qx_CC += tl.where(i == j, tl.sum(q_CE * x_CE * bonus_1E, 1)[:, None], 0.0)
        if bonus_ptr is not None:
            q_CE *= tl.exp(-g_CE)
        _store_tile(q_in_ptr, tile, q_CE * tl.exp(c_CE), first, C, K, E)
        _store_tile(x_out_ptr, tile, x_CE * to_end_CE, first, C, K, E)
        if b_ptr is not None:
            b_CE = sign * _load(b_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        if a_ptr is not None:
            b_CE *= tl.exp(-g_CE)

        # 1c. Products.
        q_CE, x_CE = q_CE.to(q_ptr.dtype.element_ty), x_CE.to(q_ptr.dtype.element_ty)
        if b_ptr is not None:
            b_CE = b_CE.to(q_ptr.dtype.element_ty)
        if a_ptr is not None:
            k_CE = k_CE.to(q_ptr.dtype.element_ty)
        for level in range(LEVELS):
            left_CE, right_CE, weight_CC, seen_CC = _level(c_ptr, c_CE, tile, first, level, C, K, G, E)
            q_left_CE = _scaled(q_CE, left_CE, q_ptr)
            x_right_CE = tl.trans(_scaled(x_CE, right_CE, q_ptr))
            qx_CC += tl.where(seen_CC, _dot(q_left_CE, x_right_CE) * weight_CC, 0.0)
            if b_ptr is not None and (a_ptr is not None or not SOLVED):
                b_left_CE = _scaled(b_CE, left_CE, q_ptr)
            if b_ptr is not None and not SOLVED:
                bx_CC += tl.where(seen_CC, _dot(b_left_CE, x_right_CE) * weight_CC, 0.0)
            if a_ptr is not None:
                k_right_CE = tl.trans(_scaled(k_CE, right_CE, q_ptr))
                qk_CC += tl.where(seen_CC, _dot(q_left_CE, k_right_CE) * weight_CC, 0.0)
                bk_CC += tl.where(seen_CC, _dot(b_left_CE, k_right_CE) * weight_CC, 0.0)

    # 2. Products.
    _store_tile(qx_ptr, tile, qx_CC, 0, C, C, C)
    if a_ptr is not None:
        _store_tile(qk_ptr, tile, qk_CC, 0, C, C, C)
        _store_tile(bk_ptr, tile, bk_CC, 0, C, C, C)

    # 3. Rank-one part.
    if b_ptr is not None:
        if SOLVED:
            x_CC = _load_tile(inverse_ptr, tile, 0, C, C, C)
        else:
            x_CC = inverse(-bx_CC, C, PRECISION).to(q_ptr.dtype.element_ty)
            _store_tile(inverse_ptr, tile, x_CC, 0, C, C, C)
        for first in range(0, K, E):
            b_CE = sign * _load(b_ptr, pair_C, live_C, first, K, E).to(tl.float32)
            c_CE = _sums_at(c_ptr, tile, t, first, C, K, G, E)
            if a_ptr is not None:
                b_CE *= tl.exp(-_load_g(g_ptr, row_C, decay_C, first, K, G, E))
            _store_tile(w_ptr, tile, _dot(x_CC, _scaled(b_CE, tl.exp(c_CE), q_ptr)), first, C, K, E)

        if not SOLVED:
            if a_ptr is not None:
                x_CC = _dot(x_CC, bk_CC.to(x_CC.dtype)).to(x_CC.dtype)
            for first in range(0, V, E):
                u_CE = _dot(x_CC, _load(v_ptr, pair_C, live_C, first, V, E))
                _store_tile(u_ptr, tile, u_CE, first, C, V, E)


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
    j = tl.program_id(1) * J
    S_JI = tl.zeros([J, I], tl.float32)

    for n in range(chunks):
        # 1. State.
        tile = tl.program_id(0) * chunks + n
        _, pair_C, live_C, _, _ = _place(tile, T, H, C, N)
        at_JI = (tile.to(tl.int64) * V + j + tl.arange(0, J))[:, None] * K + tl.arange(0, I)[None, :]
        there_JI = (j + tl.arange(0, J) < V)[:, None] & (tl.arange(0, I) < K)[None, :]
        state_JI = S_JI.to(S_ptr.dtype.element_ty)
        tl.store(S_ptr + at_JI, state_JI, there_JI)

        # 2. U.
        if w_ptr is None:
            u_JC = tl.trans(_load(v_ptr, pair_C, live_C, j, V, J))
        else:
            w_IC = tl.trans(_load_tile(w_ptr, tile, 0, C, K, I))
            u_JC = tl.trans(_load_tile(u_ptr, tile, j, C, V, J)).to(tl.float32)
            u_JC = (u_JC + _dot(state_JI, w_IC)).to(state_JI.dtype)
            _store_tile(u_ptr, tile, tl.trans(u_JC), j, C, V, J)

        # 3. Next state.
        S_JI *= tl.exp(_load_total(c_ptr, tile, 0, C, K, G, I))[None, :]
        S_JI += _dot(u_JC, _load_tile(x_out_ptr, tile, 0, C, K, I))
        if k_out_ptr is not None:
            v_JC = tl.trans(_load(v_ptr, pair_C, live_C, j, V, J))
            S_JI += _dot(v_JC, _load_tile(k_out_ptr, tile, 0, C, K, I))


@triton.jit(do_not_specialize=["T"])
def chunks_outputs_kernel(
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
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Outputs of a chunk, E of their V channels: O = q_in S + (q x) U, with a + (q k) V."""
    tile = tl.program_id(0)
    row_C, pair_C, live_C, query_C, _ = _place(tile, T, H, C, N)
    j = tl.program_id(1) * E

    u_CE = _load(v_ptr, pair_C, live_C, j, V, E) if u_ptr is None else _load_tile(u_ptr, tile, j, C, V, E)
    o_CE = _dot(_load_tile(qx_ptr, tile, 0, C, C, C), u_CE)
    if qk_ptr is not None:
        o_CE += _dot(_load_tile(qk_ptr, tile, 0, C, C, C), _load(v_ptr, pair_C, live_C, j, V, E))
    for first in range(0, K, E):
        q_CE = _load_tile(q_in_ptr, tile, first, C, K, E)
        o_CE += _dot(q_CE, tl.trans(_load_state(S_ptr, tile, j, first, K, V, E)))
    _store(o_ptr, row_C, query_C, o_CE, j, V, E)


@triton.jit
def _load_state(
    S_ptr: tl.tensor, tile: tl.tensor, j: int, first: int, K: tl.constexpr, V: tl.constexpr, E: tl.constexpr
):
    """Block of a state, from value channel j and key channel ``first``."""
    row = j + tl.arange(0, E)
    e = first + tl.arange(0, E)
    at_EE = (tile.to(tl.int64) * V + row)[:, None] * K + e[None, :]
    return tl.load(S_ptr + at_EE, (row < V)[:, None] & (e < K)[None, :], 0.0)


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
    j = tl.program_id(1) * J
    dS_JI = tl.zeros([J, I], tl.float32)

    for back in range(chunks):
        # 1. Gradient of the state.
        tile = tl.program_id(0) * chunks + chunks - 1 - back
        row_C, _, _, query_C, _ = _place(tile, T, H, C, N)
        at_JI = (tile.to(tl.int64) * V + j + tl.arange(0, J))[:, None] * K + tl.arange(0, I)[None, :]
        there_JI = (j + tl.arange(0, J) < V)[:, None] & (tl.arange(0, I) < K)[None, :]
        state_JI = dS_JI.to(dS_ptr.dtype.element_ty)
        tl.store(dS_ptr + at_JI, state_JI, there_JI)

        # 2, 3. The gradients of U and of the state before.
        do_JC = tl.trans(_load(do_ptr, row_C, query_C, j, V, J)).to(state_JI.dtype)
        dS_JI *= tl.exp(_load_total(c_ptr, tile, 0, C, K, G, I))[None, :]
        dS_JI += _dot(do_JC, _load_tile(q_in_ptr, tile, 0, C, K, I))
        if w_ptr is not None:
            du_JC = _dot(do_JC, _load_tile(qx_ptr, tile, 0, C, C, C))
            du_JC += _dot(state_JI, tl.trans(_load_tile(x_out_ptr, tile, 0, C, K, I)))
            du_JC = du_JC.to(state_JI.dtype)
            _store_tile(du_ptr, tile, tl.trans(du_JC), j, C, V, J)
            dS_JI += _dot(du_JC, _load_tile(w_ptr, tile, 0, C, K, I))


@triton.jit(do_not_specialize=["T"])
def chunks_products_bwd_kernel(
    v_ptr: tl.tensor,
    x_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    qx_ptr: tl.tensor,
    qk_ptr: tl.tensor,
    bk_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    u_ptr: tl.tensor,
    do_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dS_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dqx_ptr: tl.tensor,
    dbx_ptr: tl.tensor,
    dqk_ptr: tl.tensor,
    dbk_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
):
    """Gradients of a chunk's values and products.

    1. For each block of value channels:
       a. with b, write dY in place of dU;
       b. write dV;
       c. add to the gradients of the products.
    2. Write these.
    """
    tile = tl.program_id(0)
    row_C, pair_C, live_C, query_C, _ = _place(tile, T, H, C, N)
    dqx_CC = tl.zeros([C, C], tl.float32)
    dbx_CC, dqk_CC, dbk_CC = dqx_CC, dqx_CC, dqx_CC

    for first in range(0, V, E):
        do_CE = _load(do_ptr, row_C, query_C, first, V, E).to(dqx_ptr.dtype.element_ty)
        if (bk_ptr is not None) or (u_ptr is None):
            v_CE = _load(v_ptr, pair_C, live_C, first, V, E)

        # 1a. dY.
        if u_ptr is None:
            u_CE = v_CE
        else:
            u_CE = _load_tile(u_ptr, tile, first, C, V, E)
            inverse_CC = tl.trans(_load_tile(inverse_ptr, tile, 0, C, C, C))
            dv_CE = _dot(inverse_CC, _load_tile(du_ptr, tile, first, C, V, E))
            dy_CE = dv_CE.to(u_CE.dtype)
            _store_tile(du_ptr, tile, dy_CE, first, C, V, E)

        # 1b. Values.
        if bk_ptr is not None:
            dv_CE = _dot(tl.trans(_load_tile(bk_ptr, tile, 0, C, C, C)), dy_CE)
            dv_CE += _dot(tl.trans(_load_tile(qk_ptr, tile, 0, C, C, C)), do_CE)
        elif u_ptr is None:
            dv_CE = _dot(tl.trans(_load_tile(qx_ptr, tile, 0, C, C, C)), do_CE)
        if (bk_ptr is not None) or (u_ptr is None):
            out_ptr = x_out_ptr if k_out_ptr is None else k_out_ptr
            for at in range(0, K, E):
                out_CE = _load_tile(out_ptr, tile, at, C, K, E)
                dv_CE += _dot(out_CE, tl.trans(_load_state(dS_ptr, tile, first, at, K, V, E)))
        _store(dv_ptr, pair_C, live_C, dv_CE, first, V, E)

        # 1c. Products.
        dqx_CC += _dot(do_CE, tl.trans(u_CE))
        if u_ptr is not None:
            dbx_CC += _dot(dy_CE, tl.trans(u_CE))
        if bk_ptr is not None:
            dqk_CC += _dot(do_CE, tl.trans(v_CE))
            dbk_CC += _dot(dy_CE, tl.trans(v_CE))

    # 2. Products.
    _store_tile(dqx_ptr, tile, dqx_CC, 0, C, C, C)
    if u_ptr is not None:
        _store_tile(dbx_ptr, tile, dbx_CC, 0, C, C, C)
    if bk_ptr is not None:
        _store_tile(dqk_ptr, tile, dqk_CC, 0, C, C, C)
        _store_tile(dbk_ptr, tile, dbk_CC, 0, C, C, C)


@triton.jit
def _later(y_CE: tl.tensor, SKIPPED: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Sums over the rows from this one, or the next one, on: a product, which takes fewer registers than a scan."""
    later_CC = (tl.arange(0, C)[:, None] + SKIPPED <= tl.arange(0, C)[None, :]).to(tl.float32)
    return tl.dot(later_CC, y_CE, input_precision=PRECISION)


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

    1. Sum over the value channels the gradients of rows decayed to the ends of the chunk, and of positions' own pairs.
    2. Undo these decays; begin the gradient of the decay of the whole chunk.
    3. Take the gradients of the products to the rows, level by level.
    4. Write the gradients of the decays.
    5. Undo the factors exp(-g), add what positions read of their own pairs, and write the gradients of the rows.
    """
    tile = tl.program_id(0)
    row_C, pair_C, live_C, query_C, decay_C = _place(tile, T, H, C, N)
    t = tl.arange(0, C)
    first = tl.program_id(1) * E

    # 1. Sums over values.
    dq_CE = tl.zeros([C, E], tl.float32)
    dx_CE, dk_CE, db_CE = dq_CE, dq_CE, dq_CE
    through_E = tl.zeros([E], tl.float32)
    own_u_C = tl.zeros([C], tl.float32)
    own_v_C = own_u_C
    for at in range(0, V, E):
        do_CE = _load(do_ptr, row_C, query_C, at, V, E).to(q_ptr.dtype.element_ty)
        S_EE = _load_state(S_ptr, tile, at, first, K, V, E)
        dS_EE = _load_state(dS_ptr, tile, at, first, K, V, E)
        if (a_ptr is not None) or (b_ptr is None):
            v_CE = _load(v_ptr, pair_C, live_C, at, V, E)
        if b_ptr is None:
            u_CE = v_CE
        else:
            u_CE = _load_tile(u_ptr, tile, at, C, V, E)
            db_CE += _dot(_load_tile(dy_ptr, tile, at, C, V, E), S_EE)
        dq_CE += _dot(do_CE, S_EE)
        dx_CE += _dot(u_CE, dS_EE)
        through_E += tl.sum(S_EE.to(tl.float32) * dS_EE.to(tl.float32), 0)
        own_u_C += tl.sum(u_CE.to(tl.float32) * do_CE.to(tl.float32), 1)
        if a_ptr is not None:
            own_v_C += tl.sum(v_CE.to(tl.float32) * do_CE.to(tl.float32), 1)
            dk_CE += _dot(v_CE, dS_EE)

    # 2. Rows at the ends of the chunk.
    x_ptr = k_ptr if a_ptr is None else a_ptr
    c_CE = _sums_at(c_ptr, tile, t, first, C, K, G, E)
    to_end_CE = tl.exp(_load_total(c_ptr, tile, first, C, K, G, E)[None, :] - c_CE)
    g_CE = _load_g(g_ptr, row_C, decay_C, first, K, G, E)
    q_CE = _load(q_ptr, row_C, query_C, first, K, E).to(tl.float32)
    x_CE = _load(x_ptr, pair_C, live_C, first, K, E).to(tl.float32)
    if bonus_ptr is not None:
        q_CE *= tl.exp(-g_CE)
    dq_CE *= tl.exp(c_CE)
    dx_CE *= to_end_CE
    through_E = through_E * tl.exp(_load_total(c_ptr, tile, first, C, K, G, E)) + tl.sum(x_CE * dx_CE, 0)
    if b_ptr is not None:
        db_CE *= tl.exp(c_CE)
        b_CE = _load(b_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        b_CE *= -1.0 if a_ptr is None else tl.exp(-g_CE)
    if a_ptr is not None:
        k_CE = _load(k_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        dk_CE *= to_end_CE
        through_E += tl.sum(k_CE * dk_CE, 0)

    # 3. Products.
    q_CE, x_CE = q_CE.to(q_ptr.dtype.element_ty), x_CE.to(q_ptr.dtype.element_ty)
    if b_ptr is not None:
        b_CE = b_CE.to(q_ptr.dtype.element_ty)
    if a_ptr is not None:
        k_CE = k_CE.to(q_ptr.dtype.element_ty)
    for level in range(LEVELS):
        left_CE, right_CE, weight_CC, seen_CC = _level(c_ptr, c_CE, tile, first, level, C, K, G, E)
        q_left_CE = _scaled(q_CE, left_CE, q_ptr)
        x_right_CE = _scaled(x_CE, right_CE, q_ptr)
        d_CC = tl.where(seen_CC, _load_tile(dqx_ptr, tile, 0, C, C, C) * weight_CC, 0.0).to(q_left_CE.dtype)
        dq_CE += _dot(d_CC, x_right_CE) * left_CE
        dx_CE += _dot(tl.trans(d_CC), q_left_CE) * right_CE
        if b_ptr is not None:
            b_left_CE = _scaled(b_CE, left_CE, q_ptr)
            d_CC = tl.where(seen_CC, _load_tile(dbx_ptr, tile, 0, C, C, C) * weight_CC, 0.0).to(q_left_CE.dtype)
            db_CE += _dot(d_CC, x_right_CE) * left_CE
            dx_CE += _dot(tl.trans(d_CC), b_left_CE) * right_CE
        if a_ptr is not None:
            k_right_CE = _scaled(k_CE, right_CE, q_ptr)
            d_CC = tl.where(seen_CC, _load_tile(dqk_ptr, tile, 0, C, C, C) * weight_CC, 0.0).to(q_left_CE.dtype)
            dq_CE += _dot(d_CC, k_right_CE) * left_CE
            dk_CE += _dot(tl.trans(d_CC), q_left_CE) * right_CE
            d_CC = tl.where(seen_CC, _load_tile(dbk_ptr, tile, 0, C, C, C) * weight_CC, 0.0).to(q_left_CE.dtype)
            db_CE += _dot(d_CC, k_right_CE) * left_CE
            dk_CE += _dot(tl.trans(d_CC), b_left_CE) * right_CE

    # 4. Decays.
    if G > 0:
        share_CE = -x_CE.to(tl.float32) * dx_CE
        behind_CE = tl.zeros([C, E], tl.float32)
        if bonus_ptr is None:
            share_CE += q_CE.to(tl.float32) * dq_CE
        else:
            behind_CE += q_CE.to(tl.float32) * dq_CE
        if a_ptr is not None:
            share_CE -= k_CE.to(tl.float32) * dk_CE
            behind_CE += b_CE.to(tl.float32) * db_CE
        elif b_ptr is not None:
            share_CE += b_CE.to(tl.float32) * db_CE
        dg_CE = through_E[None, :] + _later(share_CE, 0, C, PRECISION)
        if (a_ptr is not None) or (bonus_ptr is not None):
            dg_CE += _later(behind_CE, 1, C, PRECISION)
        if G > 1:
            dg_CE = tl.where(g_CE > STRONGEST, dg_CE, 0.0)
            _store(dg_ptr, row_C, decay_C, dg_CE, first, K, E)
        else:
            dg_C = tl.where(tl.sum(g_CE, 1) > STRONGEST, tl.sum(dg_CE, 1), 0.0)
            tl.store(dg_ptr + row_C * tl.cdiv(K, E) + tl.program_id(1), dg_C, decay_C)

    # 5. Rows.
    q_CE = _load(q_ptr, row_C, query_C, first, K, E).to(tl.float32)
    bonus_1E = _load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, first, H, K, E)
    if bonus_ptr is not None:
        dq_CE *= tl.exp(-g_CE)
    if a_ptr is not None:
        own_CE = own_v_C[:, None] * q_CE
        dq_CE += own_v_C[:, None] * bonus_1E * k_CE
        dk_CE += own_CE * bonus_1E
        if bonus_ptr is not None:
            dbonus_E = tl.sum(own_CE * k_CE, 0)
    if (a_ptr is None) or (bonus_ptr is None):
        own_CE = own_u_C[:, None] * q_CE
        dq_CE += own_u_C[:, None] * bonus_1E * x_CE
        dx_CE += own_CE * bonus_1E
        if bonus_ptr is not None:
            dbonus_E = tl.sum(own_CE * x_CE, 0)
    if bonus_ptr is not None:
        e = first + tl.arange(0, E)
        tl.store(dbonus_ptr + tile.to(tl.int64) * K + e, dbonus_E, e < K)
    _store(dq_ptr, row_C, query_C, dq_CE, first, K, E)
    if b_ptr is not None:
        db_CE *= -1.0 if a_ptr is None else tl.exp(-g_CE)
        _store(db_ptr, pair_C, live_C, db_CE, first, K, E)
    if a_ptr is not None:
        _store(da_ptr, pair_C, live_C, dx_CE, first, K, E)
        _store(dk_ptr, pair_C, live_C, dk_CE, first, K, E)
    else:
        _store(dk_ptr, pair_C, live_C, dx_CE, first, K, E)


def matrix_chunks_method(dtype: torch.dtype) -> Method:
    """``mixers.ops.linear_recurrence.matrix_recurrence`` with outputs in ``dtype``, for many positions.

    Tensors: q (R, B, T, H, K), k (R, B, T N, H, K), v (R, B, T N, H, V); g (R, B, T, H, K or 1) float32, a and b (R, B,
    T N, H, K), and the bonus (R, H, K) float32, each of which may be None. N is 1 but for the delta rule.
    """

    def forward(*tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        given = contiguous(*tensors)
        q, _, v = given[:3]
        sizes, levels, parts = _within(given)

        # States.
        S = q.new_empty(len(parts["q_in"]), v.shape[-1], q.shape[-1])
        grid, settings = _of_states(q, sizes)
        used = [parts[name] for name in ("c", "x_out", "k_out", "w", "u")]
        chunks_states_fwd_kernel[grid](v, *used, S, **settings, G=levels["G"])

        # Outputs.
        o = v.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
        settings = {**sizes, "E": BLOCK, **OUTPUTS}
        blocks = (S.shape[0], triton.cdiv(v.shape[-1], BLOCK))
        used = [parts[name] for name in ("q_in", "qx", "qk", "u")]
        chunks_outputs_kernel[blocks](v, *used, S, o, **settings)
        return (o,), tuple(y for y in (parts["inverse"], parts["u"], S) if y is not None)

    def backward(gradients: Tensors, tensors: Sequence[Tensor | None], outputs: Tensors, saved: Tensors) -> Optionals:
        (do,), given = contiguous(*gradients), contiguous(*tensors)
        q, _, v, g, a, b, bonus = given
        *solved, S = saved
        sizes, levels, parts = _within(given, *solved)
        tiles, K = S.shape[0], q.shape[-1]
        blocks = triton.cdiv(K, BLOCK)

        # States.
        dS, du = torch.empty_like(S), None if b is None else torch.empty_like(parts["u"])
        grid, settings = _of_states(q, sizes)
        used = [parts[name] for name in ("c", "q_in", "x_out", "qx", "w")]
        chunks_states_bwd_kernel[grid](do, *used, du, dS, **settings, G=levels["G"])

        # Values and products.
        found: list[Any] = [y if y is None else torch.empty_like(y) for y in given]
        products = [None if y is None else torch.empty_like(parts["qx"]) for y in (q, b, a, a)]
        settings = {**sizes, "E": BLOCK, **PRODUCTS}
        used = [parts[name] for name in ("x_out", "k_out", "qx", "qk", "bk", "inverse", "u")]
        chunks_products_bwd_kernel[(tiles,)](v, *used, do, du, dS, found[2], *products, **settings)

        # Rows.
        scalar = g is not None and g.shape[-1] == 1
        if scalar:
            found[3] = g.new_empty(*g.shape[:-1], blocks)
        if bonus is not None:
            found[6] = bonus.new_empty(tiles, K)
        warps = 8 if levels["G"] > 1 else 4
        settings = {**sizes, **levels, "E": BLOCK, "sequences": q.shape[1], "num_warps": warps, **ROWS}
        written = *found[:2], *found[3:]
        chunks_rows_bwd_kernel[(tiles, blocks)](
            *given, parts["c"], parts["u"], S, do, du, dS, *products, *written, **settings
        )

        # Sums over blocks, and over chunks and sequences.
        if scalar and blocks > 1:
            found[3] = found[3].sum(-1, keepdim=True)
        if bonus is not None:
            found[6] = found[6].view(*q.shape[:2], q.shape[3], -1, K).sum((1, 3))
        return found

    return Method(forward, backward)


def _within(given: tuple[Any, ...], *solved: Tensor) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return sizes of all launches, settings of products, and the parts that ``within`` writes.

    With b, the backward pass has ``solved`` two of them, X and U.
    """
    q, _, v, g, a, b, _ = given
    _, B, T, H, K = q.shape
    V, N = v.shape[-1], v.shape[2] // T
    tiles = q.shape[:2].numel() * H * triton.cdiv(T * N, CHUNK)
    G = 0 if g is None else g.shape[-1]
    sizes = {"T": T, "H": H, "K": K, "V": V, "N": N, "C": CHUNK}
    levels = {
        "G": G,
        "LEVELS": 1 if G <= 1 else (CHUNK // NEAR.value).bit_length(),
        "PRECISION": "tf32" if q.dtype == torch.bfloat16 else "tf32x3",
    }

    # Parts of each chunk.
    widths = dict.fromkeys(("q_in", "x_out", "k_out", "w"), K) | {"u": V}
    widths |= dict.fromkeys(("qx", "qk", "bk", "inverse"), CHUNK)
    absent = {"k_out", "qk", "bk"} if a is None else set()
    absent |= {"inverse", "w", "u"} if b is None else {"inverse", "u"} if solved else set()
    parts = {
        "c": None if g is None else g.new_empty(tiles, CHUNK, G),
        **{name: None if name in absent else q.new_empty(tiles, CHUNK, width) for name, width in widths.items()},
    }
    parts |= dict(zip(("inverse", "u"), solved, strict=False))
    settings = {**sizes, **levels, "E": BLOCK, "sequences": B, "SOLVED": bool(solved), **WITHIN}
    names = "c", "q_in", "x_out", "k_out", "qx", "qk", "bk", "inverse", "w", "u"
    chunks_within_kernel[(tiles,)](*given, *(parts[name] for name in names), **settings)
    return sizes, levels, parts


def _of_states(q: Tensor, sizes: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and settings of the kernels that go from chunk to chunk; rows in float32 leave no room to wait."""
    I = max(BLOCK, triton.next_power_of_2(sizes["K"]))
    stages = 1 if q.dtype == torch.float32 else 4 if I == BLOCK else 2
    settings = {**sizes, "I": I, "num_stages": stages, **STATES}
    return (q.shape[:2].numel() * sizes["H"], triton.cdiv(sizes["V"], settings["J"])), settings


@kernels_take("linear recurrence", f"keys and values of up to {MOST_CHANNELS} channels a head")
def fits_chunks(key_channels: int, value_channels: int) -> bool:
    """Return whether the kernels take heads of these sizes."""
    return max(key_channels, value_channels) <= MOST_CHANNELS
