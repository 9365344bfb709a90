"""Kernels of the recurrence with one decay per head and wide heads, as products of chunks of positions in tensor cores.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T          o_t = S_t^T q_t

    name           shape               written by        read by
    q, k           (R, B, T, M, K)     caller            all kernels         M divides H: H / M heads share each
    v              (R, B, T, H, V)     caller            all kernels
    g              (R, B, T, H, 1)     caller            all kernels         log decays, float32; may be absent
    i              (R, B, T, H, 1)     caller            all kernels         log weights, float32; may be absent
    o              (R, B, T, H, V)     chunked_fwd       caller
    n              (R, B, T, H, 1)     chunked_fwd       caller              with i: sums of weights, float32
    do             (R, B, T, H, V)     caller            both backward kernels
    dn             (R, B, T, H, 1)     caller            both backward kernels
    dq             (R, B, T, H, K)     query_bwd         caller
    share          (R, B, T, H)        query_bwd         pair_bwd            q . dq, float32
    dk             (R, B, T, H, K)     pair_bwd          caller
    dv             (R, B, T, H, V)     pair_bwd          caller
    dg             (R, B, T, H, 1)     pair_bwd          caller              float32
    di             (R, B, T, H, 1)     pair_bwd          caller              float32
    part           (R B H, N, I, J)    states            fwd, query_bwd      in the state, float32; with N > 1 segments
                                                         pair_bwd            another in its gradient, from q and do
    decay          (R B H, N)          states            as part             of whole segments, float32

Inside a chunk of C positions, position i reads pair j <= i with the weight exp(c_i - c_j) q_i . k_j, where c are
running sums of g; these factors are at most 1. A program loops over the chunks of one head of a segment with the state,
or its gradient, in registers. A segment is a whole sequence; few long sequences are cut into N segments of P positions:
``states`` computes what each adds to the state, and from these parts a program makes the state where its segment
begins, or the gradient where it ends. H and V are those after wide values are cut into blocks of 64, each of which is a
head; the gradients of what these heads share are then summed. As in ``mixers.ops.kernels.linear_recurrence``, the
gradient of g follows from quantities that are computed anyway: dg_t is the sum of q_s . dq_s - k_s . dk_s over s >= t.

With log weights i, a position writes exp(i_t) k_t v_t^T, and the decay between positions i and j has this factor, too:
exp(i_j + c_i - c_j), which the caller keeps at most 1. Then di_t = k_t . dk_t. The kernels also compute n, which is o
for values of one; its state is a vector of I numbers.

Sizes of rows: I is K and J is V, padded to powers of two of at least 16. Rows after the last position are zeros. The
queries of neighbouring positions are q_row numbers apart in memory, the keys k_row and, with weights, the values v_row.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import MASKED, contiguous, evenly_spaced, launches_early
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = {"C": 64, "num_stages": 2, "num_warps": 4}
PROGRAMS, SHORTEST, LEAST_SEGMENTS = 256, 512, 4
"""Programs that fill a GPU, fewest positions of a segment, and fewest segments that repay reading the rows twice."""
LEAST_CHANNELS = 16
"""Least number of channels that tensor cores take."""
VALUES = 64
"""Channels of a block of values with which ``mixers.ops`` calls these kernels.

