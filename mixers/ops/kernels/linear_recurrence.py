"""Kernels of the recurrence of linear-attention layers, which loop over positions with the state in registers.

    S_t = exp(g_t) S_{t-1} + a_t u_t^T + k_t v_t^T,   u_t = S_{t-1}^T b_t          o_t = S_t^T q_t

With a bonus, o_t = S_{t-1}^T q_t + ((bonus k_t) . q_t) v_t. The delta rule (DELTA) has b, but no a:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = v_t - (exp(g_t) S_{t-1})^T b_t

A position may have N pairs, which are written one after the other: exp(g) acts before the first of them, and q reads
after the last. The rows of k, v, a, b and u are those of the pairs, T N in number.

Heads are small here: a state fits into the registers of a warp, and a position costs a few multiplications per number
of the state. No step divides by a decay, so decays may be arbitrarily strong.

    name           shape                 written by         read by
    start          (I, J)                host               all kernels           zeros, float32
    q              (R, B, T, H, K)       caller             all kernels
    k              (R, B, T N, H, K)     caller             all kernels
    v              (R, B, T N, H, V)     caller             all kernels
    g              (R, B, T, H, G)       caller             all kernels           log decays, G = K or 1, float32
    a, b           (R, B, T N, H, K)     caller             all kernels
    bonus          (R, H, K)             caller             all kernels           float32
    o              (R, B, T, H, V)       recurrence_fwd     caller
    u              (R, B, T N, H, V)     recurrence_fwd     recurrence_*_bwd      float32; with DELTA as v
    do             (R, B, T, H, V)       caller             recurrence_*_bwd      gradient of o
    dk, da         (R, B, T N, H, K)     pair_bwd           caller
    dv             (R, B, T N, H, V)     pair_bwd           caller
    du             (R, B, T N, H, V)     pair_bwd           query_bwd             gradient of u, float32; DELTA: dv
    pairs          (R, B, T N, H, K)     pair_bwd           query_bwd             a da + k dk, float32; see below
    dq             (R, B, T, H, K)       query_bwd          caller
    db             (R, B, T N, H, K)     query_bwd          caller
    dg             (R, B, T, H, G)       query_bwd          caller                float32
    dbonus         (R, B, H, K)          query_bwd          caller                of one sequence, float32

The gradients, with dS_t the gradient of S_t, are

    dS_{t-1} = exp(g_t) dS_t + b_t du_t^T + q_{t-1} do_{t-1}^T,   du_t = dS_t^T a_t,   dv_t = dS_t^T k_t
    dk_t = dS_t v_t,   da_t = dS_t u_t,   db_t = S_{t-1} du_t,   dq_t = S_t do_t

and the gradient of g_t is the sum of exp(g_t) S_{t-1} dS_t over the values. Neither the states nor their gradients are
kept: let P_t be the sum of S_t dS_t over the values. Then P_t = dg_t + a_t da_t + k_t dk_t and
P_{t-1} = dg_t + b_t db_t + q_{t-1} dq_{t-1}, so that dg follows from running sums of gradients that are known anyway.

With the delta rule, dv_t = du_t = dS_t^T k_t, dk_t = dS_t u_t, and for the decayed state D_t = exp(g_t) S_{t-1}:

    dD_t = dS_t - b_t du_t^T,   db_t = -D_t du_t,   dS_{t-1} = exp(g_t) dD_t + q_{t-1} do_{t-1}^T

The gradient of g_t is the sum of D_t dD_t over the values, P_t = dg_t - b_t db_t + k_t dk_t, and
P_{t-1} = dg_t + q_{t-1} dq_{t-1}. The loops use u and du as they are rounded in memory: P would sum up what is left of
differences. With one decay per head the sum of k_t dk_t over the channels is enough, and pairs has a single channel.

A program loops over the positions of one head of one sequence, and a thread holds several rows of the state in a few
adjacent columns. The backward pass has two loops: one from the newest position for the gradients of keys and values,
and one from the oldest for the gradients of queries. Separate loops for keys and values would update the gradient of
the state twice. Each step prefetches the rows of the next position, which halves the time.

A thread needs the numbers of a position that belong to its rows and columns, and gets them through shared memory. With
one column and all rows per thread, these transfers took more time than the arithmetic. Triton assigns adjacent columns
to a thread for tensors that are loaded from memory; therefore the initial state is loaded as zeros (``start``).

Sizes of rows: I is K and J is V, padded to powers of two.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import contiguous, sum_columns, sum_rows
from mixers.ops.method import Method, Optionals, Tensors

MOST_CHANNELS = 64
"""Largest width of keys and of values for which the state fits into registers."""


@triton.jit
def _load(pointer: tl.tensor, row: tl.tensor, N: tl.constexpr, E: tl.constexpr):
    """Row of N numbers in float32, filled up to E with zeros; zeros without a tensor."""
    if pointer is None:
        y_E = tl.zeros([E], tl.float32)
    else:
        e = tl.arange(0, E)
        y_E = tl.load(pointer + row * N + e, e < N, 0.0).to(tl.float32)
    return y_E


@triton.jit
def _start(start_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr):
    """State of M x N zeros. It is loaded from memory, so that a thread holds several adjacent columns of it."""
    return tl.load(start_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])


@triton.jit
def _read(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
):
    """Inputs of a pair of a position, which are in the rows ``pair`` and ``row``; zeros in place of None."""
    q_I = _load(q_ptr, row, K, I)
    k_I = _load(k_ptr, pair, K, I)
    v_J = _load(v_ptr, pair, V, J)
    g_I = _load_decay(g_ptr, row, G, I)
    a_I = _load(a_ptr, pair, K, I)
    b_I = _load(b_ptr, pair, K, I)
    return q_I, k_I, v_J, g_I, a_I, b_I


@triton.jit
def _read_back(
    do_ptr: tl.tensor,
    u_ptr: tl.tensor,
    du_ptr: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    V: tl.constexpr,
    J: tl.constexpr,
):
    """Gradient of a position's outputs, and u and its gradient of one of its pairs; zeros in place of None."""
    do_J = _load(do_ptr, row, V, J)
    u_J = _load(u_ptr, pair, V, J)
    du_J = _load(du_ptr, pair, V, J)
    return do_J, u_J, du_J


