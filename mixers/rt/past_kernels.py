"""Triton kernels of attention between chunks of positions, for ``mixers.rt.fused`` and ``mixers.rt.wavefront``.

The queries of a chunk attend to the persistent pairs of earlier chunks, and to temporary pairs, before the chunk's loop
over positions starts. In the backward pass, pairs pull their gradients from the queries of later chunks.

Tensors, for N sequences of T positions; scratch memory holds S positions of each sequence from position ``base`` on:

    name         shape           written by         read by
    q            (N, T, D)       caller             all kernels
    kt, vt       (N, T, D)       caller             past_fwd, query_bwd             temporary pairs
    k, v         (N, T, D)       loop, forward      all kernels                     persistent pairs
    slopes       (H,)            caller             all kernels                     ALiBi
    m, l         (N, S, H)       past_fwd           past_fwd, loop                  softmax maximum and sum
    o            (N, S, D)       past_fwd           past_fwd, loop                  softmax numerator
    lse          (N, T, H)       loop, forward      past_bwd, query_bwd             m + log2(l)
    da           (N, T, D)       loop, backward     past_bwd, query_bwd             gradient of the attention output a
    delta        (N, T, H)       loop, backward     past_bwd, query_bwd             da . a of each head
    dk, dv       (N, S, D)       past_bwd           past_bwd, loop                  gradients of persistent pairs
    dq           (N, S, D)       query_bwd          caller
    dkt, dvt     (N, S, D)       query_bwd          caller

Heads are concatenated: D = H * K. Logits are in units of log2. A program serves G heads of one sequence. Its rows are
(head, position), suffix N; its columns are the E = G * K channels of these heads, suffix E; positions of the other side
of the attention have the suffix J. Queries are zero outside the channels of their own head, so one product gives the
logits of all G heads, and head dims below the 16 that ``tl.dot`` needs cost nothing extra.

Compile-time settings of all kernels:
    D, K: width and head dim. In ``mixers.rt.fused`` a layer's heads may have fewer channels than K and fill less than D
        (``mixers.rt.fused.padding``); the other channels are zero.
    UNIT: factor of the logits, 1 / sqrt(the layer's own head dim).
    C, J: positions of a program, and positions of the other side that it takes at a time.
    G, E: heads of a program and their channels.
    SKEW: positions by which each further group of ``step`` rows works earlier.
    EARLY: whether the launch is a programmatic dependent one.

Positions of a sequence are ``step`` rows apart: 1 where sequences come first, and the number of sequences where
positions come first. In the latter case each further T * step rows are another layer, which works SKEW positions
earlier but has its own positions from 0 on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import LOG2E, MASKED


@triton.jit
def _program(D: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """Sequence of this program and the number of its group of heads."""
    groups: tl.constexpr = D // (G * K)
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups
    return row, group


@triton.jit
def _rows(
    group: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
):
    """First head of a group; head and position of each row of a tile; channel of each column."""
    head_first = group * G
    head_N = head_first + tl.arange(0, G * C) // C
    place_N = tl.arange(0, G * C) % C
    channel_E = head_first * K + tl.arange(0, E)
    return head_first, head_N, place_N, channel_E


@triton.jit
def _first_row(row: tl.tensor, step: tl.tensor, T: tl.tensor):
    """Row of position 0 of the sequence ``row``, whose T positions are ``step`` rows apart."""
    return (row // step).to(tl.int64) * T * step + row % step


@triton.jit
def _in_block(j: tl.tensor, t: tl.tensor, BLOCK: tl.constexpr):
    """Whether the query at t sees the temporary pair of j."""
    return (j <= t) & (j // BLOCK == t // BLOCK)


@triton.jit
def _logits(
    q_NE: tl.tensor,
    bias_NJ: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_J: tl.tensor,
    here_J: tl.tensor,
    channel_E: tl.tensor,
    D: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Logits of queries and J pairs, and the pairs."""
    at_JE = row_J[:, None] * D + channel_E[None, :]
    k_JE = tl.load(k_ptr + at_JE, here_J[:, None], 0.0)
    v_JE = tl.load(v_ptr + at_JE, here_J[:, None], 0.0)

    s_NJ = tl.dot(q_NE, tl.trans(k_JE), input_precision="ieee") * (UNIT * LOG2E)
    return s_NJ + bias_NJ, k_JE, v_JE


