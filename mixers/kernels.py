"""Fused Triton kernels for what layers share: embedding, norms, projections, softmax attention with ALiBi, the MLP.

On small models these parts are bound by memory traffic and by the number of launches, not by arithmetic, so each
kernel does all that can be done to a tile of rows while it is on the chip, and the backward passes compute again what
is cheap. Products are in the dtype of the weights handed in (bfloat16, or float32 in tests), sums and statistics in
float32. There are no atomics: results repeat bitwise. Every operation here is checked against its plain PyTorch form.

Tensors carry a leading run axis R (see ``mixers.base`` for the other dimensions); logits are kept in units of log2.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.base import RMSNorm
from mixers.products import group_sum, rows_products
from mixers.runs import Method, Optionals, Tensors

EPS: tl.constexpr = tl.constexpr(RMSNorm.eps)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MASKED: tl.constexpr = tl.constexpr(-1e30)

# Tiles, the fastest of those tried on an H200 at width 128, length 128, 30 runs.
EMBED_FWD = {"M": 16, "num_warps": 4}
EMBED_BWD = {"M": 32, "num_warps": 4}
PROJECT_FWD = {"M": 64, "num_warps": 4}
PROJECT_BWD = {"M": 32, "num_warps": 4}
MLP_FWD = {"M": 64, "W": 64, "num_warps": 4}
MLP_BWD = {"M": 64, "W": 32, "num_warps": 4}
# The second ones for numbers of 16 bits and head dims from 32 on, at 512 sequences of 512 positions, 16 heads of 64.
ATTENTION_QUERIES = ({"C": 32, "J": 32, "num_warps": 2}, {"C": 64, "J": 32, "num_warps": 4})
ATTENTION_PAIRS = ({"C": 16, "J": 32, "num_warps": 1}, {"C": 64, "J": 32, "num_warps": 4, "num_stages": 1})


@triton.jit
def normal_cdf(h):
    """Standard normal distribution function at h, and exp(-h^2 / 2).

    Abramowitz & Stegun 7.1.26: error under 1.5e-7 at half the instructions of erf, which were a sixth of the forward.
    """
    bell = tl.exp2(h * h * (-0.5 * LOG2E))
    r = 1.0 + tl.abs(h) * (0.3275911 * 0.7071067811865476)
    r = tl.rsqrt(r * r)  # a third of the instructions of a division
    tail = 0.5 * bell * r
    tail *= 0.254829592 + r * (-0.284496736 + r * (1.421413741 + r * (-1.453152027 + r * 1.061405429)))
    return tl.where(h < 0, tail, 1.0 - tail), bell


@triton.jit
def rms(y_MD, D: tl.constexpr):
    """Reciprocal root mean square of each row."""
    return tl.rsqrt(tl.sum(y_MD * y_MD, 1) / D + EPS)


@triton.jit
def rms_bwd(dy_MD, normed_MD, r_M, D: tl.constexpr):
    """Gradient of y for ``normed = y * r`` and gradient ``dy`` of normed."""
    return r_M[:, None] * (dy_MD - normed_MD * (tl.sum(dy_MD * normed_MD, 1) / D)[:, None])


@triton.jit
def embed_fwd_kernel(tokens_ptr, w_ptr, x_ptr, rows, V, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """Rows of w (V, D) at M tokens; E is the power of two from D on."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here = (m < rows)[:, None] & (e < D)[None, :]
    token_M = tl.load(tokens_ptr + run * rows + m, m < rows, 0)
    w_ME = tl.load(w_ptr + (run * V + token_M)[:, None] * D + e[None, :], here, 0.0)
    tl.store(x_ptr + (run * rows + m)[:, None] * D + e[None, :], w_ME, here)