@triton.jit
def _store(pointer: tl.tensor, row: tl.tensor, y_E: tl.tensor, N: tl.constexpr, E: tl.constexpr):
    e = tl.arange(0, E)
    tl.store(pointer + row * N + e, y_E, e < N)


@triton.jit
def _load_decay(g_ptr: tl.tensor, row: tl.tensor, G: tl.constexpr, E: tl.constexpr):
    """Logarithms of the decays of the key channels: one per channel, one per head (G = 1), or zeros (G = 0)."""
    g_E = _load(g_ptr, row, G, 1 if G == 1 else E)
    return g_E + tl.zeros([E], tl.float32)


@triton.jit(do_not_specialize=["T"])
def recurrence_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    start_ptr: tl.tensor,
    o_ptr: tl.tensor,
    u_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    RANK_ONE: tl.constexpr,
    DELTA: tl.constexpr,
    BONUS: tl.constexpr,
):
    """Outputs of one head of one sequence, oldest position first.

    1. Start with a state of zeros.
    2. For each pair of each position, while the next one is read:
       a. with a bonus, write o = S^T q + ((bonus k) . q) v, before the state changes;
       b. with a rank-one part, write u = S^T b;
       c. S <- exp(g) S + a u^T + k v^T;
       d. by the delta rule, S <- exp(g) S before the first pair, write u = v - S^T b, and S <- S + k u^T;
       e. without a bonus, write o = S^T q after the last pair.
    """
    # 1. State.
    head = tl.program_id(0) % H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    first = sequence * T * H + head
    first_pair = sequence * T * N * H + head
    q_I, k_I, v_J, g_I, a_I, b_I = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, first, first_pair, K, V, I, J, G)
    S_IJ = _start(start_ptr, I, J)
    if BONUS:
        bonus_I = _load(bonus_ptr, sequence // sequences * H + head, K, I)

    for t in range(T):
        row = first + t * H
        for n in tl.static_range(N):
            pair = first_pair + (t * N + n) * H
            ahead = first + tl.minimum(t + 1, T - 1) * H if n == N - 1 else row
            ahead_pair = first_pair + tl.minimum(t + 1, T - 1) * N * H if n == N - 1 else pair + H
            following = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, ahead, ahead_pair, K, V, I, J, G)

            # 2a. Outputs that see their own pair only through the bonus.
            if BONUS:
                o_J = sum_rows(S_IJ * q_I[:, None], I, J) + tl.sum(bonus_I * k_I * q_I, 0) * v_J

            # 2b, 2c. The next state.
            if not DELTA:
                pair_IJ = k_I[:, None] * v_J[None, :]
                if RANK_ONE:
                    u_J = sum_rows(S_IJ * b_I[:, None], I, J)
                    _store(u_ptr, pair, u_J, V, J)
                    pair_IJ += a_I[:, None] * u_J[None, :]
                if G > 0:
                    S_IJ *= tl.exp(g_I)[:, None]
                S_IJ += pair_IJ

            # 2d. The next state by the delta rule.
            else:
                if (G > 0) & (n == 0):
                    S_IJ *= tl.exp(g_I)[:, None]
                u_J = (v_J - sum_rows(S_IJ * b_I[:, None], I, J)).to(u_ptr.dtype.element_ty).to(tl.float32)
                _store(u_ptr, pair, u_J, V, J)
                S_IJ += k_I[:, None] * u_J[None, :]

            # 2e. Outputs that see it.
            if n == N - 1:
                if not BONUS:
                    o_J = sum_rows(S_IJ * q_I[:, None], I, J)
                _store(o_ptr, row, o_J, V, J)

            q_I, k_I, v_J, g_I, a_I, b_I = following


