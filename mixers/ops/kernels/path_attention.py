"""Fused kernels of PaTH attention: logits through products of matrices I - beta w w^T (Yang et al. 2025, section 3).

    name       shape                  written by     read by
    q, k       (R, B, T, D)           caller         chunks, rows_bwd
    v          (R, B, T, D)           caller         fwd, queries_bwd, keys_bwd
    w          (R, B, T, D)           caller         chunks, rows_bwd         of any length, scaled to length one here
    beta       (R, B, T, H)           caller         chunks, rows_bwd         float32
    c          (R, B, H, T)           caller         all but rows_bwd         sums of log gates, float32; may be absent
    inverse    (R, B, H, N, C, C)     chunks         rows_bwd                 X, see below; float32
    own        (R, B, H, N, C, C)     chunks         fwd, keys_bwd            logits of the pairs of a chunk; float32
    q_in       (R, B, H, N, C, I)     chunks         fwd, queries_bwd         queries before their chunk
    k_out      (R, B, H, N, C, I)     chunks         fwd, queries_bwd, keys_bwd   keys behind their chunk
    whole      (R, B, H, N, I, I)     chunks         fwd, queries_bwd         P, the product of a chunk
    a          (R, B, T, D)           fwd            queries_bwd              outputs
    lse        (R, B, H, T)           fwd            queries_bwd, keys_bwd    log2 of the sum of weights; float32
    da         (R, B, T, D)           caller         queries_bwd, keys_bwd    gradient of a
    delta      (R, B, H, T)           queries_bwd    keys_bwd                 da . a; float32
    z          (heads, pairs, C, I)   queries_bwd    queries_bwd, keys_bwd    queries behind an earlier chunk
    dz         (heads, pairs, C, I)   queries_bwd    keys_bwd                 gradient of z P, with P of this chunk
    dq_in      (R, B, H, N, C, I)     queries_bwd    rows_bwd                 float32
    dc         (R, B, H, T)           queries_bwd    keys_bwd                 part of it, from earlier chunks; float32
                                      keys_bwd       caller                   in its place
    dv         (R, B, T, D)           keys_bwd       caller
    ds         (R, B, H, N, C, C)     keys_bwd       rows_bwd                 gradient of q k^T - Q A
    dk_out     (R, B, H, N, C, I)     keys_bwd       rows_bwd                 float32
    dwhole     (R, B, H, N, I, I)     keys_bwd       rows_bwd
    dq, dk, dw (R, B, T, D)           rows_bwd       caller
    dbeta      (R, B, T, H)           rows_bwd       caller                   float32

All others have the dtype of q. A sequence has N chunks of C positions. A program serves one chunk of one head of one
sequence; those of the most pairs start first. The K channels of a head are filled up to I with zeros; positions after
the last one have zeros. Inside a chunk (the paper's UT transform), with the lower triangle (tril) and the strictly
lower one (stril):

    X = (1 + beta stril(w w^T))^-1    U = X beta    A = U stril(w k^T)    Y = U w    Q = tril(q w^T)
    logits = q k^T - Q A    k_out = k - A^T w    q_in = q - Q Y    P = 1 - w^T Y

The queries q_in of a chunk read k_out of the chunk before, then go through its P to the one before that, and so on.
Logits are divided by sqrt(K); with gates, c_i - c_j is added.

The backward pass keeps the queries behind each earlier chunk, which grow with the square of the positions: the pair of
the chunks n and b < n is number n (n - 1) / 2 + b of a head. It goes through the heads in slices, as many as SCRATCH
bytes hold.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, contiguous, kernels_take
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = 32
CHUNKS = {"num_warps": 1, "num_stages": 1}
FORWARD = {"num_warps": 1, "num_stages": 2}
"""One warp passes products on in its registers; several would share columns, and exchange them for the next product."""
QUERIES = {"num_warps": 2, "num_stages": 3}
KEYS = {"num_warps": 2, "num_stages": 2}
"""Not 4 warps with several stages: Triton up to 3.7.1 then overwrites z while a product may still read it.

