"""The Recurrent Transformer's recurrence for wide models: three levels of time, the library's products, the rest fused.

For models whose products fill a GPU (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). Time is split in chunks,
these in groups. At the start of a group one kernel lets its queries attend to all earlier groups, at the start of a
chunk another to the group's earlier chunks; then the positions of the chunk follow one another, and only the keys of
the chunk itself remain. A position is four matrix products and five kernels between them: attention; residual and
norm; GELU; residual and norm; the persistent pair. The backward mirrors this from the
last position to the first with as many of each. What does not wait for the next position back are products over all
positions, before and after that loop: of what the loop needs from the forward only outputs, attention outputs and
persistent pairs are kept (10 bytes a channel in bfloat16, beside inputs), and the rest is computed again. No atomics:
results repeat bitwise. Thousands of small launches: meant to be captured in a CUDA graph.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions); rows are sequences of all runs.
Logits are kept in units of log2. Buffers named ``now`` hold one position of all rows.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.kernels import LOG2E, MASKED, norm_fwd_kernel, normal_cdf, rms, rms_bwd, rows_product
from mixers.rt.kernels import as_operands, gains, past_bwd_kernel, past_fwd_kernel, query_bwd_kernel
from mixers.rt.naive import Weights

CHUNK = 16
GROUP = 64
"""Positions of a chunk, and of a group of chunks."""
HEAD_DIMS = (16, 32, 64, 128)

# Tiles, the fastest of those tried on an H200.
GROUP_TILE: dict[str, Any] = {"C": GROUP, "S": GROUP, "G": 1, "FIRST": True, "num_warps": 4}
CHUNK_TILE: dict[str, Any] = {"C": CHUNK, "S": GROUP, "G": 1, "J": 16, "FIRST": False, "num_warps": 1}
QUERY_TILE: dict[str, Any] = {"C": 64, "G": 1, "num_warps": 4}
ATTEND: dict[str, Any] = {"C": CHUNK, "S": GROUP, "G": 1, "num_warps": 1}
ROW: dict[str, Any] = {"num_warps": 4}
GELU: dict[str, Any] = {"W": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["T", "base", "start", "t"])
def attend_fwd_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, o_ptr, slopes_ptr, a_ptr, lse_ptr, now_ptr, T, base, start, t,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Position t of G heads of a row attends to its chunk's positions before it; the result also goes into now.

    The state of earlier chunks is kept for S positions from ``base`` on.
    """
    H: tl.constexpr = D // K
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]
    j = start + tl.arange(0, C)
    at_CGK = (row * T + j[:, None, None]) * D + hk_GK[None, :, :]
    past_CGK = (j < t)[:, None, None] & live_G1[None, :, :]
    k_CGK = tl.load(k_ptr + at_CGK, past_CGK, 0.0)
    v_CGK = tl.load(v_ptr + at_CGK, past_CGK, 0.0)
    q_GK = tl.load(q_ptr + (row * T + t) * D + hk_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
    at_G = (row * S + t - base) * H + head
    m_G = tl.load(m_ptr + at_G, head < H, 0.0)
    l_G = tl.load(l_ptr + at_G, head < H, 1.0)
    o_GK = tl.load(o_ptr + (row * S + t - base) * D + hk_GK, live_G1, 0.0)
    s_CG = tl.sum(q_GK[None, :, :] * k_CGK.to(tl.float32), 2) + slope_G[None, :] * (j - t)[:, None]
    s_CG = tl.where((j < t)[:, None], s_CG, MASKED)
    top_G = tl.maximum(m_G, tl.max(s_CG, 0))
    p_CG, shrink_G = tl.exp2(s_CG - top_G[None, :]), tl.exp2(m_G - top_G)
    l_G = l_G * shrink_G + tl.sum(p_CG, 0)
    o_GK = o_GK * shrink_G[:, None] + tl.sum(p_CG[:, :, None] * v_CGK.to(tl.float32), 0)
    a_GK = o_GK / l_G[:, None]
    tl.store(a_ptr + (row * T + t) * D + hk_GK, a_GK, live_G1)
    tl.store(now_ptr + row * D + hk_GK, a_GK, live_G1)
    tl.store(lse_ptr + (row * T + t) * H + head, top_G + tl.log2(l_G), head < H)


@triton.jit(do_not_specialize=["B", "T", "t"])
def pair_fwd_kernel(
    now_ptr, gain_ptr, k_ptr, v_ptr, B, T, t, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The pair of position t of a row from the products k, v (2 D) of now."""
    row = tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    k_1E = tl.load(now_ptr + row * 2 * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    v_1E = tl.load(now_ptr + row * 2 * D + D + e_1E, e_1E < D, 0.0)
    if NORM:
        k_1E *= rms(k_1E, D)[:, None] * tl.load(gain_ptr + row // B * D + e_1E, e_1E < D, 0.0)
    tl.store(k_ptr + (row * T + t) * D + e_1E, k_1E, e_1E < D)
    tl.store(v_ptr + (row * T + t) * D + e_1E, v_1E, e_1E < D)


@triton.jit(do_not_specialize=["B"])
def add_norm_fwd_kernel(
    x_ptr, x_stride, y_ptr, gain_ptr, u_ptr, u_stride, n_ptr, B, scale,
    D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One position of a row: u = x + scale y for ``y`` of now, and its norm n into now; strides are those of rows."""
    row = tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    y_1E = tl.load(y_ptr + row * D + e_1E, e_1E < D, 0.0).to(tl.float32)
    u_1E = tl.load(x_ptr + row * x_stride + e_1E, e_1E < D, 0.0) + scale * y_1E
    tl.store(u_ptr + row * u_stride + e_1E, u_1E, e_1E < D)
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


@triton.jit
def gelu_fwd_kernel(now_ptr, total, W: tl.constexpr):
    """GELU of W numbers, in place."""
    at_W = tl.program_id(0) * W + tl.arange(0, W)
    h_W = tl.load(now_ptr + at_W, at_W < total, 0.0).to(tl.float32)
    below_W, _ = normal_cdf(h_W)
    tl.store(now_ptr + at_W, h_W * below_W, at_W < total)


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


@triton.jit(do_not_specialize=["T", "base", "stop", "t"])
def attend_bwd_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, da_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, slopes_ptr, da_now_ptr, dk_now_ptr,
    dkv_ptr, now_ptr, T, base, stop, t,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    QUERY: tl.constexpr, PULL: tl.constexpr,
):  # fmt: skip
    """G heads of a row: da of position t + 1 comes in (QUERY), then the pair of position t pulls its gradients (PULL).

    ``dk`` and ``dv`` have what later chunks sent back, for S positions from ``base`` on. The gradient of v is final
    and goes into the second half of now.
    """
    H: tl.constexpr = D // K
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * G + tl.arange(0, G)
    hk_GK = head[:, None] * K + tl.arange(0, K)[None, :]
    live_G1 = (head < H)[:, None]
    at_GK = (row * T + t) * D + hk_GK
    # Reading comes first, so that a program waits for memory once.
    if PULL:
        k_GK = tl.load(k_ptr + at_GK, live_G1, 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
        v_GK = tl.load(v_ptr + at_GK, live_G1, 0.0).to(tl.float32)
        dk_GK = tl.load(dk_ptr + (row * S + t - base) * D + hk_GK, live_G1, 0.0)
        dv_GK = tl.load(dv_ptr + (row * S + t - base) * D + hk_GK, live_G1, 0.0)
        slope_G = tl.load(slopes_ptr + head, head < H, 0.0) * LOG2E
        if QUERY:
            i = t + 2 + tl.arange(0, C)
            later_CG = (i < stop)[:, None] & (head < H)[None, :]
            at_CGK = (row * T + i[:, None, None]) * D + hk_GK[None, :, :]
            at_CG = (row * T + i[:, None]) * H + head[None, :]
            q_CGK = tl.load(q_ptr + at_CGK, later_CG[:, :, None], 0.0)
            da_CGK = tl.load(da_ptr + at_CGK, later_CG[:, :, None], 0.0)
            lse_CG = tl.load(lse_ptr + at_CG, later_CG, 0.0)
            delta_CG = tl.load(delta_ptr + at_CG, later_CG, 0.0)
            q_GK = tl.load(q_ptr + at_GK + D, live_G1, 0.0).to(tl.float32)
            lse_G = tl.load(lse_ptr + (row * T + t + 1) * H + head, head < H, 0.0)
    if QUERY:
        da_GK = tl.load(da_now_ptr + row * D + hk_GK, live_G1, 0.0)
        a_GK = tl.load(a_ptr + at_GK + D, live_G1, 0.0).to(tl.float32)
        tl.store(da_ptr + at_GK + D, da_GK, live_G1)
        da_GK = da_GK.to(tl.float32)
        delta_G = tl.sum(da_GK * a_GK, 1)
        tl.store(delta_ptr + (row * T + t + 1) * H + head, delta_G, head < H)
    if PULL:
        if QUERY:
            p_G = tl.exp2(tl.sum(q_GK * k_GK, 1) - slope_G - lse_G)
            ds_G = p_G * (tl.sum(da_GK * v_GK, 1) - delta_G)
            s_CG = tl.sum(q_CGK.to(tl.float32) * k_GK[None, :, :], 2) + slope_G[None, :] * (t - i)[:, None]
            p_CG = tl.where(later_CG, tl.exp2(s_CG - lse_CG), 0.0)
            ds_CG = p_CG * (tl.sum(da_CGK.to(tl.float32) * v_GK[None, :, :], 2) - delta_CG)
            dv_GK += p_G[:, None] * da_GK + tl.sum(p_CG[:, :, None] * da_CGK.to(tl.float32), 0)
            dk_GK += ds_G[:, None] * q_GK + tl.sum(ds_CG[:, :, None] * q_CGK.to(tl.float32), 0)
        tl.store(dk_now_ptr + row * D + hk_GK, dk_GK * K**-0.5, live_G1)
        tl.store(dkv_ptr + (row * T + t) * 2 * D + D + hk_GK, dv_GK, live_G1)
        tl.store(now_ptr + row * 2 * D + D + hk_GK, dv_GK, live_G1)


@triton.jit(do_not_specialize=["B", "T", "t"])
def pair_bwd_kernel(
    dk_now_ptr, raw_ptr, gain_ptr, dgain_ptr, dkv_ptr, now_ptr, B, T, t,
    D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gradient of the product k of position t of a row, before its norm, kept and put into the first half of now."""
    row = tl.program_id(0).to(tl.int64)
    e_1E = tl.arange(0, E)[None, :]
    dk_1E = tl.load(dk_now_ptr + row * D + e_1E, e_1E < D, 0.0)
    if NORM:
        raw_1E = tl.load(raw_ptr + (row * T + t) * D + e_1E, e_1E < D, 0.0).to(tl.float32)
        gain_1E = tl.load(gain_ptr + row // B * D + e_1E, e_1E < D, 0.0)
        dgain_1E = tl.load(dgain_ptr + row * D + e_1E, e_1E < D, 0.0)
        r_1 = rms(raw_1E, D)
        raw_1E *= r_1[:, None]
        tl.store(dgain_ptr + row * D + e_1E, dgain_1E + dk_1E * raw_1E, e_1E < D)
        dk_1E = rms_bwd(dk_1E * gain_1E, raw_1E, r_1, D)
    tl.store(dkv_ptr + (row * T + t) * 2 * D + e_1E, dk_1E, e_1E < D)
    tl.store(now_ptr + row * 2 * D + e_1E, dk_1E, e_1E < D)


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
    z = torch.empty_like(x)
    a, k, v = (torch.empty_like(q) for _ in range(3))
    lse = x.new_empty(R, B, T, H)
    m, l = x.new_empty(R, B, GROUP, H), x.new_empty(R, B, GROUP, H)
    o = x.new_empty(R, B, GROUP, D)
    a_now, y_now, n_now, h_now, kv_now = (q.new_empty(R, B, n) for n in (D, D, D, F, 2 * D))
    u_now = x.new_empty(R, B, D)
    rows, dims = R * B, {"D": D, "K": D // H}
    row = {"D": D, "E": triton.next_power_of_2(D), **ROW}

    group_tile = GROUP_TILE | _pairs(D // H)
    past = partial(past_fwd_kernel[(rows * H,)], q, kt, vt, k, v, slopes, m, l, o, T, E=D // H, **dims)
    attend = partial(
        attend_fwd_kernel[rows, triton.cdiv(H, ATTEND["G"])],
        q, k, v, m, l, o, slopes, a, lse, a_now, T, **dims, **ATTEND,
    )  # fmt: skip
    for start in range(0, T, CHUNK):
        stop, base = min(start + CHUNK, T), start - start % GROUP
        if start == base:
            past(0, base, min(base + GROUP, T), base, **group_tile)
        else:
            past(base, start, stop, base, **CHUNK_TILE)
        for t in range(start, stop):
            attend(base, start, t)
            _product(a_now, wo, y_now)
            add_norm_fwd_kernel[(rows,)](
                x[:, :, t], T * D, y_now, mlp_norm, u_now, D, n_now, B, scale, NORM=True, **row
            )  # fmt: skip
            _product(n_now, up, h_now)
            gelu_fwd_kernel[(triton.cdiv(h_now.numel(), GELU["W"]),)](h_now, h_now.numel(), **GELU)
            _product(h_now, down, y_now)
            add_norm_fwd_kernel[(rows,)](
                u_now, D, y_now, kv_norm, z[:, :, t], T * D, n_now, B, scale, NORM=weights.kv_norm_D is not None, **row
            )  # fmt: skip
            _product(n_now, wkv, kv_now)
            pair_fwd_kernel[(rows,)](kv_now, k_norm, k, v, B, T, t, NORM=weights.k_norm_D is not None, **row)
    return z, (a, lse, k, v)


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
    a, lse, k, v = saved
    wo, up, down, wk, wv = as_operands(weights, dtype)
    wkv = torch.cat([wk, wv], dim=1)
    mlp_norm, kv_norm, k_norm = gains(weights)
    dz, x, z, q, kt, vt = (y.contiguous() for y in (dz_RBTD, x_RBTD, z_RBTD, q_RBTD, k_RBTD, v_RBTD))
    slopes = slopes_H.to(dz)
    rows, dims = R * B, {"D": D, "K": D // H}
    row = {"D": D, "E": triton.next_power_of_2(D), **ROW}
    u, n = torch.empty_like(x), torch.empty_like(q)
    add_norm_fwd_kernel[(rows * T,)](
        x, D, _product(a, wo.mT), mlp_norm, u, D, n, B * T, scale, NORM=True, **row
    )  # fmt: skip
    h = _product(n, up.mT)
    del n
    raw = k if weights.k_norm_D is None else _product(_normed_output(z, weights, kv_norm, dtype), wk.mT)
    dx = torch.empty_like(dz)
    da, du, dy = (torch.empty_like(q) for _ in range(3))
    dh, dkv = torch.empty_like(h), q.new_empty(R, B, T, 2 * D)
    delta = torch.empty_like(lse)
    dk, dv = dz.new_empty(R, B, GROUP, D), dz.new_empty(R, B, GROUP, D)
    dk_now, dk_norm = dz.new_empty(R, B, D), dz.new_zeros(R, B, D)
    da_now, y_now, n_now, h_now, kv_now = (q.new_empty(R, B, n) for n in (D, D, D, F, 2 * D))

    group_tile = GROUP_TILE | _pairs(D // H)
    past = partial(past_bwd_kernel[(rows * H,)], q, k, v, da, lse, delta, slopes, dk, dv, T, E=D // H, **dims)
    attend = partial(
        attend_bwd_kernel[rows, triton.cdiv(H, ATTEND["G"])],
        q, k, v, a, da, lse, delta, dk, dv, slopes, da_now, dk_now, dkv, kv_now, T, **dims, **ATTEND,
    )  # fmt: skip
    for start in reversed(range(0, T, CHUNK)):
        stop, base = min(start + CHUNK, T), start - start % GROUP
        end = min(base + GROUP, T)
        if stop == end:
            past(base, end, end, T, base, **group_tile)
        else:
            past(start, stop, stop, end, base, **CHUNK_TILE)
        for t in reversed(range(start, stop)):
            attend(base, stop, t, QUERY=t + 1 < stop, PULL=True)
            pair_bwd_kernel[(rows,)](
                dk_now, raw, k_norm, dk_norm, dkv, kv_now, B, T, t, NORM=weights.k_norm_D is not None, **row
            )  # fmt: skip
            _product(kv_now, wkv, y_now)
            add_norm_bwd_kernel[(rows,)](
                dz, y_now, z, kv_norm, dx, dy, n_now, B, T, t, scale, NORM=weights.kv_norm_D is not None, **row
            )  # fmt: skip
            _product(n_now, down, h_now)
            gelu_bwd_kernel[rows, triton.cdiv(F, GELU["W"])](h_now, h, dh, T, t, F=F, **GELU)
            _product(h_now, up, y_now)
            add_norm_bwd_kernel[(rows,)](dx, y_now, u, mlp_norm, dx, du, n_now, B, T, t, scale, NORM=True, **row)
            _product(n_now, wo, da_now)
        attend(base, stop, start - 1, QUERY=True, PULL=False)
    del raw, attend
    ones = torch.ones_like(mlp_norm)
    dup = rows_product(dh, _normed(u, ones, dtype))
    del dh, u
    ddown = rows_product(dy, torch.nn.functional.gelu(h))
    del dy, h
    dwo = rows_product(du, a)
    del du
    dwkv = rows_product(dkv, _normed_output(z, weights, ones, dtype))
    del dkv, dk, dv, past
    dq, dkt, dvt = (torch.empty_like(q) for _ in range(3))
    query_bwd_kernel[rows * H, triton.cdiv(T, QUERY_TILE["C"])](
        q, kt, vt, k, v, da, lse, delta, slopes, dq, dkt, dvt, T, E=D // H, **dims, **QUERY_TILE, **_pairs(D // H)
    )  # fmt: skip
    wk_wv = torch.cat([weights.wk_DD, weights.wv_DD], dim=1)
    dwk, dwv = (dwkv if weights.kv_norm_D is None else dwkv * kv_norm[:, None]).split(D, dim=1)
    gradients = Weights(
        wo_DD=dwo,
        mlp_norm_D=(dup * weights.up_FD).sum(1),
        up_FD=dup * mlp_norm[:, None],
        down_DF=ddown,
        kv_norm_D=None if weights.kv_norm_D is None else (dwkv * wk_wv).sum(1),
        wk_DD=dwk,
        k_norm_D=None if weights.k_norm_D is None else dk_norm.sum(1),
        wv_DD=dwv,
    )
    return dx, dq, dkt, dvt, gradients


def _pairs(head_dim: int) -> dict[str, int]:
    """Pairs that a tile of queries meets at once: those that fit the shared memory of the smaller GPUs."""
    return {"J": min(64, 4096 // head_dim)}


def _product(y: Tensor, w_RIO: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows y (R, ..., I) times each run's matrix."""
    if len(y) == 1:
        rows = None if out is None else out.flatten(0, -2)
        return torch.mm(y.flatten(0, -2), w_RIO[0], out=rows).view(*y.shape[:-1], w_RIO.shape[-1])
    rows = None if out is None else out.flatten(1, -2)
    return torch.bmm(y.flatten(1, -2), w_RIO, out=rows).view(*y.shape[:-1], w_RIO.shape[-1])


def _normed_output(z: Tensor, weights: Weights, gain_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """What persistent pairs are linear in."""
    return z.to(dtype) if weights.kv_norm_D is None else _normed(z, gain_RD, dtype)


def _normed(y: Tensor, gain_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """RMS norm of each row (R, ..., D)."""
    (R, D), normed = gain_RD.shape, torch.empty_like(y, dtype=dtype)
    rows, M = y.numel() // (R * D), 4
    norm_fwd_kernel[triton.cdiv(rows, M), R](
        y, gain_RD, normed, rows, D=D, E=triton.next_power_of_2(D), M=M, num_warps=4
    )  # fmt: skip
    return normed