@triton.jit
def embed_bwd_kernel(
    tokens_ptr, dx_ptr, dw_ptr, rows, V, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, U: tl.constexpr
):  # fmt: skip
    """Gradients of U rows of w (V, D), one sum a program: the product of one-hot tokens and the rows' gradients."""
    run = tl.program_id(2).to(tl.int64)
    u = tl.program_id(1) * U + tl.arange(0, U)
    e = tl.arange(0, E)
    dw_UE = tl.zeros([U, E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        m = first + tl.arange(0, M)
        here = (m < rows)[:, None] & (e < D)[None, :]
        token_M = tl.load(tokens_ptr + run * rows + m, m < rows, -1)
        dx_ME = tl.load(dx_ptr + (run * rows + m)[:, None] * D + e[None, :], here, 0.0).to(tl.float32)
        hot_UM = (u[:, None] == token_M[None, :]).to(tl.float32)
        dw_UE = tl.dot(hot_UM, dx_ME, dw_UE, input_precision="tf32x3")
    to_UE = ((run * tl.num_programs(0) + tl.program_id(0)) * V + u)[:, None] * D + e[None, :]
    tl.store(dw_ptr + to_UE, dw_UE, (u < V)[:, None] & (e < D)[None, :])


@triton.jit
def norm_fwd_kernel(x_ptr, gain_ptr, y_ptr, rows, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """RMS norm of M rows; E is the power of two from D on."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here = (m < rows)[:, None] & (e < D)[None, :]
    at_ME = (run * rows + m)[:, None] * D + e[None, :]
    x_ME = tl.load(x_ptr + at_ME, here, 0.0).to(tl.float32)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    tl.store(y_ptr + at_ME, x_ME * rms(x_ME, D)[:, None] * gain_E[None, :], here)


@triton.jit
def norm_bwd_kernel(
    x_ptr, gain_ptr, dy_ptr, dx_ptr, dgain_ptr, rows, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Gradient of the rows; that of the gain leaves as one row of sums a program."""
    run = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, E)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    dgain_E = tl.zeros([E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        m = first + tl.arange(0, M)
        here = (m < rows)[:, None] & (e < D)[None, :]
        at_ME = (run * rows + m)[:, None] * D + e[None, :]
        x_ME = tl.load(x_ptr + at_ME, here, 0.0).to(tl.float32)
        dy_ME = tl.load(dy_ptr + at_ME, here, 0.0).to(tl.float32)
        r_M = rms(x_ME, D)
        x_ME *= r_M[:, None]
        dgain_E += tl.sum(dy_ME * x_ME, 0)
        tl.store(dx_ptr + at_ME, rms_bwd(dy_ME * gain_E[None, :], x_ME, r_M, D), here)
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + e, dgain_E, e < D)


@triton.jit
def project_fwd_kernel(
    x_ptr, gain_ptr, w_ptr, q_gain_ptr, k_gain_ptr, qkv_ptr, rows, total,
    D: tl.constexpr, QK_NORM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values, ``total`` elements each, of M normed rows; queries and keys are normed if QK_NORM."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    live_M1 = (m < rows)[:, None]
    at_MD = (run * rows + m)[:, None] * D + d[None, :]
    x_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    n_MD = (x_MD * rms(x_MD, D)[:, None] * gain_D[None, :]).to(w_ptr.dtype.element_ty)
    for i in tl.static_range(3):
        w_DD = tl.load(w_ptr + (run * 3 + i) * D * D + d[None, :] * D + d[:, None])
        y_MD = tl.dot(n_MD, w_DD, input_precision="ieee")
        if QK_NORM and i < 2:
            y_gain_ptr = q_gain_ptr if i == 0 else k_gain_ptr
            y_MD *= rms(y_MD, D)[:, None] * tl.load(y_gain_ptr + run * D + d)[None, :]
        tl.store(qkv_ptr + i * total.to(tl.int64) + at_MD, y_MD, live_M1)


@triton.jit
def project_bwd_kernel(
    x_ptr, gain_ptr, w_ptr, q_gain_ptr, k_gain_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, n_ptr, draw_ptr, dgain_ptr, rows,
    D: tl.constexpr, QK_NORM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Gradient of the rows; (draw, n), whose product is the weights' gradient; sums for the gradients of the gains."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    live_M1 = (m < rows)[:, None]
    row_M1 = (run * rows + m)[:, None]
    at_MD = row_M1 * D + d[None, :]
    x_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    r_M = rms(x_MD, D)
    x_MD *= r_M[:, None]
    n_MD = (x_MD * gain_D[None, :]).to(w_ptr.dtype.element_ty)
    tl.store(n_ptr + at_MD, n_MD, live_M1)
    to_D = (run * tl.num_programs(0) + tl.program_id(0)) * (3 if QK_NORM else 1) * D + d
    dn_MD = tl.zeros([M, D], tl.float32)
    for i in tl.static_range(3):
        w_DD = tl.load(w_ptr + (run * 3 + i) * D * D + d[:, None] * D + d[None, :])
        dy_ptr = dq_ptr if i == 0 else (dk_ptr if i == 1 else dv_ptr)
        dy_MD = tl.load(dy_ptr + at_MD, live_M1, 0.0).to(tl.float32)
        if QK_NORM and i < 2:
            y_gain_ptr = q_gain_ptr if i == 0 else k_gain_ptr
            y_MD = tl.dot(n_MD, tl.trans(w_DD), input_precision="ieee")
            ry_M = rms(y_MD, D)
            y_MD *= ry_M[:, None]
            tl.store(dgain_ptr + to_D + (i + 1) * D, tl.sum(dy_MD * y_MD, 0))
            dy_MD *= tl.load(y_gain_ptr + run * D + d)[None, :]
            dy_MD = rms_bwd(dy_MD, y_MD, ry_M, D)
        draw_MD = dy_MD.to(w_DD.dtype)
        tl.store(draw_ptr + row_M1 * 3 * D + i * D + d[None, :], draw_MD, live_M1)
        dn_MD = tl.dot(draw_MD, w_DD, dn_MD, input_precision="ieee")
    tl.store(dgain_ptr + to_D, tl.sum(dn_MD * x_MD, 0))
    tl.store(dx_ptr + at_MD, rms_bwd(dn_MD * gain_D[None, :], x_MD, r_M, D), live_M1)


@triton.jit
def mlp_fwd_kernel(
    x_ptr, y_ptr, gain_ptr, up_ptr, down_ptr, z_ptr, rows, scale,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """u = x + scale y; z = u + scale mlp(norm(u)) for M rows, W columns of the hidden layer at a time."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    live_M1 = (m < rows)[:, None]
    at_MD = (run * rows + m)[:, None] * D + d[None, :]
    u_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    u_MD += scale * tl.load(y_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    n_MD = (u_MD * rms(u_MD, D)[:, None] * gain_D[None, :]).to(up_ptr.dtype.element_ty)
    up_ptr += run * F * D
    down_ptr += run * F * D
    out_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        up_DW = tl.load(up_ptr + (f + w)[None, :] * D + d[:, None])
        h_MW = tl.dot(n_MD, up_DW, input_precision="ieee")
        below_MW, _ = normal_cdf(h_MW)
        down_WD = tl.load(down_ptr + d[None, :] * F + (f + w)[:, None])
        out_MD = tl.dot((h_MW * below_MW).to(n_MD.dtype), down_WD, out_MD, input_precision="ieee")
    tl.store(z_ptr + at_MD, u_MD + scale * out_MD, live_M1)


@triton.jit
def mlp_bwd_kernel(
    x_ptr, y_ptr, gain_ptr, up_ptr, down_ptr, dz_ptr, dx_ptr, dy_ptr, n_ptr, dh_ptr, dout_ptr, g_ptr, dgain_ptr,
    rows, scale, D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Gradients of x and y; (dh, n) and (dout, g), whose products are those of up and down; sums for the gain's."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    live_M1 = (m < rows)[:, None]
    row_M1 = (run * rows + m)[:, None]
    at_MD = row_M1 * D + d[None, :]
    u_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    u_MD += scale * tl.load(y_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    r_M = rms(u_MD, D)
    u_MD *= r_M[:, None]
    cd = up_ptr.dtype.element_ty
    n_MD = (u_MD * gain_D[None, :]).to(cd)
    tl.store(n_ptr + at_MD, n_MD, live_M1)
    dz_MD = tl.load(dz_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    dout_MD = (dz_MD * scale).to(cd)
    tl.store(dout_ptr + at_MD, dout_MD, live_M1)
    up_ptr += run * F * D
    down_ptr += run * F * D
    dn_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        up_WD = tl.load(up_ptr + (f + w)[:, None] * D + d[None, :])
        down_DW = tl.load(down_ptr + d[:, None] * F + (f + w)[None, :])
        h_MW = tl.dot(n_MD, tl.trans(up_WD), input_precision="ieee")
        dg_MW = tl.dot(dout_MD, down_DW, input_precision="ieee")
        below_MW, bell_MW = normal_cdf(h_MW)
        at_MW = row_M1 * F + (f + w)[None, :]
        tl.store(g_ptr + at_MW, h_MW * below_MW, live_M1)
        dh_MW = (dg_MW * (below_MW + h_MW * bell_MW * 0.3989422804014327)).to(cd)
        tl.store(dh_ptr + at_MW, dh_MW, live_M1)
        dn_MD = tl.dot(dh_MW, up_WD, dn_MD, input_precision="ieee")
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + d, tl.sum(dn_MD * u_MD, 0))
    dx_MD = dz_MD + rms_bwd(dn_MD * gain_D[None, :], u_MD, r_M, D)
    tl.store(dx_ptr + at_MD, dx_MD, live_M1)
    tl.store(dy_ptr + at_MD, dx_MD * scale, live_M1)


@triton.jit(do_not_specialize=["T"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, a_ptr, lse_ptr, T,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, E: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Causal attention of C positions of one sequence in G heads, and the logarithm of the sum of its weights.

    Rows are (head, position), columns the E = G * K channels of the heads. Queries are zero outside their own head's
    channels, so one product gives the logits of all G heads, and head dims under the 16 of tl.dot cost nothing. Of lse,
    and of delta in the backward, positions lie behind each other (R, B, H, T): pulled gradients need a head's of many.
    """
    group = tl.program_id(0) % (D // E)
    row = (tl.program_id(0) // (D // E)).to(tl.int64)
    start = tl.program_id(1) * C
    head = group * G + tl.arange(0, G * C) // C
    t = start + tl.arange(0, G * C) % C
    channel = group * E + tl.arange(0, E)
    here = (t < T)[:, None] & (channel[None, :] // K == head[:, None])
    at_NE = (row * T + t)[:, None] * D + channel[None, :]
    q_NE = tl.load(q_ptr + at_NE, here, 0.0)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    m_N = tl.full([G * C], MASKED, tl.float32)
    l_N = tl.zeros([G * C], tl.float32)
    o_NE = tl.zeros([G * C, E], tl.float32)
    for first in range(0, tl.minimum(start + C, T), J):
        j = first + tl.arange(0, J)
        at_JE = (row * T + j)[:, None] * D + channel[None, :]
        k_JE = tl.load(k_ptr + at_JE, (j < T)[:, None], 0.0)
        v_JE = tl.load(v_ptr + at_JE, (j < T)[:, None], 0.0)
        s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        s_NJ += slope_N[:, None] * (j[None, :] - t[:, None])
        s_NJ = tl.where(j[None, :] <= t[:, None], s_NJ, MASKED)
        top_N = tl.maximum(m_N, tl.max(s_NJ, 1))
        p_NJ = tl.exp2(s_NJ - top_N[:, None])
        shrink_N = tl.exp2(m_N - top_N)
        l_N = l_N * shrink_N + tl.sum(p_NJ, 1)
        o_NE = tl.dot(p_NJ.to(v_JE.dtype), v_JE, o_NE * shrink_N[:, None], input_precision="ieee")
        m_N = top_N
    tl.store(a_ptr + at_NE, o_NE / l_N[:, None], here)
    tl.store(lse_ptr + (row * (D // K) + head) * T + t, m_N + tl.log2(l_N), t < T)


@triton.jit(do_not_specialize=["T"])
def attention_query_bwd_kernel(
    q_ptr, k_ptr, v_ptr, da_ptr, a_ptr, lse_ptr, slopes_ptr, dq_ptr, delta_ptr, T,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, E: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Gradients of C queries, and delta = da . a of each head; layout as attention_fwd_kernel."""
    group = tl.program_id(0) % (D // E)
    row = (tl.program_id(0) // (D // E)).to(tl.int64)
    start = tl.program_id(1) * C
    head = group * G + tl.arange(0, G * C) // C
    t = start + tl.arange(0, G * C) % C
    channel = group * E + tl.arange(0, E)
    here = (t < T)[:, None] & (channel[None, :] // K == head[:, None])
    at_NE = (row * T + t)[:, None] * D + channel[None, :]
    at_N = (row * (D // K) + head) * T + t
    q_NE = tl.load(q_ptr + at_NE, here, 0.0)
    da_NE = tl.load(da_ptr + at_NE, here, 0.0)
    delta_N = tl.sum(da_NE.to(tl.float32) * tl.load(a_ptr + at_NE, here, 0.0).to(tl.float32), 1)
    tl.store(delta_ptr + at_N, delta_N, t < T)
    lse_N = tl.load(lse_ptr + at_N, t < T, 0.0)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    dq_NE = tl.zeros([G * C, E], tl.float32)
    for first in range(0, tl.minimum(start + C, T), J):
        j = first + tl.arange(0, J)
        at_JE = (row * T + j)[:, None] * D + channel[None, :]
        k_JE = tl.load(k_ptr + at_JE, (j < T)[:, None], 0.0)
        v_JE = tl.load(v_ptr + at_JE, (j < T)[:, None], 0.0)
        s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        s_NJ += slope_N[:, None] * (j[None, :] - t[:, None]) - lse_N[:, None]
        p_NJ = tl.where(j[None, :] <= t[:, None], tl.exp2(s_NJ), 0.0)
        ds_NJ = p_NJ * (tl.dot(da_NE, tl.trans(v_JE), input_precision="ieee") - delta_N[:, None])
        dq_NE = tl.dot(ds_NJ.to(k_JE.dtype), k_JE, dq_NE, input_precision="ieee")
    tl.store(dq_ptr + at_NE, dq_NE * K**-0.5, here)


@triton.jit(do_not_specialize=["T"])
def attention_pair_bwd_kernel(
    q_ptr, k_ptr, v_ptr, da_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, T,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, G: tl.constexpr, E: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of C positions, pulled from later queries; layout as attention_fwd_kernel."""
    H: tl.constexpr = D // K
    blocks = tl.cdiv(T, C)
    start = tl.program_id(0) % blocks * C  # programs that read the same queries follow one another
    group = tl.program_id(0) // blocks % (D // E)
    row = (tl.program_id(0) // blocks // (D // E)).to(tl.int64)
    head = group * G + tl.arange(0, G * C) // C
    t = start + tl.arange(0, G * C) % C
    channel = group * E + tl.arange(0, E)
    here = (t < T)[:, None] & (channel[None, :] // K == head[:, None])
    at_NE = (row * T + t)[:, None] * D + channel[None, :]
    k_NE = tl.load(k_ptr + at_NE, here, 0.0)
    v_NE = tl.load(v_ptr + at_NE, here, 0.0)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    dk_NE = tl.zeros([G * C, E], tl.float32)
    dv_NE = tl.zeros([G * C, E], tl.float32)
    is_first = (head == group * G)[:, None]
    for first in range(start, T, J):
        i = first + tl.arange(0, J)
        at_JE = (row * T + i)[:, None] * D + channel[None, :]
        q_JE = tl.load(q_ptr + at_JE, (i < T)[:, None], 0.0)
        da_JE = tl.load(da_ptr + at_JE, (i < T)[:, None], 0.0)
        at_J = (row * H + group * G) * T + i
        lse_NJ = tl.load(lse_ptr + at_J, i < T, 0.0)[None, :]
        delta_NJ = tl.load(delta_ptr + at_J, i < T, 0.0)[None, :]
        if G == 2:
            lse_NJ = tl.where(is_first, lse_NJ, tl.load(lse_ptr + at_J + T, i < T, 0.0)[None, :])
            delta_NJ = tl.where(is_first, delta_NJ, tl.load(delta_ptr + at_J + T, i < T, 0.0)[None, :])
        s_NJ = tl.dot(k_NE, tl.trans(q_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        s_NJ += slope_N[:, None] * (t[:, None] - i[None, :]) - lse_NJ
        p_NJ = tl.where((t[:, None] <= i[None, :]) & (i < T)[None, :], tl.exp2(s_NJ), 0.0)
        ds_NJ = p_NJ * (tl.dot(v_NE, tl.trans(da_JE), input_precision="ieee") - delta_NJ)
        dv_NE = tl.dot(p_NJ.to(da_JE.dtype), da_JE, dv_NE, input_precision="ieee")
        dk_NE = tl.dot(ds_NJ.to(q_JE.dtype), q_JE, dk_NE, input_precision="ieee")
    tl.store(dk_ptr + at_NE, dk_NE * K**-0.5, here)
    tl.store(dv_ptr + at_NE, dv_NE, here)


def fits_embedding(V: int, D: int) -> bool:
    """Whether ``embedding_method`` takes V rows of this width; it reads gradients once for every 32 rows."""
    return V <= 256 and D <= 256


def fits_project(D: int) -> bool:
    """Whether ``project_method`` takes this width."""
    return D in (32, 64, 128)


def fits_mlp(D: int, F: int) -> bool:
    """Whether ``mlp_method`` takes these widths."""
    return D in (32, 64, 128) and F % 64 == 0


def fits_attention(D: int, H: int) -> bool:
    """Whether ``attention_method`` takes H heads of this width."""
    return D % H == 0 and D // H in (8, 16, 32, 64, 128) and D % 16 == 0


def embedding_method() -> Method:
    """Rows (R, ..., D) of a table at tokens. Tensors: tokens (R, ...) int64 in [0, V), table (R, V, D)."""

    def width(table: Tensor) -> dict[str, int]:
        return {"D": table.shape[2], "E": max(16, triton.next_power_of_2(table.shape[2]))}

    def forward(tokens: Tensor, table: Tensor) -> tuple[Tensors, Tensors]:
        tokens, table = tokens.contiguous(), table.contiguous()
        R, V, D = table.shape
        x, rows = table.new_empty(*tokens.shape, D), tokens[0].numel()
        embed_fwd_kernel[triton.cdiv(rows, EMBED_FWD["M"]), R](tokens, table, x, rows, V, **width(table), **EMBED_FWD)
        return (x,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dx, tokens, table = (y.contiguous() for y in (*gradients, *tensors))
        R, V, D = table.shape
        rows, U = tokens[0].numel(), min(32, max(16, triton.next_power_of_2(V)))
        programs = min(triton.cdiv(rows, EMBED_BWD["M"]), triton.cdiv(512, R))
        dtable = table.new_empty(R, programs, V, D)
        embed_bwd_kernel[programs, triton.cdiv(V, U), R](
            tokens, dx, dtable, rows, V, U=U, **width(table), **EMBED_BWD
        )  # fmt: skip
        return None, group_sum(dtable)

    return Method(forward, backward)


def rms_norm_method(dtype: torch.dtype) -> Method:
    """``gain * x / rms(x)`` in ``dtype``. Tensors: x (R, ..., D) of any width, gain (R, D) float32."""

    def forward(x: Tensor, gain: Tensor) -> tuple[Tensors, Tensors]:
        x, gain = x.contiguous(), gain.contiguous()
        y, rows, tile = torch.empty_like(x, dtype=dtype), _rows(x), _norm_tile(x.shape[-1])
        norm_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](x, gain, y, rows, **tile)
        return (y,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dy, x, gain = (y.contiguous() for y in (*gradients, *tensors))
        rows, tile = _rows(x), _norm_tile(x.shape[-1])
        programs = min(triton.cdiv(rows, tile["M"]), triton.cdiv(1024, len(x)))
        dx, dgain = torch.empty_like(x), gain.new_empty(len(x), programs, x.shape[-1])
        norm_bwd_kernel[programs, len(x)](x, gain, dy, dx, dgain, rows, **tile)
        return dx, group_sum(dgain)

    return Method(forward, backward)


def project_method(dtype: torch.dtype) -> Method:
    """Queries, keys and values (R, B, T, D) in ``dtype``.

    Tensors: x (R, B, T, D), gain of its norm, gains of the norms of q and k (both None: no norm), weights of q, k, v.
    """

    def norms(gain: Tensor, others: Sequence[Tensor | None]) -> tuple[bool, tuple[Tensor, ...]]:
        """Whether q and k are normed, and three gains; in place of those that there are not, any tensor."""
        return others[0] is not None, tuple((gain if y is None else y).contiguous() for y in (gain, *others[:2]))

    def forward(x: Tensor, gain: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
        x, (normed, (gain, q_gain, k_gain)) = x.contiguous(), norms(gain, others)
        weights = torch.stack(others[2:], 1).to(dtype)
        rows, tile = _rows(x), PROJECT_FWD
        qkv = x.new_empty(3, *x.shape, dtype=dtype)
        project_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](
            x, gain, weights, q_gain, k_gain, qkv, rows, x.numel(), D=x.shape[-1], QK_NORM=normed, **tile
        )
        return qkv.unbind(), (weights,)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, gain, *others = tensors
        x, (normed, (gain, q_gain, k_gain)), (weights,) = x.contiguous(), norms(gain, others), saved
        rows, D, tile = _rows(x), x.shape[-1], PROJECT_BWD
        programs = triton.cdiv(rows, tile["M"])
        dx, n = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        draw = x.new_empty(*x.shape[:-1], 3 * D, dtype=dtype)
        dgain = gain.new_empty(len(x), programs, 3 if normed else 1, D)
        project_bwd_kernel[programs, len(x)](
            x, gain, weights, q_gain, k_gain, *(y.contiguous() for y in gradients), dx, n, draw, dgain, rows,
            D=D, QK_NORM=normed, **tile,
        )  # fmt: skip
        first, *gains = group_sum(dgain).unbind(1)
        return dx, first, *(gains or (None, None)), *rows_products((draw, n))[0].split(D, dim=1)

    return Method(forward, backward, outputs=3)


def mlp_method(scale: float) -> Method:
    """u = x + scale y; z = u + scale mlp(norm(u)), in the dtype of x, products in that of y.

    Tensors: x and y (R, ..., D), gain (R, D), weights of up (R, F, D) and down (R, D, F).
    """

    def forward(x: Tensor, y: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> tuple[Tensors, Tensors]:
        x, y, gain = x.contiguous(), y.contiguous(), gain.contiguous()
        z, rows, tile = torch.empty_like(x), _rows(x), MLP_FWD
        mlp_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](
            x, y, gain, _cast(up, y), _cast(down, y), z, rows, scale, D=x.shape[-1], F=up.shape[1], **tile
        )
        return (z,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dz, x, y, gain = (y.contiguous() for y in (*gradients, *tensors[:3]))
        up, down = (_cast(w, y) for w in tensors[3:])
        rows, F, tile = _rows(x), up.shape[1], MLP_BWD
        programs = triton.cdiv(rows, tile["M"])
        dx, (dy, n, dout) = torch.empty_like(x), (torch.empty_like(y) for _ in range(3))
        dh, g = (y.new_empty(*y.shape[:-1], F) for _ in range(2))
        dgain = gain.new_empty(len(x), programs, x.shape[-1])
        mlp_bwd_kernel[programs, len(x)](
            x, y, gain, up, down, dz, dx, dy, n, dh, dout, g, dgain, rows, scale, D=x.shape[-1], F=F, **tile
        )
        return dx, dy, group_sum(dgain), *rows_products((dh, n), (dout, g))

    return Method(forward, backward)


def attention_method(slopes_H: Tensor) -> Method:
    """Causal softmax attention with ALiBi. Tensors: q, k, v (R, B, T, D), heads concatenated; the output is like q."""

    def sizes(q: Tensor, tiles: Sequence[dict[str, int]]) -> tuple[int, int, dict[str, int]]:
        """Groups of heads of all sequences, tiles of a sequence, and the settings of the kernel."""
        D, K = q.shape[3], q.shape[3] // len(slopes_H)
        G = 2 if K == 8 else 1
        tile = {"D": D, "K": K, "G": G, "E": G * K, **tiles[K >= 32 and q.element_size() == 2]}
        return q.shape[0] * q.shape[1] * D // tile["E"], triton.cdiv(q.shape[2], tile["C"]), tile

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
        q, k, v, slopes = q.contiguous(), k.contiguous(), v.contiguous(), slopes_H.float()
        R, B, T, _ = q.shape
        a, lse = torch.empty_like(q), slopes.new_empty(R, B, len(slopes), T)
        groups, blocks, tile = sizes(q, ATTENTION_QUERIES)
        attention_fwd_kernel[groups, blocks](q, k, v, slopes, a, lse, T, **tile)
        return (a,), (lse,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        da, q, k, v, a, lse = (y.contiguous() for y in (*gradients, *tensors, *outputs, *saved))
        slopes, delta, T = slopes_H.float(), torch.empty_like(lse), q.shape[2]
        dq, dk, dv = (torch.empty_like(y) for y in (q, k, v))
        groups, blocks, tile = sizes(q, ATTENTION_QUERIES)
        attention_query_bwd_kernel[groups, blocks](q, k, v, da, a, lse, slopes, dq, delta, T, **tile)
        groups, blocks, tile = sizes(q, ATTENTION_PAIRS)
        attention_pair_bwd_kernel[(groups * blocks,)](q, k, v, da, lse, delta, slopes, dk, dv, T, **tile)
        return dq, dk, dv

    return Method(forward, backward)


def _norm_tile(D: int) -> dict[str, int]:
    E = triton.next_power_of_2(D)
    return {"D": D, "E": E, "M": max(1, 4096 // E)}


def _rows(x: Tensor) -> int:
    """Rows of one run."""
    return x[0].numel() // x.shape[-1]


def _cast(weight: Tensor, like: Tensor) -> Tensor:
    return weight.to(like.dtype).contiguous()
