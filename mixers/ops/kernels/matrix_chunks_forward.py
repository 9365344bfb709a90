"""The kernels of ``mixers.ops.kernels.matrix_chunks``, forward; math and tensors: see there."""

import triton
import triton.language as tl

from mixers.ops.kernels.matrix_chunks_tiles import (
    M,
    between,
    dot,
    load,
    load_bonus,
    load_g,
    load_left,
    load_part,
    load_state,
    load_sum,
    load_tile,
    plain_products,
    scaled,
    store,
    store_tile,
    tile_rows,
)
from mixers.ops.kernels.path_attention import inverse


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
    place = tile_rows(tile, t, T, H, C, N)
    row_C, pair_C, live_C, _, decay_C = place
    first = tl.program_id(1) * E

    # Running sums. Triton 3.6 does not compile those of a column; it does those of a vector.
    c_CE = load_g(g_ptr, row_C, decay_C, first, K, G, E)
    if G > 1:
        c_CE = tl.cumsum(c_CE, 0)
        store_tile(c_ptr, tile, t, c_CE, first, C, K, E)
    elif G == 1:
        c_CE = tl.cumsum(tl.sum(c_CE, 1), 0)[:, None]
        store_tile(c_ptr, tile, t, c_CE, 0, C, 1, 1)
    to_end_CE = tl.exp2(tl.sum(tl.where(t[:, None] == C - 1, c_CE, 0.0), 0)[None, :] - c_CE)

    # Rows.
    q_CE, b_CE = load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
    store_tile(q_in_ptr, tile, t, q_CE * tl.exp2(c_CE), first, C, K, E)
    if b_ptr is not None:
        store_tile(b_in_ptr, tile, t, b_CE * tl.exp2(c_CE), first, C, K, E)
    k_CE = load(k_ptr, pair_C, live_C, first, K, E).to(tl.float32)
    if a_ptr is None:
        store_tile(x_out_ptr, tile, t, k_CE * to_end_CE, first, C, K, E)
    else:
        store_tile(k_out_ptr, tile, t, k_CE * to_end_CE, first, C, K, E)
        a_CE = load(a_ptr, pair_C, live_C, first, K, E).to(tl.float32)
        store_tile(x_out_ptr, tile, t, a_CE * to_end_CE, first, C, K, E)


