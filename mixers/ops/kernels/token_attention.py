"""Fused kernels of attention of memory tokens to themselves and to the positions of a segment, with QK-norm.

    name      shape               written by    read by
    raw       (R, 3, B, P, D)     caller        both kernels    queries, keys, values of P tokens before their norms
    gains     (2 R, D)            caller        both kernels    float32; of queries and keys, None without QK-norm
    k, v      (R, B, C, D)        caller        both kernels    of the positions; runs and sequences may be strided
    bias      (P + C, P, H)       caller        both kernels    of the logits, float32
    r         (R, 2, B P)         token_fwd     token_bwd       1 / rms of raw queries and keys, float32
    a         (R, B P, D)         token_fwd     token_bwd       outputs
    lse       (R, B P, H)         token_fwd     token_bwd       log2 of the sum of weights, float32
    da        (R, B P, D)         caller        token_bwd       gradient of a
    rest      (R, 2, B, P, D)     caller        token_bwd       further gradients of keys and values; may be strided
    dqkv      (R, 3, B P, D)      token_bwd     caller          gradients of queries and keys after their norms, values

A program serves X tokens of a sequence in one head of K channels, and reads J positions at a time. There are few
tokens and positions, so its time is that of waiting: it reads much at once, and takes products on tensor cores.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import EPS, LOG2E, MASKED, Settings

TOKENS = 16
"""Tokens X of a program; absent ones are zeros."""
NORM_ELEMENTS: tl.constexpr = tl.constexpr(4096)
"""Numbers of raw rows that a program reads at a time for their norms."""


@triton.jit
def _place(B: tl.tensor, P: tl.constexpr, D: tl.constexpr, K: tl.constexpr, X: tl.constexpr):
    """Row of a program among all sequences, its run, head and tokens, and where the raw queries of the row begin."""
    row = (tl.program_id(0) // (D // K)).to(tl.int64)
    run = row // B
    x_X = tl.program_id(1) * X + tl.arange(0, X)
    return row, run, tl.program_id(0) % (D // K), x_X, (run * 2 * B + row) * P


@triton.jit
def _norm(
    y_ptr: tl.tensor,
    first: tl.tensor,
    P: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
):
    """1 / rms (X) of rows of width D from a first one, of which there are P; the last X - Y do not exist."""
    W: tl.constexpr = NORM_ELEMENTS // Y
    y_Y = tl.arange(0, Y)
    squares_Y = tl.zeros([Y], tl.float32)
    for d in range(0, D, W):
        d_W = d + tl.arange(0, W)
        here_YW = (first + y_Y < P)[:, None] & (d_W < D)[None, :]
        y_YW = tl.load(y_ptr + (first + y_Y)[:, None] * D + d_W[None, :], here_YW, 0.0).to(tl.float32)
        squares_Y += tl.sum(y_YW * y_YW, 1)
    r_Y = tl.rsqrt(squares_Y / D + EPS)
    return tl.sum(tl.where(tl.arange(0, X)[:, None] == y_Y[None, :], r_Y[None, :], 0.0), 1)


@triton.jit
def _channels(head: tl.tensor, K: tl.constexpr):
    """Channels (1, K) of a head in a row, and whether they exist; products on tensor cores have 16 of them or more."""
    c_1K = tl.arange(0, 16 if K < 16 else K)[None, :]
    return head * K + c_1K, c_1K < K


@triton.jit
def _of_head(y_ptr: tl.tensor, y_Y: tl.tensor, rows: tl.constexpr, head: tl.tensor, D: tl.constexpr, K: tl.constexpr):
    """Channels (Y, K) of a head in rows of width D, of which there are ``rows``."""
    c_1K, exists_1K = _channels(head, K)
    return tl.load(y_ptr + y_Y[:, None] * D + c_1K, (y_Y < rows)[:, None] & exists_1K, 0.0)


@triton.jit
def _normed(y_YK: tl.tensor, r_Y: tl.tensor, gain_ptr: tl.tensor, head: tl.tensor, K: tl.constexpr):
    """Channels of a head after the norm of their rows, if there is one."""
    if gain_ptr is not None:
        c_1K, exists_1K = _channels(head, K)
        gain_1K = tl.load(gain_ptr + c_1K, exists_1K, 0.0)
        y_YK = (y_YK.to(tl.float32) * r_Y[:, None] * gain_1K).to(y_YK.dtype)
    return y_YK


@triton.jit
def _logits(
    q_XK: tl.tensor,
    k_JK: tl.tensor,
    bias_ptr: tl.tensor,
    x_X: tl.tensor,
    j_J: tl.tensor,
    keys: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
):
    """Logits (X, J) in units of log2; minus infinity for keys that do not exist."""
    s_XJ = tl.dot(q_XK, tl.trans(k_JK), input_precision="ieee") * (K**-0.5 * LOG2E)
    live_XJ = (x_X < P)[:, None] & (j_J < keys)[None, :]
    bias_XJ = tl.load(bias_ptr + (j_J[None, :] * P + x_X[:, None]) * (D // K), live_XJ, 0.0)
    return tl.where((j_J < keys)[None, :], s_XJ + tl.maximum(bias_XJ * LOG2E, MASKED), -float("inf"))


@triton.jit
def _product(p_XJ: tl.tensor, y_JK: tl.tensor, sum_XK: tl.tensor):
    """sum + p y, for p in float32: its leading bits in the dtype of y, then the bits that this dtype drops."""
    high_XJ = p_XJ.to(y_JK.dtype)
    sum_XK = tl.dot((p_XJ - high_XJ.to(tl.float32)).to(y_JK.dtype), y_JK, sum_XK, input_precision="ieee")
    return tl.dot(high_XJ, y_JK, sum_XK, input_precision="ieee")


@triton.jit
def _softmax_step(
    s_XJ: tl.tensor,
    v_JK: tl.tensor,
    m_X: tl.tensor,
    l_X: tl.tensor,
    o_XK: tl.tensor,
):
    """Maximum, sum and numerator of the softmax after J more keys."""
    top_X = tl.maximum(m_X, tl.max(s_XJ, 1))
    p_XJ = tl.exp2(s_XJ - top_X[:, None])
    shrink_X = tl.exp2(m_X - top_X)
    return top_X, l_X * shrink_X + tl.sum(p_XJ, 1), _product(p_XJ, v_JK, o_XK * shrink_X[:, None])


@triton.jit
def _logit_gradients(
    s_XJ: tl.tensor,
    v_JK: tl.tensor,
    da_XK: tl.tensor,
    lse_X: tl.tensor,
    delta_X: tl.tensor,
    K: tl.constexpr,
):
    """Attention weights (X, J), and the gradients of the products of queries and keys."""
    p_XJ = tl.exp2(s_XJ - lse_X[:, None])
    dp_XJ = tl.dot(da_XK, tl.trans(v_JK), input_precision="ieee")
    return p_XJ, p_XJ * (dp_XJ - delta_X[:, None]) * K**-0.5


@triton.jit(do_not_specialize=["B"])
def token_fwd_kernel(
    raw_ptr: tl.tensor,
    gains_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    r_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    B: tl.tensor,
    run_stride: tl.tensor,
    row_stride: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    J: tl.constexpr,
):
    """Attention of X tokens of a sequence in one head.

    1. Read the queries, and normalise them with QK-norm.
    2. For each X tokens, then for each J positions: update the softmax state: maximum m, sum l, numerator o.
    3. Write a = o / l and lse = m + log2(l).

    The programs of head 0 also write r.
    """
    # 1. Queries.
    row, run, head, x_X, at = _place(B, P, D, K, X)
    q_ptr = raw_ptr + at * D
    plane = B * P
    q_gain_ptr = gains_ptr if gains_ptr is None else gains_ptr + run * 2 * D
    k_gain_ptr = gains_ptr if gains_ptr is None else gains_ptr + (run * 2 + 1) * D
    r_ptr += run * plane + row * P
    r_X = tl.full([X], 1.0, tl.float32)
    if gains_ptr is not None:
        r_X = _norm(q_ptr, tl.program_id(1) * X, P, D, X, Y)
        tl.store(r_ptr + x_X, r_X, (x_X < P) & (head == 0))
    q_XK = _normed(_of_head(q_ptr, x_X, P, head, D, K), r_X, q_gain_ptr, head, K)
    bias_ptr += head

    # 2. Tokens.
    m_X = tl.full([X], MASKED, tl.float32)
    l_X = tl.zeros([X], tl.float32)
    o_XK = tl.zeros(q_XK.shape, tl.float32)
    k_raw_ptr = q_ptr + plane * D
    for first in range(0, P, X):
        j_X = first + tl.arange(0, X)
        if gains_ptr is not None:
            r_X = _norm(k_raw_ptr, first, P, D, X, Y)
            tl.store(r_ptr + plane + j_X, r_X, (j_X < P) & (head == 0))
        k_XK = _normed(_of_head(k_raw_ptr, j_X, P, head, D, K), r_X, k_gain_ptr, head, K)
        v_XK = _of_head(k_raw_ptr + plane * D, j_X, P, head, D, K)
        s_XX = _logits(q_XK, k_XK, bias_ptr, x_X, j_X, P, P, D, K)
        m_X, l_X, o_XK = _softmax_step(s_XX, v_XK, m_X, l_X, o_XK)

    # 2. Positions.
    pairs_at = run * run_stride + row % B * row_stride
    for first in range(0, C, J):
        j_J = first + tl.arange(0, J)
        k_JK = _of_head(k_ptr + pairs_at, j_J, C, head, D, K)
        v_JK = _of_head(v_ptr + pairs_at, j_J, C, head, D, K)
        s_XJ = _logits(q_XK, k_JK, bias_ptr + P * P * (D // K), x_X, j_J, C, P, D, K)
        m_X, l_X, o_XK = _softmax_step(s_XJ, v_JK, m_X, l_X, o_XK)

    # 3. Outputs.
    c_1K, exists_1K = _channels(head, K)
    at_X, live_X = row * P + x_X, x_X < P
    tl.store(a_ptr + at_X[:, None] * D + c_1K, o_XK / l_X[:, None], live_X[:, None] & exists_1K)
    tl.store(lse_ptr + at_X * (D // K) + head, m_X + tl.log2(l_X), live_X)


@triton.jit(do_not_specialize=["B"])
def token_bwd_kernel(
    raw_ptr: tl.tensor,
    gains_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    r_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    da_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    dqkv_ptr: tl.tensor,
    B: tl.tensor,
    run_stride: tl.tensor,
    row_stride: tl.tensor,
    rest_run_stride: tl.tensor,
    rest_plane_stride: tl.tensor,
    rest_row_stride: tl.tensor,
    P: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    J: tl.constexpr,
):
    """Gradients of X tokens of a sequence in one head, as queries and as pairs.

    The weights are p = exp2(s - lse), the gradients of the logits ds = p (da . v - delta), with delta = da . a.

    1. Read the tokens.
    2. As queries: for each X tokens, then for each J positions: dq += ds k. Write dq.
    3. As pairs: for each X queries: dk += ds q and dv += p da. Write dk and dv, plus the rest.
    """
    # 1. Tokens.
    H: tl.constexpr = D // K
    row, run, head, x_X, at = _place(B, P, D, K, X)
    live_X = x_X < P
    q_ptr = raw_ptr + at * D
    plane = B * P
    k_raw_ptr = q_ptr + plane * D
    v_raw_ptr = k_raw_ptr + plane * D
    q_gain_ptr = gains_ptr if gains_ptr is None else gains_ptr + run * 2 * D
    k_gain_ptr = gains_ptr if gains_ptr is None else gains_ptr + (run * 2 + 1) * D
    r_ptr += run * plane + row * P
    a_ptr += row * P * D
    da_ptr += row * P * D
    lse_ptr += row * P * H + head
    bias_ptr += head

    # 2. Queries.
    r_X = tl.load(r_ptr + x_X, live_X, 0.0)
    q_XK = _normed(_of_head(q_ptr, x_X, P, head, D, K), r_X, q_gain_ptr, head, K)
    da_XK = _of_head(da_ptr, x_X, P, head, D, K)
    delta_X = tl.sum(da_XK.to(tl.float32) * _of_head(a_ptr, x_X, P, head, D, K).to(tl.float32), 1)
    lse_X = tl.load(lse_ptr + x_X * H, live_X, float("inf"))
    dq_XK = tl.zeros(q_XK.shape, tl.float32)
    for first in range(0, P, X):
        j_X = first + tl.arange(0, X)
        r_X = tl.load(r_ptr + plane + j_X, j_X < P, 0.0)
        k_XK = _normed(_of_head(k_raw_ptr, j_X, P, head, D, K), r_X, k_gain_ptr, head, K)
        v_XK = _of_head(v_raw_ptr, j_X, P, head, D, K)
        s_XX = _logits(q_XK, k_XK, bias_ptr, x_X, j_X, P, P, D, K)
        _, ds_XX = _logit_gradients(s_XX, v_XK, da_XK, lse_X, delta_X, K)
        dq_XK = _product(ds_XX, k_XK, dq_XK)

    pairs_at = run * run_stride + row % B * row_stride
    for first in range(0, C, J):
        j_J = first + tl.arange(0, J)
        k_JK = _of_head(k_ptr + pairs_at, j_J, C, head, D, K)
        v_JK = _of_head(v_ptr + pairs_at, j_J, C, head, D, K)
        s_XJ = _logits(q_XK, k_JK, bias_ptr + P * P * (D // K), x_X, j_J, C, P, D, K)
        _, ds_XJ = _logit_gradients(s_XJ, v_JK, da_XK, lse_X, delta_X, K)
        dq_XK = _product(ds_XJ, k_JK, dq_XK)

    c_1K, exists_1K = _channels(head, K)
    at_XK, here_XK = x_X[:, None] * D + c_1K, live_X[:, None] & exists_1K
    to_XK = dqkv_ptr + at * D + at_XK
    tl.store(to_XK, dq_XK, here_XK)

    # 3. Pairs.
    r_X = tl.load(r_ptr + plane + x_X, live_X, 0.0)
    k_XK = _normed(_of_head(k_raw_ptr, x_X, P, head, D, K), r_X, k_gain_ptr, head, K)
    v_XK = _of_head(v_raw_ptr, x_X, P, head, D, K)
    rest_XK = rest_ptr + run * rest_run_stride + row % B * rest_row_stride + at_XK
    dk_XK = tl.load(rest_XK, here_XK, 0.0).to(tl.float32)
    dv_XK = tl.load(rest_XK + rest_plane_stride, here_XK, 0.0).to(tl.float32)
    for first in range(0, P, X):
        i_X = first + tl.arange(0, X)
        r_X = tl.load(r_ptr + i_X, i_X < P, 0.0)
        q_XK = _normed(_of_head(q_ptr, i_X, P, head, D, K), r_X, q_gain_ptr, head, K)
        da_XK = _of_head(da_ptr, i_X, P, head, D, K)
        delta_X = tl.sum(da_XK.to(tl.float32) * _of_head(a_ptr, i_X, P, head, D, K).to(tl.float32), 1)
        lse_X = tl.load(lse_ptr + i_X * H, i_X < P, float("inf"))
        s_XX = _logits(q_XK, k_XK, bias_ptr, i_X, x_X, P, P, D, K)
        p_XX, ds_XX = _logit_gradients(s_XX, v_XK, da_XK, lse_X, delta_X, K)
        dk_XK = _product(tl.trans(ds_XX), q_XK, dk_XK)
        dv_XK = _product(tl.trans(p_XX), da_XK, dv_XK)

    tl.store(to_XK + plane * D, dk_XK, here_XK)
    tl.store(to_XK + 2 * plane * D, dv_XK, here_XK)


def token_attention(
    raw: Tensor, gains: Tensor | None, segment: tuple[Tensor, Tensor], bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs a (R, M, D), lse (R, M, H) and r (R, 2, M) of M = B P tokens.

    Args:
        raw: queries, keys and values (R, 3, M, D), contiguous.
        gains: of QK-norm (2 R, D), of queries and keys of a run after another.
        segment: keys and values (R, B, C, D) of the positions, with equal strides, channels side by side.
        bias: (P + C, P, H), contiguous.
    """
    grid, sizes, settings = _launch(raw, segment[0], bias)
    (R, _, M, D), (_, P, H) = raw.shape, bias.shape
    a = raw.new_empty(R, M, D)
    lse, r = bias.new_empty(R, M, H), bias.new_empty(R, 2, M)
    Y = min(triton.next_power_of_2(P), TOKENS)
    token_fwd_kernel[grid](raw, gains, *segment, bias, r, a, lse, *sizes, **settings, Y=Y)
    return a, lse, r