@triton.jit
def _attend(
    q_NE: tl.tensor,
    bias_NJ: tl.tensor,
    seen_NJ: tl.tensor,
    m_N: tl.tensor,
    l_N: tl.tensor,
    o_NE: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_J: tl.tensor,
    here_J: tl.tensor,
    channel_E: tl.tensor,
    D: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Softmax state after J more pairs, of which ``seen`` count; the first J must hold a seen pair for every row."""
    s_NJ, _, v_JE = _logits(q_NE, bias_NJ, k_ptr, v_ptr, row_J, here_J, channel_E, D, UNIT)
    s_NJ = tl.where(seen_NJ, s_NJ, MASKED)

    top_N = tl.maximum(m_N, tl.max(s_NJ, 1))
    p_NJ = tl.exp2(s_NJ - top_N[:, None])
    shrink_N = tl.exp2(m_N - top_N)
    l_N = l_N * shrink_N + tl.sum(p_NJ, 1)
    o_NE = tl.dot(p_NJ.to(v_JE.dtype), v_JE, o_NE * shrink_N[:, None], input_precision="ieee")
    return top_N, l_N, o_NE


@triton.jit(do_not_specialize=["T", "begin", "start", "stop", "base"])
def past_fwd_kernel(
    q_ptr: tl.tensor,
    kt_ptr: tl.tensor,
    vt_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    o_ptr: tl.tensor,
    T: tl.tensor,
    step: tl.tensor,
    begin: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    base: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    FIRST: tl.constexpr,
    SKEW: tl.constexpr,
    EARLY: tl.constexpr = False,
    BLOCK: tl.constexpr = 1,
):
    """Attend from the positions start..stop to the persistent pairs of begin..start; write the softmax state.

    1. Find the sequence and the heads of this program, and its positions.
    2. Read the queries.
    3. Start the softmax state: empty in the FIRST call for a position, otherwise what the calls before left.
    4. Attend to the persistent pairs before the block of ``start``, J at a time.
    5. In the FIRST call, attend to temporary pairs: those of a position's own block of BLOCK positions up to itself.
       With blocks of one position, ``kt`` and ``vt`` may be None, which stands for zeros.
    6. Write the softmax state.

    With a BLOCK of several positions, the first call for a position must be its only one.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()

    # 1. Sequence, heads and positions.
    H: tl.constexpr = D // K
    row, group = _program(D, K, G)
    early = row // step * SKEW
    begin = tl.maximum(begin - early, 0)
    start -= early
    stop -= early
    base -= early
    _, head_N, place_N, channel_E = _rows(group, K, C, G, E)
    here_NE = (start + place_N < stop)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    first_row = _first_row(row, step, T)

    # 2. Queries.
    at_NE = (first_row + (start + place_N) * step)[:, None] * D + channel_E[None, :]
    q_NE = tl.load(q_ptr + at_NE, here_NE, 0.0)
    if FIRST and BLOCK == 1 and kt_ptr is not None:
        kt_NE = tl.load(kt_ptr + at_NE, here_NE, 0.0).to(tl.float32)
        vt_NE = tl.load(vt_ptr + at_NE, here_NE, 0.0).to(tl.float32)
    slope_N = tl.load(slopes_ptr + head_N) * LOG2E

    # 3. Softmax state.
    state_N = _first_row(row, step, S) + (start - base + place_N) * step
    if FIRST:
        m_N = tl.full([G * C], MASKED, tl.float32)
        l_N = tl.zeros([G * C], tl.float32)
        o_NE = tl.zeros([G * C, E], tl.float32)
    else:
        m_N = tl.load(m_ptr + state_N * H + head_N, start + place_N < stop, 0.0)
        l_N = tl.load(l_ptr + state_N * H + head_N, start + place_N < stop, 1.0)
        o_NE = tl.load(o_ptr + state_N[:, None] * D + channel_E[None, :], here_NE, 0.0)

    # 4. Persistent pairs, up to where the block of the first position begins.
    own = start // BLOCK * BLOCK
    for first in range(begin, own, J):
        j = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (j[None, :] - start - place_N[:, None])
        seen_1J = (j < own)[None, :]
        row_J = first_row + j * step
        m_N, l_N, o_NE = _attend(
            q_NE, bias_NJ, seen_1J, m_N, l_N, o_NE, k_ptr, v_ptr, row_J, j < own, channel_E, D, UNIT
        )

    # 5. Temporary pairs: those of the block, or the position's own, whose loads then need not be awaited before 4.
    if BLOCK > 1:
        t_N = start + place_N
        for first in range(own, stop, J):
            j = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (j[None, :] - t_N[:, None])
            seen_NJ = _in_block(j[None, :], t_N[:, None], BLOCK)
            row_J = first_row + j * step
            m_N, l_N, o_NE = _attend(
                q_NE, bias_NJ, seen_NJ, m_N, l_N, o_NE, kt_ptr, vt_ptr, row_J, j < stop, channel_E, D, UNIT
            )
    elif FIRST:
        s_N = tl.zeros([G * C], tl.float32)
        if kt_ptr is not None:
            s_N = tl.sum(q_NE.to(tl.float32) * kt_NE, 1) * (UNIT * LOG2E)
        top_N = tl.maximum(m_N, s_N)
        p_N = tl.exp2(s_N - top_N)
        shrink_N = tl.exp2(m_N - top_N)
        l_N = l_N * shrink_N + p_N
        o_NE = o_NE * shrink_N[:, None]
        if kt_ptr is not None:
            o_NE += p_N[:, None] * vt_NE
        m_N = top_N

    # 6. The state.
    tl.store(m_ptr + state_N * H + head_N, m_N, start + place_N < stop)
    tl.store(l_ptr + state_N * H + head_N, l_N, start + place_N < stop)
    tl.store(o_ptr + state_N[:, None] * D + channel_E[None, :], o_NE, here_NE)


@triton.jit
def _pull(
    k_NE: tl.tensor,
    v_NE: tl.tensor,
    bias_NJ: tl.tensor,
    seen_NJ: tl.tensor,
    dk_NE: tl.tensor,
    dv_NE: tl.tensor,
    q_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    row_J: tl.tensor,
    here_J: tl.tensor,
    channel_E: tl.tensor,
    head_N: tl.tensor,
    head_first: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    G: tl.constexpr,
):
    """Gradients of pairs after J more queries: dk / UNIT and dv. ``seen`` says which queries have seen which pairs."""
    # What the queries left.
    at_JE = row_J[:, None] * D + channel_E[None, :]
    q_JE = tl.load(q_ptr + at_JE, here_J[:, None], 0.0)
    da_JE = tl.load(da_ptr + at_JE, here_J[:, None], 0.0)
    at_J = row_J * (D // K) + head_first
    lse_NJ = tl.load(lse_ptr + at_J, here_J, 0.0)[None, :]
    delta_NJ = tl.load(delta_ptr + at_J, here_J, 0.0)[None, :]
    if G == 2:
        is_first_N1 = (head_N == head_first)[:, None]
        lse_NJ = tl.where(is_first_N1, lse_NJ, tl.load(lse_ptr + at_J + 1, here_J, 0.0)[None, :])
        delta_NJ = tl.where(is_first_N1, delta_NJ, tl.load(delta_ptr + at_J + 1, here_J, 0.0)[None, :])

    # Weights p of the softmax, gradients ds of the logits.
    s_NJ = tl.dot(k_NE, tl.trans(q_JE), input_precision="ieee") * (UNIT * LOG2E)
    s_NJ += bias_NJ
    p_NJ = tl.where(seen_NJ, tl.exp2(s_NJ - lse_NJ), 0.0)
    ds_NJ = p_NJ * (tl.dot(v_NE, tl.trans(da_JE), input_precision="ieee") - delta_NJ)

    dv_NE = tl.dot(p_NJ.to(da_JE.dtype), da_JE, dv_NE, input_precision="ieee")
    dk_NE = tl.dot(ds_NJ.to(q_JE.dtype), q_JE, dk_NE, input_precision="ieee")
    return dk_NE, dv_NE


@triton.jit(do_not_specialize=["T", "start", "stop", "begin", "end", "base"])
def past_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    T: tl.tensor,
    step: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    base: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    FIRST: tl.constexpr,
    SKEW: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Pull the gradients of the persistent pairs of start..stop from the queries of begin..end.

    1. Find the sequence and the heads of this program, and its positions. Queries end at T.
    2. Read the pairs.
    3. Start the gradients: zero in the FIRST call for a pair, otherwise what the calls before left.
    4. Add what the queries send back, J at a time.
    5. Write the gradients; that of k still lacks the factor UNIT.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()

    # 1. Sequence, heads and positions.
    row, group = _program(D, K, G)
    early = row // step * SKEW
    start -= early
    stop -= early
    begin -= early
    end = tl.minimum(end - early, T)
    base -= early
    head_first, head_N, place_N, channel_E = _rows(group, K, C, G, E)
    here_NE = (start + place_N < stop)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    first_row = _first_row(row, step, T)

    # 2. Pairs.
    pair_NE = (first_row + (start + place_N) * step)[:, None] * D + channel_E[None, :]
    k_NE = tl.load(k_ptr + pair_NE, here_NE, 0.0)
    v_NE = tl.load(v_ptr + pair_NE, here_NE, 0.0)
    slope_N = tl.load(slopes_ptr + head_N) * LOG2E

    # 3. Gradients so far.
    at_NE = (_first_row(row, step, S) + (start - base + place_N) * step)[:, None] * D + channel_E[None, :]
    if FIRST:
        dk_NE = tl.zeros([G * C, E], tl.float32)
        dv_NE = tl.zeros([G * C, E], tl.float32)
    else:
        dk_NE = tl.load(dk_ptr + at_NE, here_NE, 0.0)
        dv_NE = tl.load(dv_ptr + at_NE, here_NE, 0.0)

    # 4. Queries.
    for first in range(begin, end, J):
        i = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (start + place_N[:, None] - i[None, :])
        here_1J = (i < end)[None, :]
        row_J = first_row + i * step
        dk_NE, dv_NE = _pull(
            k_NE,
            v_NE,
            bias_NJ,
            here_1J,
            dk_NE,
            dv_NE,
            q_ptr,
            da_ptr,
            lse_ptr,
            delta_ptr,
            row_J,
            i < end,
            channel_E,
            head_N,
            head_first,
            D,
            K,
            UNIT,
            G,
        )

    # 5. Gradients.
    tl.store(dk_ptr + at_NE, dk_NE, here_NE)
    tl.store(dv_ptr + at_NE, dv_NE, here_NE)


@triton.jit
def _push(
    q_NE: tl.tensor,
    da_NE: tl.tensor,
    lse_N: tl.tensor,
    delta_N: tl.tensor,
    bias_NJ: tl.tensor,
    seen_NJ: tl.tensor,
    dq_NE: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    row_J: tl.tensor,
    here_J: tl.tensor,
    channel_E: tl.tensor,
    D: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Gradients of queries after J more pairs, dq / UNIT. ``seen`` says which queries have seen which pairs."""
    s_NJ, k_JE, v_JE = _logits(q_NE, bias_NJ, k_ptr, v_ptr, row_J, here_J, channel_E, D, UNIT)
    p_NJ = tl.where(seen_NJ, tl.exp2(s_NJ - lse_N[:, None]), 0.0)
    ds_NJ = p_NJ * (tl.dot(da_NE, tl.trans(v_JE), input_precision="ieee") - delta_N[:, None])
    return tl.dot(ds_NJ.to(k_JE.dtype), k_JE, dq_NE, input_precision="ieee")


@triton.jit(do_not_specialize=["T", "S", "base"])
def query_bwd_kernel(
    q_ptr: tl.tensor,
    kt_ptr: tl.tensor,
    vt_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dkt_ptr: tl.tensor,
    dvt_ptr: tl.tensor,
    T: tl.tensor,
    step: tl.tensor,
    base: tl.tensor,
    S: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    J: tl.constexpr,
    TEMPORARY: tl.constexpr,
    SKEW: tl.constexpr,
    BLOCK: tl.constexpr = 1,
):
    """Gradients of the queries of C positions; with TEMPORARY those of the temporary pairs of these positions, too.

    1. Find the sequence and the heads of this program, and its positions.
    2. Read the queries with their lse, delta and da.
    3. Add to dq what the persistent pairs before a position's block of BLOCK positions send back, J at a time.
    4. With TEMPORARY and a BLOCK of several positions:
       a. add to dq what the temporary pairs of the block send back;
       b. pull the gradients of the temporary pairs from the queries of their block.
    5. With TEMPORARY and blocks of one position, do both for a position and its own pair.
    6. Write dq.
    """
    # 1. Sequence, heads and positions.
    H: tl.constexpr = D // K
    row, group = _program(D, K, G)
    head_first, head_N, _, channel_E = _rows(group, K, C, G, E)
    start = base - row // step * SKEW + tl.program_id(1) * C
    place_N = tl.arange(0, G * C) % C
    t_N = start + place_N
    here_NE = (t_N < T)[:, None] & (channel_E[None, :] // K == head_N[:, None])
    first_row = _first_row(row, step, T)
    row_N = first_row + t_N * step
    at_NE = row_N[:, None] * D + channel_E[None, :]

    # 2. Queries.
    q_NE = tl.load(q_ptr + at_NE, here_NE, 0.0)
    da_NE = tl.load(da_ptr + at_NE, here_NE, 0.0)
    lse_N = tl.load(lse_ptr + row_N * H + head_N, t_N < T, 0.0)
    delta_N = tl.load(delta_ptr + row_N * H + head_N, t_N < T, 0.0)
    slope_N = tl.load(slopes_ptr + head_N) * LOG2E
    dq_NE = tl.zeros([G * C, E], tl.float32)

    # 3. Persistent pairs.
    last = tl.minimum(start + C, T) - 1
    for first in range(0, last // BLOCK * BLOCK, J):
        j = first + tl.arange(0, J)
        bias_NJ = slope_N[:, None] * (j[None, :] - t_N[:, None])
        seen_NJ = j[None, :] < t_N[:, None] // BLOCK * BLOCK
        row_J = first_row + j * step
        dq_NE = _push(
            q_NE, da_NE, lse_N, delta_N, bias_NJ, seen_NJ, dq_NE, k_ptr, v_ptr, row_J, j < T, channel_E, D, UNIT
        )

    out_N = _first_row(row, step, S) + (tl.program_id(1) * C + place_N) * step
    out_NE = out_N[:, None] * D + channel_E[None, :]
    if TEMPORARY and BLOCK > 1:
        # 4a. Temporary pairs to queries.
        for first in range(start // BLOCK * BLOCK, last + 1, J):
            j = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (j[None, :] - t_N[:, None])
            seen_NJ = _in_block(j[None, :], t_N[:, None], BLOCK)
            row_J = first_row + j * step
            dq_NE = _push(
                q_NE,
                da_NE,
                lse_N,
                delta_N,
                bias_NJ,
                seen_NJ,
                dq_NE,
                kt_ptr,
                vt_ptr,
                row_J,
                j <= last,
                channel_E,
                D,
                UNIT,
            )

        # 4b. Queries to temporary pairs.
        kt_NE = tl.load(kt_ptr + at_NE, here_NE, 0.0)
        vt_NE = tl.load(vt_ptr + at_NE, here_NE, 0.0)
        dkt_NE = tl.zeros([G * C, E], tl.float32)
        dvt_NE = tl.zeros([G * C, E], tl.float32)
        end = tl.minimum((last // BLOCK + 1) * BLOCK, T)
        for first in range(start, end, J):
            i = first + tl.arange(0, J)
            bias_NJ = slope_N[:, None] * (t_N[:, None] - i[None, :])
            seen_NJ = _in_block(t_N[:, None], i[None, :], BLOCK) & (i < end)[None, :]
            row_J = first_row + i * step
            dkt_NE, dvt_NE = _pull(
                kt_NE,
                vt_NE,
                bias_NJ,
                seen_NJ,
                dkt_NE,
                dvt_NE,
                q_ptr,
                da_ptr,
                lse_ptr,
                delta_ptr,
                row_J,
                i < end,
                channel_E,
                head_N,
                head_first,
                D,
                K,
                UNIT,
                G,
            )
        tl.store(dkt_ptr + out_NE, dkt_NE * UNIT, here_NE)
        tl.store(dvt_ptr + out_NE, dvt_NE, here_NE)
    elif TEMPORARY:
        # 5. A position's own pair.
        kt_NE = tl.load(kt_ptr + at_NE, here_NE, 0.0).to(tl.float32)
        vt_NE = tl.load(vt_ptr + at_NE, here_NE, 0.0).to(tl.float32)
        p_N = tl.exp2(tl.sum(q_NE.to(tl.float32) * kt_NE, 1) * (UNIT * LOG2E) - lse_N)
        ds_N = p_N * (tl.sum(da_NE.to(tl.float32) * vt_NE, 1) - delta_N)
        tl.store(dkt_ptr + out_NE, ds_N[:, None] * UNIT * q_NE.to(tl.float32), here_NE)
        tl.store(dvt_ptr + out_NE, p_N[:, None] * da_NE.to(tl.float32), here_NE)
        dq_NE += ds_N[:, None] * kt_NE

    # 6. Gradients of the queries.
    tl.store(dq_ptr + out_NE, dq_NE * UNIT, here_NE)