With values of 24 channels or one, keys of 64, thousands of programs and bfloat16, compiled kernels returned wrong
numbers on an H200 or ended with illegal memory accesses (Triton 3.6). With 64 they are right, and in Triton's
interpreter with all. Others report the same of products with 32 columns on Hopper, where tensor cores read memory
beyond small operands:
https://github.com/triton-lang/triton/issues/11366 and 10629.
"""


@triton.jit
def _load(pointer: tl.tensor, row_C: tl.tensor, live_C: tl.tensor, N: tl.constexpr, E: tl.constexpr):
    """Rows of N numbers, filled up to E with zeros."""
    e = tl.arange(0, E)
    return tl.load(pointer + row_C[:, None] * N + e[None, :], live_C[:, None] & (e < N)[None, :], 0.0)


@triton.jit
def _load_keys(
    pointer: tl.tensor,
    row_C: tl.tensor,
    distance: tl.tensor,
    head: tl.tensor,
    live_C: tl.tensor,
    K: tl.constexpr,
    I: tl.constexpr,
):
    """Rows of a head of queries or keys, filled up to I with zeros."""
    i = tl.arange(0, I)
    at_CI = (row_C * distance + head * K)[:, None] + i[None, :]
    return tl.load(pointer + at_CI, live_C[:, None] & (i < K)[None, :], 0.0)


@triton.jit
def _store(pointer: tl.tensor, row_C: tl.tensor, live_C: tl.tensor, y_CE: tl.tensor, N: tl.constexpr, E: tl.constexpr):
    e = tl.arange(0, E)
    tl.store(pointer + row_C[:, None] * N + e[None, :], y_CE, live_C[:, None] & (e < N)[None, :])


@triton.jit
def _decays(g_ptr: tl.tensor, i_ptr: tl.tensor, row_C: tl.tensor, live_C: tl.tensor, C: tl.constexpr, G: tl.constexpr):
    """Decays between positions (C, C), from the chunk's start (C), and to its end (C), and of the whole chunk.

    Those that begin at a position have its weight.
    """
    c = tl.arange(0, C)
    seen_CC = c[:, None] >= c[None, :]
    g_C = tl.zeros([C], tl.float32)
    if G > 0:
        g_C += tl.load(g_ptr + row_C, live_C, 0.0)
    sum_C = tl.cumsum(g_C, 0)
    total = tl.sum(g_C, 0)
    since_C = sum_C
    if i_ptr is not None:
        since_C = sum_C - tl.load(i_ptr + row_C, live_C, 0.0)
    between_CC = tl.exp(tl.where(seen_CC, sum_C[:, None] - since_C[None, :], MASKED))
    return between_CC, tl.exp(sum_C), tl.exp(total - since_C), tl.exp(total)


@triton.jit
def _load_values(
    v_ptr: tl.tensor,
    row_C: tl.tensor,
    keys_C: tl.tensor,
    v_row: tl.tensor,
    head: tl.tensor,
    live_C: tl.tensor,
    V: tl.constexpr,
    J: tl.constexpr,
):
    """Rows of values of a head, which without v_row have no gaps between them."""
    return _load(v_ptr, row_C, live_C, V, J) if v_row is None else _load_keys(v_ptr, keys_C, v_row, head, live_C, V, J)


@triton.jit
def _gathered(
    part_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    first: tl.tensor,
    step: tl.constexpr,
    count: tl.tensor,
    I: tl.constexpr,
    J: tl.constexpr,
):
    """State, or its gradient, after ``count`` segments from the first on; zeros without segments."""
    S_IJ = tl.zeros([I, J], tl.float32)
    if part_ptr is not None:
        at_IJ = tl.arange(0, I)[:, None] * J + tl.arange(0, J)[None, :]
        for n in range(count):
            place = first + n * step
            if decay_ptr is not None:
                S_IJ *= tl.load(decay_ptr + place)
            S_IJ += tl.load(part_ptr + place * (I * J) + at_IJ)
    return S_IJ


@triton.jit(do_not_specialize=["T", "P"])
def chunked_states_kernel(
    left_ptr: tl.tensor,
    right_ptr: tl.tensor,
    g_ptr: tl.tensor,
    part_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    left_row: tl.tensor,
    T: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    BACK: tl.constexpr,
):
    """Part of a segment in the state, from k and v, or in the state's gradient, from q and do; and its whole decay.

    1. Start with zeros.
    2. For each chunk, the oldest first, or the newest first for gradients:
       S <- (decay of the chunk) S + ((decay between row and next chunk) left)^T right.
    3. Write what there is after the last chunk.
    """
    # 1. Zeros.
    head = tl.program_id(0) % H
    shared = head * M // H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    begin = tl.program_id(1) * P
    chunks = tl.cdiv(min(T - begin, P), C)
    S_IJ = tl.zeros([I, J], tl.float32)
    decay = 1.0

    # 2. Chunks.
    for n in range(chunks):
        t = begin + (chunks - 1 - n if BACK else n) * C + tl.arange(0, C)
        live_C = t < T
        row_C = (sequence * T + t) * H + head
        left_CI = _load_keys(left_ptr, sequence * T + t, left_row, shared, live_C, K, I)
        right_CJ = _load(right_ptr, row_C, live_C, V, J)
        _, from_start_C, to_end_C, whole = _decays(g_ptr, None, row_C, live_C, C, G)
        near_C = from_start_C if BACK else to_end_C
        left_CI = (left_CI.to(right_CJ.dtype).to(tl.float32) * near_C[:, None]).to(right_CJ.dtype)
        S_IJ = tl.dot(tl.trans(left_CI), right_CJ, S_IJ * whole, input_precision="ieee")
        decay *= whole

    # 3. Part and decay.
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    at_IJ = tl.arange(0, I)[:, None] * J + tl.arange(0, J)[None, :]
    tl.store(part_ptr + place * (I * J) + at_IJ, S_IJ)
    if decay_ptr is not None:
        tl.store(decay_ptr + place, decay)


@triton.jit(do_not_specialize=["T", "P"])
def chunked_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    i_ptr: tl.tensor,
    o_ptr: tl.tensor,
    n_ptr: tl.tensor,
    part_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    T: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Outputs of one head of one sequence.

    1. Start with the state before the segment.
    2. For each chunk, the oldest first:
       a. read its rows and decays;
       b. write o = (decayed q k^T) v + (decay from the start) q S;
       c. S <- (decay of the chunk) S + ((decay to the end) k)^T v;
       d. with weights, write n in the same way, which has a state of its own.
    """
    # 1. State.
    head = tl.program_id(0) % H
    shared = head * M // H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    segment = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    S_IJ = _gathered(part_ptr, decay_ptr, first, 1, segment, I, J)
    sum_I = tl.zeros([I], tl.float32)

    for start in range(segment * P, min(T, segment * P + P), C):
        # 2a. Rows and decays.
        t = start + tl.arange(0, C)
        live_C = t < T
        row_C = (sequence * T + t) * H + head
        keys_C = sequence * T + t
        q_CI = _load_keys(q_ptr, keys_C, q_row, shared, live_C, K, I).to(k_ptr.dtype.element_ty)
        k_CI = _load_keys(k_ptr, keys_C, k_row, shared, live_C, K, I)
        v_CJ = _load_values(v_ptr, row_C, keys_C, v_row, head, live_C, V, J)
        between_CC, from_start_C, to_end_C, whole = _decays(g_ptr, i_ptr, row_C, live_C, C, G)

        # 2b. Outputs.
        w_CC = tl.dot(q_CI, tl.trans(k_CI), input_precision="ieee") * between_CC
        o_CJ = tl.dot(q_CI, S_IJ.to(q_CI.dtype), input_precision="ieee") * from_start_C[:, None]
        o_CJ = tl.dot(w_CC.to(v_CJ.dtype), v_CJ, o_CJ, input_precision="ieee")
        _store(o_ptr, row_C, live_C, o_CJ, V, J)

        # 2c. State.
        k_CI = (k_CI.to(tl.float32) * to_end_C[:, None]).to(k_CI.dtype)
        S_IJ = tl.dot(tl.trans(k_CI), v_CJ, S_IJ * whole, input_precision="ieee")

        # 2d. Sums of weights.
        if i_ptr is not None:
            n_C = tl.sum(w_CC, 1) + tl.sum(q_CI.to(tl.float32) * sum_I[None, :], 1) * from_start_C
            tl.store(n_ptr + row_C, n_C, live_C)
            sum_I = sum_I * whole + tl.sum(k_CI.to(tl.float32), 0)