@triton.jit(do_not_specialize=["T"])
def recurrence_pair_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    start_ptr: tl.tensor,
    do_ptr: tl.tensor,
    u_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    da_ptr: tl.tensor,
    du_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    RANK_ONE: tl.constexpr,
    DELTA: tl.constexpr,
    BONUS: tl.constexpr,
):
    """Gradients of the keys and values of one head of one sequence, newest position first.

    1. Start with a state gradient of zeros.
    2. For each pair of each position, while the next one is read:
       a. without a bonus, dS += q do^T at the last pair;
       b. compute dk = dS v and dv = dS^T k, and with a rank-one part write da = dS u and du = dS^T a;
          by the delta rule, dk = dS u and du = dv;
       c. with decays, write their share of the gradient of g, pairs = k dk + a da;
       d. write dk and dv, with a bonus + bonus q (v . do) and + ((bonus k) . q) do;
       e. dS <- exp(g) dS + b du^T, with a bonus + q do^T;
       f. by the delta rule, dS <- dS - b du^T, then dS <- exp(g) dS after the first pair.
    """
    # 1. State gradient.
    head = tl.program_id(0) % H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    dS_IJ = _start(start_ptr, I, J)
    if BONUS:
        bonus_I = _load(bonus_ptr, sequence // sequences * H + head, K, I)

    first = sequence * T * H + head
    last = first + (T - 1) * H
    first_pair = sequence * T * N * H + head
    last_pair = first_pair + (T * N - 1) * H
    q_I, k_I, v_J, g_I, a_I, b_I = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, last, last_pair, K, V, I, J, G)
    do_J, u_J, _ = _read_back(do_ptr, u_ptr, None, last, last_pair, V, J)

    for back in range(T):
        row = last - back * H
        for n in tl.static_range(N - 1, -1, -1):
            pair = last_pair - (back * N + N - 1 - n) * H
            ahead = tl.maximum(row - H, first) if n == 0 else row
            ahead_pair = tl.maximum(pair - H, first_pair)
            following = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, ahead, ahead_pair, K, V, I, J, G)
            following_back = _read_back(do_ptr, u_ptr, None, ahead, ahead_pair, V, J)

            # 2a, 2b. Keys and values, and the rank-one part.
            if (not BONUS) & (n == N - 1):
                dS_IJ += q_I[:, None] * do_J[None, :]
            if not DELTA:
                dk_I = sum_columns(dS_IJ * v_J[None, :], I, J)
                dv_J = sum_rows(dS_IJ * k_I[:, None], I, J)
                if RANK_ONE:
                    da_I = sum_columns(dS_IJ * u_J[None, :], I, J)
                    du_J = sum_rows(dS_IJ * a_I[:, None], I, J)
                    _store(da_ptr, pair, da_I, K, I)
                    _store(du_ptr, pair, du_J, V, J)
            else:
                dk_I = sum_columns(dS_IJ * u_J[None, :], I, J)
                dv_J = sum_rows(dS_IJ * k_I[:, None], I, J).to(dv_ptr.dtype.element_ty).to(tl.float32)

            # 2c. Decays.
            if G > 0:
                pairs_I = k_I * dk_I
                if RANK_ONE:
                    pairs_I += a_I * da_I
                if DELTA and G == 1:
                    tl.store(pairs_ptr + pair, tl.sum(pairs_I, 0))
                else:
                    _store(pairs_ptr, pair, pairs_I, K, I)

            # 2d. Gradients that bypass the state.
            if BONUS:
                dk_I += bonus_I * q_I * tl.sum(v_J * do_J, 0)
                dv_J += tl.sum(bonus_I * k_I * q_I, 0) * do_J
            _store(dk_ptr, pair, dk_I, K, I)
            _store(dv_ptr, pair, dv_J, V, J)

            # 2e. Gradient of the previous state.
            if not DELTA:
                if G > 0:
                    dS_IJ *= tl.exp(g_I)[:, None]
                if RANK_ONE:
                    dS_IJ += b_I[:, None] * du_J[None, :]
                if BONUS:
                    dS_IJ += q_I[:, None] * do_J[None, :]

            # 2f. The same by the delta rule.
            else:
                dS_IJ -= b_I[:, None] * dv_J[None, :]
                if (G > 0) & (n == 0):
                    dS_IJ *= tl.exp(g_I)[:, None]

            q_I, k_I, v_J, g_I, a_I, b_I = following
            do_J, u_J, _ = following_back


