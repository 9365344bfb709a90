"""Triton kernels of the Recurrent Transformer's two loops over positions, for ``mixers.rt.fused``.

That says how they follow one another and what PARTS and EARLY mean. Logits are kept in units of log2. A layer may be
smaller than a kernel's D channels and heads of K (``mixers.rt.room``): WIDTH is its own width, which divides the sums
of norms, and UNIT 1 / sqrt(its own head dim).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import LOG2E, MASKED, normal_cdf, rms, rms_bwd
from mixers.rt.fused.exchange import received, send


@triton.jit
def _square(w_ptr, D: tl.constexpr, first, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Rows first .. first + ROWS of W^T (TRANSPOSED) or W, for W (D, D)."""
    inner = first + tl.arange(0, ROWS)
    outer = tl.arange(0, D)
    at = outer[None, :] * D + inner[:, None] if TRANSPOSED else inner[:, None] * D + outer[None, :]
    return tl.load(w_ptr + at)


@triton.jit
def _product(y_MD, acc, w_ptr, w_DD, D: tl.constexpr, PINNED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """acc + y W^T (TRANSPOSED) or acc + y W; W from ``w_DD`` if PINNED, else read in halves of the summed axis."""
    if PINNED:
        acc = tl.dot(y_MD, w_DD, acc, input_precision="ieee")
    else:
        halves = tl.permute(tl.reshape(y_MD, [y_MD.shape[0], 2, D // 2]), [0, 2, 1])
        left, right = tl.split(halves)
        acc = tl.dot(left, _square(w_ptr, D, 0, D // 2, TRANSPOSED), acc, input_precision="ieee")
        acc = tl.dot(right, _square(w_ptr, D, D // 2, D // 2, TRANSPOSED), acc, input_precision="ieee")
    return acc


@triton.jit
def _writes(tensor: tl.constexpr, part, PARTS: tl.constexpr):
    """Whether a part writes a tensor that all parts have: they share the work, for stores take time as well."""
    return part == tensor % PARTS


@triton.jit
def _fwd_rows(
    x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, at_MD, at_HMK, state_HM, state_HMK, t, inside,
    D: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """What position t, the chunk's position ``inside``, begins with."""
    x_MD = tl.load(x_ptr + at_MD + t * D)
    q_HMK = tl.load(q_ptr + at_HMK + t * D)
    m_HM = tl.load(m_ptr + state_HM + inside * H)
    l_HM = tl.load(l_ptr + state_HM + inside * H)
    o_HMK = tl.load(o_ptr + state_HMK + inside * D)
    return x_MD, q_HMK, m_HM, l_HM, o_HMK


@triton.jit
def _fwd_slice(y_MD, n_MD, up_DW, down_WD, g_ptr, slope_ptr, at_MW, live_M1):
    """y and what a slice of the hidden layer adds to it; the slice and the slope of its gelu are kept."""
    h_MW = tl.dot(n_MD, up_DW, input_precision="ieee")
    below_MW, bell_MW = normal_cdf(h_MW)
    g_MW = (h_MW * below_MW).to(n_MD.dtype)
    tl.store(g_ptr + at_MW, g_MW, live_M1)
    tl.store(slope_ptr + at_MW, (below_MW + h_MW * bell_MW * 0.3989422804014327).to(n_MD.dtype), live_M1)
    return tl.dot(g_MW, down_WD, y_MD, input_precision="ieee")


@triton.jit(do_not_specialize=["B", "T", "start", "stop"])
def rt_fwd_kernel(
    x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, slopes_ptr,
    w_ptr, mlp_norm_ptr, kv_norm_ptr, k_norm_ptr,
    z_ptr, a_ptr, lse_ptr, n_ptr, nz_ptr, nk_ptr, r_ptr, g_ptr, slope_ptr, k_ptr, v_ptr, mail_ptr,
    B, T, start, stop, scale,
    D: tl.constexpr, K: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    KV_NORM: tl.constexpr, K_NORM: tl.constexpr, PINNED: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Positions start..stop of M / STEP sequences of one run, STEP at a time; W columns of the MLP at a time.

    The M rows of a tile are STEP positions of each sequence, which do not attend to each other's persistent pairs.
    The PARTS of a tile have the same but for the hidden layer of the MLP. What other programs read, one of them writes.
    Kept for the backward: rows as the norms leave them before their gains, n for the MLP, nz for keys and values, nk of
    keys; and r, the three reciprocal root mean squares of each position.
    """
    H: tl.constexpr = D // K
    run = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    mail_ptr += (run * (tl.num_programs(0) // PARTS) + tile) * (PARTS * M * D)
    sequence_M = (tile * M + tl.arange(0, M)) // STEP
    place_M = tl.arange(0, M) % STEP
    row_M = run * B + tl.minimum(sequence_M, B - 1)  # beyond the last sequence: that one again, but not written
    first_M = row_M * T + place_M
    d = tl.arange(0, D)
    # In-chunk attention has heads first and claims no contiguity over them: Triton then gives a thread whole heads of
    # one sequence and all J keys, so its sums over K and J stay inside the thread.
    head = tl.max_contiguous(tl.arange(0, H), [1])
    hk_H1K = head[:, None, None] * K + tl.arange(0, K)[None, None, :]
    at_HM = (first_M * H)[None, :] + head[:, None]
    at_HMK = (first_M * D)[None, :, None] + hk_H1K
    pair_HMK = (row_M * T * D)[None, :, None] + hk_H1K
    state_HM = ((row_M * C + place_M) * H)[None, :] + head[:, None]
    state_HMK = ((row_M * C + place_M) * D)[None, :, None] + hk_H1K
    live_M = sequence_M < B
    live_1M = live_M[None, :]
    live_1M1 = live_M[None, :, None]
    live_M1 = live_M[:, None]
    w = part * (F // PARTS) + tl.arange(0, W)
    at_M = first_M * 3
    at_MD = (first_M * D)[:, None] + d[None, :]
    at_MW = (first_M * F)[:, None] + w[None, :]
    cd = k_ptr.dtype.element_ty
    wo_ptr = w_ptr + run * (3 * D * D + 2 * F * D)
    wk_ptr = wo_ptr + D * D
    wv_ptr = wk_ptr + D * D
    up_ptr = wv_ptr + D * D
    down_ptr = up_ptr + F * D
    mlp_norm_D = tl.load(mlp_norm_ptr + run * D + d)
    if KV_NORM:
        kv_norm_D = tl.load(kv_norm_ptr + run * D + d)
    if K_NORM:
        k_norm_D = tl.load(k_norm_ptr + run * D + d)
    slope_H = tl.load(slopes_ptr + head) * LOG2E
    if STEP > 1:
        shift_HM = slope_H[:, None] * place_M[None, :]
    wo_DD = _square(wo_ptr, D, 0, D, True) if PINNED else 0
    wk_DD = _square(wk_ptr, D, 0, D, True) if PINNED else 0
    wv_DD = _square(wv_ptr, D, 0, D, True) if PINNED else 0
    HELD: tl.constexpr = PINNED and PARTS * W == F
    held_DW = tl.load(up_ptr + w[None, :] * D + d[:, None]) if HELD else 0
    held_WD = tl.load(down_ptr + d[None, :] * F + w[:, None]) if HELD else 0
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    rows = _fwd_rows(
        x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, at_MD, at_HMK, state_HM, state_HMK, start, 0, D, H
    )  # fmt: skip
    for t in range(start, stop, STEP):
        x_MD, q_HMK, m_HM, l_HM, o_HMK = rows
        q_HMK = q_HMK.to(tl.float32) * (UNIT * LOG2E)
        if STEP > 1:  # distances are counted from t for all rows, which shifts the logits of each
            m_HM += shift_HM
        for first in tl.range(start, t, J, num_stages=1):
            j = first + tl.arange(0, J)
            at_HMJK = pair_HMK[:, :, None, :] + (tl.minimum(j, t - 1) * D)[None, None, :, None]
            k_HMJK = tl.load(k_ptr + at_HMJK).to(tl.float32)
            v_HMJK = tl.load(v_ptr + at_HMJK).to(tl.float32)
            s_HMJ = tl.sum(k_HMJK * q_HMK[:, :, None, :], 3) + slope_H[:, None, None] * (j - t)[None, None, :]
            s_HMJ = tl.where((j < t)[None, None, :], s_HMJ, MASKED)
            top_HM = tl.maximum(m_HM, tl.max(s_HMJ, 2))
            p_HMJ = tl.exp2(s_HMJ - top_HM[:, :, None])
            shrink_HM = tl.exp2(m_HM - top_HM)
            l_HM = l_HM * shrink_HM + tl.sum(p_HMJ, 2)
            o_HMK = o_HMK * shrink_HM[:, :, None] + tl.sum(p_HMJ[:, :, :, None] * v_HMJK, 2)
            m_HM = top_HM
        a_HMK = (o_HMK / l_HM[:, :, None]).to(cd)
        if STEP > 1:
            m_HM -= shift_HM
        if _writes(0, part, PARTS):
            tl.store(a_ptr + at_HMK + t * D, a_HMK, live_1M1)
            tl.store(lse_ptr + at_HM + t * H, m_HM + tl.log2(l_HM), live_1M)
        zero_MD = tl.zeros([M, D], tl.float32)
        a_MD = tl.reshape(tl.permute(a_HMK, [1, 0, 2]), [M, D])
        u_MD = x_MD + scale * _product(a_MD, zero_MD, wo_ptr, wo_DD, D, PINNED, True)
        r_M = rms(u_MD, WIDTH)
        n_MD = u_MD * r_M[:, None]
        if _writes(1, part, PARTS):
            tl.store(n_ptr + at_MD + t * D, n_MD.to(cd), live_M1)
            tl.store(r_ptr + at_M + t * 3, r_M, live_M)
        n_MD = (n_MD * mlp_norm_D[None, :]).to(cd)
        y_MD = tl.zeros([M, D], tl.float32)
        if HELD:
            y_MD = _fwd_slice(y_MD, n_MD, held_DW, held_WD, g_ptr, slope_ptr, at_MW + t * F, live_M1)
        else:
            for f in tl.range(0, F // PARTS, W, num_stages=STAGES):
                up_DW = tl.load(up_ptr + (f + w)[None, :] * D + d[:, None])
                down_WD = tl.load(down_ptr + d[None, :] * F + (f + w)[:, None])
                y_MD = _fwd_slice(y_MD, n_MD, up_DW, down_WD, g_ptr, slope_ptr, at_MW + t * F + f, live_M1)
        if PARTS > 1:
            at_ME = send(y_MD, mail_ptr, t // STEP, part, M, D, PARTS, WARPS)
        ahead = tl.minimum(t + STEP, stop - STEP)  # of the next step, read before the other parts are waited for
        rows = _fwd_rows(
            x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, at_MD, at_HMK, state_HM, state_HMK, ahead, ahead - start, D, H
        )  # fmt: skip
        if PARTS > 1:
            y_MD = received(at_ME, mail_ptr, t // STEP, M, D, PARTS, WARPS)
        z_MD = u_MD + scale * y_MD
        if _writes(2, part, PARTS):
            tl.store(z_ptr + at_MD + t * D, z_MD, live_M1)
        if KV_NORM:
            r_M = rms(z_MD, WIDTH)
            z_MD *= r_M[:, None]
            if _writes(3, part, PARTS):
                tl.store(r_ptr + at_M + t * 3 + 1, r_M, live_M)
        if _writes(3, part, PARTS):
            tl.store(nz_ptr + at_MD + t * D, z_MD.to(cd), live_M1)
        if KV_NORM:
            z_MD *= kv_norm_D[None, :]
        z_MD = z_MD.to(cd)
        k_MD = _product(z_MD, zero_MD, wk_ptr, wk_DD, D, PINNED, True)
        v_MD = _product(z_MD, zero_MD, wv_ptr, wv_DD, D, PINNED, True)
        if K_NORM:
            r_M = rms(k_MD, WIDTH)
            nk_MD = (k_MD * r_M[:, None]).to(cd)
            if _writes(4, part, PARTS):
                tl.store(nk_ptr + at_MD + t * D, nk_MD, live_M1)
                tl.store(r_ptr + at_M + t * 3 + 2, r_M, live_M)
            k_MD = nk_MD.to(tl.float32) * k_norm_D[None, :]
        tl.store(k_ptr + at_MD + t * D, k_MD.to(cd), live_M1)
        tl.store(v_ptr + at_MD + t * D, v_MD.to(cd), live_M1)
        tl.debug_barrier()  # the pair is read by other threads of this program from here on


@triton.jit
def _bwd_rows(
    dz_ptr, n_ptr, nz_ptr, nk_ptr, r_ptr, slope_ptr, v_ptr, a_ptr, dk_ptr, dv_ptr, at_M, at_MD, at_HMK, at_MW,
    state_HMK, t, inside, D: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """What position t, the chunk's position ``inside``, begins with, in the order of use.

    The slope is that of the first channels of the hidden layer. Of a norm that is absent, r is anything.
    """
    nk_HMK = tl.load(nk_ptr + at_HMK + t * D)
    v_HMK = tl.load(v_ptr + at_HMK + t * D)
    dk_HMK = tl.load(dk_ptr + state_HMK + inside * D)
    dv_HMK = tl.load(dv_ptr + state_HMK + inside * D)
    r_k_M = tl.load(r_ptr + at_M + t * 3 + 2)
    r_kv_M = tl.load(r_ptr + at_M + t * 3 + 1)
    nz_MD = tl.load(nz_ptr + at_MD + t * D)
    dz_MD = tl.load(dz_ptr + at_MD + t * D)
    slope_MW = tl.load(slope_ptr + at_MW + t * F)
    r_mlp_M = tl.load(r_ptr + at_M + t * 3)
    n_MD = tl.load(n_ptr + at_MD + t * D)
    a_HMK = tl.load(a_ptr + at_HMK + t * D)
    return nk_HMK, v_HMK, dk_HMK, dv_HMK, r_k_M, r_kv_M, nz_MD, dz_MD, slope_MW, r_mlp_M, n_MD, a_HMK


@triton.jit
def _bwd_slice(dn_MD, dy_MD, down_DW, up_WD, slope_MW, dh_ptrs, live_M1):
    """dn and what a slice of the hidden layer adds to it; the slice's gradient is kept."""
    dg_MW = tl.dot(dy_MD, down_DW, input_precision="ieee")
    dh_MW = (dg_MW * slope_MW.to(tl.float32)).to(dy_MD.dtype)
    tl.store(dh_ptrs, dh_MW, live_M1)
    return tl.dot(dh_MW, up_WD, dn_MD, input_precision="ieee")


@triton.jit(do_not_specialize=["B", "T", "start", "stop"])
def rt_bwd_kernel(
    dz_ptr, n_ptr, nz_ptr, nk_ptr, r_ptr, slope_ptr, q_ptr, k_ptr, v_ptr, a_ptr, lse_ptr, slopes_ptr, dk_ptr, dv_ptr,
    w_ptr, mlp_norm_ptr, kv_norm_ptr, k_norm_ptr,
    dx_ptr, da_ptr, delta_ptr, du_ptr, dh_ptr, dy_ptr, dkv_ptr, dgain_ptr, mail_ptr,
    B, T, start, stop, scale,
    D: tl.constexpr, K: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
    KV_NORM: tl.constexpr, K_NORM: tl.constexpr, PINNED: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Positions start..stop of M / STEP sequences of one run, the last STEP of them first; rows as rt_fwd_kernel.

    Writes dx; what earlier positions pull (da, and delta = da . a of each head); and the rows whose products with what
    the forward kept are the weight gradients: (s du, a), (dh, n), (s dz, gelu(h)), (d[k, v], nz). The gradient of the
    keys' gain leaves as one row of sums for each tile and chunk.
    """
    H: tl.constexpr = D // K
    run = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    mail_ptr += (run * (tl.num_programs(0) // PARTS) + tile) * (PARTS * M * D)
    sequence_M = (tile * M + tl.arange(0, M)) // STEP
    place_M = tl.arange(0, M) % STEP
    row_M = run * B + tl.minimum(sequence_M, B - 1)  # beyond the last sequence: that one again, but not written
    first_M = row_M * T + place_M
    d = tl.arange(0, D)
    # In-chunk attention has heads first and claims no contiguity over them: Triton then gives a thread whole heads of
    # one sequence and all J keys, so its sums over K and J stay inside the thread.
    head = tl.max_contiguous(tl.arange(0, H), [1])
    hk_H1K = head[:, None, None] * K + tl.arange(0, K)[None, None, :]
    at_HM = (first_M * H)[None, :] + head[:, None]
    at_HMK = (first_M * D)[None, :, None] + hk_H1K
    query_HM = (row_M * T * H)[None, :] + head[:, None]
    query_HMK = (row_M * T * D)[None, :, None] + hk_H1K
    state_HMK = ((row_M * C + place_M) * D)[None, :, None] + hk_H1K
    live_M = sequence_M < B
    live_1M = live_M[None, :]
    live_1M1 = live_M[None, :, None]
    live_M1 = live_M[:, None]
    w = part * (F // PARTS) + tl.arange(0, W)
    at_M = first_M * 3
    at_MD = (first_M * D)[:, None] + d[None, :]
    at_MW = (first_M * F)[:, None] + w[None, :]
    cd = k_ptr.dtype.element_ty
    wo_ptr = w_ptr + run * (3 * D * D + 2 * F * D)
    wk_ptr = wo_ptr + D * D
    wv_ptr = wk_ptr + D * D
    up_ptr = wv_ptr + D * D
    down_ptr = up_ptr + F * D
    mlp_norm_D = tl.load(mlp_norm_ptr + run * D + d)
    if KV_NORM:
        kv_norm_D = tl.load(kv_norm_ptr + run * D + d)
    if K_NORM:
        k_norm_HK = tl.load(k_norm_ptr + run * D + head[:, None] * K + tl.arange(0, K)[None, :])
    slope_H = tl.load(slopes_ptr + head) * LOG2E
    if STEP > 1:
        shift_HM = slope_H[:, None] * place_M[None, :]
    wo_DD = _square(wo_ptr, D, 0, D, False) if PINNED else 0
    wk_DD = _square(wk_ptr, D, 0, D, False) if PINNED else 0
    wv_DD = _square(wv_ptr, D, 0, D, False) if PINNED else 0
    HELD: tl.constexpr = PINNED and PARTS * W == F
    held_DW = tl.load(down_ptr + d[:, None] * F + w[None, :]) if HELD else 0
    held_WD = tl.load(up_ptr + w[:, None] * D + d[None, :]) if HELD else 0
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dk_norm_HMK = tl.zeros([H, M, K], tl.float32)
    rows = _bwd_rows(
        dz_ptr, n_ptr, nz_ptr, nk_ptr, r_ptr, slope_ptr, v_ptr, a_ptr, dk_ptr, dv_ptr, at_M, at_MD, at_HMK, at_MW,
        state_HMK, stop - STEP, stop - STEP - start, D, F,
    )  # fmt: skip
    for back in range(0, stop - start, STEP):
        t = stop - STEP - back
        nk_HMK, v_HMK, dk_HMK, dv_HMK, r_k_M, r_kv_M, nz_MD, dz_MD, first_MW, r_mlp_M, n_MD, a_HMK = rows
        k_HMK = nk_HMK.to(tl.float32)
        if K_NORM:
            k_HMK = (k_HMK * k_norm_HK[:, None, :]).to(cd).to(tl.float32)
        k_HMK *= UNIT * LOG2E
        v_HMK = v_HMK.to(tl.float32)
        for first in tl.range(t + STEP, stop, J, num_stages=1):
            i = first + tl.arange(0, J)
            at_J = tl.minimum(i, stop - 1)
            at_HMJ = query_HM[:, :, None] + (at_J * H)[None, None, :]
            at_HMJK = query_HMK[:, :, None, :] + (at_J * D)[None, None, :, None]
            q_HMJK = tl.load(q_ptr + at_HMJK).to(tl.float32)
            da_HMJK = tl.load(da_ptr + at_HMJK).to(tl.float32)
            lse_HMJ = tl.load(lse_ptr + at_HMJ)
            delta_HMJ = tl.load(delta_ptr + at_HMJ)
            s_HMJ = tl.sum(q_HMJK * k_HMK[:, :, None, :], 3) + slope_H[:, None, None] * (t - i)[None, None, :]
            if STEP > 1:
                s_HMJ += shift_HM[:, :, None]
            p_HMJ = tl.where((i < stop)[None, None, :], tl.exp2(s_HMJ - lse_HMJ), 0.0)
            ds_HMJ = p_HMJ * (tl.sum(da_HMJK * v_HMK[:, :, None, :], 3) - delta_HMJ)
            dv_HMK += tl.sum(p_HMJ[:, :, :, None] * da_HMJK, 2)
            dk_HMK += tl.sum(ds_HMJ[:, :, :, None] * q_HMJK, 2)
        dk_HMK *= UNIT
        if K_NORM:
            nk_HMK = nk_HMK.to(tl.float32)
            dk_norm_HMK += dk_HMK * nk_HMK
            dk_HMK *= k_norm_HK[:, None, :]
            dot_M = tl.sum(tl.sum(dk_HMK * nk_HMK, 2), 0) / WIDTH
            dk_HMK = r_k_M[None, :, None] * (dk_HMK - nk_HMK * dot_M[None, :, None])
        dk_MD = tl.reshape(tl.permute(dk_HMK.to(cd), [1, 0, 2]), [M, D])
        dv_MD = tl.reshape(tl.permute(dv_HMK.to(cd), [1, 0, 2]), [M, D])
        at_dkv = ((first_M + t) * 2 * D)[:, None] + d[None, :]
        if _writes(0, part, PARTS):
            tl.store(dkv_ptr + at_dkv, dk_MD, live_M1)
        if _writes(1, part, PARTS):
            tl.store(dkv_ptr + at_dkv + D, dv_MD, live_M1)
        dn_MD = tl.zeros([M, D], tl.float32)
        dn_MD = _product(dk_MD, dn_MD, wk_ptr, wk_DD, D, PINNED, False)
        dn_MD = _product(dv_MD, dn_MD, wv_ptr, wv_DD, D, PINNED, False)
        if KV_NORM:
            dz_MD += rms_bwd(dn_MD * kv_norm_D[None, :], nz_MD.to(tl.float32), r_kv_M, WIDTH)
        else:
            dz_MD += dn_MD
        dy_MD = (dz_MD * scale).to(cd)
        if _writes(2, part, PARTS):
            tl.store(dy_ptr + at_MD + t * D, dy_MD, live_M1)
        dn_MD = tl.zeros([M, D], tl.float32)
        if HELD:
            dn_MD = _bwd_slice(dn_MD, dy_MD, held_DW, held_WD, first_MW, dh_ptr + at_MW + t * F, live_M1)
        else:
            for f in tl.range(0, F // PARTS, W, num_stages=STAGES):
                down_DW = tl.load(down_ptr + d[:, None] * F + (f + w)[None, :])
                up_WD = tl.load(up_ptr + (f + w)[:, None] * D + d[None, :])
                slope_MW = tl.load(slope_ptr + at_MW + t * F + f)
                dn_MD = _bwd_slice(dn_MD, dy_MD, down_DW, up_WD, slope_MW, dh_ptr + at_MW + t * F + f, live_M1)
        if PARTS > 1:
            at_ME = send(dn_MD, mail_ptr, T // STEP - 1 - t // STEP, part, M, D, PARTS, WARPS)
        ahead = tl.maximum(t - STEP, start)  # of the next step, read before the other parts are waited for
        rows = _bwd_rows(
            dz_ptr, n_ptr, nz_ptr, nk_ptr, r_ptr, slope_ptr, v_ptr, a_ptr, dk_ptr, dv_ptr, at_M, at_MD, at_HMK,
            at_MW, state_HMK, ahead, ahead - start, D, F,
        )  # fmt: skip
        if PARTS > 1:
            dn_MD = received(at_ME, mail_ptr, T // STEP - 1 - t // STEP, M, D, PARTS, WARPS)
        dz_MD += rms_bwd(dn_MD * mlp_norm_D[None, :], n_MD.to(tl.float32), r_mlp_M, WIDTH)
        if _writes(3, part, PARTS):
            tl.store(dx_ptr + at_MD + t * D, dz_MD, live_M1)
        du_MD = (dz_MD * scale).to(cd)
        if _writes(4, part, PARTS):
            tl.store(du_ptr + at_MD + t * D, du_MD, live_M1)
        da_MD = _product(du_MD, tl.zeros([M, D], tl.float32), wo_ptr, wo_DD, D, PINNED, False).to(cd)
        da_HMK = tl.permute(tl.reshape(da_MD, [M, H, K]), [1, 0, 2])
        tl.store(da_ptr + at_HMK + t * D, da_HMK, live_1M1)
        tl.store(delta_ptr + at_HM + t * H, tl.sum(da_HMK.to(tl.float32) * a_HMK.to(tl.float32), 2), live_1M)
        tl.debug_barrier()  # da and delta are read by other threads of this program from here on
    if K_NORM:
        row = (run * tl.cdiv(T, C) + start // C) * (tl.num_programs(0) // PARTS) + tile
        dk_norm_HMK = tl.where(live_1M1, dk_norm_HMK, 0.0)
        tl.store(dgain_ptr + row * D + d, tl.reshape(tl.sum(dk_norm_HMK, 1), [D]))