@triton.jit(do_not_specialize=["T", "P"])
def chunked_query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    i_ptr: tl.tensor,
    do_ptr: tl.tensor,
    dn_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    share_ptr: tl.tensor,
    part_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    T: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of the queries of one head of one sequence.

    1. Start with the state before the segment.
    2. For each chunk, the oldest first:
       a. read its rows and decays;
       b. write dq = (decayed do v^T) k + (decay from the start) do S^T, and with decays share = q . dq; with weights,
          dn joins the gradient of the sums;
       c. S <- (decay of the chunk) S + ((decay to the end) k)^T v;
       d. with weights, do the same for sums.
    """
    # 1. State.
    head = tl.program_id(0) % H
    shared = head * M // H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    segment = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * tl.num_programs(1)
    S_IJ = _gathered(part_ptr, decay_ptr, first, 1, segment, I, J)
    sum_I = tl.zeros([I], tl.float32)

    for start in range(segment * P, min(T, segment * P + P), C):
        # 2a. Rows and decays.
        t = start + tl.arange(0, C)
        live_C = t < T
        row_C = (sequence * T + t) * H + head
        keys_C = sequence * T + t
        k_CI = _load_keys(k_ptr, keys_C, k_row, shared, live_C, K, I)
        v_CJ = _load_values(v_ptr, row_C, keys_C, v_row, head, live_C, V, J)
        do_CJ = _load(do_ptr, row_C, live_C, V, J)
        between_CC, from_start_C, to_end_C, whole = _decays(g_ptr, i_ptr, row_C, live_C, C, G)

        # 2b. Queries.
        dw_CC = tl.dot(do_CJ, tl.trans(v_CJ), input_precision="ieee") * between_CC
        dq_CI = tl.dot(do_CJ, tl.trans(S_IJ).to(do_CJ.dtype), input_precision="ieee") * from_start_C[:, None]
        if i_ptr is not None:
            dn_C = tl.load(dn_ptr + row_C, live_C, 0.0)
            dw_CC += dn_C[:, None] * between_CC
            dq_CI += (dn_C * from_start_C)[:, None] * sum_I[None, :]
        dq_CI = tl.dot(dw_CC.to(k_CI.dtype), k_CI, dq_CI, input_precision="ieee")
        _store(dq_ptr, row_C, live_C, dq_CI, K, I)
        if G > 0:
            q_CI = _load_keys(q_ptr, keys_C, q_row, shared, live_C, K, I).to(k_ptr.dtype.element_ty).to(tl.float32)
            tl.store(share_ptr + row_C, tl.sum(q_CI * dq_CI, 1), live_C)

        # 2c. State.
        k_CI = (k_CI.to(tl.float32) * to_end_C[:, None]).to(k_CI.dtype)
        S_IJ = tl.dot(tl.trans(k_CI), v_CJ, S_IJ * whole, input_precision="ieee")

        # 2d. State of sums.
        if i_ptr is not None:
            sum_I = sum_I * whole + tl.sum(k_CI.to(tl.float32), 0)


@triton.jit(do_not_specialize=["T", "P"])
def chunked_pair_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    i_ptr: tl.tensor,
    do_ptr: tl.tensor,
    dn_ptr: tl.tensor,
    share_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dg_ptr: tl.tensor,
    di_ptr: tl.tensor,
    part_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    T: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of the pairs and decays of one head of one sequence.

    1. Start with the state's gradient after the segment, and a gradient of later decays of zeros.
    2. For each chunk, the newest first:
       a. read its rows and decays;
       b. write dv = (decayed q k^T)^T do + (decay to the end) k dS;
       c. write dk = (decayed do v^T)^T q + (decay to the end) v dS^T, with weights with those of dn;
       d. with decays, write dg: sums of share - k . dk over this and the segment's later positions; and di = k . dk;
       e. dS <- (decay of the chunk) dS + ((decay from the start) q)^T do, and so for sums.
    """
    # 1. Gradients of what comes later.
    head = tl.program_id(0) % H
    shared = head * M // H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    begin = tl.program_id(1) * P
    chunks = tl.cdiv(min(T - begin, P), C)
    last = (tl.program_id(0).to(tl.int64) + 1) * tl.num_programs(1) - 1
    dS_IJ = _gathered(part_ptr, decay_ptr, last, -1, tl.num_programs(1) - 1 - tl.program_id(1), I, J)
    dsum_I = tl.zeros([I], tl.float32)
    later = 0.0

    for back in range(chunks):
        # 2a. Rows and decays.
        t = begin + (chunks - 1 - back) * C + tl.arange(0, C)
        live_C = t < T
        row_C = (sequence * T + t) * H + head
        keys_C = sequence * T + t
        q_CI = _load_keys(q_ptr, keys_C, q_row, shared, live_C, K, I).to(k_ptr.dtype.element_ty)
        k_CI = _load_keys(k_ptr, keys_C, k_row, shared, live_C, K, I)
        v_CJ = _load_values(v_ptr, row_C, keys_C, v_row, head, live_C, V, J)
        do_CJ = _load(do_ptr, row_C, live_C, V, J)
        between_CC, from_start_C, to_end_C, whole = _decays(g_ptr, i_ptr, row_C, live_C, C, G)

        # 2b. Values.
        w_CC = tl.dot(q_CI, tl.trans(k_CI), input_precision="ieee") * between_CC
        dv_CJ = tl.dot(k_CI, dS_IJ.to(k_CI.dtype), input_precision="ieee") * to_end_C[:, None]
        dv_CJ = tl.dot(tl.trans(w_CC.to(do_CJ.dtype)), do_CJ, dv_CJ, input_precision="ieee")
        _store(dv_ptr, row_C, live_C, dv_CJ, V, J)

        # 2c. Keys.
        dw_CC = tl.dot(do_CJ, tl.trans(v_CJ), input_precision="ieee") * between_CC
        dk_CI = tl.dot(v_CJ, tl.trans(dS_IJ).to(v_CJ.dtype), input_precision="ieee") * to_end_C[:, None]
        if i_ptr is not None:
            dn_C = tl.load(dn_ptr + row_C, live_C, 0.0)
            dw_CC += dn_C[:, None] * between_CC
            dk_CI += to_end_C[:, None] * dsum_I[None, :]
        dk_CI = tl.dot(tl.trans(dw_CC.to(q_CI.dtype)), q_CI, dk_CI, input_precision="ieee")
        _store(dk_ptr, row_C, live_C, dk_CI, K, I)

        # 2d. Decays.
        if G > 0:
            dg_C = tl.load(share_ptr + row_C, live_C, 0.0) - tl.sum(k_CI.to(tl.float32) * dk_CI, 1)
            tl.store(dg_ptr + row_C, later + tl.cumsum(dg_C, 0, reverse=True), live_C)
            later += tl.sum(dg_C, 0)
        if i_ptr is not None:
            tl.store(di_ptr + row_C, tl.sum(k_CI.to(tl.float32) * dk_CI, 1), live_C)

        # 2e. State gradient.
        q_CI = (q_CI.to(tl.float32) * from_start_C[:, None]).to(q_CI.dtype)
        dS_IJ = tl.dot(tl.trans(q_CI), do_CJ, dS_IJ * whole, input_precision="ieee")
        if i_ptr is not None:
            dsum_I = dsum_I * whole + tl.sum(q_CI.to(tl.float32) * dn_C[:, None], 0)


