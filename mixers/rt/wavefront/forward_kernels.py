"""Triton kernels of the wavefront's forward, between the matrix products; ``forward`` says in what order they run.

A *row* is one position of one sequence; rows of a layer have positions first: row = position * B + sequence. A kernel
serves all layers at work. Each ``x_ptr`` with an ``x_stride`` points to the first layer, and the stride is the distance
between layers in elements; the tables below leave the axis of layers out. ``low`` is the dtype of matrix products
(bfloat16 or float32). E is D rounded up to a power of two. Logits are kept in units of log2.
"""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED, normal_cdf, rms


@triton.jit
def begin_fwd_kernel(
    raw_ptr: tl.tensor,
    raw_stride: tl.tensor,
    gain_ptr: tl.tensor,
    q_ptr: tl.tensor,
    q_stride: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    o_ptr: tl.tensor,
    kt_ptr: tl.tensor,
    vt_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
):
    """Query of a row, and its temporary pair or its softmax state over this pair. Grid: (rows, layers).

    1. Load the row's products q_raw, k_raw and v.
    2. q = q_raw rms(q_raw) gain and k = k_raw rms(k_raw); without NORM, q = q_raw and k = k_raw.
    3. Round q and k to ``low`` and store q.
    4. Without kt_ptr (blocks of one position), store the softmax state of each head: m = q k / sqrt(K), l = 1, o = v.
       With it, store k and v, to which the whole block attends.

    ======  ========================  ======================  =============================
    tensor  shape, dtype              writer                  reader
    ======  ========================  ======================  =============================
    raw     (rows, 3 D) low           product with qkv        here, begin_bwd_kernel
    gain    (D) float32               weights.key_gain        here, begin_bwd_kernel
    q       (rows, D) low             here                    attention, both passes
    kt, vt  (rows, D) low             here                    past_fwd, query_bwd
    m, l    (rows, H) float32         here, past_fwd_kernel   past_fwd, attend_fwd_kernel
    o       (rows, D) float32         here, past_fwd_kernel   past_fwd, attend_fwd_kernel
    ======  ========================  ======================  =============================

    ``rows`` is the number of rows of a layer; gain, m, l and o have no gap between layers. kt and vt have that of q.
    """
    H: tl.constexpr = D // K
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]

    # 1. Products of the row.
    raw_row_ptr = raw_ptr + (layer * raw_stride + row * 3 * D)
    q_raw_1E = tl.load(raw_row_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    k_raw_1E = tl.load(raw_row_ptr + D + e_1E, e_1E < D, 0.0).to(tl.float32)
    v_1E = tl.load(raw_row_ptr + 2 * D + e_1E, e_1E < D, 0.0)

    # 2. Norms.
    if NORM:
        q_1E = q_raw_1E * (rms(q_raw_1E, D)[:, None] * tl.load(gain_ptr + layer * D + e_1E, e_1E < D, 0.0))
        k_1E = k_raw_1E * rms(k_raw_1E, D)[:, None]
    else:
        q_1E = q_raw_1E
        k_1E = k_raw_1E

    # 3. Query.
    q_low_1E = q_1E.to(v_1E.dtype)
    k_low_1E = k_1E.to(v_1E.dtype)
    at_1E = layer * q_stride + row * D + e_1E
    tl.store(q_ptr + at_1E, q_low_1E, e_1E < D)

    # 4. Temporary pair.
    if kt_ptr is not None:
        tl.store(kt_ptr + at_1E, k_low_1E, e_1E < D)
        tl.store(vt_ptr + at_1E, v_1E, e_1E < D)
    else:
        # 5. Softmax state.
        qk_1E = q_low_1E.to(tl.float32) * k_low_1E.to(tl.float32)
        h = tl.arange(0, E // K)
        at = (layer * rows + row) * H + h
        tl.store(m_ptr + at, tl.sum(tl.reshape(qk_1E, [E // K, K]), 1) * (K**-0.5 * LOG2E), h < H)
        tl.store(l_ptr + at, tl.full([E // K], 1.0, tl.float32), h < H)
        tl.store(o_ptr + (layer * rows + row) * D + e_1E, v_1E, e_1E < D)


@triton.jit(do_not_specialize=["B", "N", "t"])
def attend_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    o_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    B: tl.tensor,
    N: tl.tensor,
    t: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention output of position i of the block at t of a chunk, in G heads of a sequence.

    Grid: (layers * BLOCK * B, H / G).

    1. Load the pairs of the chunk's t <= J positions before t, which a tile of J takes.
    2. Load the query, scaled by 1/sqrt(K), and the softmax state over temporary pairs and the pairs of earlier chunks.
    3. Logits s_j = q k_j + slope (j - i).
    4. New maximum m, weights p_j = 2^(s_j - m), and shrink = 2^(m_before - m).
    5. l = l_before shrink + sum p_j and o = o_before shrink + sum p_j v_j.
    6. Store a = o / l and lse = m + log2 l.

    ======  ========================  ============================  ===========================
    tensor  shape, dtype              writer                        reader
    ======  ========================  ============================  ===========================
    q       (chunk, B, D) low         begin_fwd_kernel              here, past, backward
    k, v    (chunk, B, D) low         pair_fwd_kernel               here, past, backward
    m, l    (chunk, B, H) float32     begin_fwd, past_fwd_kernel    here
    o       (chunk, B, D) float32     begin_fwd, past_fwd_kernel    here
    slopes  (H) float32               the layer                     here
    a       (chunk, B, D) low         here                          product with out, backward
    lse     (chunk, B, H) float32     here                          backward
    ======  ========================  ============================  ===========================

    Pointers are to the chunk's first position. Layers are N rows apart, those of m, l and o S * B rows.
    """
    H: tl.constexpr = D // K
    layer = (tl.program_id(0) // (BLOCK * B)).to(tl.int64)
    row_in_block = tl.program_id(0) % (BLOCK * B)
    first_row = layer * N + row_in_block % B
    row = layer * N + row_in_block + t * B
    state_row = layer * S * B + row_in_block + t * B
    i = t + row_in_block // B if BLOCK > 1 else t
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]

    # 1. Pairs.
    j = tl.arange(0, J)
    at_JGK = (first_row + j[:, None, None] * B) * D + hk_GK[None, :, :]
    past_JGK = (j < t)[:, None, None] & live_G1[None, :, :]
    k_JGK = tl.load(k_ptr + at_JGK, past_JGK, 0.0)
    v_JGK = tl.load(v_ptr + at_JGK, past_JGK, 0.0)

    # 2. Query and state.
    q_GK = tl.load(q_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
    m_before_G = tl.load(m_ptr + state_row * H + head, head < H, 0.0)
    l_before_G = tl.load(l_ptr + state_row * H + head, head < H, 1.0)
    o_before_GK = tl.load(o_ptr + state_row * D + hk_GK, live_G1, 0.0)

    # 3. Logits.
    s_JG = tl.sum(q_GK[None, :, :] * k_JGK.to(tl.float32), 2) + slope_G[None, :] * (j - i)[:, None]
    s_seen_JG = tl.where((j < t)[:, None], s_JG, MASKED)

    # 4. Maximum and weights.
    m_G = tl.maximum(m_before_G, tl.max(s_seen_JG, 0))
    p_JG = tl.exp2(s_seen_JG - m_G[None, :])
    shrink_G = tl.exp2(m_before_G - m_G)

    # 5. Sums.
    l_G = l_before_G * shrink_G + tl.sum(p_JG, 0)
    o_GK = o_before_GK * shrink_G[:, None] + tl.sum(p_JG[:, :, None] * v_JGK.to(tl.float32), 0)

    # 6. Output.
    tl.store(a_ptr + row * D + hk_GK, o_GK / l_G[:, None], live_G1)
    tl.store(lse_ptr + row * H + head, m_G + tl.log2(l_G), head < H)


@triton.jit
def add_norm_fwd_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    y_ptr: tl.tensor,
    y_stride: tl.tensor,
    u_ptr: tl.tensor,
    u_stride: tl.tensor,
    n_ptr: tl.tensor,
    n_stride: tl.tensor,
    r_ptr: tl.tensor,
    r_stride: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
):
    """Residual branch and the norm that follows it. Grid: (rows, layers).

    1. u = x + scale y; u = x where y is None.
    2. Store u, unless u_ptr is None.
    3. r = rms(u), n = u r, and store r; without NORM, n = u.
    4. Store n.

    ======  ====================  ===================================  =================================
    tensor  shape, dtype          writer                               reader
    ======  ====================  ===================================  =================================
    x       (rows, D) float32     the layer before, or this kernel     here
    y       (rows, D) low         product with out or down             here
    u       (rows, D) float32     here                                 this kernel, or the next layer
    n       (rows, D) low         here                                 product with qkv, up or kv; backward
    r       (rows, 1) float32     here                                 add_norm_bwd_kernel
    ======  ====================  ===================================  =================================
    """
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = row * D + e_1E

    # 1. Residual branch.
    x_1E = tl.load(x_ptr + layer * x_stride + at_1E, e_1E < D, 0.0)
    if y_ptr is not None:
        u_1E = x_1E + scale * tl.load(y_ptr + layer * y_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
    else:
        u_1E = x_1E

    # 2. Residual stream.
    if u_ptr is not None:
        tl.store(u_ptr + layer * u_stride + at_1E, u_1E, e_1E < D)

    # 3. Norm.
    if NORM:
        r_1 = rms(u_1E, D)
        n_1E = u_1E * r_1[:, None]
        tl.store(r_ptr + layer * r_stride + row + tl.arange(0, 1), r_1)
    else:
        n_1E = u_1E

    # 4. Normed row.
    tl.store(n_ptr + layer * n_stride + at_1E, n_1E, e_1E < D)


@triton.jit
def gelu_fwd_kernel(h_ptr: tl.tensor, total: tl.tensor, W: tl.constexpr):
    """GELU of W of ``total`` numbers, in place. Grid: (total / W).

    1. Load h.
    2. Store h P(h), P the normal distribution function.

    ======  ====================  ===============================  ==================
    tensor  shape, dtype          writer                           reader
    ======  ====================  ===============================  ==================
    h       (total) low           product with up; then here       product with down
    ======  ====================  ===============================  ==================
    """
    # 1. Input.
    at_W = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    h_W = tl.load(h_ptr + at_W, at_W < total, 0.0).to(tl.float32)

    # 2. GELU.
    below_W, _ = normal_cdf(h_W)
    tl.store(h_ptr + at_W, h_W * below_W, at_W < total)


@triton.jit
def pair_fwd_kernel(
    raw_ptr: tl.tensor,
    raw_stride: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pair_stride: tl.tensor,
    r_ptr: tl.tensor,
    r_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
):
    """Persistent pair of a row. Grid: (rows, layers).

    1. Load the row's products k_raw and v.
    2. r = rms(k_raw), k = k_raw r, and store r; without NORM, k = k_raw.
    3. Store k and v.

    ======  ====================  ==================  ====================================
    tensor  shape, dtype          writer              reader
    ======  ====================  ==================  ====================================
    raw     (rows, 2 D) low       product with kv     here
    k, v    (rows, D) low         here                attention, both passes; pair_bwd (k)
    r       (rows, 1) float32     here                pair_bwd_kernel
    ======  ====================  ==================  ====================================
    """
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]

    # 1. Products of the row.
    raw_row_ptr = raw_ptr + (layer * raw_stride + row * 2 * D)
    k_raw_1E = tl.load(raw_row_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    v_1E = tl.load(raw_row_ptr + D + e_1E, e_1E < D, 0.0)

    # 2. Norm.
    if NORM:
        r_1 = rms(k_raw_1E, D)
        k_1E = k_raw_1E * r_1[:, None]
        tl.store(r_ptr + layer * r_stride + row + tl.arange(0, 1), r_1)
    else:
        k_1E = k_raw_1E

    # 3. Pair.
    tl.store(k_ptr + layer * pair_stride + row * D + e_1E, k_1E, e_1E < D)
    tl.store(v_ptr + layer * pair_stride + row * D + e_1E, v_1E, e_1E < D)