@triton.jit
def _product(left_ME: tl.tensor, right_ME: tl.tensor, weight_MM: tl.tensor, seen_MM: tl.tensor):
    return tl.where(seen_MM, dot(left_ME, tl.trans(right_ME)) * weight_MM, 0.0)


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
    place = tile_rows(tile, i + t, T, H, C, N)
    row_M, pair_M, live_M, query_M, _ = place
    bonus_1E = load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, 0, H, K, E)
    asks_ME = load(q_ptr, row_M, query_M, 0, K, E).to(tl.float32) * bonus_1E
    own_x_M, own_k_M = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    if a_ptr is not None:
        own_k_M += tl.sum(asks_ME * load(k_ptr, pair_M, live_M, 0, K, E), 1)
    if (a_ptr is None) or (bonus_ptr is None):
        own_x_M += tl.sum(asks_ME * load(x_ptr, pair_M, live_M, 0, K, E), 1)
    q_ME, b_ME = load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, 0, K, G, E)
    q_ME, b_ME = q_ME.to(q_ptr.dtype.element_ty), b_ME.to(q_ptr.dtype.element_ty)

    # 2. Products. Levels of the block with itself add up.
    zero_MM = tl.zeros([M, M], tl.float32)
    qx_MM, bx_MM, qk_MM, bk_MM = zero_MM, zero_MM, zero_MM, zero_MM
    for step in range(i // M + LEVELS):
        j, level = tl.minimum(step * M, i), tl.maximum(step - i // M, -1)
        kept, own_MM = tl.where(level > 0, 1.0, 0.0), ((i + t)[:, None] == (j + t)[None, :]) & (level == 0)
        _, pair_M, live_M, _, _ = tile_rows(tile, j + t, T, H, C, N)
        left_ME, right_ME, weight_MM, seen_MM = between(c_ptr, tile, i, j, level, 0, C, K, G, E)
        q_left_ME, b_left_ME = scaled(q_ME, left_ME, q_ptr), scaled(b_ME, left_ME, q_ptr)
        x_right_ME = scaled(load(x_ptr, pair_M, live_M, 0, K, E), right_ME, q_ptr)
        qx_MM = kept * qx_MM + _product(q_left_ME, x_right_ME, weight_MM, seen_MM)
        qx_MM = tl.where(own_MM, own_x_M[:, None], qx_MM)
        store_tile(qx_ptr, tile, i + t, qx_MM, j, C, C, M)
        if bx_ptr is not None:
            bx_MM = kept * bx_MM + _product(b_left_ME, x_right_ME, weight_MM, seen_MM)
            store_tile(bx_ptr, tile, i + t, bx_MM, j, C, C, M)
        if a_ptr is not None:
            k_right_ME = scaled(load(k_ptr, pair_M, live_M, 0, K, E), right_ME, q_ptr)
            qk_MM = kept * qk_MM + _product(q_left_ME, k_right_ME, weight_MM, seen_MM)
            qk_MM = tl.where(own_MM, own_k_M[:, None], qk_MM)
            store_tile(qk_ptr, tile, i + t, qk_MM, j, C, C, M)
            bk_MM = kept * bk_MM + _product(b_left_ME, k_right_ME, weight_MM, seen_MM)
            store_tile(bk_ptr, tile, i + t, bk_MM, j, C, C, M)

    # 3. Zeros.
    for j in range(i + M, C, M):
        store_tile(qx_ptr, tile, i + t, zero_MM, j, C, C, M)
        if bx_ptr is not None:
            store_tile(bx_ptr, tile, i + t, zero_MM, j, C, C, M)
        if a_ptr is not None:
            store_tile(qk_ptr, tile, i + t, zero_MM, j, C, C, M)
            store_tile(bk_ptr, tile, i + t, zero_MM, j, C, C, M)


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
    row_C, pair_C, live_C, query_C, _ = tile_rows(tile, t, T, H, C, N)

    # Products; without decays the caller's b stand for -b.
    m_CC = tl.zeros([C, C], tl.float32)
    if q_ptr is not None:
        qx_CC = m_CC
        for first in range(0, K, E):
            x_EC = tl.trans(load(k_ptr, pair_C, live_C, first, K, E))
            qx_CC += dot(load(q_ptr, row_C, query_C, first, K, E).to(x_EC.dtype), x_EC)
            if not SOLVED:
                m_CC += dot(load(b_in_ptr, pair_C, live_C, first, K, E), x_EC)
        store_tile(qx_ptr, tile, t, tl.where(t[:, None] >= t[None, :], qx_CC, 0.0), 0, C, C, C)
        m_CC = tl.where(t[:, None] > t[None, :], m_CC, 0.0)
    elif not SOLVED:
        m_CC -= load_tile(bx_ptr, tile, t, 0, C, C, C)

    # X and W.
    if SOLVED:
        x_CC = load_tile(inverse_ptr, tile, t, 0, C, C, C)
    else:
        x_CC = inverse(m_CC, C, PRECISION).to(v_ptr.dtype.element_ty)
        store_tile(inverse_ptr, tile, t, x_CC, 0, C, C, C)
    for first in range(0, K, E):
        w_CE = dot(x_CC, load_part(b_in_ptr, tile, t, pair_C, live_C, first, C, K, G, E))
        if (G == 0) and (bk_ptr is None):
            w_CE = -w_CE
        store_tile(w_ptr, tile, t, w_CE, first, C, K, E)

    # U.
    if not SOLVED:
        if bk_ptr is not None:
            x_CC = dot(x_CC, load_tile(bk_ptr, tile, t, 0, C, C, C)).to(x_CC.dtype)
        for first in range(0, V, E):
            u_CE = dot(x_CC, load(v_ptr, pair_C, live_C, first, V, E))
            store_tile(u_ptr, tile, t, u_CE, first, C, V, E)


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
        _, pair_C, live_C, _, _ = tile_rows(tile, t, T, H, C, N)
        state_JI = S_JI.to(S_ptr.dtype.element_ty)
        store(S_ptr, tile.to(tl.int64) * V + j_J, j_J < V, state_JI, 0, K, I)

        # 2. U.
        if w_ptr is None:
            u_JC = tl.trans(load(v_ptr, pair_C, live_C, j, V, J))
        else:
            w_IC = tl.trans(load_tile(w_ptr, tile, t, 0, C, K, I))
            u_JC = tl.trans(load_tile(u_ptr, tile, t, j, C, V, J)).to(tl.float32)
            u_JC = (u_JC + dot(state_JI, w_IC)).to(state_JI.dtype)
            store_tile(u_ptr, tile, t, tl.trans(u_JC), j, C, V, J)

        # 3. Next state.
        S_JI *= tl.exp2(load_sum(c_ptr, tile, C - 1, 0, C, K, G, I))[None, :]
        S_JI += dot(u_JC, load_part(x_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I))
        if k_out_ptr is not None:
            v_JC = tl.trans(load(v_ptr, pair_C, live_C, j, V, J))
            S_JI += dot(v_JC, load_part(k_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I))


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
    row_C, pair_C, live_C, query_C, _ = tile_rows(tile, t, T, H, C, N)
    j = tl.program_id(1) * E

    u_CE = load(v_ptr, pair_C, live_C, j, V, E) if u_ptr is None else load_tile(u_ptr, tile, t, j, C, V, E)
    if qx_ptr is None:
        qx_CC = plain_products(q_in_ptr, k_ptr, row_C, pair_C, live_C, t, K, C, E)
    else:
        qx_CC = load_tile(qx_ptr, tile, t, 0, C, C, C)
    o_CE = dot(qx_CC, u_CE)
    if qk_ptr is not None:
        o_CE += dot(load_tile(qk_ptr, tile, t, 0, C, C, C), load(v_ptr, pair_C, live_C, j, V, E))
    for first in range(0, K, E):
        q_CE = load_part(q_in_ptr, tile, t, row_C, query_C, first, C, K, G, E).to(S_ptr.dtype.element_ty)
        o_CE += dot(q_CE, tl.trans(load_state(S_ptr, tile, j, first, K, V, E)))
    store(o_ptr, row_C, query_C, o_CE, j, V, E)