@triton.jit(do_not_specialize=["T"])
def recurrence_query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    start_ptr: tl.tensor,
    do_ptr: tl.tensor,
    u_ptr: tl.tensor,
    du_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    db_ptr: tl.tensor,
    dg_ptr: tl.tensor,
    dbonus_ptr: tl.tensor,
    T: tl.tensor,
    sequences: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    RANK_ONE: tl.constexpr,
    DELTA: tl.constexpr,
    BONUS: tl.constexpr,
):
    """Gradients of the queries and decays of one head of one sequence, oldest position first.

    1. Start with a state and a running sum P of zeros.
    2. For each pair of each position, while the next one is read:
       a. with a bonus, compute dq = S do and take q dq from P, before the state changes;
       b. with a rank-one part, write db = S du and take b db from P;
       c. with decays, write dg = P, and add pairs to P;
       d. S <- exp(g) S + a u^T + k v^T;
       e. by the delta rule, in place of b to d: write dg = P and S <- exp(g) S before the first pair; write db = -S du,
          take b db from P and add pairs; S <- S + k u^T;
       f. without a bonus, compute dq = S do after the last pair and take q dq from P;
       g. write dq, with a bonus + bonus k (v . do), and add q k (v . do) to the gradient of the bonus.
    3. With a bonus, write its gradient.
    """
    # 1. State.
    head = tl.program_id(0) % H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    S_JI = _start(start_ptr, J, I)
    P_I = tl.zeros([I], tl.float32)
    if BONUS:
        bonus_I = _load(bonus_ptr, sequence // sequences * H + head, K, I)
        dbonus_I = tl.zeros([I], tl.float32)

    first = sequence * T * H + head
    first_pair = sequence * T * N * H + head
    q_I, k_I, v_J, g_I, a_I, b_I = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, first, first_pair, K, V, I, J, G)
    do_J, u_J, du_J = _read_back(do_ptr, u_ptr, du_ptr, first, first_pair, V, J)
    shares: tl.constexpr = 1 if DELTA and G == 1 else K
    pairs_I = _load(pairs_ptr, first_pair, shares, I)

    for t in range(T):
        row = first + t * H
        for n in tl.static_range(N):
            pair = first_pair + (t * N + n) * H
            ahead = first + tl.minimum(t + 1, T - 1) * H if n == N - 1 else row
            ahead_pair = first_pair + tl.minimum(t + 1, T - 1) * N * H if n == N - 1 else pair + H
            following = _read(q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, b_ptr, ahead, ahead_pair, K, V, I, J, G)
            following_back = _read_back(do_ptr, u_ptr, du_ptr, ahead, ahead_pair, V, J)
            following_pairs_I = _load(pairs_ptr, ahead_pair, shares, I)

            # 2a. Queries that do not see their own pair.
            if BONUS:
                dq_I = sum_rows(S_JI * do_J[:, None], J, I)
                P_I -= q_I * dq_I

            # 2b. Rank-one part.
            if RANK_ONE:
                db_I = sum_rows(S_JI * du_J[:, None], J, I)
                _store(db_ptr, pair, db_I, K, I)
                P_I -= b_I * db_I

            # 2c. Decays.
            if n == 0:
                if G == 1:
                    tl.store(dg_ptr + row, tl.sum(P_I, 0))
                elif G > 0:
                    _store(dg_ptr, row, P_I, K, I)
                if G > 0:
                    if not DELTA:
                        P_I += pairs_I
                    S_JI *= tl.exp(g_I)[None, :]

            # 2d. The next state.
            if not DELTA:
                S_JI += v_J[:, None] * k_I[None, :]
                if RANK_ONE:
                    S_JI += u_J[:, None] * a_I[None, :]

            # 2e. Right factors and the next state by the delta rule.
            else:
                db_I = -sum_rows(S_JI * du_J[:, None], J, I)
                _store(db_ptr, pair, db_I, K, I)
                P_I += pairs_I - b_I * db_I
                S_JI += u_J[:, None] * k_I[None, :]

            # 2f. Queries that see it.
            if (not BONUS) & (n == N - 1):
                dq_I = sum_rows(S_JI * do_J[:, None], J, I)
                P_I -= q_I * dq_I

            # 2g. Queries and bonus.
            if BONUS:
                weight = tl.sum(v_J * do_J, 0)
                dq_I += bonus_I * k_I * weight
                dbonus_I += q_I * k_I * weight
            if n == N - 1:
                _store(dq_ptr, row, dq_I, K, I)

            q_I, k_I, v_J, g_I, a_I, b_I = following
            do_J, u_J, du_J = following_back
            pairs_I = following_pairs_I

    # 3. Bonus.
    if BONUS:
        _store(dbonus_ptr, sequence * H + head, dbonus_I, K, I)


