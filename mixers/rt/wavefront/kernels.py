"""Triton kernels between the matrix products of ``mixers.rt.chunked``; its docstring says how they follow one another.

Rows are sequences, or positions and sequences, of a layer; layers are strides apart and the last axis of the grid, for
attention part of the first. The gain is that of queries and keys; other norms have none. Logits are kept in units of
log2.
"""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED, normal_cdf, rms, rms_bwd


@triton.jit
def begin_fwd_kernel(
    raw_ptr, raw_stride, gain_ptr, q_ptr, q_stride, m_ptr, l_ptr, o_ptr, rows,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Query of a row from the products q, k, v (3 D), and its softmax state over its temporary pair alone."""
    H: tl.constexpr = D // K
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    raw_ptr += layer * raw_stride + row * 3 * D
    q_1E = tl.load(raw_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    k_1E = tl.load(raw_ptr + D + e_1E, e_1E < D, 0.0).to(tl.float32)
    v_1E = tl.load(raw_ptr + 2 * D + e_1E, e_1E < D, 0.0)
    if NORM:
        q_1E *= rms(q_1E, D)[:, None] * tl.load(gain_ptr + layer * D + e_1E, e_1E < D, 0.0)
        k_1E *= rms(k_1E, D)[:, None]
    q_1E = q_1E.to(v_1E.dtype)
    tl.store(q_ptr + layer * q_stride + row * D + e_1E, q_1E, e_1E < D)
    s_1E = q_1E.to(tl.float32) * k_1E.to(v_1E.dtype).to(tl.float32)
    h = tl.arange(0, E // K)
    at = (layer * rows + row) * H + h
    tl.store(m_ptr + at, tl.sum(tl.reshape(s_1E, [E // K, K]), 1) * (K**-0.5 * LOG2E), h < H)
    tl.store(l_ptr + at, tl.full([E // K], 1.0, tl.float32), h < H)
    tl.store(o_ptr + (layer * rows + row) * D + e_1E, v_1E, e_1E < D)


@triton.jit(do_not_specialize=["B", "N", "t"])
def attend_fwd_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, o_ptr, slopes_ptr, a_ptr, lse_ptr, B, N, t,
    D: tl.constexpr, K: tl.constexpr, J: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Position t of a chunk, in G heads of a row, attends to the chunk's t <= J positions before it.

    Pointers are to the chunk's first position; layers are N rows apart, their softmax states S * B.
    """
    H: tl.constexpr = D // K
    layer = (tl.program_id(0) // B).to(tl.int64)
    row = layer * N + tl.program_id(0) % B
    state = layer * S * B + tl.program_id(0) % B + t * B
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]
    j = tl.arange(0, J)
    at_JGK = (row + j[:, None, None] * B) * D + hk_GK[None, :, :]
    past_JGK = (j < t)[:, None, None] & live_G1[None, :, :]
    k_JGK = tl.load(k_ptr + at_JGK, past_JGK, 0.0)
    v_JGK = tl.load(v_ptr + at_JGK, past_JGK, 0.0)
    q_GK = tl.load(q_ptr + (row + t * B) * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
    m_G = tl.load(m_ptr + state * H + head, head < H, 0.0)
    l_G = tl.load(l_ptr + state * H + head, head < H, 1.0)
    o_GK = tl.load(o_ptr + state * D + hk_GK, live_G1, 0.0)
    s_JG = tl.sum(q_GK[None, :, :] * k_JGK.to(tl.float32), 2) + slope_G[None, :] * (j - t)[:, None]
    s_JG = tl.where((j < t)[:, None], s_JG, MASKED)
    top_G = tl.maximum(m_G, tl.max(s_JG, 0))
    p_JG, shrink_G = tl.exp2(s_JG - top_G[None, :]), tl.exp2(m_G - top_G)
    l_G = l_G * shrink_G + tl.sum(p_JG, 0)
    o_GK = o_GK * shrink_G[:, None] + tl.sum(p_JG[:, :, None] * v_JGK.to(tl.float32), 0)
    tl.store(a_ptr + (row + t * B) * D + hk_GK, o_GK / l_G[:, None], live_G1)
    tl.store(lse_ptr + (row + t * B) * H + head, top_G + tl.log2(l_G), head < H)


@triton.jit
def add_norm_fwd_kernel(
    x_ptr, x_stride, y_ptr, y_stride, u_ptr, u_stride, n_ptr, n_stride, r_ptr, r_stride, scale,
    D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row of a layer: u = x + scale y, the reciprocal r of its root mean square, and n = u r. Strides are layers'.

    Without y, u = x; without NORM, n = u. u leaves where there is room for it.
    """
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = row * D + e_1E
    u_1E = tl.load(x_ptr + layer * x_stride + at_1E, e_1E < D, 0.0)
    if y_ptr is not None:
        u_1E += scale * tl.load(y_ptr + layer * y_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
    if u_ptr is not None:
        tl.store(u_ptr + layer * u_stride + at_1E, u_1E, e_1E < D)
    if NORM:
        r_1 = rms(u_1E, D)
        u_1E *= r_1[:, None]
        tl.store(r_ptr + layer * r_stride + row + tl.arange(0, 1), r_1)
    tl.store(n_ptr + layer * n_stride + at_1E, u_1E, e_1E < D)


@triton.jit
def gelu_fwd_kernel(h_ptr, total, W: tl.constexpr):
    """GELU of W numbers, in place."""
    at_W = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    h_W = tl.load(h_ptr + at_W, at_W < total, 0.0).to(tl.float32)
    below_W, _ = normal_cdf(h_W)
    tl.store(h_ptr + at_W, h_W * below_W, at_W < total)


@triton.jit
def pair_fwd_kernel(
    raw_ptr, raw_stride, k_ptr, v_ptr, stride, r_ptr, r_stride, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The persistent pair of a row from the products k, v (2 D); and r of the norm of k."""
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    raw_ptr += layer * raw_stride + row * 2 * D
    k_1E = tl.load(raw_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    v_1E = tl.load(raw_ptr + D + e_1E, e_1E < D, 0.0)
    if NORM:
        r_1 = rms(k_1E, D)
        k_1E *= r_1[:, None]
        tl.store(r_ptr + layer * r_stride + row + tl.arange(0, 1), r_1)
    tl.store(k_ptr + layer * stride + row * D + e_1E, k_1E, e_1E < D)
    tl.store(v_ptr + layer * stride + row * D + e_1E, v_1E, e_1E < D)


@triton.jit(do_not_specialize=["B", "N", "t"])
def attend_bwd_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, da_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, slopes_ptr, dkv_ptr, B, N, t,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, G: tl.constexpr, J: tl.constexpr,
    QUERY: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """G heads of a row: finds delta of position t + 1 (QUERY); the pair of position t pulls its gradients (PULL).

    At most J queries of a chunk of C come after t + 1. ``dk`` and ``dv`` have what later chunks sent back; the
    gradients leave side by side in ``dkv``. Pointers are to the chunk's first position; layers are N rows apart, or
    S * B where a buffer has a group.
    """
    H: tl.constexpr = D // K
    layer = (tl.program_id(0) // B).to(tl.int64)
    row = layer * N + tl.program_id(0) % B + t * B
    state = layer * S * B + tl.program_id(0) % B + t * B
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]
    # Reading comes first, so that a program waits for memory once.
    if PULL:
        k_GK = tl.load(k_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
        v_GK = tl.load(v_ptr + row * D + hk_GK, live_G1, 0.0).to(tl.float32)
        dk_GK = tl.load(dk_ptr + state * D + hk_GK, live_G1, 0.0)
        dv_GK = tl.load(dv_ptr + state * D + hk_GK, live_G1, 0.0)
        slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
        if QUERY:
            i = 2 + tl.arange(0, J)
            later_JG = (t + i < C)[:, None] & (head < H)[None, :]
            at_JGK = (row + i[:, None, None] * B) * D + hk_GK[None, :, :]
            at_JG = (row + i[:, None] * B) * H + head[None, :]
            q_JGK = tl.load(q_ptr + at_JGK, later_JG[:, :, None], 0.0)
            da_JGK = tl.load(da_ptr + at_JGK, later_JG[:, :, None], 0.0)
            lse_JG = tl.load(lse_ptr + at_JG, later_JG, 0.0)
            delta_JG = tl.load(delta_ptr + at_JG, later_JG, 0.0)
            q_GK = tl.load(q_ptr + (row + B) * D + hk_GK, live_G1, 0.0).to(tl.float32)
            lse_G = tl.load(lse_ptr + (row + B) * H + head, head < H, 0.0)
    if QUERY:
        da_GK = tl.load(da_ptr + (row + B) * D + hk_GK, live_G1, 0.0).to(tl.float32)
        a_GK = tl.load(a_ptr + (row + B) * D + hk_GK, live_G1, 0.0).to(tl.float32)
        delta_G = tl.sum(da_GK * a_GK, 1)
        tl.store(delta_ptr + (row + B) * H + head, delta_G, head < H)
    if PULL:
        if QUERY:
            p_G = tl.exp2(tl.sum(q_GK * k_GK, 1) - slope_G - lse_G)
            ds_G = p_G * (tl.sum(da_GK * v_GK, 1) - delta_G)
            s_JG = tl.sum(q_JGK.to(tl.float32) * k_GK[None, :, :], 2) - slope_G[None, :] * i[:, None]
            p_JG = tl.where(later_JG, tl.exp2(s_JG - lse_JG), 0.0)
            ds_JG = p_JG * (tl.sum(da_JGK.to(tl.float32) * v_GK[None, :, :], 2) - delta_JG)
            dv_GK += p_G[:, None] * da_GK + tl.sum(p_JG[:, :, None] * da_JGK.to(tl.float32), 0)
            dk_GK += ds_G[:, None] * q_GK + tl.sum(ds_JG[:, :, None] * q_JGK.to(tl.float32), 0)
        tl.store(dkv_ptr + state * 2 * D + hk_GK, dk_GK * K**-0.5, live_G1)
        tl.store(dkv_ptr + state * 2 * D + D + hk_GK, dv_GK, live_G1)


@triton.jit
def pair_bwd_kernel(
    dkv_ptr, dkv_stride, k_ptr, k_stride, r_ptr, r_stride, D: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """A row's gradient of k, the first half of dkv, becomes that of the product before its norm."""
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    dk_ptr = dkv_ptr + layer * dkv_stride + row * 2 * D
    dk_1E = tl.load(dk_ptr + e_1E, e_1E < D, 0.0).to(tl.float32)
    k_1E = tl.load(k_ptr + layer * k_stride + row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    r_1 = tl.load(r_ptr + layer * r_stride + row + tl.arange(0, 1))
    tl.store(dk_ptr + e_1E, rms_bwd(dk_1E, k_1E, r_1, D), e_1E < D)


@triton.jit
def add_norm_bwd_kernel(
    d_ptr, d_stride, dn_ptr, dn_stride, n_ptr, n_stride, r_ptr, r_stride, du_ptr, du_stride, low_ptr, low_stride, scale,
    D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row of a layer: gradient of u, ``d`` plus that through its norm; scale times it too, where there is room."""
    layer, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = row * D + e_1E
    dn_1E = tl.load(dn_ptr + layer * dn_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
    d_1E = tl.load(d_ptr + layer * d_stride + at_1E, e_1E < D, 0.0)
    if NORM:
        n_1E = tl.load(n_ptr + layer * n_stride + at_1E, e_1E < D, 0.0).to(tl.float32)
        r_1 = tl.load(r_ptr + layer * r_stride + row + tl.arange(0, 1))
        dn_1E = rms_bwd(dn_1E, n_1E, r_1, D)
    d_1E += dn_1E
    tl.store(du_ptr + layer * du_stride + at_1E, d_1E, e_1E < D)
    if low_ptr is not None:
        tl.store(low_ptr + layer * low_stride + at_1E, d_1E * scale, e_1E < D)


@triton.jit
def gelu_bwd_kernel(
    dg_ptr, dg_stride, h_ptr, h_stride, dh_ptr, dh_stride, F: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """W channels of a row: gradient of h from that of its GELU, which takes the place of h."""
    layer, row = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * W + tl.arange(0, W)
    h_ptr += layer * h_stride + row * F
    h_W = tl.load(h_ptr + f, f < F, 0.0).to(tl.float32)
    below_W, bell_W = normal_cdf(h_W)
    dg_W = tl.load(dg_ptr + layer * dg_stride + row * F + f, f < F, 0.0).to(tl.float32)
    tl.store(dh_ptr + layer * dh_stride + row * F + f, dg_W * (below_W + h_W * bell_W * 0.3989422804014327), f < F)
    tl.store(h_ptr + f, h_W * below_W, f < F)


@triton.jit(do_not_specialize=["B"])
def begin_bwd_kernel(
    raw_ptr, raw_stride, gain_ptr, da_ptr, stride, lse_ptr, delta_ptr, dq_ptr, draw_ptr, dgain_ptr, B,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gradients of the products q, k, v (3 D) of a row at C positions of a group; those of the gain are added up.

    ``dq`` has what persistent pairs send; here the temporary pair's part is added.
    """
    H: tl.constexpr = D // K
    layer, part, row = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    here = e_1E < D
    h = tl.arange(0, E // K)
    unit = K**-0.5
    if NORM:
        gain_1E = tl.load(gain_ptr + layer * D + e_1E, here, 0.0)
        at_gain_1E = ((layer * (S // C) + part) * B + row) * D + e_1E
        dgain_1E = tl.load(dgain_ptr + at_gain_1E, here, 0.0)
    for i in range(C):
        at = (part * C + i) * B + row
        group = layer * S * B + at
        raw_at_1E = layer * raw_stride + at * 3 * D + e_1E
        q_1E = tl.load(raw_ptr + raw_at_1E, here, 0.0).to(tl.float32)
        k_1E = tl.load(raw_ptr + raw_at_1E + D, here, 0.0).to(tl.float32)
        v_1E = tl.load(raw_ptr + raw_at_1E + 2 * D, here, 0.0)
        da_1E = tl.load(da_ptr + layer * stride + at * D + e_1E, here, 0.0).to(tl.float32)
        lse_H = tl.load(lse_ptr + layer * (stride // K) + at * H + h, h < H, 0.0)
        delta_H = tl.load(delta_ptr + layer * (stride // K) + at * H + h, h < H, 0.0)
        dq_1E = tl.load(dq_ptr + group * D + e_1E, here, 0.0).to(tl.float32)
        low = v_1E.dtype
        v_1E = v_1E.to(tl.float32)
        if NORM:
            rq_1, rk_1 = rms(q_1E, D), rms(k_1E, D)
            nq_1E, nk_1E = q_1E * rq_1[:, None], k_1E * rk_1[:, None]
            q_1E, k_1E = nq_1E * gain_1E, nk_1E
        q_1E, k_1E = q_1E.to(low).to(tl.float32), k_1E.to(low).to(tl.float32)
        s_H = tl.sum(tl.reshape(q_1E * k_1E, [E // K, K]), 1) * (unit * LOG2E)
        p_H = tl.exp2(s_H - lse_H)
        ds_H = p_H * (tl.sum(tl.reshape(da_1E * v_1E, [E // K, K]), 1) - delta_H) * unit
        p_1E = tl.reshape(tl.broadcast_to(p_H[:, None], [E // K, K]), [1, E])
        ds_1E = tl.reshape(tl.broadcast_to(ds_H[:, None], [E // K, K]), [1, E])
        dq_1E += ds_1E * k_1E
        dk_1E = ds_1E * q_1E
        if NORM:
            dgain_1E += dq_1E * nq_1E
            dq_1E = rms_bwd(dq_1E * gain_1E, nq_1E, rq_1, D)
            dk_1E = rms_bwd(dk_1E, nk_1E, rk_1, D)
        tl.store(draw_ptr + group * 3 * D + e_1E, dq_1E, here)
        tl.store(draw_ptr + group * 3 * D + D + e_1E, dk_1E, here)
        tl.store(draw_ptr + group * 3 * D + 2 * D + e_1E, p_1E * da_1E, here)
    if NORM:
        tl.store(dgain_ptr + at_gain_1E, dgain_1E, here)
