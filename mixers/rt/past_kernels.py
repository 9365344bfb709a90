"""Triton kernels of attention between chunks of positions, for ``mixers.rt.fused`` and ``mixers.rt.chunked``.

Logits are kept in units of log2; UNIT is 1 / sqrt(head dim). In ``fused`` heads may have fewer channels than K, and
fill less than D of them (``mixers.rt.room``); the others are zero.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import LOG2E, MASKED


@triton.jit
def _first_row(row, step, T):
    """Row of position 0 of the sequence ``row``, for T positions of a sequence that are ``step`` rows apart."""
    return (row // step).to(tl.int64) * T * step + row % step


@triton.jit
def _in_block(j, t, BLOCK: tl.constexpr):
    """Whether the query at t sees the temporary pair of j."""
    return (j <= t) & (j // BLOCK == t // BLOCK)


@triton.jit
def _logits(
    q_NE, bias_NJ, k_ptr, v_ptr, row_J, here_J, channel, D: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Logits of queries and J pairs, and the pairs."""
    at_JE = row_J[:, None] * D + channel[None, :]
    k_JE = tl.load(k_ptr + at_JE, here_J[:, None], 0.0)
    v_JE = tl.load(v_ptr + at_JE, here_J[:, None], 0.0)
    s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (UNIT * LOG2E)
    return s_NJ + bias_NJ, k_JE, v_JE


