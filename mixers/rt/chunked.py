"""The Recurrent Transformer's recurrence for wide models: two levels of time, products by the library, the rest fused.

For models whose products fill a GPU (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). Time is split in chunks.
At the start of a chunk one kernel lets its queries attend to all earlier chunks; then the positions of the chunk follow
one another, and only the keys of the chunk itself remain. A position is four matrix products and four kernels between
them: attention and the pair before it; residual and norm; GELU; residual and norm. The backward mirrors this from the
last position to the first with as many of each. What does not wait for the next position back (weight gradients,
gradients of queries and temporary pairs) are products over all positions after the loop. No atomics: results repeat
bitwise. Thousands of small launches: meant to be captured in a CUDA graph.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions); rows are sequences of all runs.
Logits are kept in units of log2. Buffers named ``now`` hold one position of all rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.kernels import EPS, LOG2E, MASKED, norm_fwd_kernel, normal_cdf, rms, rms_bwd, rows_product
from mixers.rt.kernels import as_operands, gains, past_bwd_kernel, past_fwd_kernel, query_bwd_kernel
from mixers.rt.naive import Weights

CHUNK = 16
HEAD_DIMS = (16, 32, 64, 128)

# Tiles, the fastest of those tried on an H200.
PAST: dict[str, Any] = {"G": 1, "J": 64, "num_warps": 1}
QUERY_BWD: dict[str, Any] = {"C": 64, "G": 1, "J": 64, "num_warps": 4}
ATTEND_FWD: dict[str, Any] = {"G": 1, "num_warps": 1}
ATTEND_BWD: dict[str, Any] = {"J": 4, "STAGES": 1, "num_warps": 4}
ROW: dict[str, Any] = {"num_warps": 4}
GELU: dict[str, Any] = {"W": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["B", "T", "start", "t"])
def attend_fwd_kernel(
    q_ptr, m_ptr, l_ptr, o_ptr, slopes_ptr, now_ptr, gain_ptr, raw_ptr, k_ptr, v_ptr, a_ptr, lse_ptr, a_now_ptr,
    B, T, start, t,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    K_NORM: tl.constexpr, PAIR: tl.constexpr, ATTEND: tl.constexpr,
):  # fmt: skip
    """G heads of a row: the pair of position t - 1 (PAIR), then attention of position t to its chunk (ATTEND).

    ``now`` has the products k, v (2 D) of position t - 1; a program reads all of k for the norm's statistic, and
    finishes the channels of its heads.
    """
    H: tl.constexpr = D // K
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]
    cd = k_ptr.dtype.element_ty
    # All that is there already is read at first, so that a program waits for memory once.
    if PAIR:
        k_GK = tl.load(now_ptr + row * 2 * D + hk_GK, live_G1, 0.0).to(tl.float32)
        v_GK = tl.load(now_ptr + row * 2 * D + D + hk_GK, live_G1, 0.0)
        if K_NORM:
            e = tl.arange(0, E)
            raw_E = tl.load(now_ptr + row * 2 * D + e, e < D, 0.0).to(tl.float32)
            gain_GK = tl.load(gain_ptr + row // B * D + hk_GK, live_G1, 0.0)
    if ATTEND:
        slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
        q_GK = tl.load(q_ptr + (row * T + t) * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
        at_G = (row * C + t - start) * H + head
        m_G = tl.load(m_ptr + at_G, head < H, 0.0)
        l_G = tl.load(l_ptr + at_G, head < H, 1.0)
        o_GK = tl.load(o_ptr + (row * C + t - start) * D + hk_GK, live_G1, 0.0)
        if PAIR:
            j = start + tl.arange(0, C)
            past_C = j < t - 1
            at_GCK = (row * T + j[None, :, None]) * D + hk_GK[:, None, :]
            past_GCK = past_C[None, :, None] & live_G1[:, :, None]
            k_GCK = tl.load(k_ptr + at_GCK, past_GCK, 0.0)
            v_GCK = tl.load(v_ptr + at_GCK, past_GCK, 0.0)
    if PAIR:
        at_GK = (row * T + t - 1) * D + hk_GK
        if K_NORM:
            tl.store(raw_ptr + at_GK, k_GK.to(cd), live_G1)
            k_GK *= tl.rsqrt(tl.sum(raw_E * raw_E, 0) / D + EPS) * gain_GK
        k_GK = k_GK.to(cd)
        tl.store(k_ptr + at_GK, k_GK, live_G1)
        tl.store(v_ptr + at_GK, v_GK, live_G1)
    if ATTEND:
        if PAIR:
            s_G = tl.sum(q_GK * k_GK.to(tl.float32), 1) - slope_G
            s_GC = tl.sum(q_GK[:, None, :] * k_GCK.to(tl.float32), 2) + slope_G[:, None] * (j - t)[None, :]
            s_GC = tl.where(past_C[None, :], s_GC, MASKED)
            top_G = tl.maximum(tl.maximum(m_G, s_G), tl.max(s_GC, 1))
            p_G, p_GC, shrink_G = tl.exp2(s_G - top_G), tl.exp2(s_GC - top_G[:, None]), tl.exp2(m_G - top_G)
            l_G = l_G * shrink_G + p_G + tl.sum(p_GC, 1)
            o_GK = o_GK * shrink_G[:, None] + p_G[:, None] * v_GK.to(tl.float32)
            o_GK += tl.sum(p_GC[:, :, None] * v_GCK.to(tl.float32), 1)
            m_G = top_G
        a_GK = (o_GK / l_G[:, None]).to(cd)
        tl.store(a_ptr + (row * T + t) * D + hk_GK, a_GK, live_G1)
        tl.store(a_now_ptr + row * D + hk_GK, a_GK, live_G1)
        tl.store(lse_ptr + (row * T + t) * H + head, m_G + tl.log2(l_G), head < H)


@triton.jit(do_not_specialize=["B", "T", "t"])
def add_norm_fwd_kernel(
    x_ptr, y_ptr, gain_ptr, u_ptr, n_ptr, B, T, t, scale, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Position t of a row: u = x + scale y for ``y`` of now, and its norm n into now."""
    row = tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = (row * T + t) * D + e_1E
    y_1E = tl.load(y_ptr + row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    u_1E = tl.load(x_ptr + at_1E, e_1E < D, 0.0) + scale * y_1E
    tl.store(u_ptr + at_1E, u_1E, e_1E < D)
    if NORM:
        u_1E *= rms(u_1E, D)[:, None] * tl.load(gain_ptr + row // B * D + e_1E, e_1E < D, 0.0)
    tl.store(n_ptr + row * D + e_1E, u_1E, e_1E < D)


@triton.jit(do_not_specialize=["B", "T", "t"])
def add_norm_bwd_kernel(
    d_ptr, dn_ptr, u_ptr, gain_ptr, du_ptr, low_ptr, now_ptr, B, T, t, scale,
    D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Position t of a row: gradient of u, ``d`` plus that through its norm; scale times it is kept and put into now."""
    row = tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    at_1E = (row * T + t) * D + e_1E
    dn_1E = tl.load(dn_ptr + row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    d_1E = tl.load(d_ptr + at_1E, e_1E < D, 0.0)
    if NORM:
        u_1E = tl.load(u_ptr + at_1E, e_1E < D, 0.0)
        gain_1E = tl.load(gain_ptr + row // B * D + e_1E, e_1E < D, 0.0)
        r_1 = rms(u_1E, D)
        dn_1E = rms_bwd(dn_1E * gain_1E, u_1E * r_1[:, None], r_1, D)
    d_1E += dn_1E
    tl.store(du_ptr + at_1E, d_1E, e_1E < D)
    d_1E *= scale
    tl.store(low_ptr + at_1E, d_1E, e_1E < D)
    tl.store(now_ptr + row * D + e_1E, d_1E, e_1E < D)


@triton.jit(do_not_specialize=["T", "t"])
def gelu_fwd_kernel(now_ptr, h_ptr, T, t, F: tl.constexpr, W: tl.constexpr):
    """W channels of position t of a row: keeps what is in now and puts its GELU there."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * W + tl.arange(0, W)
    h_W = tl.load(now_ptr + row * F + f, f < F, 0.0)
    tl.store(h_ptr + (row * T + t) * F + f, h_W, f < F)
    h_W = h_W.to(tl.float32)
    below_W, _ = normal_cdf(h_W)
    tl.store(now_ptr + row * F + f, h_W * below_W, f < F)


@triton.jit(do_not_specialize=["T", "t"])
def gelu_bwd_kernel(now_ptr, h_ptr, dh_ptr, T, t, F: tl.constexpr, W: tl.constexpr):
    """W channels of position t of a row: gradient in now times the slope of GELU, kept and put into now."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * W + tl.arange(0, W)
    at_W = (row * T + t) * F + f
    h_W = tl.load(h_ptr + at_W, f < F, 0.0).to(tl.float32)
    below_W, bell_W = normal_cdf(h_W)
    d_W = tl.load(now_ptr + row * F + f, f < F, 0.0).to(tl.float32) * (below_W + h_W * bell_W * 0.3989422804014327)
    tl.store(dh_ptr + at_W, d_W, f < F)
    tl.store(now_ptr + row * F + f, d_W, f < F)


@triton.jit(do_not_specialize=["B", "T", "start", "stop", "t"])
def attend_bwd_kernel(
    q_ptr, a_ptr, k_ptr, v_ptr, raw_ptr, da_now_ptr, da_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, gain_ptr,
    dgain_ptr, dkv_ptr, now_ptr, B, T, start, stop, t,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, HP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr,
    K_NORM: tl.constexpr, QUERY: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """A row: da of position t + 1 comes in (QUERY), then the pair of position t pulls its gradients (PULL).

    HP is the power of two from the number of heads on. ``dk`` and ``dv`` hold what later chunks sent back.
    """
    H: tl.constexpr = D // K
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    live_H = head < H
    hk_HK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_H1 = live_H[:, None]
    at_HK = (row * T + t) * D + hk_HK
    # All that is there already is read at first, so that a program waits for memory once.
    if QUERY:
        da_low_HK = tl.load(da_now_ptr + row * D + hk_HK, live_H1, 0.0)
        a_HK = tl.load(a_ptr + at_HK + D, live_H1, 0.0).to(tl.float32)
    if PULL:
        k_HK = tl.load(k_ptr + at_HK, live_H1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
        v_HK = tl.load(v_ptr + at_HK, live_H1, 0.0).to(tl.float32)
        dk_HK = tl.load(dk_ptr + (row * C + t - start) * D + hk_HK, live_H1, 0.0)
        dv_HK = tl.load(dv_ptr + (row * C + t - start) * D + hk_HK, live_H1, 0.0)
        slope_H = tl.load(slopes_ptr + head, live_H, 0.0) * LOG2E
        if QUERY:
            q_HK = tl.load(q_ptr + at_HK + D, live_H1, 0.0).to(tl.float32)
            lse_H = tl.load(lse_ptr + (row * T + t + 1) * H + head, live_H, 0.0)
        if K_NORM:
            raw_HK = tl.load(raw_ptr + at_HK, live_H1, 0.0).to(tl.float32)
            gain_HK = tl.load(gain_ptr + row // B * D + hk_HK, live_H1, 0.0)
            dgain_at_HK = dgain_ptr + row * D + hk_HK
            dgain_HK = tl.load(dgain_at_HK, live_H1, 0.0)
    if QUERY:
        tl.store(da_ptr + at_HK + D, da_low_HK, live_H1)
        da_HK = da_low_HK.to(tl.float32)
        delta_H = tl.sum(da_HK * a_HK, 1)
        tl.store(delta_ptr + (row * T + t + 1) * H + head, delta_H, live_H)
    if PULL:
        if QUERY:
            p_H = tl.exp2(tl.sum(q_HK * k_HK, 1) - slope_H - lse_H)
            ds_H = p_H * (tl.sum(da_HK * v_HK, 1) - delta_H)
            dv_HK += p_H[:, None] * da_HK
            dk_HK += ds_H[:, None] * q_HK
            for first in tl.range(t + 2, stop, J, num_stages=STAGES):
                i = first + tl.arange(0, J)
                at_HJK = (row * T + i[None, :, None]) * D + hk_HK[:, None, :]
                later_HJ = live_H[:, None] & (i < stop)[None, :]
                later_HJK = (i < stop)[None, :, None] & live_H1[:, None, :]
                q_HJK = tl.load(q_ptr + at_HJK, later_HJK, 0.0).to(tl.float32)
                da_HJK = tl.load(da_ptr + at_HJK, later_HJK, 0.0).to(tl.float32)
                at_HJ = (row * T + i[None, :]) * H + head[:, None]
                lse_HJ = tl.load(lse_ptr + at_HJ, later_HJ, 0.0)
                delta_HJ = tl.load(delta_ptr + at_HJ, later_HJ, 0.0)
                s_HJ = tl.sum(q_HJK * k_HK[:, None, :], 2) + slope_H[:, None] * (t - i)[None, :]
                p_HJ = tl.where(later_HJ, tl.exp2(s_HJ - lse_HJ), 0.0)
                ds_HJ = p_HJ * (tl.sum(da_HJK * v_HK[:, None, :], 2) - delta_HJ)
                dv_HK += tl.sum(p_HJ[:, :, None] * da_HJK, 1)
                dk_HK += tl.sum(ds_HJ[:, :, None] * q_HJK, 1)
        dk_HK *= K**-0.5
        if K_NORM:
            r = tl.rsqrt(tl.sum(tl.sum(raw_HK * raw_HK, 1), 0) / D + EPS)
            raw_HK *= r
            tl.store(dgain_at_HK, dgain_HK + dk_HK * raw_HK, live_H1)
            dk_HK *= gain_HK
            dk_HK = r * (dk_HK - raw_HK * (tl.sum(tl.sum(dk_HK * raw_HK, 1), 0) / D))
        at_HK = (row * T + t) * 2 * D + hk_HK
        tl.store(dkv_ptr + at_HK, dk_HK, live_H1)
        tl.store(dkv_ptr + at_HK + D, dv_HK, live_H1)
        tl.store(now_ptr + row * 2 * D + hk_HK, dk_HK, live_H1)
        tl.store(now_ptr + row * 2 * D + D + hk_HK, dv_HK, live_H1)


def unsupported(D: int, H: int, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this implementation cannot take a case, in words; None if it can. ``dtype`` is that of q, k and v."""
    if block != 1:
        return f"blocks of {block} positions (kernels are written for blocks of 1)"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} (kernels compute in float32 or bfloat16)"
    if D % H or D // H not in HEAD_DIMS:
        return f"{H} heads of width {D} (kernels: head dim {', '.join(map(str, HEAD_DIMS))})"
    if device.type != "cuda" and not (triton.knobs.runtime.interpret and dtype == torch.float32):
        return f"{dtype} on {device.type} (kernels: cuda; TRITON_INTERPRET=1 lends them the CPU in float32 alone)"
    return None


def chunked_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs z (R, B, T, D) in float32 and what ``chunked_backward`` wants as ``saved``.

    Arguments are those of ``naive_recurrence`` with a leading run axis, also on every weight; x and weights float32.
    Products are computed in the dtype of q, k, v (float32 or bfloat16).
    """
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    if reason := unsupported(D, H, block, dtype, x_RBTD.device):
        raise ValueError(f"no kernel for {reason}")
    x, q, kt, vt = (y.contiguous() for y in (x_RBTD, q_RBTD, k_RBTD, v_RBTD))
    wo, up, down, wk, wv = (w.mT for w in as_operands(weights, dtype))
    wkv = torch.cat([wk, wv], dim=2)
    mlp_norm, kv_norm, k_norm = gains(weights)
    slopes = slopes_H.to(x)
    z, u = torch.empty_like(x), torch.empty_like(x)
    a, raw, k, v = (torch.empty_like(q) for _ in range(4))
    h = q.new_empty(R, B, T, F)
    lse = x.new_empty(R, B, T, H)
    m, l = x.new_empty(R, B, CHUNK, H), x.new_empty(R, B, CHUNK, H)
    o = x.new_empty(R, B, CHUNK, D)
    a_now, y_now, n_now, h_now, kv_now = (q.new_empty(R, B, n) for n in (D, D, D, F, 2 * D))
    rows, dims = R * B, {"D": D, "K": D // H}
    row = {"D": D, "E": triton.next_power_of_2(D), **ROW}

    def attend(start: int, t: int, pair: bool, attend: bool) -> None:
        attend_fwd_kernel[rows, triton.cdiv(H, ATTEND_FWD["G"])](
            q, m, l, o, slopes, kv_now, k_norm, raw, k, v, a, lse, a_now, B, T, start, t,
            E=row["E"], C=CHUNK, K_NORM=weights.k_norm_D is not None, PAIR=pair, ATTEND=attend, **dims, **ATTEND_FWD,
        )  # fmt: skip

    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        past_fwd_kernel[(rows * H,)](
            q, kt, vt, k, v, slopes, m, l, o, T, start, stop, E=D // H, C=CHUNK, **dims, **PAST
        )  # fmt: skip
        for t in range(start, stop):
            attend(start, t, pair=t > start, attend=True)
            _product(a_now, wo, y_now)
            add_norm_fwd_kernel[(rows,)](x, y_now, mlp_norm, u, n_now, B, T, t, scale, NORM=True, **row)
            _product(n_now, up, h_now)
            gelu_fwd_kernel[rows, triton.cdiv(F, GELU["W"])](h_now, h, T, t, F=F, **GELU)
            _product(h_now, down, y_now)
            add_norm_fwd_kernel[(rows,)](
                u, y_now, kv_norm, z, n_now, B, T, t, scale, NORM=weights.kv_norm_D is not None, **row
            )  # fmt: skip
            _product(n_now, wkv, kv_now)
        attend(start, stop, pair=True, attend=False)
    return z, (a, lse, u, h, raw, k, v)


def chunked_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Gradients of x (float32), q, k, v (their dtype) and of all weights (float32; None where the weight is None)."""
    R, B, T, D = x_RBTD.shape
    H, F, dtype = len(slopes_H), weights.up_FD.shape[1], q_RBTD.dtype
    a, lse, u, h, raw, k, v = saved
    wo, up, down, wk, wv = as_operands(weights, dtype)
    wkv = torch.cat([wk, wv], dim=1)
    mlp_norm, kv_norm, k_norm = gains(weights)
    dz, z, q, kt, vt = (y.contiguous() for y in (dz_RBTD, z_RBTD, q_RBTD, k_RBTD, v_RBTD))
    slopes = slopes_H.to(dz)
    dx = torch.empty_like(dz)
    dq, dkt, dvt, da, du, dy = (torch.empty_like(q) for _ in range(6))
    dh, dkv = torch.empty_like(h), q.new_empty(R, B, T, 2 * D)
    delta = torch.empty_like(lse)
    dk, dv = dz.new_empty(R, B, CHUNK, D), dz.new_empty(R, B, CHUNK, D)
    dk_norm = dz.new_zeros(R, B, D)
    da_now, y_now, n_now, h_now, kv_now = (q.new_empty(R, B, n) for n in (D, D, D, F, 2 * D))
    rows, dims = R * B, {"D": D, "K": D // H}
    row = {"D": D, "E": triton.next_power_of_2(D), **ROW}

    def attend(start: int, stop: int, t: int, query: bool, pull: bool) -> None:
        attend_bwd_kernel[(rows,)](
            q, a, k, v, raw, da_now, da, lse, delta, slopes, dk, dv, k_norm, dk_norm, dkv, kv_now, B, T, start, stop, t,
            C=CHUNK, HP=triton.next_power_of_2(H), K_NORM=weights.k_norm_D is not None, QUERY=query, PULL=pull,
            **dims, **ATTEND_BWD,
        )  # fmt: skip

    for start in reversed(range(0, T, CHUNK)):
        stop = min(start + CHUNK, T)
        past_bwd_kernel[(rows * H,)](
            q, k, v, da, lse, delta, slopes, dk, dv, T, start, stop, E=D // H, C=CHUNK, **dims, **PAST
        )  # fmt: skip
        for t in reversed(range(start, stop)):
            attend(start, stop, t, query=t + 1 < stop, pull=True)
            _product(kv_now, wkv, y_now)
            add_norm_bwd_kernel[(rows,)](
                dz, y_now, z, kv_norm, dx, dy, n_now, B, T, t, scale, NORM=weights.kv_norm_D is not None, **row
            )  # fmt: skip
            _product(n_now, down, h_now)
            gelu_bwd_kernel[rows, triton.cdiv(F, GELU["W"])](h_now, h, dh, T, t, F=F, **GELU)
            _product(h_now, up, y_now)
            add_norm_bwd_kernel[(rows,)](dx, y_now, u, mlp_norm, dx, du, n_now, B, T, t, scale, NORM=True, **row)
            _product(n_now, wo, da_now)
        attend(start, stop, start - 1, query=True, pull=False)
    query_bwd_kernel[rows * H, triton.cdiv(T, QUERY_BWD["C"])](
        q, kt, vt, k, v, da, lse, delta, slopes, dq, dkt, dvt, T, E=D // H, **dims, **QUERY_BWD
    )  # fmt: skip
    dup = rows_product(dh, _normed(u, dtype))
    dwkv = rows_product(dkv, _normed(z, dtype) if weights.kv_norm_D is not None else z.to(dtype))
    wk_wv = torch.cat([weights.wk_DD, weights.wv_DD], dim=1)
    dwk, dwv = (dwkv if weights.kv_norm_D is None else dwkv * kv_norm[:, None]).split(D, dim=1)
    gradients = Weights(
        wo_DD=rows_product(du, a),
        mlp_norm_D=(dup * weights.up_FD).sum(1),
        up_FD=dup * mlp_norm[:, None],
        down_DF=rows_product(dy, torch.nn.functional.gelu(h)),
        kv_norm_D=None if weights.kv_norm_D is None else (dwkv * wk_wv).sum(1),
        wk_DD=dwk,
        k_norm_D=None if weights.k_norm_D is None else dk_norm.sum(1),
        wv_DD=dwv,
    )
    return dx, dq, dkt, dvt, gradients


def _product(y_RBI: Tensor, w_RIO: Tensor, out_RBO: Tensor) -> None:
    if len(y_RBI) == 1:
        torch.mm(y_RBI[0], w_RIO[0], out=out_RBO[0])
    else:
        torch.bmm(y_RBI, w_RIO, out=out_RBO)


def _normed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row over its root mean square."""
    D, normed = y.shape[-1], torch.empty_like(y, dtype=dtype)
    rows, M = y.numel() // D, 4
    norm_fwd_kernel[triton.cdiv(rows, M), 1](
        y, y.new_ones(D), normed, rows, D=D, E=triton.next_power_of_2(D), M=M, num_warps=4
    )  # fmt: skip
    return normed