def token_gradients(
    raw: Tensor,
    gains: Tensor | None,
    segment: tuple[Tensor, Tensor],
    bias: Tensor,
    softmax: Sequence[Tensor],
    da: Tensor,
    rest: Tensor,
) -> Tensor:
    """Gradients (R, 3, M, D) of the tokens' queries and keys after their norms, and of their values.

    Args:
        raw, gains, segment, bias: as of ``token_attention``.
        softmax: what ``token_attention`` returns.
        da: gradient (R, M, D) of a, contiguous.
        rest: gradients (R, 2, B, P, D) of keys and values from elsewhere, which are added; tokens side by side.
    """
    grid, sizes, settings = _launch(raw, segment[0], bias)
    a, lse, r = softmax
    dqkv = torch.empty_like(raw)
    tensors = raw, gains, *segment, bias, r, a, lse, da, rest, dqkv
    token_bwd_kernel[grid](*tensors, *sizes, *rest.stride()[:3], **settings)
    return dqkv


def _launch(raw: Tensor, k: Tensor, bias: Tensor) -> tuple[tuple[int, int], tuple[int, ...], Settings]:
    """Grid, number of sequences and strides of the positions, and compile-time settings."""
    R, B, C, D = k.shape
    P, H = bias.shape[1:]
    J = min(max(triton.next_power_of_2(C), 16), 64)
    settings: Settings = {
        "P": P,
        "C": C,
        "D": D,
        "K": D // H,
        "X": TOKENS,
        "J": J,
        "num_warps": 1,
    }
    return (R * B * H, triton.cdiv(P, TOKENS)), (B, *k.stride()[:2]), settings