def fits_blocks(key_channels: int, value_channels: int, device: torch.device, *, decays: bool) -> bool:
    """Return whether the kernels are fast with heads of these sizes.

    Wide keys spill registers but on Hopper, and without decays ``mixers.ops.kernels.matrix_chunks`` is faster.
    """
    return key_channels <= (128 if decays and launches_early(device) else 64) and value_channels % VALUES == 0


def chunked_recurrence_method(dtype: torch.dtype, weighted: bool = False) -> Method:
    """``mixers.ops.linear_recurrence.matrix_recurrence`` with at most one decay per head, and outputs in ``dtype``.

    Tensors: q, k (R, B, T, M, K) and v (R, B, T, H, V) in ``dtype``, V at most 64 or a multiple of it; g (R, B, T, H,
    1) float32, or None. Queries may be float32, which is the type of their gradient, too; products round them to
    ``dtype``. A weighted method, with V at most 64, also takes log weights (R, B, T, H, 1) float32, and also returns
    the sums of weights, as ``weighted_recurrence``.
    """

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        grid, given, settings = _launch(*tensors)
        _, k, v, g, _ = given
        o = v.new_empty(tensors[2].shape, dtype=dtype)
        n = torch.empty_like(given[4]) if weighted else None
        states = _states(grid, k, v, g, settings["k_row"], settings, back=False)
        chunked_fwd_kernel[grid](*given, o, n, *states, **settings)
        return (o,) if n is None else (o, n), tuple(y for y in states if y is not None)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        grid, given, settings = _launch(*tensors)
        do, dn = contiguous(*gradients) if weighted else (*contiguous(*gradients), None)
        q, k, v, g, i = given
        heads = (*v.shape[:3], settings["H"], settings["K"])
        dq, dk, dv = q.new_empty(heads), k.new_empty(heads), v.new_empty(tensors[2].shape)
        dg, share, di = (None if y is None else torch.empty_like(y) for y in (g, g, i))
        states = (*saved, None, None)[:2]
        chunked_query_bwd_kernel[grid](*given, do, dn, dq, share, *states, **settings)
        states = _states(grid, q, do, g, settings["q_row"], settings, back=True)
        chunked_pair_bwd_kernel[grid](*given, do, dn, share, dk, dv, dg, di, *states, **settings)
        if dg is not None and grid[1] > 1:  # each segment summed over its own positions
            firsts = dg[:, :, :: settings["P"]]
            later = firsts.flip(2).cumsum(2).flip(2) - firsts
            dg += later.repeat_interleave(settings["P"], 2)[:, :, : settings["T"]]

        # Sums over the heads, or blocks of values, that share a tensor.
        M, H = tensors[0].shape[3], tensors[2].shape[3]
        dq, dk = (y if y.shape[3] == M else y.unflatten(3, (M, -1)).sum(4) for y in (dq, dk))
        if dg is not None and dg.shape[3] > H:
            dg = dg.unflatten(3, (H, -1)).sum(4)
        return (dq, dk, dv, dg, di) if weighted else (dq, dk, dv, dg)

    return Method(forward, backward, outputs=2 if weighted else 1)


