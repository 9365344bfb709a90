"""Triton kernels of the Feedback Transformer, between the matrix products; ``passes`` says in what order they run.

A *row* is one position of one sequence. Kernels serve all R runs that are trained together, the last axis of each grid.
Pointers are to the first row that a kernel takes, of the first run. ``run_stride`` is the number of rows between runs
in tensors of all positions; tensors without positions have B rows a run. ``low`` is the dtype of matrix
products (bfloat16 or float32). E is D rounded up to a power of two. Logits are kept in units of log2.
"""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED, rms, rms_bwd


@triton.jit(do_not_specialize=["t", "run_stride"])
def attend_fwd_kernel(
    raw_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    gain_stride: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    q_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    t: tl.tensor,
    run_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
    NORM: tl.constexpr,
):
    """Query and attention output of a layer at position t, in G heads of a sequence. Grid: (B, H / G, R).

    1. q = q_raw rms(q_raw) gain; without NORM, q = q_raw. Round q to ``low`` and store it.
    2. Start the softmax with the pair of zeros at the position itself: m = 0, l = 1, o = 0.
    3. For J earlier positions at a time: logits s_j = q k_j / sqrt(K) + slope (j - t), new maximum m, weights
       p_j = 2^(s_j - m), l += sum p_j and o += sum p_j v_j after both have shrunk to the new maximum.
    4. Store a = o / l and lse = m + log2 l.

    ======  ======================  ===================  =================================
    tensor  shape, dtype            writer               reader
    ======  ======================  ===================  =================================
    raw     (B, D) low, at t        product with q       here, query_norm_bwd_kernel
    gain    (D) float32             the layer            here, query_norm_bwd_kernel
    k, v    (T, B, D) low, from 0   pair_fwd_kernel      here, backward
    slopes  (H) float32             the layer            here, backward
    q       (B, D) low, at t        here                 backward
    a       (B, D) low, at t        here                 product with out, backward
    lse     (B, H) float32, at t    here                 backward
    ======  ======================  ===================  =================================

    ``gain_stride`` is the distance between runs.
    """
    H: tl.constexpr = D // K
    B, run = tl.num_programs(0), tl.program_id(2).to(tl.int64)
    first_row = run * run_stride + tl.program_id(0)
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]

    # 1. Query.
    q_GK = tl.load(raw_ptr + first_row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    if NORM:
        e_1E = tl.arange(0, E)[None, :]
        raw_1E = tl.load(raw_ptr + first_row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
        q_GK *= rms(raw_1E, D)[:, None] * tl.load(gain_ptr + run * gain_stride + hk_GK, live_G1, 0.0)
    q_low_GK = q_GK.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + first_row * D + hk_GK, q_low_GK, live_G1)
    scaled_GK = q_low_GK.to(tl.float32) * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E

    # 2. Softmax over the pair of zeros.
    m_G = tl.zeros([G], tl.float32)
    l_G = tl.full([G], 1.0, tl.float32)
    o_GK = tl.zeros([G, K], tl.float32)

    # 3. Earlier positions.
    for first in range(0, t, J):
        j = first + tl.arange(0, J)
        at_JGK = (first_row + j[:, None, None] * B) * D + hk_GK[None, :, :]
        past_JGK = (j < t)[:, None, None] & live_G1[None, :, :]
        k_JGK = tl.load(k_ptr + at_JGK, past_JGK, 0.0).to(tl.float32)
        v_JGK = tl.load(v_ptr + at_JGK, past_JGK, 0.0).to(tl.float32)

        s_JG = tl.sum(scaled_GK[None, :, :] * k_JGK, 2) + slope_G[None, :] * (j - t)[:, None]
        s_JG = tl.where((j < t)[:, None], s_JG, MASKED)
        m_new_G = tl.maximum(m_G, tl.max(s_JG, 0))
        p_JG = tl.exp2(s_JG - m_new_G[None, :])
        shrink_G = tl.exp2(m_G - m_new_G)
        l_G = l_G * shrink_G + tl.sum(p_JG, 0)
        o_GK = o_GK * shrink_G[:, None] + tl.sum(p_JG[:, :, None] * v_JGK, 0)
        m_G = m_new_G

    # 4. Output.
    tl.store(a_ptr + first_row * D + hk_GK, o_GK / l_G[:, None], live_G1)
    tl.store(lse_ptr + first_row * H + head, m_G + tl.log2(l_G), head < H)


@triton.jit(do_not_specialize=["run_stride", "layer_stride"])
def memory_fwd_kernel(
    u_ptr: tl.tensor,
    y_ptr: tl.tensor,
    share_ptr: tl.tensor,
    h_ptr: tl.tensor,
    n_ptr: tl.tensor,
    r_ptr: tl.tensor,
    scale: tl.tensor,
    run_stride: tl.tensor,
    layer_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
):
    """Output of the last layer at a position, and the normed memory of the position. Grid: (B, 1, R).

    1. h_L = u + scale y; store it.
    2. memory = sum over l of share_l h_l.
    3. r = rms(memory), n = memory r; store both.

    ======  ================================  ===================  ==================================
    tensor  shape, dtype                      writer               reader
    ======  ================================  ===================  ==================================
    u       (B, D) float32                    add_norm_fwd_kernel  here
    y       (B, D) low                        product with down    here
    share   (L + 1) float32                   the layer            here, memory_bwd, input_bwd_kernel
    h       (L + 1, B, D) float32, at t       here and add_norm    here, gradient of share
    n       (B, D) low, at t                  here                 product with kv, memory_bwd_kernel
    r       (B, 1) float32, at t              here                 memory_bwd_kernel
    ======  ================================  ===================  ==================================

    ``layer_stride`` is the number of rows from one layer to the next.
    """
    run, sequence = tl.program_id(2).to(tl.int64), tl.program_id(0)
    row = run * run_stride + sequence
    e_1E = tl.arange(0, E)[None, :]
    here_1E = e_1E < D
    scratch_1E = (run * tl.num_programs(0) + sequence) * D + e_1E
    share_ptr += run * (L + 1)

    # 1. Output.
    y_1E = tl.load(y_ptr + scratch_1E, here_1E, 0.0).to(tl.float32)
    z_1E = tl.load(u_ptr + scratch_1E, here_1E, 0.0) + scale * y_1E
    tl.store(h_ptr + (L * layer_stride.to(tl.int64) + row) * D + e_1E, z_1E, here_1E)

    # 2. Memory.
    memory_1E = tl.load(share_ptr + L) * z_1E
    for layer in tl.static_range(L):
        h_1E = tl.load(h_ptr + (layer * layer_stride.to(tl.int64) + row) * D + e_1E, here_1E, 0.0)
        memory_1E += tl.load(share_ptr + layer) * h_1E

    # 3. Norm.
    r_1 = rms(memory_1E, D)
    tl.store(n_ptr + row * D + e_1E, memory_1E * r_1[:, None], here_1E)
    tl.store(r_ptr + row + tl.arange(0, 1), r_1)


@triton.jit(do_not_specialize=["i", "count", "run_stride", "layer_stride"])
def pair_bwd_kernel(
    q_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    r_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    dkv_ptr: tl.tensor,
    i: tl.tensor,
    count: tl.tensor,
    run_stride: tl.tensor,
    layer_stride: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradients of the products k_raw and v of position i of a chunk of C. Grid: (B, 1, R).

    The chunk has ``count`` <= C positions. All tensors but dk, dv and dkv begin at its first position.

    1. Load the pair, with k scaled by 1/sqrt(K), and what later chunks sent back: dk, dv.
    2. For each layer and the chunk's queries n > i: p_n = 2^(s_n - lse_n) and ds_n = p_n (da_n v - delta_n), with
       logits s_n = q_n k - slope (n - i); dv += sum p_n da_n and dk += sum ds_n q_n.
    3. NORM: take dk / sqrt(K) through the norm of k.
    4. Store both side by side.

    ======  ================================  ===================  ===================================
    tensor  shape, dtype                      writer               reader
    ======  ================================  ===================  ===================================
    q       (L, chunk, B, D) low              attend_fwd_kernel    here, past_bwd_kernel
    da      (L, chunk, B, D) low              product with out     here, past_bwd_kernel
    lse     (L, chunk, B, H) float32          attend_fwd_kernel    here, past_bwd_kernel
    delta   (L, chunk, B, H) float32          query_bwd_kernel     here, past_bwd_kernel
    k, v    (chunk, B, D) low                 pair_fwd_kernel      here, past_bwd_kernel
    r       (chunk, B, 1) float32             pair_fwd_kernel      here
    dk, dv  (C, B, D) float32                 past_bwd_kernel      here
    dkv     (B, 2 D) low, at i                here                 product with kv, gradient of kv
    ======  ================================  ===================  ===================================

    G is the number of heads, rounded up to a power of two.
    """
    H: tl.constexpr = D // K
    B, run, sequence = tl.num_programs(0), tl.program_id(2).to(tl.int64), tl.program_id(0)
    first_row = run * run_stride + sequence
    row = first_row + i * B
    head = tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]

    # 1. Pair.
    k_GK = tl.load(k_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    v_GK = tl.load(v_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    scaled_GK = k_GK * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
    at_GK = ((run * C + i) * B + sequence) * D + hk_GK
    dk_GK = tl.load(dk_ptr + at_GK, live_G1, 0.0)
    dv_GK = tl.load(dv_ptr + at_GK, live_G1, 0.0)

    # 2. Later queries of the chunk.
    n = tl.arange(0, C)
    later = (n > i) & (n < count)
    later_CG = later[:, None] & (head < H)[None, :]
    later_CGK = later[:, None, None] & live_G1[None, :, :]
    for layer in tl.static_range(L):
        row_C = first_row + layer * layer_stride.to(tl.int64) + n * B
        at_CGK = row_C[:, None, None] * D + hk_GK[None, :, :]
        at_CG = row_C[:, None] * H + head[None, :]
        q_CGK = tl.load(q_ptr + at_CGK, later_CGK, 0.0).to(tl.float32)
        da_CGK = tl.load(da_ptr + at_CGK, later_CGK, 0.0).to(tl.float32)
        lse_CG = tl.load(lse_ptr + at_CG, later_CG, 0.0)
        delta_CG = tl.load(delta_ptr + at_CG, later_CG, 0.0)

        s_CG = tl.sum(q_CGK * scaled_GK[None, :, :], 2) + slope_G[None, :] * (i - n)[:, None]
        p_CG = tl.where(later_CG, tl.exp2(s_CG - lse_CG), 0.0)
        ds_CG = p_CG * (tl.sum(da_CGK * v_GK[None, :, :], 2) - delta_CG)
        dv_GK += tl.sum(p_CG[:, :, None] * da_CGK, 0)
        dk_GK += tl.sum(ds_CG[:, :, None] * q_CGK, 0)

    # 3. Norm.
    dk_GK *= K**-0.5
    if NORM:
        mean = tl.sum(dk_GK * k_GK) / D
        dk_GK = tl.load(r_ptr + row) * (dk_GK - k_GK * mean)

    # 4. Results.
    out_ptr = dkv_ptr + (run * run_stride + sequence) * 2 * D
    tl.store(out_ptr + hk_GK, dk_GK, live_G1)
    tl.store(out_ptr + D + hk_GK, dv_GK, live_G1)


@triton.jit(do_not_specialize=["run_stride"])
def memory_bwd_kernel(
    dz_ptr: tl.tensor,
    dn_ptr: tl.tensor,
    n_ptr: tl.tensor,
    r_ptr: tl.tensor,
    share_ptr: tl.tensor,
    dm_ptr: tl.tensor,
    d_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    scale: tl.tensor,
    run_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
):
    """Gradients of a position's memory and of the last layer's output. Grid: (B, 1, R).

    1. dm = dn through the norm of the memory; store it.
    2. d = dz + share_L dm; store it, and scale d, the gradient of y.

    ======  ======================  =======================  =========================================
    tensor  shape, dtype            writer                   reader
    ======  ======================  =======================  =========================================
    dz      (B, D) float32, at t    the caller               here
    dn      (B, D) low              product with kv          here
    n, r    (B, ...), at t          memory_fwd_kernel        here
    share   (L + 1) float32         the layer                here, input_bwd_kernel
    dm      (B, D) float32, at t    here                     input_bwd_kernel, gradient of share
    d       (B, D) float32          here                     add_norm_bwd_kernel
    dy      (B, D) low, at t        here                     product with down, gradient of down
    ======  ======================  =======================  =========================================
    """
    run, sequence = tl.program_id(2).to(tl.int64), tl.program_id(0)
    row = run * run_stride + sequence
    e_1E = tl.arange(0, E)[None, :]
    here_1E = e_1E < D
    at_1E = row * D + e_1E
    scratch_1E = (run * tl.num_programs(0) + sequence) * D + e_1E

    # 1. Memory.
    dn_1E = tl.load(dn_ptr + scratch_1E, here_1E, 0.0).to(tl.float32)
    n_1E = tl.load(n_ptr + at_1E, here_1E, 0.0).to(tl.float32)
    dm_1E = rms_bwd(dn_1E, n_1E, tl.load(r_ptr + row + tl.arange(0, 1)), D)
    tl.store(dm_ptr + at_1E, dm_1E, here_1E)

    # 2. Output.
    d_1E = tl.load(dz_ptr + at_1E, here_1E, 0.0) + tl.load(share_ptr + run * (L + 1) + L) * dm_1E
    tl.store(d_ptr + scratch_1E, d_1E, here_1E)
    tl.store(dy_ptr + at_1E, d_1E * scale, here_1E)


@triton.jit(do_not_specialize=["t", "run_stride"])
def query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    a_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    t: tl.tensor,
    run_stride: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,
):
    """Gradient of a layer's query at position t, in G heads of a sequence. Grid: (B, H / G, R).

    1. delta = sum of a da over the channels of a head; store it.
    2. For J earlier positions at a time: p_j and ds_j = p_j (da v_j - delta), as in ``pair_bwd_kernel``;
       dq += sum ds_j k_j.
    3. Store dq / sqrt(K).

    ======  ======================  ===================  ==================================
    tensor  shape, dtype            writer               reader
    ======  ======================  ===================  ==================================
    q, a    (B, D) low, at t        attend_fwd_kernel    here
    k, v    (T, B, D) low, from 0   pair_fwd_kernel      here
    da      (B, D) low, at t        product with out     here
    lse     (B, H) float32, at t    attend_fwd_kernel    here
    delta   (B, H) float32, at t    here                 pair_bwd_kernel, past_bwd_kernel
    dq      (B, D) float32          here                 query_norm_bwd_kernel
    ======  ======================  ===================  ==================================
    """
    H: tl.constexpr = D // K
    B, run, sequence = tl.num_programs(0), tl.program_id(2).to(tl.int64), tl.program_id(0)
    first_row = run * run_stride + sequence
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]

    # 1. Delta.
    q_GK = tl.load(q_ptr + first_row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    a_GK = tl.load(a_ptr + first_row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    da_GK = tl.load(da_ptr + first_row * D + hk_GK, live_G1, 0.0).to(tl.float32)
    lse_G = tl.load(lse_ptr + first_row * H + head, head < H, 0.0)
    delta_G = tl.sum(a_GK * da_GK, 1)
    tl.store(delta_ptr + first_row * H + head, delta_G, head < H)
    scaled_GK = q_GK * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E

    # 2. Earlier positions.
    dq_GK = tl.zeros([G, K], tl.float32)
    for first in range(0, t, J):
        j = first + tl.arange(0, J)
        at_JGK = (first_row + j[:, None, None] * B) * D + hk_GK[None, :, :]
        past_JGK = (j < t)[:, None, None] & live_G1[None, :, :]
        k_JGK = tl.load(k_ptr + at_JGK, past_JGK, 0.0).to(tl.float32)
        v_JGK = tl.load(v_ptr + at_JGK, past_JGK, 0.0).to(tl.float32)

        s_JG = tl.sum(scaled_GK[None, :, :] * k_JGK, 2) + slope_G[None, :] * (j - t)[:, None]
        p_JG = tl.where((j < t)[:, None], tl.exp2(s_JG - lse_G[None, :]), 0.0)
        ds_JG = p_JG * (tl.sum(da_GK[None, :, :] * v_JGK, 2) - delta_G[None, :])
        dq_GK += tl.sum(ds_JG[:, :, None] * k_JGK, 0)

    # 3. Result.
    tl.store(dq_ptr + (run * B + sequence) * D + hk_GK, dq_GK * K**-0.5, live_G1)


@triton.jit(do_not_specialize=["run_stride"])
def query_norm_bwd_kernel(
    raw_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    gain_stride: tl.tensor,
    dq_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    run_stride: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradient of the product q_raw of a layer at a position, from that of the query. Grid: (B, 1, R).

    NORM: through gain and norm, and add the gradient of the gain to its sum over positions.

    ======  ======================  =====================  ==================================
    tensor  shape, dtype            writer                 reader
    ======  ======================  =====================  ==================================
    raw     (B, D) low, at t        product with q         here
    gain    (D) float32             the layer              here
    dq      (B, D) float32          query_bwd_kernel       here
    draw    (B, D) low, at t        here                   product with q, gradient of q
    dgain   (B, D) float32          here, at each t        the end of the backward
    ======  ======================  =====================  ==================================
    """
    run, sequence = tl.program_id(2).to(tl.int64), tl.program_id(0)
    e_1E = tl.arange(0, E)[None, :]
    here_1E = e_1E < D
    at_1E = (run * run_stride + sequence) * D + e_1E
    scratch_1E = (run * tl.num_programs(0) + sequence) * D + e_1E

    dq_1E = tl.load(dq_ptr + scratch_1E, here_1E, 0.0)
    if NORM:
        raw_1E = tl.load(raw_ptr + at_1E, here_1E, 0.0).to(tl.float32)
        r_1 = rms(raw_1E, D)
        n_1E = raw_1E * r_1[:, None]
        dgain_1E = tl.load(dgain_ptr + scratch_1E, here_1E, 0.0)
        tl.store(dgain_ptr + scratch_1E, dgain_1E + dq_1E * n_1E, here_1E)
        dq_1E = rms_bwd(dq_1E * tl.load(gain_ptr + run * gain_stride + e_1E, here_1E, 0.0), n_1E, r_1, D)
    tl.store(draw_ptr + at_1E, dq_1E, here_1E)


@triton.jit
def input_bwd_kernel(
    d_ptr: tl.tensor,
    d_stride: tl.tensor,
    dn_ptr: tl.tensor,
    dn_stride: tl.tensor,
    n_ptr: tl.tensor,
    n_stride: tl.tensor,
    r_ptr: tl.tensor,
    r_stride: tl.tensor,
    dm_ptr: tl.tensor,
    dm_stride: tl.tensor,
    share_ptr: tl.tensor,
    share_stride: tl.tensor,
    dx_ptr: tl.tensor,
    dx_stride: tl.tensor,
    dy_ptr: tl.tensor,
    dy_stride: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Gradient of a layer's input: from the residual stream, its norm and the memory. Grid: (rows, 1, R).

    1. dx = d + dn through the norm + share dm; store it.
    2. Store scale dx, the gradient of the layer before's y, unless dy_ptr is None.

    ======  =======================  =====================  ===============================================
    tensor  shape, dtype             writer                 reader
    ======  =======================  =====================  ===============================================
    d       (rows, D) float32        add_norm_bwd_kernel    here
    dn      (rows, D) low            product with q         here
    n, r    (rows, ...)              add_norm_fwd_kernel    here
    dm      (rows, D) float32        memory_bwd_kernel      here
    share   (1) float32              the layer              here
    dx      (rows, D) float32        here                   add_norm_bwd_kernel of the layer before, caller
    dy      (rows, D) low            here                   product with down, gradient of down
    ======  =======================  =====================  ===============================================

    Each ``x_stride`` is the distance between runs in elements.
    """
    run, row = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    here_1E = e_1E < D
    at_1E = row * D + e_1E

    # 1. Input.
    dn_1E = tl.load(dn_ptr + run * dn_stride + at_1E, here_1E, 0.0).to(tl.float32)
    n_1E = tl.load(n_ptr + run * n_stride + at_1E, here_1E, 0.0).to(tl.float32)
    dx_1E = rms_bwd(dn_1E, n_1E, tl.load(r_ptr + run * r_stride + row + tl.arange(0, 1)), D)
    dx_1E += tl.load(d_ptr + run * d_stride + at_1E, here_1E, 0.0)
    dm_1E = tl.load(dm_ptr + run * dm_stride + at_1E, here_1E, 0.0)
    dx_1E += tl.load(share_ptr + run * share_stride) * dm_1E
    tl.store(dx_ptr + run * dx_stride + at_1E, dx_1E, here_1E)

    # 2. Residual branch of the layer before.
    if dy_ptr is not None:
        tl.store(dy_ptr + run * dy_stride + at_1E, dx_1E * scale, here_1E)