https://github.com/triton-lang/triton/issues/6691
"""
SCRATCH = 2**30
"""Most bytes of z and dz, unless one head needs more."""
PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "tf32x3"}
"""Precision of products by the dtype of rows.

For rows in bfloat16, tf32 would have 0.6 times the error (at 128 positions 2e-3 to 4e-3 in place of 3e-3 to 7e-3, which
is what plain PyTorch has) and take 1.5 times as long.
"""
LEAST_CHANNELS = 16
"""Least number of channels that tensor cores take."""
MOST_CHANNELS = 64
NEAR: tl.constexpr = tl.constexpr(4)
"""Positions of the smallest blocks of an inverse. The powers of larger blocks could be too large for their sum."""


@triton.jit
def _dot(x: tl.tensor, y: tl.tensor, PRECISION: tl.constexpr):
    """x y in float32; of numbers rounded to bfloat16 if that is the precision."""
    if PRECISION == "bf16":
        x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
    return tl.dot(x, y, input_precision="ieee" if PRECISION == "bf16" else PRECISION)


@triton.jit
def _add_dot(z: tl.tensor, x: tl.tensor, y: tl.tensor, PRECISION: tl.constexpr):
    """z + x y; see ``_dot``."""
    if PRECISION == "bf16":
        x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
    return tl.dot(x, y, z, input_precision="ieee" if PRECISION == "bf16" else PRECISION)


@triton.jit
def _place(sequence: tl.tensor, T: tl.tensor, D: tl.constexpr, K: tl.constexpr):
    """Where the rows and where the strengths of one head of one sequence begin."""
    H: tl.constexpr = D // K
    return sequence // H * T * D + sequence % H * K, sequence // H * T * H + sequence % H


@triton.jit
def _load(pointer: tl.tensor, t_C: tl.tensor, T: tl.tensor, D: tl.constexpr, K: tl.constexpr, I: tl.constexpr):
    """Rows of a head in float32, filled up to I with zeros; the pointer is that of its first number."""
    e = tl.arange(0, I)
    here_CI = (t_C < T)[:, None] & (e < K)[None, :]
    return tl.load(pointer + t_C[:, None] * D + e[None, :], here_CI, 0.0).to(tl.float32)


@triton.jit
def _store(
    pointer: tl.tensor,
    y_CI: tl.tensor,
    t_C: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
):
    e = tl.arange(0, I)
    tl.store(pointer + t_C[:, None] * D + e[None, :], y_CI, (t_C < T)[:, None] & (e < K)[None, :])


@triton.jit
def _pairs_before(head: tl.tensor, n: tl.tensor):
    """Number of the pair of the chunks n and 0, from the first head of a slice."""
    chunks = tl.num_programs(1)
    return head.to(tl.int64) * (chunks * (chunks - 1) // 2) + n * (n - 1) // 2


@triton.jit
def _tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of the numbers of a tile."""
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _unit(w_CI: tl.tensor):
    """Rows of length one, and the factors that make them so."""
    r_C = tl.rsqrt(tl.sum(w_CI * w_CI, 1) + 1e-6)
    return w_CI * r_C[:, None], r_C