def fits_recurrence(key_channels: int, value_channels: int) -> bool:
    """Return whether the kernels take heads of these sizes."""
    return max(key_channels, value_channels) <= MOST_CHANNELS


def recurrence_method(dtype: torch.dtype) -> Method:
    """``mixers.ops.linear_recurrence.matrix_recurrence`` with outputs in ``dtype``.

    Tensors: q (R, B, T, H, K), k (R, B, T N, H, K), v (R, B, T N, H, V); g (R, B, T, H, K or 1) float32, a and b (R, B,
    T N, H, K), and the bonus (R, H, K) float32, each of which may be None. N is 1 but for the delta rule.
    """

    def forward(*tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        q, k, v, g, a, b, bonus = contiguous(*tensors)
        o = v.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
        u = None if b is None else torch.empty_like(v, dtype=torch.float32 if a is not None else None)
        grid, start, settings = _launch(q, v, g, a, b, bonus)
        recurrence_fwd_kernel[grid](q, k, v, g, a, b, bonus, start, o, u, **settings, **_registers(settings, 80))
        return (o,), () if u is None else (u,)

    def backward(gradients: Tensors, tensors: Sequence[Tensor | None], outputs: Tensors, saved: Tensors) -> Optionals:
        u = saved[0] if saved else None
        delta = tensors[4] is None and u is not None
        read = u if delta else tensors[2]  # by the delta rule, u in place of values
        do, q, k, v, g, a, b, bonus = contiguous(gradients[0], *tensors[:2], read, *tensors[3:])
        grid, start, settings = _launch(q, v, g, a, b, bonus)
        settings |= _registers(settings, 96)

        # Keys, values and left factors.
        dk, da, db, dg = (None if y is None else torch.empty_like(y) for y in (k, a, b, g))
        dv = torch.empty_like(v, dtype=k.dtype)
        du = None if u is None or delta else torch.empty_like(u)
        totals = delta and g is not None and g.shape[-1] == 1
        pairs = None if g is None else k.new_empty(*k.shape[:-1], 1 if totals else k.shape[-1], dtype=torch.float32)
        recurrence_pair_bwd_kernel[grid](q, k, v, g, a, b, bonus, start, do, u, dk, dv, da, du, pairs, **settings)

        # Queries, right factors, decays and bonus.
        dq = torch.empty_like(q)
        dbonus = None if bonus is None else bonus.new_empty(*q.shape[:2], *bonus.shape[1:])
        recurrence_query_bwd_kernel[grid](
            q, k, v, g, a, b, bonus, start, do, u, dv if delta else du, pairs, dq, db, dg, dbonus, **settings
        )
        return dq, dk, dv, dg, da, db, None if dbonus is None else dbonus.sum(1)

    return Method(forward, backward)


def _launch(
    q: Tensor, v: Tensor, g: Tensor | None, a: Tensor | None, b: Tensor | None, bonus: Tensor | None
) -> tuple[tuple[int], Tensor, dict[str, Any]]:
    """Return the grid, the first state and the settings, which all kernels share."""
    R, B, T, H, K = q.shape
    V = v.shape[-1]
    settings = {
        "T": T,
        "sequences": B,
        "H": H,
        "K": K,
        "V": V,
        "I": triton.next_power_of_2(K),
        "J": triton.next_power_of_2(V),
        "G": 0 if g is None else g.shape[-1],
        "N": v.shape[2] // T,
        "RANK_ONE": a is not None,
        "DELTA": a is None and b is not None,
        "BONUS": bonus is not None,
        "num_warps": 1 if max(K, V) <= 32 else 2,
    }
    start = q.new_zeros(settings["I"] * settings["J"], dtype=torch.float32)
    return (R * B * H,), start, settings


def _registers(settings: dict[str, Any], most: int) -> dict[str, int]:
    """Return a limit of registers a thread as a setting of the launch; none unless narrow heads have several pairs.

    More programs then run at once: with two pairs the three kernels take 5.0 ms in place of 5.8 (H200, 30 runs).
    """
    return {"maxnreg": most} if settings["N"] > 1 and settings["num_warps"] == 1 else {}
