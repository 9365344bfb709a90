"""Fused kernels of PaTH attention: logits through products of matrices I - beta w w^T (Yang et al. 2025, section 3).

    name       shape                  written by     read by
    q, k, v    (R, B, T, D)           caller         both kernels
    w          (R, B, T, D)           caller         both kernels         of any length, scaled to length one here
    beta       (R, B, T, H)           caller         both kernels         float32
    c          (R, B, H, T)           caller         both kernels         sums of log gates, float32; may be absent
    a          (R, B, T, D)           path_fwd       path_bwd             outputs
    lse        (R, B, H, T)           path_fwd       path_bwd             log2 of the sum of weights
    inverse    (R, B, H, N, C, C)     path_fwd       path_bwd             X, see below
    k_out      (R, B, H, N, C, I)     path_fwd       both kernels         keys behind their chunk
    whole      (R, B, H, N, I, I)     path_fwd       both kernels         P, the product of a chunk
    da         (R, B, T, D)           caller         path_bwd             gradient of a
    y          (R, B, H, N, C, I)     path_bwd       path_bwd             queries of one chunk behind each earlier chunk
    dk_out     (R, B, H, N, C, I)     path_bwd       path_bwd             sums over later chunks, as are the next two
    dv_out     (R, B, H, N, C, I)     path_bwd       path_bwd
    dwhole     (R, B, H, N, I, I)     path_bwd       path_bwd
    dq .. dw   like q .. w            path_bwd       caller
    dbeta      (R, B, T, H)           path_bwd       caller               float32
    dc         (R, B, H, T)           path_bwd       caller               float32; its sums, too

All others are float32. A program serves one head of one sequence and goes through its N chunks of C positions. The K
channels of a head are filled up to I with zeros; positions after the last one have zeros. Inside a chunk (the paper's
UT transform), with the lower triangle (tril) and the strictly lower one (stril):

    X = (1 + beta stril(w w^T))^-1    U = X beta    A = U stril(w k^T)    Y = U w    Q = tril(q w^T)
    logits = q k^T - Q A    k_out = k - A^T w    q_in = q - Q Y    P = 1 - w^T Y

The queries q_in of a chunk read k_out of the chunk before, then go through its P to the one before that, and so on.
Logits are divided by sqrt(K); with gates, c_i - c_j is added.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, contiguous, kernels_take
from mixers.ops.method import Method, Optionals, Tensors

CHUNK = 32
FORWARD = {"num_warps": 2, "num_stages": 1}
BACKWARD = {"num_warps": 2, "num_stages": 1}
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
def _sums(c_ptr: tl.tensor, sequence: tl.tensor, t_C: tl.tensor, T: tl.tensor, C: tl.constexpr, GATED: tl.constexpr):
    """Sums of the logarithms of gates; very low ones after the last position, which see no other chunk."""
    c_C = tl.zeros([C], tl.float32)
    if GATED:
        c_C = tl.load(c_ptr + sequence * T + t_C, t_C < T, MASKED)
    return c_C


@triton.jit(do_not_specialize=["T"])
def path_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    w_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    c_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one head of one sequence.

    For each chunk, the oldest first:
    1. Read its rows; write X, k_out and P.
    2. Begin the softmax state with the pairs of the chunk: maximum m, sum l, numerator o.
    3. For each earlier chunk, the newest first: add its pairs, and take the queries through its P.
    4. Write a = o / l and lse = m + log2(l).
    """
    H: tl.constexpr = D // K
    head = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64)
    sequence = row * H + head
    first = row * T * D + head * K
    chunks = tl.cdiv(T, C)
    one_II = (tl.arange(0, I)[:, None] == tl.arange(0, I)[None, :]).to(tl.float32)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    for n in range(chunks):
        # 1. Chunk.
        t_C = n * C + tl.arange(0, C)
        q_CI = _load(q_ptr + first, t_C, T, D, K, I)
        k_CI = _load(k_ptr + first, t_C, T, D, K, I)
        v_CI = _load(v_ptr + first, t_C, T, D, K, I)
        w_CI, _ = _unit(_load(w_ptr + first, t_C, T, D, K, I))
        beta_C = tl.load(beta_ptr + row * T * H + head + t_C * H, t_C < T, 0.0)
        c_C = _sums(c_ptr, sequence, t_C, T, C, GATED)

        ww_CC = tl.where(i > j, _dot(w_CI, tl.trans(w_CI), PRECISION), 0.0)
        x_CC = inverse(beta_C[:, None] * ww_CC, C, PRECISION)
        _, a_CC, y_CI, qw_CC = _products(q_CI, k_CI, w_CI, x_CC * beta_C[None, :], C, PRECISION)
        k_out_CI = k_CI - _dot(tl.trans(a_CC), w_CI, PRECISION)
        whole_II = one_II - _dot(tl.trans(w_CI), y_CI, PRECISION)
        tl.store(inverse_ptr + (sequence * chunks + n) * (C * C) + _tile(C, C), x_CC)
        tl.store(k_out_ptr + (sequence * chunks + n) * (C * I) + _tile(C, I), k_out_CI)
        tl.store(whole_ptr + (sequence * chunks + n) * (I * I) + _tile(I, I), whole_II)

        # 2. Own pairs.
        s_CC = _own_logits(q_CI, k_CI, qw_CC, a_CC, c_C, K, C, PRECISION)
        m_C = tl.max(s_CC, 1)
        p_CC = tl.exp2(s_CC - m_C[:, None])
        l_C = tl.sum(p_CC, 1)
        o_CI = _dot(p_CC, v_CI, PRECISION)

        # 3. Earlier chunks, which other threads of this program wrote, hence the barrier.
        q_CI -= _dot(qw_CC, y_CI, PRECISION)
        tl.debug_barrier()
        for back in range(n):
            b = n - 1 - back
            tile = sequence * chunks + b
            t_b_C = b * C + tl.arange(0, C)
            k_b_CI = tl.load(k_out_ptr + tile * (C * I) + _tile(C, I))
            v_b_CI = _load(v_ptr + first, t_b_C, T, D, K, I)
            c_b_C = _sums(c_ptr, sequence, t_b_C, T, C, GATED)

            s_CC = _dot(q_CI, tl.trans(k_b_CI), PRECISION) * (K**-0.5 * LOG2E)
            s_CC += (c_C[:, None] - c_b_C[None, :]) * LOG2E
            top_C = tl.maximum(m_C, tl.max(s_CC, 1))
            p_CC = tl.exp2(s_CC - top_C[:, None])
            shrink_C = tl.exp2(m_C - top_C)
            l_C = l_C * shrink_C + tl.sum(p_CC, 1)
            o_CI = _add_dot(o_CI * shrink_C[:, None], p_CC, v_b_CI, PRECISION)
            m_C = top_C
            q_CI = _dot(q_CI, tl.load(whole_ptr + tile * (I * I) + _tile(I, I)), PRECISION)

        # 4. Outputs.
        _store(a_ptr + first, o_CI / l_C[:, None], t_C, T, D, K, I)
        tl.store(lse_ptr + sequence * T + t_C, m_C + tl.log2(l_C), t_C < T)