@triton.jit
def inverse(m_CC: tl.tensor, C: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + m)^-1 for a strictly lower m: of blocks of NEAR positions, then of blocks twice as large, up to C."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    one_CC = (i == j).to(tl.float32)
    near_CC = tl.where(i // NEAR == j // NEAR, m_CC, 0.0)
    square_CC = _dot(near_CC, near_CC, PRECISION)
    x_CC = _dot(one_CC - near_CC, one_CC + square_CC, PRECISION)
    for n in tl.static_range(8):
        if NEAR * 2**n < C:
            x_CC = _of_pairs(x_CC, m_CC, NEAR * 2**n, C, PRECISION)
    return x_CC


@triton.jit
def _of_pairs(x_CC: tl.tensor, m_CC: tl.tensor, SIZE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of blocks of 2 SIZE positions, from that of blocks of SIZE positions."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    beside_CC = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE), m_CC, 0.0)
    return x_CC - _dot(_dot(x_CC, beside_CC, PRECISION), x_CC, PRECISION)


@triton.jit
def _products(
    q_CI: tl.tensor, k_CI: tl.tensor, w_CI: tl.tensor, u_CC: tl.tensor, C: tl.constexpr, PRECISION: tl.constexpr
):
    """stril(w k^T), A, Y and Q of a chunk."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    wk_CC = tl.where(i > j, _dot(w_CI, tl.trans(k_CI), PRECISION), 0.0)
    a_CC = _dot(u_CC, wk_CC, PRECISION)
    y_CI = _dot(u_CC, w_CI, PRECISION)
    qw_CC = tl.where(i >= j, _dot(q_CI, tl.trans(w_CI), PRECISION), 0.0)
    return wk_CC, a_CC, y_CI, qw_CC


@triton.jit
def _own_logits(
    q_CI: tl.tensor,
    k_CI: tl.tensor,
    qw_CC: tl.tensor,
    a_CC: tl.tensor,
    c_C: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits inside a chunk, masked where the pair is later."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    s_CC = _dot(q_CI, tl.trans(k_CI), PRECISION) - _dot(qw_CC, a_CC, PRECISION)
    s_CC = s_CC * (K**-0.5 * LOG2E) + (c_C[:, None] - c_C[None, :]) * LOG2E
    return tl.where(i >= j, s_CC, MASKED)


@triton.jit
def _logits(x: tl.tensor, y: tl.tensor, gap: tl.tensor, K: tl.constexpr, PRECISION: tl.constexpr):
    """Logits x y^T of queries and keys of an earlier chunk, in either order, with sums of log gates between."""
    return _dot(x, tl.trans(y), PRECISION) * (K**-0.5 * LOG2E) + gap * LOG2E


@triton.jit
def _weights(s: tl.tensor, lse: tl.tensor, x: tl.tensor, y: tl.tensor, delta: tl.tensor, PRECISION: tl.constexpr):
    """Weights p of logits, and their gradients ds = p (x y^T - delta); x and y are da and v, in the order of logits."""
    p = tl.exp2(s - lse)
    return p, p * (_dot(x, tl.trans(y), PRECISION) - delta)


@triton.jit
def _sums(c_ptr: tl.tensor, sequence: tl.tensor, t_C: tl.tensor, T: tl.tensor, C: tl.constexpr):
    """Sums of the logarithms of gates; very low ones after the last position, which see no other chunk."""
    c_C = tl.zeros([C], tl.float32)
    if c_ptr is not None:
        c_C = tl.load(c_ptr + sequence * T + t_C, t_C < T, MASKED)
    return c_C


@triton.jit(do_not_specialize=["T"])
def path_chunks_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    w_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    c_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    own_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X, logits, q_in, k_out and P of one chunk."""
    H: tl.constexpr = D // K
    sequence, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, first_beta = _place(sequence, T, D, K)
    tile = sequence * tl.num_programs(1) + n
    t_C = n * C + tl.arange(0, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    one_II = (tl.arange(0, I)[:, None] == tl.arange(0, I)[None, :]).to(tl.float32)

    k_CI = _load(k_ptr + first, t_C, T, D, K, I)
    w_CI, _ = _unit(_load(w_ptr + first, t_C, T, D, K, I))
    beta_C = tl.load(beta_ptr + first_beta + t_C * H, t_C < T, 0.0)
    ww_CC = tl.where(i > j, _dot(w_CI, tl.trans(w_CI), PRECISION), 0.0)
    x_CC = inverse(beta_C[:, None] * ww_CC, C, PRECISION)
    tl.store(inverse_ptr + tile * (C * C) + _tile(C, C), x_CC)

    q_CI = _load(q_ptr + first, t_C, T, D, K, I)
    _, a_CC, y_CI, qw_CC = _products(q_CI, k_CI, w_CI, x_CC * beta_C[None, :], C, PRECISION)
    s_CC = _own_logits(q_CI, k_CI, qw_CC, a_CC, _sums(c_ptr, sequence, t_C, T, C), K, C, PRECISION)
    tl.store(own_ptr + tile * (C * C) + _tile(C, C), s_CC)
    tl.store(q_in_ptr + tile * (C * I) + _tile(C, I), q_CI - _dot(qw_CC, y_CI, PRECISION))
    tl.store(k_out_ptr + tile * (C * I) + _tile(C, I), k_CI - _dot(tl.trans(a_CC), w_CI, PRECISION))
    tl.store(whole_ptr + tile * (I * I) + _tile(I, I), one_II - _dot(tl.trans(w_CI), y_CI, PRECISION))


@triton.jit(do_not_specialize=["T"])
def path_fwd_kernel(
    v_ptr: tl.tensor,
    c_ptr: tl.tensor,
    own_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one chunk of queries.

    1. Begin the softmax state with the pairs of the chunk: maximum m, sum l, numerator o.
    2. For each earlier chunk, the newest first: add its pairs, and take the queries through its P.
    3. Write a = o / l and lse = m + log2(l).
    """
    sequence, n = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    first = _place(sequence, T, D, K)[0]
    tile = sequence * tl.num_programs(1) + n
    t_C = n * C + tl.arange(0, C)

    # 1. Own pairs.
    s_CC = tl.load(own_ptr + tile * (C * C) + _tile(C, C))
    m_C = tl.max(s_CC, 1)
    p_CC = tl.exp2(s_CC - m_C[:, None])
    l_C = tl.sum(p_CC, 1)
    o_CI = _dot(p_CC, _load(v_ptr + first, t_C, T, D, K, I), PRECISION)

    # 2. Earlier chunks.
    c_C = _sums(c_ptr, sequence, t_C, T, C)
    z_CI = tl.load(q_in_ptr + tile * (C * I) + _tile(C, I))
    for back in range(1, n + 1):
        t_b_C = (n - back) * C + tl.arange(0, C)
        k_b_CI = tl.load(k_out_ptr + (tile - back) * (C * I) + _tile(C, I))
        v_b_CI = _load(v_ptr + first, t_b_C, T, D, K, I)
        c_b_C = _sums(c_ptr, sequence, t_b_C, T, C)

        s_CC = _logits(z_CI, k_b_CI, c_C[:, None] - c_b_C[None, :], K, PRECISION)
        top_C = tl.maximum(m_C, tl.max(s_CC, 1))
        p_CC = tl.exp2(s_CC - top_C[:, None])
        shrink_C = tl.exp2(m_C - top_C)
        l_C = l_C * shrink_C + tl.sum(p_CC, 1)
        o_CI = _add_dot(o_CI * shrink_C[:, None], p_CC, v_b_CI, PRECISION)
        m_C = top_C
        whole_II = tl.load(whole_ptr + (tile - back) * (I * I) + _tile(I, I))
        z_CI = _dot(z_CI, whole_II, PRECISION).to(z_CI.dtype)

    # 3. Outputs.
    _store(a_ptr + first, o_CI / l_C[:, None], t_C, T, D, K, I)
    tl.store(lse_ptr + sequence * T + t_C, m_C + tl.log2(l_C), t_C < T)


@triton.jit(do_not_specialize=["earlier", "T"])
def path_queries_bwd_kernel(
    v_ptr: tl.tensor,
    c_ptr: tl.tensor,
    q_in_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    da_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    dq_in_ptr: tl.tensor,
    dc_ptr: tl.tensor,
    earlier: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the q_in of one chunk, after ``earlier`` heads.

    1. Read its rows; write delta.
    2. For each earlier chunk, the newest first: write the queries z behind it, and take them through its P.
    3. For each earlier chunk, the oldest first: gradients ds of the logits of its pairs. With dz the gradient of the
       queries behind the chunk before, which is written, that of the queries behind this one is ds k_out + dz P^T.
    4. Write dq_in, and the sums of ds over keys.
    """
    sequence, n = tl.program_id(0).to(tl.int64) + earlier, tl.num_programs(1) - 1 - tl.program_id(1)
    first = _place(sequence, T, D, K)[0]
    oldest = sequence * tl.num_programs(1)
    pair = _pairs_before(tl.program_id(0), n)
    t_C = n * C + tl.arange(0, C)

    # 1. Chunk.
    da_CI = _load(da_ptr + first, t_C, T, D, K, I)
    delta_C = tl.sum(da_CI * _load(a_ptr + first, t_C, T, D, K, I), 1)
    lse_C = tl.load(lse_ptr + sequence * T + t_C, t_C < T, 0.0)
    c_C = _sums(c_ptr, sequence, t_C, T, C)
    z_CI = tl.load(q_in_ptr + (oldest + n) * (C * I) + _tile(C, I))
    tl.store(delta_ptr + sequence * T + t_C, delta_C, t_C < T)

    # 2. Queries.
    for back in range(1, n + 1):
        b = n - back
        tl.store(z_ptr + (pair + b) * (C * I) + _tile(C, I), z_CI)
        z_CI = _dot(z_CI, tl.load(whole_ptr + (oldest + b) * (I * I) + _tile(I, I)), PRECISION).to(z_CI.dtype)

    # 3. Gradients. Other threads of this program wrote the queries, hence the barrier.
    tl.debug_barrier()
    dz_CI = tl.zeros([C, I], tl.float32)
    dc_C = tl.zeros([C], tl.float32)
    for b in range(n):
        t_b_C = b * C + tl.arange(0, C)
        z_CI = tl.load(z_ptr + (pair + b) * (C * I) + _tile(C, I))
        k_b_CI = tl.load(k_out_ptr + (oldest + b) * (C * I) + _tile(C, I))
        v_b_CI = _load(v_ptr + first, t_b_C, T, D, K, I)
        c_b_C = _sums(c_ptr, sequence, t_b_C, T, C)
        s_CC = _logits(z_CI, k_b_CI, c_C[:, None] - c_b_C[None, :], K, PRECISION)
        _, ds_CC = _weights(s_CC, lse_C[:, None], da_CI, v_b_CI, delta_C[:, None], PRECISION)
        dc_C += tl.sum(ds_CC, 1)

        tl.store(dz_ptr + (pair + b) * (C * I) + _tile(C, I), dz_CI)
        whole_II = tl.load(whole_ptr + (oldest + b) * (I * I) + _tile(I, I))
        dz_CI = _dot(dz_CI, tl.trans(whole_II), PRECISION)
        dz_CI = _add_dot(dz_CI, ds_CC * K**-0.5, k_b_CI, PRECISION)

    # 4. Results.
    tl.store(dq_in_ptr + (oldest + n) * (C * I) + _tile(C, I), dz_CI)
    if c_ptr is not None:
        tl.store(dc_ptr + sequence * T + t_C, dc_C, t_C < T)


@triton.jit(do_not_specialize=["earlier", "T"])
def path_keys_bwd_kernel(
    v_ptr: tl.tensor,
    c_ptr: tl.tensor,
    own_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    da_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    z_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    ds_ptr: tl.tensor,
    dk_out_ptr: tl.tensor,
    dwhole_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dc_ptr: tl.tensor,
    earlier: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the values, k_out and P of one chunk, after ``earlier`` heads.

    1. Own pairs: begin dv, and write ds.
    2. For each later chunk, the oldest first: add its pairs to dv and dk_out, and dz^T z to dP^T.
    3. Write the sums; subtract those of ds over queries from dc.

    Rows of s, p and ds are keys here, columns are queries.
    """
    sequence, b = tl.program_id(0).to(tl.int64) + earlier, tl.program_id(1)
    first = _place(sequence, T, D, K)[0]
    tile = sequence * tl.num_programs(1) + b
    t_C = b * C + tl.arange(0, C)

    # 1. Own pairs.
    v_CI = _load(v_ptr + first, t_C, T, D, K, I)
    da_CI = _load(da_ptr + first, t_C, T, D, K, I)
    lse_C = tl.load(lse_ptr + sequence * T + t_C, t_C < T, 0.0)
    delta_C = tl.load(delta_ptr + sequence * T + t_C, t_C < T, 0.0)
    s_CC = tl.trans(tl.load(own_ptr + tile * (C * C) + _tile(C, C)))
    p_CC, ds_CC = _weights(s_CC, lse_C[None, :], v_CI, da_CI, delta_C[None, :], PRECISION)
    dv_CI = _dot(p_CC, da_CI, PRECISION)
    dc_C = tl.sum(ds_CC, 0) - tl.sum(ds_CC, 1)
    tl.store(ds_ptr + tile * (C * C) + _tile(C, C), tl.trans(ds_CC * K**-0.5))

    # 2. Later chunks.
    k_out_CI = tl.load(k_out_ptr + tile * (C * I) + _tile(C, I))
    c_C = _sums(c_ptr, sequence, t_C, T, C)
    dk_out_CI = tl.zeros([C, I], tl.float32)
    dwhole_II = tl.zeros([I, I], tl.float32)
    for n in range(b + 1, tl.num_programs(1)):
        pair = _pairs_before(tl.program_id(0), n) + b
        t_n_C = n * C + tl.arange(0, C)
        z_CI = tl.load(z_ptr + pair * (C * I) + _tile(C, I))
        dz_CI = tl.load(dz_ptr + pair * (C * I) + _tile(C, I))
        da_CI = _load(da_ptr + first, t_n_C, T, D, K, I)
        lse_C = tl.load(lse_ptr + sequence * T + t_n_C, t_n_C < T, 0.0)
        delta_C = tl.load(delta_ptr + sequence * T + t_n_C, t_n_C < T, 0.0)
        c_n_C = _sums(c_ptr, sequence, t_n_C, T, C)

        s_CC = _logits(k_out_CI, z_CI, c_n_C[None, :] - c_C[:, None], K, PRECISION)
        p_CC, ds_CC = _weights(s_CC, lse_C[None, :], v_CI, da_CI, delta_C[None, :], PRECISION)
        dv_CI = _add_dot(dv_CI, p_CC, da_CI, PRECISION)
        dk_out_CI = _add_dot(dk_out_CI, ds_CC * K**-0.5, z_CI, PRECISION)
        dwhole_II = _add_dot(dwhole_II, tl.trans(dz_CI), z_CI, PRECISION)
        dc_C -= tl.sum(ds_CC, 1)

    # 3. Sums.
    _store(dv_ptr + first, dv_CI, t_C, T, D, K, I)
    tl.store(dk_out_ptr + tile * (C * I) + _tile(C, I), dk_out_CI)
    tl.store(dwhole_ptr + tile * (I * I) + _tile(I, I), tl.trans(dwhole_II))
    if c_ptr is not None:
        dc_C += tl.load(dc_ptr + sequence * T + t_C, t_C < T, 0.0)
        tl.store(dc_ptr + sequence * T + t_C, dc_C, t_C < T)


@triton.jit(do_not_specialize=["T"])
def path_rows_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    w_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    ds_ptr: tl.tensor,
    dq_in_ptr: tl.tensor,
    dk_out_ptr: tl.tensor,
    dwhole_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    dbeta_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the rows of one chunk, from those of its logits, q_in, k_out and P."""
    H: tl.constexpr = D // K
    sequence, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, first_beta = _place(sequence, T, D, K)
    tile = sequence * tl.num_programs(1) + n
    t_C = n * C + tl.arange(0, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    q_CI = _load(q_ptr + first, t_C, T, D, K, I)
    k_CI = _load(k_ptr + first, t_C, T, D, K, I)
    w_CI, r_C = _unit(_load(w_ptr + first, t_C, T, D, K, I))
    beta_C = tl.load(beta_ptr + first_beta + t_C * H, t_C < T, 0.0)
    x_CC = tl.load(inverse_ptr + tile * (C * C) + _tile(C, C))
    wk_CC, a_CC, y_CI, qw_CC = _products(q_CI, k_CI, w_CI, x_CC * beta_C[None, :], C, PRECISION)

    # Q, A and Y.
    ds_CC = tl.load(ds_ptr + tile * (C * C) + _tile(C, C))
    dq_in_CI = tl.load(dq_in_ptr + tile * (C * I) + _tile(C, I))
    dk_out_CI = tl.load(dk_out_ptr + tile * (C * I) + _tile(C, I))
    dwhole_II = tl.load(dwhole_ptr + tile * (I * I) + _tile(I, I))
    dqw_CC = _dot(ds_CC, tl.trans(a_CC), PRECISION)
    dqw_CC = tl.where(i >= j, -_add_dot(dqw_CC, dq_in_CI, tl.trans(y_CI), PRECISION), 0.0)
    da_CC = _dot(tl.trans(qw_CC), ds_CC, PRECISION)
    da_CC = -_add_dot(da_CC, w_CI, tl.trans(dk_out_CI), PRECISION)
    dy_CI = _dot(tl.trans(qw_CC), dq_in_CI, PRECISION)
    dy_CI = -_add_dot(dy_CI, w_CI, dwhole_II, PRECISION)

    # Queries and keys.
    dq_CI = _add_dot(dq_in_CI, ds_CC, k_CI, PRECISION)
    dq_CI = _add_dot(dq_CI, dqw_CC, w_CI, PRECISION)
    _store(dq_ptr + first, dq_CI, t_C, T, D, K, I)
    xa_CC = _dot(tl.trans(x_CC), da_CC, PRECISION)
    xy_CI = _dot(tl.trans(x_CC), dy_CI, PRECISION)
    dwk_CC = tl.where(i > j, beta_C[:, None] * xa_CC, 0.0)
    dk_CI = _add_dot(dk_out_CI, tl.trans(ds_CC), q_CI, PRECISION)
    dk_CI = _add_dot(dk_CI, tl.trans(dwk_CC), w_CI, PRECISION)
    _store(dk_ptr + first, dk_CI, t_C, T, D, K, I)

    # Directions and strengths.
    dw_CI = _dot(a_CC, dk_out_CI, PRECISION)
    dw_CI = beta_C[:, None] * xy_CI - _add_dot(dw_CI, y_CI, tl.trans(dwhole_II), PRECISION)
    dw_CI = _add_dot(dw_CI, tl.trans(dqw_CC), q_CI, PRECISION)
    dw_CI = _add_dot(dw_CI, dwk_CC, k_CI, PRECISION)
    dm_CC = _dot(xa_CC, tl.trans(a_CC), PRECISION)
    dm_CC = tl.where(i > j, -_add_dot(dm_CC, xy_CI, tl.trans(y_CI), PRECISION), 0.0)
    ww_CC = _dot(w_CI, tl.trans(w_CI), PRECISION)
    dbeta_C = tl.sum(xa_CC * wk_CC + dm_CC * ww_CC, 1) + tl.sum(xy_CI * w_CI, 1)
    tl.store(dbeta_ptr + first_beta + t_C * H, dbeta_C, t_C < T)
    dm_CC *= beta_C[:, None]
    dw_CI = _add_dot(dw_CI, dm_CC + tl.trans(dm_CC), w_CI, PRECISION)
    dw_CI = r_C[:, None] * (dw_CI - w_CI * tl.sum(dw_CI * w_CI, 1)[:, None])
    _store(dw_ptr + first, dw_CI, t_C, T, D, K, I)


@kernels_take("PaTH attention", f"heads of up to {MOST_CHANNELS} channels")
def fits_path(D: int, H: int) -> bool:
    """Whether ``path_attention_method`` takes H heads of this width."""
    return D % H == 0 and D // H <= MOST_CHANNELS


def path_attention_method(heads: int) -> Method:
    """``mixers.ops.path_attention.path_attention`` of rows in bfloat16 or float32.

    Tensors: q, k, v, w (R, B, T, D), heads concatenated; beta (R, B, T, H) and c (R, B, H, T) or None, float32. The
    output is like q.
    """

    def launch(q: Tensor) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
        """Axes (R, B, H, N) of the tiles, and settings of all kernels."""
        R, B, T, D = q.shape
        settings = {
            "T": T,
            "D": D,
            "K": D // heads,
            "I": max(LEAST_CHANNELS, triton.next_power_of_2(D // heads)),
            "C": CHUNK,
            "PRECISION": PRECISIONS[q.dtype],
        }
        return (R, B, heads, triton.cdiv(T, CHUNK)), settings

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        q, k, v, w, beta, c = contiguous(*tensors)
        axes, settings = launch(q)
        grid, I = (prod(axes[:3]), axes[3]), settings["I"]
        inverse, own = (q.new_empty(*axes, CHUNK, CHUNK, dtype=torch.float32) for _ in range(2))
        q_in, k_out = (q.new_empty(*axes, CHUNK, I) for _ in range(2))
        whole = q.new_empty(*axes, I, I)
        a, lse = torch.empty_like(q), q.new_empty(*axes[:3], q.shape[2], dtype=torch.float32)
        path_chunks_kernel[grid](q, k, w, beta, c, inverse, own, q_in, k_out, whole, **settings, **CHUNKS)
        path_fwd_kernel[grid](v, c, own, q_in, k_out, whole, a, lse, **settings, **FORWARD)
        return (a,), (lse, inverse, own, q_in, k_out, whole)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        q, k, v, w, beta, c = tensors = contiguous(*tensors)
        a, lse, inverse, own, q_in, k_out, whole, da = contiguous(*outputs, *saved, *gradients)
        axes, settings = launch(q)
        count, chunks, I = prod(axes[:3]), axes[3], settings["I"]
        dq, dk, dv, dw, dbeta, dc = found = [y if y is None else torch.empty_like(y) for y in tensors]
        delta, ds, dwhole = torch.empty_like(lse), q.new_empty(*axes, CHUNK, CHUNK), torch.empty_like(whole)
        dq_in, dk_out = (torch.empty_like(y, dtype=torch.float32) for y in (q_in, k_out))

        pairs = chunks * (chunks - 1) // 2
        size = min(count, max(1, SCRATCH // max(1, 2 * pairs * CHUNK * I * q.element_size())))
        z, dz = (q.new_empty(size, pairs, CHUNK, I) for _ in range(2))
        for earlier in range(0, count, size):
            grid = min(size, count - earlier), chunks
            path_queries_bwd_kernel[grid](
                v, c, q_in, k_out, whole, a, lse, da, delta, z, dz, dq_in, dc, earlier, **settings, **QUERIES
            )
            path_keys_bwd_kernel[grid](
                v, c, own, k_out, lse, da, delta, z, dz, ds, dk_out, dwhole, dv, dc, earlier, **settings, **KEYS
            )
        warps = {"num_warps": 2 if I <= 32 else 4, "num_stages": 1}
        path_rows_bwd_kernel[count, chunks](
            q, k, w, beta, inverse, ds, dq_in, dk_out, dwhole, dq, dk, dw, dbeta, **settings, **warps
        )
        return found

    return Method(forward, backward)
