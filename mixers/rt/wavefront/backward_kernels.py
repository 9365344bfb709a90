"""Triton kernels of the wavefront's backward, between the matrix products; ``backward`` says in what order they run.

Rows, strides, ``low``, E and the units of logits are those of ``forward_kernels``.
"""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, normal_cdf, rms, rms_bwd

BELL_HEIGHT: tl.constexpr = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi): density of the normal distribution at zero."""


@triton.jit(do_not_specialize=["B", "N", "t"])
def attend_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    a_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    dkv_ptr: tl.tensor,
    B: tl.tensor,
    N: tl.tensor,
    t: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY: tl.constexpr,
    PULL: tl.constexpr,
):
    """Gradients of a pair of the block at position t of a chunk of C, in G heads of a sequence.

    QUERY: the next block, at t + BLOCK, is in the chunk, and its da is complete. PULL: there is a block at t; none is
    at t = -BLOCK. Grid: (layers * BLOCK * B, H / G).

    1. PULL: load the pair, with k scaled by 1/sqrt(K), and what later chunks sent back: dk, dv.
    2. PULL and QUERY: load the chunk's queries after the block: those n of the next block, without delta, and later
       ones i with it. A tile of J takes the later ones.
    3. QUERY: compute delta = sum of a da, over the channels of a head, of the next block's queries; store one of them.
    4. PULL and QUERY, for the queries n and then i: p_i = 2^(s_i - lse_i) and ds_i = p_i (da_i v - delta_i), with
       logits s_i = q_i k - slope (distance of i).
    5. PULL and QUERY: dv += sum p_i da_i and dk += sum ds_i q_i.
    6. PULL: store dk / sqrt(K) and dv side by side.

    ======  ========================  ================================  ==================================
    tensor  shape, dtype              writer                            reader
    ======  ========================  ================================  ==================================
    q       (chunk, B, D) low         begin_fwd_kernel                  here
    k, v    (chunk, B, D) low         pair_fwd_kernel                   here
    a       (chunk, B, D) low         attend_fwd_kernel                 here
    da      (chunk, B, D) low         product with out                  here, past_bwd, query_bwd, begin_bwd
    lse     (chunk, B, H) float32     attend_fwd_kernel                 here
    delta   (chunk, B, H) float32     here                              here, past_bwd, query_bwd, begin_bwd
    dk, dv  (chunk, B, D) float32     past_bwd_kernel                   here
    slopes  (H) float32               the layer                         here
    dkv     (chunk, B, 2 D) low       here; pair_bwd_kernel             product with kv
    ======  ========================  ================================  ==================================

    Pointers are to the chunk's first position. Layers are N rows apart, those of dk, dv and dkv S * B rows.
    """
    H: tl.constexpr = D // K
    layer = (tl.program_id(0) // (BLOCK * B)).to(tl.int64)
    row_in_block = tl.program_id(0) % (BLOCK * B)
    row = layer * N + row_in_block + t * B
    group_row = layer * S * B + row_in_block + t * B
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]

    # Queries of the next block and later ones, as distances from the pair.
    place = row_in_block // B if BLOCK > 1 else 0
    n = BLOCK - place + tl.arange(0, BLOCK)
    i = 2 * BLOCK - place + tl.arange(0, J)
    at_NGK = (row + n[:, None, None] * B) * D + hk_GK[None, :, :]
    at_NG = (row + n[:, None] * B) * H + head[None, :]
    live_1G = (head < H)[None, :]

    # All loads come first, so that a program waits for memory once.
    if PULL:
        # 1. Pair.
        k_GK = tl.load(k_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
        v_GK = tl.load(v_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32)
        dk_GK = tl.load(dk_ptr + group_row * D + hk_GK, live_G1, 0.0)
        dv_GK = tl.load(dv_ptr + group_row * D + hk_GK, live_G1, 0.0)
        slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E

        # 2. Queries after the block.
        if QUERY:
            later_JG = (t + place + i < C)[:, None] & live_1G
            at_JGK = (row + i[:, None, None] * B) * D + hk_GK[None, :, :]
            at_JG = (row + i[:, None] * B) * H + head[None, :]
            q_JGK = tl.load(q_ptr + at_JGK, later_JG[:, :, None], 0.0)
            da_JGK = tl.load(da_ptr + at_JGK, later_JG[:, :, None], 0.0)
            lse_JG = tl.load(lse_ptr + at_JG, later_JG, 0.0)
            delta_JG = tl.load(delta_ptr + at_JG, later_JG, 0.0)
            q_NGK = tl.load(q_ptr + at_NGK, live_1G[:, :, None], 0.0).to(tl.float32)
            lse_NG = tl.load(lse_ptr + at_NG, live_1G, 0.0)

    # 3. delta of the next block.
    if QUERY:
        da_NGK = tl.load(da_ptr + at_NGK, live_1G[:, :, None], 0.0).to(tl.float32)
        a_NGK = tl.load(a_ptr + at_NGK, live_1G[:, :, None], 0.0).to(tl.float32)
        delta_NG = tl.sum(da_NGK * a_NGK, 2)
        tl.store(delta_ptr + at_NG, delta_NG, live_1G & (n == BLOCK)[:, None])

    if PULL:
        if QUERY:
            # 4. Weights and gradients of logits.
            s_NG = tl.sum(q_NGK * k_GK[None, :, :], 2) - slope_G[None, :] * n[:, None]
            p_NG = tl.exp2(s_NG - lse_NG)
            ds_NG = p_NG * (tl.sum(da_NGK * v_GK[None, :, :], 2) - delta_NG)
            s_JG = tl.sum(q_JGK.to(tl.float32) * k_GK[None, :, :], 2) - slope_G[None, :] * i[:, None]
            p_JG = tl.where(later_JG, tl.exp2(s_JG - lse_JG), 0.0)
            ds_JG = p_JG * (tl.sum(da_JGK.to(tl.float32) * v_GK[None, :, :], 2) - delta_JG)

            # 5. Gradients of the pair.
            dv_GK += tl.sum(p_NG[:, :, None] * da_NGK, 0) + tl.sum(p_JG[:, :, None] * da_JGK.to(tl.float32), 0)
            dk_GK += tl.sum(ds_NG[:, :, None] * q_NGK, 0) + tl.sum(ds_JG[:, :, None] * q_JGK.to(tl.float32), 0)

        # 6. Results.
        tl.store(dkv_ptr + group_row * 2 * D + hk_GK, dk_GK * K**-0.5, live_G1)
        tl.store(dkv_ptr + group_row * 2 * D + D + hk_GK, dv_GK, live_G1)


@triton.jit
def pair_bwd_kernel(
    dkv_ptr: tl.tensor,
    dkv_stride: tl.tensor,
    k_ptr: tl.tensor,
    k_stride: tl.tensor,
    r_ptr: tl.tensor,
    r_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Gradient of a persistent key through its norm, in place. Grid: (rows, layers).

    1. Load dk, the first half of dkv; the normed key k; and r of its norm.
    2. Store the gradient of k_raw = k / r in place of dk.

    ======  ====================  =================================  =====================================
    tensor  shape, dtype          writer                             reader
    ======  ====================  =================================  =====================================
    dkv     (rows, 2 D) low       attend_bwd_kernel; then here       product with kv, gradient of kv
    k       (rows, D) low         pair_fwd_kernel                    here
    r       (rows, 1) float32     pair_fwd_kernel                    here
    ======  ====================  =================================  =====================================
    """
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]

    # 1. Inputs.
    dk_ptr = dkv_ptr + layer * dkv_stride + row * 2 * D
    dk_1E = tl.load(dk_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    k_1E = tl.load(k_ptr + layer * k_stride + row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    r_1 = tl.load(r_ptr + layer * r_stride + row + tl.arange(0, 1))

    # 2. Gradient of the product.
    dk_raw_1E = rms_bwd(dk_1E, k_1E, r_1, D)
    tl.store(dk_ptr + e_1E, dk_raw_1E, e_1E < D)


@triton.jit
def add_norm_bwd_kernel(
    d_ptr: tl.tensor,
    d_stride: tl.tensor,
    dn_ptr: tl.tensor,
    dn_stride: tl.tensor,
    n_ptr: tl.tensor,
    n_stride: tl.tensor,
    r_ptr: tl.tensor,
    r_stride: tl.tensor,
    du_ptr: tl.tensor,
    du_stride: tl.tensor,
    dy_ptr: tl.tensor,
    dy_stride: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradient of u = x + scale y from those of u itself and of its norm n. Grid: (rows, layers).

    1. Load dn, the gradient of n, and d, the gradient of u but for its norm.
    2. du = d + the gradient of u through its norm; without NORM, du = d + dn.
    3. Store du, and scale du, the gradient of y, unless dy_ptr is None.

    ======  ====================  ====================================  =======================================
    tensor  shape, dtype          writer                                reader
    ======  ====================  ====================================  =======================================
    d       (rows, D) float32     the next layer, or this kernel        here
    dn      (rows, D) low         product with kv, up or qkv            here
    n       (rows, D) low         add_norm_fwd_kernel                   here
    r       (rows, 1) float32     add_norm_fwd_kernel                   here
    du      (rows, D) float32     here                                  this kernel, or the layer before
    dy      (rows, D) low         here                                  product with down or out, their gradients
    ======  ====================  ====================================  =======================================
    """
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = row * D + e_1E

    # 1. Inputs.
    dn_1E = tl.load(dn_ptr + layer * dn_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
    d_1E = tl.load(d_ptr + layer * d_stride + at_1E, e_1E < D, 0.0)

    # 2. Gradient through the norm.
    if NORM:
        n_1E = tl.load(n_ptr + layer * n_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
        r_1 = tl.load(r_ptr + layer * r_stride + row + tl.arange(0, 1))
        du_1E = d_1E + rms_bwd(dn_1E, n_1E, r_1, D)
    else:
        du_1E = d_1E + dn_1E

    # 3. Results.
    tl.store(du_ptr + layer * du_stride + at_1E, du_1E, e_1E < D)
    if dy_ptr is not None:
        tl.store(dy_ptr + layer * dy_stride + at_1E, du_1E * scale, e_1E < D)


@triton.jit
def gelu_bwd_kernel(
    dg_ptr: tl.tensor,
    dg_stride: tl.tensor,
    h_ptr: tl.tensor,
    h_stride: tl.tensor,
    dh_ptr: tl.tensor,
    dh_stride: tl.tensor,
    F: tl.constexpr,
    W: tl.constexpr,
):
    """Gradient of h from that of g = GELU(h), W channels of a row; g replaces h. Grid: (rows, F / W, layers).

    1. Load h and dg.
    2. Store dh = dg (P(h) + h P'(h)), P the normal distribution function.
    3. Store g = h P(h).

    ======  ====================  =================================  ========================================
    tensor  shape, dtype          writer                             reader
    ======  ====================  =================================  ========================================
    dg      (rows, F) low         product with down                  here
    h       (rows, F) low         product with up; then here (g)     here; as g the gradient of down
    dh      (rows, F) low         here                               product with up, gradient of up
    ======  ====================  =================================  ========================================
    """
    layer, row = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * W + tl.arange(0, W)

    # 1. Inputs.
    h_row_ptr = h_ptr + (layer * h_stride + row * F)
    h_W = tl.load(h_row_ptr + f, f < F, 0.0).to(tl.float32)
    below_W, bell_W = normal_cdf(h_W)
    dg_W = tl.load(dg_ptr + layer * dg_stride + row * F + f, f < F, 0.0).to(tl.float32)

    # 2. Gradient.
    tl.store(dh_ptr + layer * dh_stride + row * F + f, dg_W * (below_W + h_W * bell_W * BELL_HEIGHT), f < F)

    # 3. GELU.
    tl.store(h_row_ptr + f, h_W * below_W, f < F)


@triton.jit(do_not_specialize=["B"])
def begin_bwd_kernel(
    raw_ptr: tl.tensor,
    raw_stride: tl.tensor,
    gain_ptr: tl.tensor,
    da_ptr: tl.tensor,
    da_stride: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dkt_ptr: tl.tensor,
    dvt_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    B: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradients of the products q, k, v of inputs, at C positions of a group of S. Grid: (B, S / C, layers).

    1. NORM: load the gain and the sum of its gradients so far.
    2. For each position:
       a. load the products q_raw, k_raw, v, the gradient da of its attention output, lse and delta of its softmax, and
          dq_past, its query's gradient from persistent pairs;
       b. compute the query q and the temporary key k again, as ``begin_fwd_kernel`` does;
       c. p and ds, weight and gradient of the logit of the temporary pair;
       d. dq = dq_past + ds k, dk = ds q and dv = p da; with dkt_ptr (blocks of several positions) dq = dq_past, and dk
          and dv are loaded;
       e. NORM: add the gradient of the gain, and take dq and dk through their norms;
       f. store dq_raw, dk_raw and dv.
    3. NORM: store the sum of the gain's gradients.

    ======  ==========================  ================================  ================================
    tensor  shape, dtype                writer                            reader
    ======  ==========================  ================================  ================================
    raw     (S, B, 3 D) low             product with qkv                  here
    gain    (D) float32                 weights.key_gain                  here
    da      (S, B, D) low               product with out                  here
    lse     (S, B, H) float32           attend_fwd_kernel                 here
    delta   (S, B, H) float32           attend_bwd_kernel                 here
    dq      (S, B, D) low               query_bwd_kernel                  here
    dkt     (S, B, D) low               query_bwd_kernel                  here
    dvt     (S, B, D) low               query_bwd_kernel                  here
    draw    (S, B, 3 D) low             here                              product with qkv, gradient of qkv
    dgain   (S / C, B, D) float32       here, group after group           the end of the backward
    ======  ==========================  ================================  ================================

    ``da_stride`` gives the distance between layers of da, and with D / K times fewer elements of lse and delta; gain,
    dq, dkt, dvt, draw and dgain have no gap between layers.
    """
    H: tl.constexpr = D // K
    layer, part, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    here = e_1E < D
    h = tl.arange(0, E // K)
    unit = K**-0.5

    # 1. Gain.
    if NORM:
        gain_1E = tl.load(gain_ptr + layer * D + e_1E, here, 0.0)
        at_gain_1E = ((layer * (S // C) + part) * B + sequence) * D + e_1E
        dgain_1E = tl.load(dgain_ptr + at_gain_1E, here, 0.0)

    # 2. Positions.
    for i in range(C):
        # a. Inputs.
        at = (part * C + i) * B + sequence
        group_row = layer * S * B + at
        raw_at_1E = layer * raw_stride + at * 3 * D + e_1E
        q_raw_1E = tl.load(raw_ptr + raw_at_1E, here, 0.0).to(tl.float32)
        k_raw_1E = tl.load(raw_ptr + raw_at_1E + D, here, 0.0).to(tl.float32)
        v_low_1E = tl.load(raw_ptr + raw_at_1E + 2 * D, here, 0.0)
        da_1E = tl.load(da_ptr + layer * da_stride + at * D + e_1E, here, 0.0).to(tl.float32)
        lse_H = tl.load(lse_ptr + layer * (da_stride // K) + at * H + h, h < H, 0.0)
        delta_H = tl.load(delta_ptr + layer * (da_stride // K) + at * H + h, h < H, 0.0)
        dq_past_1E = tl.load(dq_ptr + group_row * D + e_1E, here, 0.0).to(tl.float32)
        low = v_low_1E.dtype
        v_1E = v_low_1E.to(tl.float32)

        # b. Query and temporary key.
        if NORM:
            rq_1, rk_1 = rms(q_raw_1E, D), rms(k_raw_1E, D)
            nq_1E, nk_1E = q_raw_1E * rq_1[:, None], k_raw_1E * rk_1[:, None]
            q_1E, k_1E = (nq_1E * gain_1E).to(low).to(tl.float32), nk_1E.to(low).to(tl.float32)
        else:
            q_1E, k_1E = q_raw_1E.to(low).to(tl.float32), k_raw_1E.to(low).to(tl.float32)

        if dkt_ptr is None:
            # c. Weight and gradient of the logit.
            s_H = tl.sum(tl.reshape(q_1E * k_1E, [E // K, K]), 1) * (unit * LOG2E)
            p_H = tl.exp2(s_H - lse_H)
            ds_H = p_H * (tl.sum(tl.reshape(da_1E * v_1E, [E // K, K]), 1) - delta_H) * unit
            p_1E = tl.reshape(tl.broadcast_to(p_H[:, None], [E // K, K]), [1, E])
            ds_1E = tl.reshape(tl.broadcast_to(ds_H[:, None], [E // K, K]), [1, E])

            # d. Gradients of query and pair.
            dq_1E = dq_past_1E + ds_1E * k_1E
            dk_1E = ds_1E * q_1E
            dv_1E = p_1E * da_1E
        else:
            # d. Gradients that came from the block.
            dq_1E = dq_past_1E
            dk_1E = tl.load(dkt_ptr + group_row * D + e_1E, here, 0.0).to(tl.float32)
            dv_1E = tl.load(dvt_ptr + group_row * D + e_1E, here, 0.0).to(tl.float32)

        # e. Norms.
        if NORM:
            dgain_1E += dq_1E * nq_1E
            dq_raw_1E = rms_bwd(dq_1E * gain_1E, nq_1E, rq_1, D)
            dk_raw_1E = rms_bwd(dk_1E, nk_1E, rk_1, D)
        else:
            dq_raw_1E = dq_1E
            dk_raw_1E = dk_1E

        # f. Results.
        tl.store(draw_ptr + group_row * 3 * D + e_1E, dq_raw_1E, here)
        tl.store(draw_ptr + group_row * 3 * D + D + e_1E, dk_raw_1E, here)
        tl.store(draw_ptr + group_row * 3 * D + 2 * D + e_1E, dv_1E, here)

    # 3. Gradient of the gain.
    if NORM:
        tl.store(dgain_ptr + at_gain_1E, dgain_1E, here)