@triton.jit(do_not_specialize=["T"])
def path_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    w_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    c_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    da_ptr: tl.tensor,
    y_ptr: tl.tensor,
    dk_out_ptr: tl.tensor,
    dv_out_ptr: tl.tensor,
    dwhole_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    dbeta_ptr: tl.tensor,
    dc_ptr: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    I: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one head of one sequence.

    For each chunk, the newest first, so that what later chunks add to its sums is complete:
    1. Read its rows, and compute A, Y and Q again.
    2. Compute the attention weights p of its own pairs again, and gradients of their logits ds = p (da v^T - delta).
    3. Take its queries through the P of earlier chunks, the newest first; write the queries behind each of them.
    4. For each earlier chunk, the oldest first: weights and ds of its pairs; add to dv_out, dk_out, dP and dc; the
       gradient of the queries behind the chunk is ds k_out + (that before the chunk) P^T.
    5. Write the gradients of the chunk's rows, from those of logits, k_out, q_in and P.
    """
    H: tl.constexpr = D // K
    head = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64)
    sequence = row * H + head
    first = row * T * D + head * K
    chunks = tl.cdiv(T, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]

    for step in range(chunks):
        # 1. Chunk. Its sums are zero if it is the last one, and are not written yet.
        n = chunks - 1 - step
        tile = sequence * chunks + n
        t_C = n * C + tl.arange(0, C)
        q_CI = _load(q_ptr + first, t_C, T, D, K, I)
        k_CI = _load(k_ptr + first, t_C, T, D, K, I)
        w_CI, r_C = _unit(_load(w_ptr + first, t_C, T, D, K, I))
        da_CI = _load(da_ptr + first, t_C, T, D, K, I)
        beta_C = tl.load(beta_ptr + row * T * H + head + t_C * H, t_C < T, 0.0)
        lse_C = tl.load(lse_ptr + sequence * T + t_C, t_C < T, 0.0)
        c_C = _sums(c_ptr, sequence, t_C, T, C, GATED)
        delta_C = tl.sum(da_CI * _load(a_ptr + first, t_C, T, D, K, I), 1)
        x_CC = tl.load(inverse_ptr + tile * (C * C) + _tile(C, C))
        wk_CC, a_CC, y_CI, qw_CC = _products(q_CI, k_CI, w_CI, x_CC * beta_C[None, :], C, PRECISION)
        added_C = (t_C * 0 + step) > 0
        added_I = (tl.arange(0, I) * 0 + step) > 0

        # 2. Own pairs.
        v_CI = _load(v_ptr + first, t_C, T, D, K, I)
        p_CC = tl.exp2(_own_logits(q_CI, k_CI, qw_CC, a_CC, c_C, K, C, PRECISION) - lse_C[:, None])
        ds_CC = p_CC * (_dot(da_CI, tl.trans(v_CI), PRECISION) - delta_C[:, None])
        dv_CI = tl.load(dv_out_ptr + tile * (C * I) + _tile(C, I), added_C[:, None], 0.0)
        dv_CI = _add_dot(dv_CI, tl.trans(p_CC), da_CI, PRECISION)
        _store(dv_ptr + first, dv_CI, t_C, T, D, K, I)
        if GATED:
            dc_C = tl.load(dc_ptr + sequence * T + t_C, (t_C < T) & added_C, 0.0)
            dc_C += tl.sum(ds_CC, 1) - tl.sum(ds_CC, 0)
        ds_CC *= K**-0.5

        # 3. Queries behind earlier chunks.
        z_CI = q_CI - _dot(qw_CC, y_CI, PRECISION)
        for back in range(n):
            before = sequence * chunks + n - 1 - back
            tl.store(y_ptr + before * (C * I) + _tile(C, I), z_CI)
            z_CI = _dot(z_CI, tl.load(whole_ptr + before * (I * I) + _tile(I, I)), PRECISION)
        tl.debug_barrier()

        # 4. Earlier chunks.
        dz_CI = tl.zeros([C, I], tl.float32)
        for b in range(n):
            before = sequence * chunks + b
            t_b_C = b * C + tl.arange(0, C)
            z_CI = tl.load(y_ptr + before * (C * I) + _tile(C, I))
            k_b_CI = tl.load(k_out_ptr + before * (C * I) + _tile(C, I))
            v_b_CI = _load(v_ptr + first, t_b_C, T, D, K, I)
            c_b_C = _sums(c_ptr, sequence, t_b_C, T, C, GATED)

            s_CC = _dot(z_CI, tl.trans(k_b_CI), PRECISION) * (K**-0.5 * LOG2E)
            p_CC = tl.exp2(s_CC + (c_C[:, None] - c_b_C[None, :]) * LOG2E - lse_C[:, None])
            ds_b_CC = p_CC * (_dot(da_CI, tl.trans(v_b_CI), PRECISION) - delta_C[:, None])
            if GATED:
                dc_b_C = tl.load(dc_ptr + sequence * T + t_b_C, added_C, 0.0)
                tl.store(dc_ptr + sequence * T + t_b_C, dc_b_C - tl.sum(ds_b_CC, 0))
                dc_C += tl.sum(ds_b_CC, 1)
            ds_b_CC *= K**-0.5

            # Sums of the chunk.
            dv_b_CI = tl.load(dv_out_ptr + before * (C * I) + _tile(C, I), added_C[:, None], 0.0)
            dv_b_CI = _add_dot(dv_b_CI, tl.trans(p_CC), da_CI, PRECISION)
            tl.store(dv_out_ptr + before * (C * I) + _tile(C, I), dv_b_CI)
            dk_b_CI = tl.load(dk_out_ptr + before * (C * I) + _tile(C, I), added_C[:, None], 0.0)
            dk_b_CI = _add_dot(dk_b_CI, tl.trans(ds_b_CC), z_CI, PRECISION)
            tl.store(dk_out_ptr + before * (C * I) + _tile(C, I), dk_b_CI)
            dwhole_II = tl.load(dwhole_ptr + before * (I * I) + _tile(I, I), added_I[:, None], 0.0)
            dwhole_II = _add_dot(dwhole_II, tl.trans(z_CI), dz_CI, PRECISION)
            tl.store(dwhole_ptr + before * (I * I) + _tile(I, I), dwhole_II)

            # Queries.
            whole_II = tl.load(whole_ptr + before * (I * I) + _tile(I, I))
            dz_CI = _dot(dz_CI, tl.trans(whole_II), PRECISION)
            dz_CI = _add_dot(dz_CI, ds_b_CC, k_b_CI, PRECISION)
        if GATED:
            tl.store(dc_ptr + sequence * T + t_C, dc_C, t_C < T)
        tl.debug_barrier()

        # 5. Gradients of Q, A and Y.
        dk_out_CI = tl.load(dk_out_ptr + tile * (C * I) + _tile(C, I), added_C[:, None], 0.0)
        dwhole_II = tl.load(dwhole_ptr + tile * (I * I) + _tile(I, I), added_I[:, None], 0.0)
        dqw_CC = _dot(ds_CC, tl.trans(a_CC), PRECISION)
        dqw_CC = tl.where(i >= j, -_add_dot(dqw_CC, dz_CI, tl.trans(y_CI), PRECISION), 0.0)
        da_CC = _dot(tl.trans(qw_CC), ds_CC, PRECISION)
        da_CC = -_add_dot(da_CC, w_CI, tl.trans(dk_out_CI), PRECISION)
        dy_CI = _dot(tl.trans(qw_CC), dz_CI, PRECISION)
        dy_CI = -_add_dot(dy_CI, w_CI, dwhole_II, PRECISION)

        # Queries and keys.
        dq_CI = _add_dot(dz_CI, ds_CC, k_CI, PRECISION)
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
        tl.store(dbeta_ptr + row * T * H + head + t_C * H, dbeta_C, t_C < T)
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

    def launch(q: Tensor, c: Tensor | None) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
        """Grid, axes (R, B, H, N) of the tiles, and settings of both kernels."""
        R, B, T, D = q.shape
        settings = {
            "T": T,
            "D": D,
            "K": D // heads,
            "I": max(LEAST_CHANNELS, triton.next_power_of_2(D // heads)),
            "C": CHUNK,
            "GATED": int(c is not None),
            "PRECISION": PRECISIONS[q.dtype],
        }
        return (R * B * heads,), (R, B, heads, triton.cdiv(T, CHUNK)), settings

    def tiles(q: Tensor, axes: tuple[int, ...], *sizes: int) -> Tensor:
        return q.new_empty(*axes, *sizes, dtype=torch.float32)

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        q, *_, c = tensors = contiguous(*tensors)
        grid, axes, settings = launch(q, c)
        I, a = settings["I"], torch.empty_like(q)
        lse = tiles(q, axes[:3], q.shape[2])
        saved = tiles(q, axes, CHUNK, CHUNK), tiles(q, axes, CHUNK, I), tiles(q, axes, I, I)
        path_fwd_kernel[grid](*tensors, a, lse, *saved, **settings, **FORWARD)
        return (a,), (lse, *saved)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        q, *_, c = tensors = contiguous(*tensors)
        grid, axes, settings = launch(q, c)
        I = settings["I"]
        scratch = *(tiles(q, axes, CHUNK, I) for _ in range(3)), tiles(q, axes, I, I)
        found = [y if y is None else torch.empty_like(y) for y in tensors]
        given = *contiguous(*outputs, *saved), *contiguous(*gradients)
        path_bwd_kernel[grid](*tensors, *given, *scratch, *found, **settings, **BACKWARD)
        return found

    return Method(forward, backward)