def _states(
    grid: tuple[int, int],
    left: Tensor,
    right: Tensor,
    g: Tensor | None,
    left_row: int,
    settings: dict[str, Any],
    *,
    back: bool,
) -> Any:
    """Return each segment's part in the state or its gradient, and its decay, if any; None for whole sequences."""
    if grid[1] == 1:
        return None, None
    part = left.new_empty(*grid, settings["I"], settings["J"], dtype=torch.float32)
    decay = None if g is None else part.new_empty(grid)
    own = {name: value for name, value in settings.items() if not name.endswith("_row")}
    chunked_states_kernel[grid](left, right, g, part, decay, left_row, **own, BACK=back)
    return part, decay


def _launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, i: Tensor | None = None
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Return the grid, the tensors as the kernels read them, and the settings, which all kernels share."""
    grid, sizes = _sizes(*q.shape, *v.shape[3:], g is not None, i is not None)

    # A block of wide values is a head of its own, which shares keys and decays.
    if sizes["H"] > v.shape[3]:
        v = v.unflatten(-1, (-1, VALUES)).flatten(3, 4)
        g = g if g is None else g.repeat_interleave(sizes["H"] // g.shape[3], 3)
    (q, q_row), (k, k_row) = (evenly_spaced(y.flatten(3)) for y in (q, k))
    v, v_row = (v.contiguous(), None) if i is None else evenly_spaced(v.flatten(3))
    rows = {"q_row": q_row, "k_row": k_row, "v_row": v_row}
    return grid, (q, k, v, *contiguous(g, i)), rows | sizes


@lru_cache
def _sizes(
    R: int, B: int, T: int, M: int, K: int, H: int, V: int, decays: bool, weighted: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid, and the settings that follow from sizes alone."""
    blocks = max(1, V // VALUES)
    H, V = H * blocks, V // blocks

    # Segments of whole chunks; only without weights, whose sums have a state of their own.
    segments = min(PROGRAMS // max(1, R * B * H), T // SHORTEST)
    P = CHUNK["C"] * triton.cdiv(T, CHUNK["C"] * segments) if segments >= LEAST_SEGMENTS and not weighted else T
    sizes = {
        "T": T,
        "P": P,
        "H": H,
        "M": M,
        "K": K,
        "V": V,
        "I": max(LEAST_CHANNELS, triton.next_power_of_2(K)),
        "J": max(LEAST_CHANNELS, triton.next_power_of_2(V)),
        "G": int(decays),
        **CHUNK,
    }
    return (R * B * H, triton.cdiv(T, max(1, P))), sizes
