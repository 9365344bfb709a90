"""Fused kernels of causal attention with ALiBi or forget gates, to all earlier positions or to the last ones.

    name           shape            written by              read by
    q, k, v        (R, B, T, D)     caller                  all kernels
    slopes         (H,)             caller                  all kernels              float32; absent with c
    c              (R, B, H, T)     caller                  all kernels              sums of log gates, float32
    a              (R, B, T, D)     attention_fwd           attention_query_bwd      outputs
    lse            (R, B, H, T)     attention_fwd           both backward kernels    log2 of the sum of weights, float32
    da             (R, B, T, D)     caller                  both backward kernels    gradient of a
    delta          (R, B, H, T)     attention_query_bwd     attention_pair_bwd       da . a of each head, float32
    dq             (R, B, T, D)     attention_query_bwd     caller
    dk, dv         (R, B, T, D)     attention_pair_bwd      caller
    dc_rows        (R, B, H, T)     attention_query_bwd     attention_pair_bwd       sums over the pairs, float32
    dc             (R, B, H, T)     attention_pair_bwd      caller                   float32

A program serves C positions of one sequence in G heads. Its rows are (head, position), suffix N. Its columns are the
E = G * K channels of these heads, suffix E. Positions of the other side of the attention, J at a time, have the suffix
J. Queries are zero outside the channels of their own head. Hence one product gives the logits of all G heads, and head
dims below the 16 that ``tl.dot`` needs cost nothing extra. In lse, delta and c, the positions of a head are adjacent in
memory, because a program that pulls gradients reads many positions of a head.

The logit of query i and pair j is q_i . k_j / sqrt(K) + slope (j - i) with ALiBi (GATED 0), and q_i . k_j / sqrt(K) +
c_i - c_j with forget gates (GATED 1), where c are running sums of their logarithms, which never rise: the minimum with
zero keeps masked logits finite. The sum of the gradients of a query's logits is zero but for rounding; it is in dc,
because with strong gates it cancels most of the rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, contiguous, kernels_take
from mixers.ops.method import Method, Optionals, Tensors

# The second ones for numbers of 16 bits and head dims from 32 on, at 512 sequences of 512 positions, 16 heads of 64.
ATTENTION_QUERIES = ({"C": 32, "J": 32, "num_warps": 2}, {"C": 64, "J": 32, "num_warps": 4})

ATTENTION_PAIRS = ({"C": 16, "J": 32, "num_warps": 1}, {"C": 64, "J": 32, "num_warps": 4, "num_stages": 1})


@triton.jit
def _rows(
    group: tl.tensor,
    start: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """Head and position of each row of a tile, and channel of each column."""
    head_N = group * G + tl.arange(0, G * C) // C
    t_N = start + tl.arange(0, G * C) % C
    channel_E = group * E + tl.arange(0, E)
    return head_N, t_N, channel_E


@triton.jit
def _first_pair(
    t: tl.tensor,
    WINDOW: tl.constexpr,
):
    """First position that a query sees."""
    return 0 if WINDOW == 0 else tl.maximum(t - (WINDOW - 1), 0)


@triton.jit
def _sees(
    t: tl.tensor,
    j: tl.tensor,
    WINDOW: tl.constexpr,
):
    """Whether queries at t see the pairs at j."""
    seen = j <= t
    if WINDOW > 0:
        seen = seen & (t - j < WINDOW)
    return seen


@triton.jit
def _of_heads(
    pointer: tl.tensor,
    at_J: tl.tensor,
    T: tl.tensor,
    live_J: tl.tensor,
    is_first_N1: tl.tensor,
    G: tl.constexpr,
):
    """Sums of gates of the G heads of a program at the positions J, for each row."""
    y_NJ = tl.load(pointer + at_J, live_J, 0.0)[None, :]
    if G == 2:
        y_NJ = tl.where(is_first_N1, y_NJ, tl.load(pointer + at_J + T, live_J, 0.0)[None, :])
    return y_NJ


@triton.jit(do_not_specialize=["T"])
def attention_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    c_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    GATED: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
):
    """Causal attention of C positions of one sequence in G heads.

    1. Find the heads and the sequence of this program, and its positions; read the queries.
    2. For J pairs at a time, from the first one in reach up to the last position of the program:
       a. logits: s = q k^T / sqrt(K) + ALiBi or gates, masked where the query does not see the pair;
       b. update the softmax state: maximum m, sum l, numerator o.
    3. Write a = o / l and lse = m + log2(l).
    """
    # 1. Queries.
    group = tl.program_id(0) % (D // E)
    row = (tl.program_id(0) // (D // E)).to(tl.int64)
    start = tl.program_id(1) * C
    head_N, t_N, channel_E = _rows(group, start, C, G, E)
    here_NE = (t_N < T)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    at_NE = (row * T + t_N)[:, None] * D + channel_E[None, :]
    q_NE = tl.load(q_ptr + at_NE, here_NE, 0.0)
    if GATED:
        c_N = tl.load(c_ptr + (row * (D // K) + head_N) * T + t_N, t_N < T, 0.0)
    else:
        slope_N = tl.load(slopes_ptr + head_N) * LOG2E

    m_N = tl.full([G * C], MASKED, tl.float32)
    l_N = tl.zeros([G * C], tl.float32)
    o_NE = tl.zeros([G * C, E], tl.float32)
    for first in range(_first_pair(start, WINDOW), tl.minimum(start + C, T), J):
        # 2a. Logits.
        j = first + tl.arange(0, J)
        at_JE = (row * T + j)[:, None] * D + channel_E[None, :]
        k_JE = tl.load(k_ptr + at_JE, (j < T)[:, None], 0.0)
        v_JE = tl.load(v_ptr + at_JE, (j < T)[:, None], 0.0)
        s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        if GATED:
            at_J = (row * (D // K) + group * G) * T + j
            c_NJ = _of_heads(c_ptr, at_J, T, j < T, (head_N == group * G)[:, None], G)
            s_NJ += tl.minimum(c_N[:, None] - c_NJ, 0.0) * LOG2E
        else:
            s_NJ += slope_N[:, None] * (j[None, :] - t_N[:, None])
        s_NJ = tl.where(_sees(t_N[:, None], j[None, :], WINDOW), s_NJ, MASKED)

        # 2b. Softmax state.
        top_N = tl.maximum(m_N, tl.max(s_NJ, 1))
        p_NJ = tl.exp2(s_NJ - top_N[:, None])
        shrink_N = tl.exp2(m_N - top_N)
        l_N = l_N * shrink_N + tl.sum(p_NJ, 1)
        o_NE = tl.dot(p_NJ.to(v_JE.dtype), v_JE, o_NE * shrink_N[:, None], input_precision="ieee")
        m_N = top_N

    # 3. Outputs.
    tl.store(a_ptr + at_NE, o_NE / l_N[:, None], here_NE)
    tl.store(lse_ptr + (row * (D // K) + head_N) * T + t_N, m_N + tl.log2(l_N), t_N < T)


@triton.jit(do_not_specialize=["T"])
def attention_query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    da_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    c_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dc_rows_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    GATED: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
):
    """Gradients of C queries of one sequence in G heads.

    1. Find the heads and the sequence of this program, and its positions; read the queries.
    2. Write delta = da . a of each head.
    3. For J pairs at a time, from the first one in reach up to the last position of the program:
       a. compute the logits s and the attention weights p = exp2(s - lse) again;
       b. dq += ds k, with the gradients of the logits ds = p (da v^T - delta), and with gates the sums of ds.
    4. Write dq, and the sums.
    """
    # 1. Queries.
    group = tl.program_id(0) % (D // E)
    row = (tl.program_id(0) // (D // E)).to(tl.int64)
    start = tl.program_id(1) * C
    head_N, t_N, channel_E = _rows(group, start, C, G, E)
    here_NE = (t_N < T)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    at_NE = (row * T + t_N)[:, None] * D + channel_E[None, :]
    at_N = (row * (D // K) + head_N) * T + t_N
    q_NE = tl.load(q_ptr + at_NE, here_NE, 0.0)

    # 2. Delta.
    da_NE = tl.load(da_ptr + at_NE, here_NE, 0.0)
    delta_N = tl.sum(da_NE.to(tl.float32) * tl.load(a_ptr + at_NE, here_NE, 0.0).to(tl.float32), 1)
    tl.store(delta_ptr + at_N, delta_N, t_N < T)

    lse_N = tl.load(lse_ptr + at_N, t_N < T, 0.0)
    if GATED:
        c_N = tl.load(c_ptr + at_N, t_N < T, 0.0)
        dc_N = tl.zeros([G * C], tl.float32)
    else:
        slope_N = tl.load(slopes_ptr + head_N) * LOG2E
    dq_NE = tl.zeros([G * C, E], tl.float32)
    for first in range(_first_pair(start, WINDOW), tl.minimum(start + C, T), J):
        # 3a. Attention weights.
        j = first + tl.arange(0, J)
        at_JE = (row * T + j)[:, None] * D + channel_E[None, :]
        k_JE = tl.load(k_ptr + at_JE, (j < T)[:, None], 0.0)
        v_JE = tl.load(v_ptr + at_JE, (j < T)[:, None], 0.0)
        s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        if GATED:
            at_J = (row * (D // K) + group * G) * T + j
            c_NJ = _of_heads(c_ptr, at_J, T, j < T, (head_N == group * G)[:, None], G)
            s_NJ += tl.minimum(c_N[:, None] - c_NJ, 0.0) * LOG2E - lse_N[:, None]
        else:
            s_NJ += slope_N[:, None] * (j[None, :] - t_N[:, None]) - lse_N[:, None]
        p_NJ = tl.where(_sees(t_N[:, None], j[None, :], WINDOW), tl.exp2(s_NJ), 0.0)

        # 3b. Gradients.
        ds_NJ = p_NJ * (tl.dot(da_NE, tl.trans(v_JE), input_precision="ieee") - delta_N[:, None])
        dq_NE = tl.dot(ds_NJ.to(k_JE.dtype), k_JE, dq_NE, input_precision="ieee")
        if GATED:
            dc_N += tl.sum(ds_NJ, 1)

    # 4. Outputs.
    tl.store(dq_ptr + at_NE, dq_NE * K**-0.5, here_NE)
    if GATED:
        tl.store(dc_rows_ptr + at_N, dc_N, t_N < T)


@triton.jit(do_not_specialize=["T"])
def attention_pair_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    c_ptr: tl.tensor,
    dc_rows_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dc_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    GATED: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
):
    """Gradients of C pairs of one sequence in G heads, pulled from later queries.

    1. Find the positions, the heads and the sequence of this program; read the pairs.
    2. For J queries at a time, from the first position of the program up to the last one in reach:
       a. read the queries with their lse, delta and da;
       b. compute the logits s and the attention weights p = exp2(s - lse) again;
       c. dv += p da, and dk += ds q with the gradients of the logits ds = p (v da^T - delta), and with gates dc -= ds.
    3. Write dk and dv, and dc with the sums of the same positions' queries.
    """
    # 1. Pairs. Programs that read the same queries follow one another.
    H: tl.constexpr = D // K
    blocks = tl.cdiv(T, C)
    start = tl.program_id(0) % blocks * C
    group = tl.program_id(0) // blocks % (D // E)
    row = (tl.program_id(0) // blocks // (D // E)).to(tl.int64)
    head_N, t_N, channel_E = _rows(group, start, C, G, E)
    here_NE = (t_N < T)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    at_NE = (row * T + t_N)[:, None] * D + channel_E[None, :]
    k_NE = tl.load(k_ptr + at_NE, here_NE, 0.0)
    v_NE = tl.load(v_ptr + at_NE, here_NE, 0.0)
    if GATED:
        at_N = (row * H + head_N) * T + t_N
        c_N = tl.load(c_ptr + at_N, t_N < T, 0.0)
        dc_N = tl.load(dc_rows_ptr + at_N, t_N < T, 0.0)
    else:
        slope_N = tl.load(slopes_ptr + head_N) * LOG2E

    dk_NE = tl.zeros([G * C, E], tl.float32)
    dv_NE = tl.zeros([G * C, E], tl.float32)
    is_first_N1 = (head_N == group * G)[:, None]
    stop = T if WINDOW == 0 else tl.minimum(T, start + C + WINDOW - 1)
    for first in range(start, stop, J):
        # 2a. Queries.
        i = first + tl.arange(0, J)
        at_JE = (row * T + i)[:, None] * D + channel_E[None, :]
        q_JE = tl.load(q_ptr + at_JE, (i < T)[:, None], 0.0)
        da_JE = tl.load(da_ptr + at_JE, (i < T)[:, None], 0.0)
        at_J = (row * H + group * G) * T + i
        lse_NJ = tl.load(lse_ptr + at_J, i < T, 0.0)[None, :]
        delta_NJ = tl.load(delta_ptr + at_J, i < T, 0.0)[None, :]
        if G == 2:
            lse_NJ = tl.where(is_first_N1, lse_NJ, tl.load(lse_ptr + at_J + T, i < T, 0.0)[None, :])
            delta_NJ = tl.where(is_first_N1, delta_NJ, tl.load(delta_ptr + at_J + T, i < T, 0.0)[None, :])

        # 2b. Attention weights.
        s_NJ = tl.dot(k_NE, tl.trans(q_JE), input_precision="ieee") * (K**-0.5 * LOG2E)
        if GATED:
            c_NJ = _of_heads(c_ptr, at_J, T, i < T, is_first_N1, G)
            s_NJ += tl.minimum(c_NJ - c_N[:, None], 0.0) * LOG2E - lse_NJ
        else:
            s_NJ += slope_N[:, None] * (t_N[:, None] - i[None, :]) - lse_NJ
        seen_NJ = _sees(i[None, :], t_N[:, None], WINDOW) & (i < T)[None, :]
        p_NJ = tl.where(seen_NJ, tl.exp2(s_NJ), 0.0)

        # 2c. Gradients.
        ds_NJ = p_NJ * (tl.dot(v_NE, tl.trans(da_JE), input_precision="ieee") - delta_NJ)
        dv_NE = tl.dot(p_NJ.to(da_JE.dtype), da_JE, dv_NE, input_precision="ieee")
        dk_NE = tl.dot(ds_NJ.to(q_JE.dtype), q_JE, dk_NE, input_precision="ieee")
        if GATED:
            dc_N -= tl.sum(ds_NJ, 1)

    # 3. Outputs.
    tl.store(dk_ptr + at_NE, dk_NE * K**-0.5, here_NE)
    tl.store(dv_ptr + at_NE, dv_NE, here_NE)
    if GATED:
        tl.store(dc_ptr + at_N, dc_N, t_N < T)


@kernels_take("attention", "heads of 8, 16, 32, 64 or 128 channels, and widths that 16 divides")
def fits_attention(D: int, H: int) -> bool:
    """Whether ``attention_method`` takes H heads of this width."""
    return D % H == 0 and D // H in (8, 16, 32, 64, 128) and D % 16 == 0


def attention_method(slopes_H: Tensor, window: int | None = None) -> Method:
    """Causal softmax attention with ALiBi to the last ``window`` positions, the own one included; None: to all.

    Tensors: q, k, v (R, B, T, D), heads concatenated; the output is like q.
    """
    return _method("attention", len(slopes_H), slopes_H, window)


def forgetting_attention_method(heads: int) -> Method:
    """Causal softmax attention with forget gates.

    Tensors: q, k, v (R, B, T, D), heads concatenated, and running sums of the gates' logarithms (R, B, H, T), float32;
    the output is like q.
    """
    return _method("forgetting_attention", heads, None, None)


def _method(label: str, heads: int, slopes_H: Tensor | None, window: int | None) -> Method:
    """Attention with ALiBi if there are slopes, else with gates."""

    def sizes(q: Tensor, tiles: Sequence[dict[str, int]]) -> tuple[int, int, dict[str, int]]:
        """Number of groups of heads in all sequences, tiles of a sequence, and compile-time settings of the kernel."""
        D, K = q.shape[3], q.shape[3] // heads
        G = 2 if K == 8 else 1
        reach = 0 if window is None or window >= q.shape[2] else window
        tile = {"D": D, "K": K, "WINDOW": reach, "GATED": int(slopes_H is None), "G": G, "E": G * K}
        tile |= tiles[K >= 32 and q.element_size() == 2]
        return q.shape[0] * q.shape[1] * D // tile["E"], triton.cdiv(q.shape[2], tile["C"]), tile

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        q, k, v, c = _four(tensors)
        slopes = None if slopes_H is None else slopes_H.float()
        R, B, T, _ = q.shape
        a = torch.empty_like(q)
        lse = q.new_empty(R, B, heads, T, dtype=torch.float32)

        groups, blocks, tile = sizes(q, ATTENTION_QUERIES)
        attention_fwd_kernel[groups, blocks](q, k, v, slopes, c, a, lse, T, **tile)
        return (a,), (lse,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        da, a, lse = (y.contiguous() for y in (*gradients, *outputs, *saved))
        q, k, v, c = _four(tensors)
        slopes = None if slopes_H is None else slopes_H.float()
        delta = torch.empty_like(lse)
        T = q.shape[2]
        dq, dk, dv = (torch.empty_like(y) for y in (q, k, v))
        dc_rows, dc = (None if c is None else torch.empty_like(c) for _ in range(2))

        groups, blocks, tile = sizes(q, ATTENTION_QUERIES)
        attention_query_bwd_kernel[groups, blocks](q, k, v, da, a, lse, slopes, c, dq, delta, dc_rows, T, **tile)
        groups, blocks, tile = sizes(q, ATTENTION_PAIRS)
        left = da, lse, delta, slopes, c, dc_rows
        attention_pair_bwd_kernel[(groups * blocks,)](q, k, v, *left, dk, dv, dc, T, **tile)
        return (dq, dk, dv) if c is None else (dq, dk, dv, dc)

    return Method(forward, backward, label=label)


def _four(tensors: Tensors) -> tuple[Any, ...]:
    """Queries, keys, values, and sums of gates or None, without gaps between their numbers."""
    return contiguous(*tensors, *(None for _ in range(4 - len(tensors))))