@triton.jit
def _attend(
    q_NE, bias_NJ, seen_NJ, m_N, l_N, o_NE, k_ptr, v_ptr, row_J, here_J, channel, D: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Softmax state after the pairs that are ``seen``; a row that has seen none before must see one of them."""
    s_NJ, _, v_JE = _logits(q_NE, bias_NJ, k_ptr, v_ptr, row_J, here_J, channel, D, UNIT)
    s_NJ = tl.where(seen_NJ, s_NJ, MASKED)
    top_N = tl.maximum(m_N, tl.max(s_NJ, 1))
    p_NJ = tl.exp2(s_NJ - top_N[:, None])
    shrink_N = tl.exp2(m_N - top_N)
    l_N = l_N * shrink_N + tl.sum(p_NJ, 1)
    o_NE = tl.dot(p_NJ.to(v_JE.dtype), v_JE, o_NE * shrink_N[:, None], input_precision="ieee")
    return top_N, l_N, o_NE


@triton.jit(do_not_specialize=["T", "begin", "start", "stop", "base"])
def past_fwd_kernel(
    q_ptr, kt_ptr, vt_ptr, k_ptr, v_ptr, slopes_ptr, m_ptr, l_ptr, o_ptr, T, step, begin, start, stop, base,
    D: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, J: tl.constexpr, FIRST: tl.constexpr, SKEW: tl.constexpr, EARLY: tl.constexpr = False,
    BLOCK: tl.constexpr = 1,
):  # fmt: skip
    """Softmax state (maximum m, sum l, value o) of positions start..stop over keys begin..start.

    The FIRST call for a position adds its temporary pair, others go on from the state, which is kept for S positions
    from ``base`` on. With a BLOCK of several positions, whose first call is the only one, the keys end where the block
    of ``start`` begins, and temporary pairs are those of a position's own block up to itself.
    Positions of a sequence are ``step`` rows apart: 1, or as many as there are sequences where positions come first;
    then each further T positions work SKEW positions earlier, but from position 0 on as before.

    A program serves G heads of one sequence: rows are (head, position), columns the E = G * K channels of the heads.
    Queries are zero outside their own head's channels, so one product gives the logits of all G heads, and
    head dims under the 16 that tl.dot needs cost nothing.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    group = tl.program_id(0) % (D // (G * K))
    row = tl.program_id(0) // (D // (G * K))
    early = row // step * SKEW
    begin = tl.maximum(begin - early, 0)
    start -= early
    stop -= early
    base -= early
    head = group * G + tl.arange(0, G * C) // C
    at = tl.arange(0, G * C) % C
    channel = group * G * K + tl.arange(0, E)
    here = (start + at < stop)[:, None] & (channel[None, :] // K == head[:, None])
    first_row = _first_row(row, step, T)
    at_NE = (first_row + (start + at) * step)[:, None] * D + channel[None, :]
    q_NE = tl.load(q_ptr + at_NE, here, 0.0)
    if FIRST and BLOCK == 1:
        kt_NE = tl.load(kt_ptr + at_NE, here, 0.0).to(tl.float32)
        vt_NE = tl.load(vt_ptr + at_NE, here, 0.0).to(tl.float32)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    H: tl.constexpr = D // K
    state_N = _first_row(row, step, S) + (start - base + at) * step
    if FIRST:
        m_N = tl.full([G * C], MASKED, tl.float32)
        l_N = tl.zeros([G * C], tl.float32)
        o_NE = tl.zeros([G * C, E], tl.float32)
    else:
        m_N = tl.load(m_ptr + state_N * H + head, start + at < stop, 0.0)
        l_N = tl.load(l_ptr + state_N * H + head, start + at < stop, 1.0)
        o_NE = tl.load(o_ptr + state_N[:, None] * D + channel[None, :], here, 0.0)
    own = start // BLOCK * BLOCK  # where the block of the first position begins
    for first in range(begin, own, J):
        j = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (j[None, :] - start - at[:, None])
        m_N, l_N, o_NE = _attend(
            q_NE, bias_NJ, (j < own)[None, :], m_N, l_N, o_NE,
            k_ptr, v_ptr, first_row + j * step, j < own, channel, D, UNIT,
        )  # fmt: skip
    if BLOCK > 1:
        t = start + at
        for first in range(own, stop, J):
            j = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (j[None, :] - t[:, None])
            m_N, l_N, o_NE = _attend(
                q_NE, bias_NJ, _in_block(j[None, :], t[:, None], BLOCK), m_N, l_N, o_NE,
                kt_ptr, vt_ptr, first_row + j * step, j < stop, channel, D, UNIT,
            )  # fmt: skip
    elif FIRST:  # the temporary pair comes last, so that nothing waits for its loads before the loop
        s_N = tl.sum(q_NE.to(tl.float32) * kt_NE, 1) * (UNIT * LOG2E)
        top_N = tl.maximum(m_N, s_N)
        p_N = tl.exp2(s_N - top_N)
        shrink_N = tl.exp2(m_N - top_N)
        l_N = l_N * shrink_N + p_N
        o_NE = o_NE * shrink_N[:, None] + p_N[:, None] * vt_NE
        m_N = top_N
    tl.store(m_ptr + state_N * H + head, m_N, start + at < stop)
    tl.store(l_ptr + state_N * H + head, l_N, start + at < stop)
    tl.store(o_ptr + state_N[:, None] * D + channel[None, :], o_NE, here)


@triton.jit
def _pull(
    k_NE, v_NE, bias_NJ, seen_NJ, dk_NE, dv_NE,
    q_ptr, da_ptr, lse_ptr, delta_ptr, row_J, here_J, channel, head, head_first,
    D: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """dk, but for the factor UNIT, and dv with what the queries that have ``seen`` the pairs add."""
    at_JE = row_J[:, None] * D + channel[None, :]
    q_JE = tl.load(q_ptr + at_JE, here_J[:, None], 0.0)
    da_JE = tl.load(da_ptr + at_JE, here_J[:, None], 0.0)
    at_J = row_J * (D // K) + head_first
    lse_NJ = tl.load(lse_ptr + at_J, here_J, 0.0)[None, :]
    delta_NJ = tl.load(delta_ptr + at_J, here_J, 0.0)[None, :]
    if G == 2:
        is_first = (head == head_first)[:, None]
        lse_NJ = tl.where(is_first, lse_NJ, tl.load(lse_ptr + at_J + 1, here_J, 0.0)[None, :])
        delta_NJ = tl.where(is_first, delta_NJ, tl.load(delta_ptr + at_J + 1, here_J, 0.0)[None, :])
    s_NJ = tl.dot(k_NE, tl.trans(q_JE), input_precision="ieee") * (UNIT * LOG2E)
    s_NJ += bias_NJ
    p_NJ = tl.where(seen_NJ, tl.exp2(s_NJ - lse_NJ), 0.0)
    ds_NJ = p_NJ * (tl.dot(v_NE, tl.trans(da_JE), input_precision="ieee") - delta_NJ)
    dv_NE = tl.dot(p_NJ.to(da_JE.dtype), da_JE, dv_NE, input_precision="ieee")
    dk_NE = tl.dot(ds_NJ.to(q_JE.dtype), q_JE, dk_NE, input_precision="ieee")
    return dk_NE, dv_NE


@triton.jit(do_not_specialize=["T", "start", "stop", "begin", "end", "base"])
def past_bwd_kernel(
    q_ptr, k_ptr, v_ptr, da_ptr, lse_ptr, delta_ptr, slopes_ptr, dk_ptr, dv_ptr, T, step, start, stop, begin, end, base,
    D: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, J: tl.constexpr, FIRST: tl.constexpr, SKEW: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Gradients of the persistent pairs of start..stop pulled from the queries begin..end; layout as past_fwd_kernel.

    The FIRST call for a pair starts from zero, the others from what is there. T positions end the queries.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    group = tl.program_id(0) % (D // (G * K))
    row = tl.program_id(0) // (D // (G * K))
    early = row // step * SKEW
    start -= early
    stop -= early
    begin -= early
    end = tl.minimum(end - early, T)
    base -= early
    head_first = group * G
    head = head_first + tl.arange(0, G * C) // C
    at = tl.arange(0, G * C) % C
    channel = head_first * K + tl.arange(0, E)
    here = (start + at < stop)[:, None] & (channel[None, :] // K == head[:, None])
    first_row = _first_row(row, step, T)
    pair_NE = (first_row + (start + at) * step)[:, None] * D + channel[None, :]
    k_NE = tl.load(k_ptr + pair_NE, here, 0.0)
    v_NE = tl.load(v_ptr + pair_NE, here, 0.0)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    at_NE = (_first_row(row, step, S) + (start - base + at) * step)[:, None] * D + channel[None, :]
    if FIRST:
        dk_NE = tl.zeros([G * C, E], tl.float32)
        dv_NE = tl.zeros([G * C, E], tl.float32)
    else:
        dk_NE = tl.load(dk_ptr + at_NE, here, 0.0)
        dv_NE = tl.load(dv_ptr + at_NE, here, 0.0)
    for first in range(begin, end, J):
        i = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (start + at[:, None] - i[None, :])
        dk_NE, dv_NE = _pull(
            k_NE, v_NE, bias_NJ, (i < end)[None, :], dk_NE, dv_NE,
            q_ptr, da_ptr, lse_ptr, delta_ptr, first_row + i * step, i < end, channel, head, head_first, D, K, UNIT, G,
        )  # fmt: skip
    tl.store(dk_ptr + at_NE, dk_NE, here)
    tl.store(dv_ptr + at_NE, dv_NE, here)


@triton.jit
def _push(
    q_NE, da_NE, lse_N, delta_N, bias_NJ, seen_NJ, dq_NE, k_ptr, v_ptr, row_J, here_J, channel,
    D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dq, but for the factor UNIT, with what the pairs that are ``seen`` add."""
    s_NJ, k_JE, v_JE = _logits(q_NE, bias_NJ, k_ptr, v_ptr, row_J, here_J, channel, D, UNIT)
    p_NJ = tl.where(seen_NJ, tl.exp2(s_NJ - lse_N[:, None]), 0.0)
    ds_NJ = p_NJ * (tl.dot(da_NE, tl.trans(v_JE), input_precision="ieee") - delta_N[:, None])
    return tl.dot(ds_NJ.to(k_JE.dtype), k_JE, dq_NE, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "S", "base"])
def query_bwd_kernel(
    q_ptr, kt_ptr, vt_ptr, k_ptr, v_ptr, da_ptr, lse_ptr, delta_ptr, slopes_ptr, dq_ptr, dkt_ptr, dvt_ptr,
    T, step, base, S,
    D: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    J: tl.constexpr, TEMPORARY: tl.constexpr, SKEW: tl.constexpr, BLOCK: tl.constexpr = 1,
):  # fmt: skip
    """Gradients of C queries, kept for S positions from ``base`` on; layout as past_fwd_kernel.

    TEMPORARY: with the temporary pairs that they see; gradients of those of the same positions are found too.
    """
    H: tl.constexpr = D // K
    group = tl.program_id(0) % (D // (G * K))
    row = tl.program_id(0) // (D // (G * K))
    head = group * G + tl.arange(0, G * C) // C
    channel = group * G * K + tl.arange(0, E)
    start = base - row // step * SKEW + tl.program_id(1) * C
    t = start + tl.arange(0, G * C) % C
    here = (t < T)[:, None] & (channel[None, :] // K == head[:, None])
    first_row = _first_row(row, step, T)
    row_N = first_row + t * step
    at_NE = row_N[:, None] * D + channel[None, :]
    q_NE = tl.load(q_ptr + at_NE, here, 0.0)
    da_NE = tl.load(da_ptr + at_NE, here, 0.0)
    lse_N = tl.load(lse_ptr + row_N * H + head, t < T, 0.0)
    delta_N = tl.load(delta_ptr + row_N * H + head, t < T, 0.0)
    slope_N = tl.load(slopes_ptr + head) * LOG2E
    dq_NE = tl.zeros([G * C, E], tl.float32)
    last = tl.minimum(start + C, T) - 1
    for first in range(0, last // BLOCK * BLOCK, J):
        j = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (j[None, :] - t[:, None])
        dq_NE = _push(
            q_NE, da_NE, lse_N, delta_N, bias_NJ, j[None, :] < t[:, None] // BLOCK * BLOCK, dq_NE,
            k_ptr, v_ptr, first_row + j * step, j < T, channel, D, UNIT,
        )  # fmt: skip
    out_N = _first_row(row, step, S) + (tl.program_id(1) * C + tl.arange(0, G * C) % C) * step
    out_NE = out_N[:, None] * D + channel[None, :]
    if TEMPORARY and BLOCK > 1:
        for first in range(start // BLOCK * BLOCK, last + 1, J):
            j = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (j[None, :] - t[:, None])
            dq_NE = _push(
                q_NE, da_NE, lse_N, delta_N, bias_NJ, _in_block(j[None, :], t[:, None], BLOCK), dq_NE,
                kt_ptr, vt_ptr, first_row + j * step, j <= last, channel, D, UNIT,
            )  # fmt: skip
        kt_NE = tl.load(kt_ptr + at_NE, here, 0.0)
        vt_NE = tl.load(vt_ptr + at_NE, here, 0.0)
        dkt_NE = tl.zeros([G * C, E], tl.float32)
        dvt_NE = tl.zeros([G * C, E], tl.float32)
        end = tl.minimum((last // BLOCK + 1) * BLOCK, T)
        for first in range(start, end, J):
            i = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (t[:, None] - i[None, :])
            seen_NJ = _in_block(t[:, None], i[None, :], BLOCK) & (i < end)[None, :]
            dkt_NE, dvt_NE = _pull(
                kt_NE, vt_NE, bias_NJ, seen_NJ, dkt_NE, dvt_NE, q_ptr, da_ptr, lse_ptr, delta_ptr,
                first_row + i * step, i < end, channel, head, group * G, D, K, UNIT, G,
            )  # fmt: skip
        tl.store(dkt_ptr + out_NE, dkt_NE * UNIT, here)
        tl.store(dvt_ptr + out_NE, dvt_NE, here)
    elif TEMPORARY:
        kt_NE = tl.load(kt_ptr + at_NE, here, 0.0).to(tl.float32)
        vt_NE = tl.load(vt_ptr + at_NE, here, 0.0).to(tl.float32)
        p_N = tl.exp2(tl.sum(q_NE.to(tl.float32) * kt_NE, 1) * (UNIT * LOG2E) - lse_N)
        ds_N = p_N * (tl.sum(da_NE.to(tl.float32) * vt_NE, 1) - delta_N)
        tl.store(dkt_ptr + out_NE, ds_N[:, None] * UNIT * q_NE.to(tl.float32), here)
        tl.store(dvt_ptr + out_NE, p_N[:, None] * da_NE.to(tl.float32), here)
        dq_NE += ds_N[:, None] * kt_NE
    tl.store(dq_ptr + out_NE, dq_NE * UNIT, here)
