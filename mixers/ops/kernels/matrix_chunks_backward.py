"""The kernels of ``mixers.ops.kernels.matrix_chunks``, backward; math and tensors: see there."""

import triton
import triton.language as tl

from mixers.ops.kernels.matrix_chunks_tiles import (
    STRONGEST,
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
    sums_at,
    tile_rows,
)


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
        row_C, pair_C, live_C, query_C, _ = tile_rows(tile, t, T, H, C, N)
        state_JI = dS_JI.to(dS_ptr.dtype.element_ty)
        store(dS_ptr, tile.to(tl.int64) * V + j_J, j_J < V, state_JI, 0, K, I)

        # 2, 3. The gradients of U and of the state before.
        do_JC = tl.trans(load(do_ptr, row_C, query_C, j, V, J)).to(state_JI.dtype)
        dS_JI *= tl.exp2(load_sum(c_ptr, tile, C - 1, 0, C, K, G, I))[None, :]
        q_CI = load_part(q_in_ptr, tile, t, row_C, query_C, 0, C, K, G, I)
        dS_JI += dot(do_JC, q_CI.to(state_JI.dtype))
        if w_ptr is not None:
            du_JC = dot(do_JC, load_tile(qx_ptr, tile, t, 0, C, C, C))
            du_JC += dot(state_JI, tl.trans(load_part(x_out_ptr, tile, t, pair_C, live_C, 0, C, K, G, I)))
            du_JC = du_JC.to(state_JI.dtype)
            store_tile(du_ptr, tile, t, tl.trans(du_JC), j, C, V, J)
            dS_JI += dot(du_JC, load_tile(w_ptr, tile, t, 0, C, K, I))


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
    row_C, pair_C, live_C, query_C, _ = tile_rows(tile, t, T, H, C, N)
    dqx_CC = tl.zeros([C, C], tl.float32)
    dbx_CC, dqk_CC, dbk_CC = dqx_CC, dqx_CC, dqx_CC
    if qx_ptr is None:
        qx_CC = plain_products(q_ptr, k_ptr, row_C, pair_C, live_C, t, K, C, E)
    elif u_ptr is None:
        qx_CC = load_tile(qx_ptr, tile, t, 0, C, C, C)

    for first in range(0, V, E):
        do_CE = load(do_ptr, row_C, query_C, first, V, E).to(dS_ptr.dtype.element_ty)
        if (bk_ptr is not None) or (u_ptr is None):
            v_CE = load(v_ptr, pair_C, live_C, first, V, E)

        # 1a. dY.
        if u_ptr is None:
            u_CE = v_CE
        else:
            u_CE = load_tile(u_ptr, tile, t, first, C, V, E)
            inverse_CC = tl.trans(load_tile(inverse_ptr, tile, t, 0, C, C, C))
            dv_CE = dot(inverse_CC, load_tile(du_ptr, tile, t, first, C, V, E))
            dy_CE = dv_CE.to(u_CE.dtype)
            store_tile(du_ptr, tile, t, dy_CE, first, C, V, E)

        # 1b. Values.
        if bk_ptr is not None:
            dv_CE = dot(tl.trans(load_tile(bk_ptr, tile, t, 0, C, C, C)), dy_CE)
            dv_CE += dot(tl.trans(load_tile(qk_ptr, tile, t, 0, C, C, C)), do_CE)
        elif u_ptr is None:
            dv_CE = dot(tl.trans(qx_CC), do_CE)
        if (bk_ptr is not None) or (u_ptr is None):
            out_ptr = x_out_ptr if k_out_ptr is None else k_out_ptr
            for at in range(0, K, E):
                out_CE = load_part(out_ptr, tile, t, pair_C, live_C, at, C, K, G, E)
                dv_CE += dot(out_CE, tl.trans(load_state(dS_ptr, tile, first, at, K, V, E)))
        store(dv_ptr, pair_C, live_C, dv_CE, first, V, E)

        # 1c. Products.
        dqx_CC += dot(do_CE, tl.trans(u_CE))
        if u_ptr is not None:
            dbx_CC += dot(dy_CE, tl.trans(u_CE))
        if bk_ptr is not None:
            dqk_CC += dot(do_CE, tl.trans(v_CE))
            dbk_CC += dot(dy_CE, tl.trans(v_CE))

    # 2. Products or rows. Other threads of this program wrote dY, hence the barrier; the caller's b stand for -b.
    if q_ptr is not None:
        tl.debug_barrier()
        dqx_CC = tl.where(t[:, None] >= t[None, :], dqx_CC, 0.0).to(dS_ptr.dtype.element_ty)
        if b_ptr is not None:
            dbx_CC = tl.where(t[:, None] > t[None, :], dbx_CC, 0.0).to(dS_ptr.dtype.element_ty)
        for at in range(0, K, E):
            k_CE = load(k_ptr, pair_C, live_C, at, K, E)
            dq_CE = dot(dqx_CC, k_CE)
            dk_CE = dot(tl.trans(dqx_CC), load(q_ptr, row_C, query_C, at, K, E).to(dqx_CC.dtype))
            if b_ptr is not None:
                db_CE = dot(dbx_CC, k_CE)
                dk_CE -= dot(tl.trans(dbx_CC), load(b_ptr, pair_C, live_C, at, K, E))
            for first in range(0, V, E):
                S_EE = load_state(S_ptr, tile, first, at, K, V, E)
                dq_CE += dot(load(do_ptr, row_C, query_C, first, V, E).to(dS_ptr.dtype.element_ty), S_EE)
                dS_EE = load_state(dS_ptr, tile, first, at, K, V, E)
                if u_ptr is None:
                    u_CE = load(v_ptr, pair_C, live_C, first, V, E)
                else:
                    u_CE = load_tile(u_ptr, tile, t, first, C, V, E)
                    db_CE += dot(load_tile(du_ptr, tile, t, first, C, V, E), S_EE)
                dk_CE += dot(u_CE, dS_EE)
            store(dq_ptr, row_C, query_C, dq_CE, at, K, E)
            store(dk_ptr, pair_C, live_C, dk_CE, at, K, E)
            if b_ptr is not None:
                store(db_ptr, pair_C, live_C, -db_CE, at, K, E)
    else:
        store_tile(dqx_ptr, tile, t, dqx_CC, 0, C, C, C)
        if u_ptr is not None:
            store_tile(dbx_ptr, tile, t, dbx_CC, 0, C, C, C)
        if bk_ptr is not None:
            store_tile(dqk_ptr, tile, t, dqk_CC, 0, C, C, C)
            store_tile(dbk_ptr, tile, t, dbk_CC, 0, C, C, C)


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
    d_MM = load_tile(pointer, tile, i + tl.arange(0, M), j, C, C, M)
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
    bonus_1E = load_bonus(bonus_ptr, tile // tl.cdiv(T * N, C), sequences, first, H, K, E)
    total_E = load_sum(c_ptr, tile, C - 1, first, C, K, G, E)
    later_E = tl.zeros([E], tl.float32)
    through_E, dbonus_E = later_E, later_E

    for later in range(C // M):
        i = C - M - later * M
        row_M, pair_M, live_M, query_M, decay_M = tile_rows(tile, i + t, T, H, C, N)
        c_ME = sums_at(c_ptr, tile, i + t, first, C, K, G, E)

        # 1a. Sums of right rows.
        dx_ME = tl.zeros([M, E], tl.float32)
        dk_ME = dx_ME
        for at in range(0, V, E):
            dS_EE = load_state(dS_ptr, tile, at, first, K, V, E)
            if b_ptr is not None:
                dx_ME += dot(load_tile(u_ptr, tile, i + t, at, C, V, E), dS_EE)
            if b_ptr is None:
                dx_ME += dot(load(v_ptr, pair_M, live_M, at, V, E), dS_EE)
            elif a_ptr is not None:
                dk_ME += dot(load(v_ptr, pair_M, live_M, at, V, E), dS_EE)
        dx_ME *= tl.exp2(total_E[None, :] - c_ME)
        dk_ME *= tl.exp2(total_E[None, :] - c_ME)
        end_ME = load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32) * dx_ME
        if a_ptr is not None:
            end_ME += load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32) * dk_ME
        through_E += tl.sum(end_ME, 0)
        for step in range(later + LEVELS):
            j, level = tl.maximum(C - M - step * M, i), tl.maximum(step - later, -1)
            place = tile_rows(tile, j + t, T, H, C, N)
            left_ME, right_ME, weight_MM, seen_MM = between(c_ptr, tile, j, i, level, first, C, K, G, E)
            q_ME, b_ME = load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
            q_left_ME, b_left_ME = scaled(q_ME, left_ME, q_ptr), scaled(b_ME, left_ME, q_ptr)
            x_sum_ME = dot(tl.trans(_gradient(dqx_ptr, tile, j, i, weight_MM, seen_MM, C)), q_left_ME)
            if b_ptr is not None:
                x_sum_ME += dot(tl.trans(_gradient(dbx_ptr, tile, j, i, weight_MM, seen_MM, C)), b_left_ME)
            dx_ME += x_sum_ME * right_ME
            if a_ptr is not None:
                k_sum_ME = dot(tl.trans(_gradient(dqk_ptr, tile, j, i, weight_MM, seen_MM, C)), q_left_ME)
                k_sum_ME += dot(tl.trans(_gradient(dbk_ptr, tile, j, i, weight_MM, seen_MM, C)), b_left_ME)
                dk_ME += k_sum_ME * right_ME

        # 1b. Gradients of right rows.
        own_M = (tile.to(tl.int64) * C + i + t) * C + i + t
        asks_ME = load(q_ptr, row_M, query_M, first, K, E).to(tl.float32)
        x_ME = load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32)
        share_ME = -x_ME * dx_ME
        if a_ptr is not None:
            k_ME = load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            share_ME -= k_ME * dk_ME
            own_ME = tl.load(dqk_ptr + own_M).to(tl.float32)[:, None] * asks_ME
            dk_ME += own_ME * bonus_1E
            if bonus_ptr is not None:
                dbonus_E += tl.sum(own_ME * k_ME, 0)
            store(dk_ptr, pair_M, live_M, dk_ME, first, K, E)
        if (a_ptr is None) or (bonus_ptr is None):
            own_ME = tl.load(dqx_ptr + own_M).to(tl.float32)[:, None] * asks_ME
            dx_ME += own_ME * bonus_1E
            if bonus_ptr is not None:
                dbonus_E += tl.sum(own_ME * x_ME, 0)
        store(dx_ptr, pair_M, live_M, dx_ME, first, K, E)
        if G > 0:
            dg_MD = _onward(i + t, share_ME, later_E[None, :], G, PRECISION)
            store(dg_ptr, row_M, decay_M, dg_MD, block * D, WIDTH, D)
            later_E += tl.sum(share_ME, 0)

    # What goes through the end of the chunk belongs to the decays of all of its rows.
    later_E = tl.zeros([E], tl.float32)
    for at in range(0, V, E):
        S_EE = load_state(S_ptr, tile, at, first, K, V, E).to(tl.float32)
        later_E += tl.sum(S_EE * load_state(dS_ptr, tile, at, first, K, V, E).to(tl.float32), 0)
    later_E = through_E + later_E * tl.exp2(total_E)

    # Other threads of this program wrote what is read of the gradients of decays, hence the barrier.
    tl.debug_barrier()
    for later in range(C // M):
        i = C - M - later * M
        place = tile_rows(tile, i + t, T, H, C, N)
        row_M, pair_M, live_M, query_M, decay_M = place
        c_ME = sums_at(c_ptr, tile, i + t, first, C, K, G, E)

        # 2a. Sums of left rows.
        dq_ME = tl.zeros([M, E], tl.float32)
        db_ME = dq_ME
        for at in range(0, V, E):
            S_EE = load_state(S_ptr, tile, at, first, K, V, E)
            dq_ME += dot(load(do_ptr, row_M, query_M, at, V, E).to(S_EE.dtype), S_EE)
            if b_ptr is not None:
                db_ME += dot(load_tile(dy_ptr, tile, i + t, at, C, V, E), S_EE)
        dq_ME *= tl.exp2(c_ME)
        db_ME *= tl.exp2(c_ME)
        for step in range(i // M + LEVELS):
            j, level = tl.minimum(step * M, i), tl.maximum(step - i // M, -1)
            _, pair_j_M, live_j_M, _, _ = tile_rows(tile, j + t, T, H, C, N)
            left_ME, right_ME, weight_MM, seen_MM = between(c_ptr, tile, i, j, level, first, C, K, G, E)
            x_right_ME = scaled(load(x_ptr, pair_j_M, live_j_M, first, K, E), right_ME, q_ptr)
            q_sum_ME = dot(_gradient(dqx_ptr, tile, i, j, weight_MM, seen_MM, C), x_right_ME)
            if b_ptr is not None:
                b_sum_ME = dot(_gradient(dbx_ptr, tile, i, j, weight_MM, seen_MM, C), x_right_ME)
            if a_ptr is not None:
                k_right_ME = scaled(load(k_ptr, pair_j_M, live_j_M, first, K, E), right_ME, q_ptr)
                q_sum_ME += dot(_gradient(dqk_ptr, tile, i, j, weight_MM, seen_MM, C), k_right_ME)
                b_sum_ME += dot(_gradient(dbk_ptr, tile, i, j, weight_MM, seen_MM, C), k_right_ME)
            dq_ME += q_sum_ME * left_ME
            if b_ptr is not None:
                db_ME += b_sum_ME * left_ME

        # 2b. Gradients of left rows.
        own_M = (tile.to(tl.int64) * C + i + t) * C + i + t
        q_ME, b_ME = load_left(q_ptr, g_ptr, a_ptr, b_ptr, bonus_ptr, place, first, K, G, E)
        share_ME, behind_ME = q_ME * dq_ME, tl.zeros([M, E], tl.float32)
        if bonus_ptr is not None:
            behind_ME += share_ME
        if b_ptr is not None:
            share_ME += b_ME * db_ME
        if a_ptr is not None:
            behind_ME += b_ME * db_ME
        before_ME = tl.exp2(-load_g(g_ptr, row_M, decay_M, first, K, G, E))
        if bonus_ptr is not None:
            dq_ME *= before_ME
        if a_ptr is not None:
            k_ME = load(k_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            dq_ME += tl.load(dqk_ptr + own_M).to(tl.float32)[:, None] * bonus_1E * k_ME
        if (a_ptr is None) or (bonus_ptr is None):
            x_ME = load(x_ptr, pair_M, live_M, first, K, E).to(tl.float32)
            dq_ME += tl.load(dqx_ptr + own_M).to(tl.float32)[:, None] * bonus_1E * x_ME
        store(dq_ptr, row_M, query_M, dq_ME, first, K, E)
        if b_ptr is not None:
            db_ME *= -1.0 if a_ptr is None else before_ME
            store(db_ptr, pair_M, live_M, db_ME, first, K, E)

        # 2c. Decays.
        if G > 0:
            dg_MD = _onward(i + t, share_ME, later_E[None, :] - behind_ME, G, PRECISION)
            dg_MD += load(dg_ptr, row_M, decay_M, block * D, WIDTH, D)
            g_MD = load_g(g_ptr, row_M, decay_M, first, K, G, E)
            store(dg_ptr, row_M, decay_M, tl.where(g_MD > STRONGEST, dg_MD, 0.0), block * D, WIDTH, D)
            later_E += tl.sum(share_ME, 0)

    if bonus_ptr is not None:
        e = first + tl.arange(0, E)
        tl.store(dbonus_ptr + tile.to(tl.int64) * K + e, dbonus_E, e < K)
