"""Fused kernels of attention of blocks of queries to memory tokens and to the positions of blocks in reach.

    name                  shape              written by          read by
    q                     (R, B, Q, D)       caller              all kernels             I queries per block
    k, v                  (R, B, T, D)       caller              all kernels             C positions per block
    memory_k, memory_v    (R, B, N M, D)     caller              all kernels             M tokens for each of N blocks
    bias                  (J, I, H)          the method          all kernels             of logits, J = M + (E + 1) C
    a                     (R, B, Q, D)       block_fwd           block_query_bwd         outputs
    lse                   (R, B, Q, H)       block_fwd           both backward kernels   log2 of the sum of weights
    da                    (R, B, Q, D)       caller              both backward kernels   gradient of a
    delta                 (R, B, Q, H)       block_query_bwd     block_pair_bwd          da . a of each head
    dq                    (R, B, Q, D)       block_query_bwd     caller
    dpairs                as k, memory_k     block_pair_bwd      caller                  of k and v, then of the memory

bias, lse and delta are float32. A query sees the M memory tokens of its block, and the C positions of its own block and
of each of the E earlier blocks. The bias is the same in all blocks; it is minus infinity on a pair that the query does
not see. Runs and sequences of k and v may be strided, so that one block of longer tensors is read in place.

A program serves X queries, or X pairs, of one block of a sequence in G heads of K channels, and loops over the pairs or
queries on the other side. Blocks are short, so tensor cores would mostly compute pairs that no query sees.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, contiguous, kernels_take
from mixers.ops.method import Method, Optionals, Tensors

ROWS = 16
"""Largest number of queries or pairs of a program."""
CHANNELS = 128
"""Largest total number of channels of a program's heads."""
WARP_ELEMENTS = 256
"""Number of elements (X, G, K) per warp."""


@triton.jit
def _place(
    size: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    G: tl.constexpr,
):
    """Sequence, block of ``size`` rows, and rows in it, of a program; its heads and channels, the same for all rows."""
    groups: tl.constexpr = D // (G * K)
    tiles = tl.cdiv(size, X)
    row = (tl.program_id(0) // groups).to(tl.int64)
    x_X = tl.program_id(1) % tiles * X + tl.arange(0, X)
    head_XG = tl.program_id(0) % groups * G + tl.arange(0, G)[None, :] + tl.zeros([X, 1], tl.int32)
    channel_XGK = head_XG[:, :, None] * K + tl.arange(0, K)[None, None, :]
    return row, tl.program_id(1) // tiles, x_X, head_XG, channel_XGK


@triton.jit
def _logits(
    q_XGK: tl.tensor,
    k_XGK: tl.tensor,
    bias_XG: tl.tensor,
):
    """Logits in units of log2; one of the factors holds 1 / sqrt(K) in these units."""
    return tl.sum(q_XGK * k_XGK, 2) + tl.maximum(bias_XG * LOG2E, MASKED)


@triton.jit
def _softmax_step(
    q_XGK: tl.tensor,
    k_XGK: tl.tensor,
    v_XGK: tl.tensor,
    bias_XG: tl.tensor,
    m_XG: tl.tensor,
    l_XG: tl.tensor,
    o_XGK: tl.tensor,
):
    """Maximum, sum and numerator of the softmax after one more pair."""
    s_XG = _logits(q_XGK, k_XGK.to(tl.float32), bias_XG)
    top_XG = tl.maximum(m_XG, s_XG)
    p_XG = tl.exp2(s_XG - top_XG)
    shrink_XG = tl.exp2(m_XG - top_XG)
    o_XGK = o_XGK * shrink_XG[:, :, None] + p_XG[:, :, None] * v_XGK.to(tl.float32)
    return top_XG, l_XG * shrink_XG + p_XG, o_XGK


@triton.jit
def _query_step(
    q_XGK: tl.tensor,
    k_XGK: tl.tensor,
    v_XGK: tl.tensor,
    bias_XG: tl.tensor,
    da_XGK: tl.tensor,
    lse_XG: tl.tensor,
    delta_XG: tl.tensor,
    dq_XGK: tl.tensor,
):
    """Gradient of the queries after one more pair."""
    k_XGK = k_XGK.to(tl.float32)
    p_XG = tl.exp2(_logits(q_XGK, k_XGK, bias_XG) - lse_XG)
    ds_XG = p_XG * (tl.sum(da_XGK * v_XGK.to(tl.float32), 2) - delta_XG)
    return dq_XGK + ds_XG[:, :, None] * k_XGK


@triton.jit(do_not_specialize=["Q", "T", "I", "M", "C", "E"])
def block_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    memory_k_ptr: tl.tensor,
    memory_v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    B: tl.tensor,
    run_stride: tl.tensor,
    row_stride: tl.tensor,
    Q: tl.tensor,
    T: tl.tensor,
    I: tl.tensor,
    M: tl.tensor,
    C: tl.tensor,
    E: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    G: tl.constexpr,
):
    """Attention of X queries of one block in G heads.

    1. Read the queries.
    2. For each memory token of the block: update the softmax state: maximum m, sum l, numerator o.
    3. For each position of the blocks in reach: the same.
    4. Write a = o / l and lse = m + log2(l).
    """
    # 1. Queries.
    H: tl.constexpr = D // K
    row, block, i_X, head_XG, channel_XGK = _place(I, D, K, X, G)
    t_X = block * I + i_X
    live_X = (i_X < I) & (t_X < Q)
    at_XGK = (row * Q + t_X)[:, None, None] * D + channel_XGK
    q_XGK = tl.load(q_ptr + at_XGK, live_X[:, None, None], 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    bias_ptr += i_X[:, None] * H + head_XG

    # 2. Memory.
    m_XG = tl.full([X, G], MASKED, tl.float32)
    l_XG = tl.zeros([X, G], tl.float32)
    o_XGK = tl.zeros([X, G, K], tl.float32)
    memory_at_XGK = (row * tl.cdiv(Q, I) + block) * M * D + channel_XGK
    for j in range(M):
        k_XGK = tl.load(memory_k_ptr + memory_at_XGK + j * D)
        v_XGK = tl.load(memory_v_ptr + memory_at_XGK + j * D)
        bias_XG = tl.load(bias_ptr + j * I * H, live_X[:, None], 0.0)
        m_XG, l_XG, o_XGK = _softmax_step(q_XGK, k_XGK, v_XGK, bias_XG, m_XG, l_XG, o_XGK)

    # 3. Positions.
    pairs_at_XGK = row // B * run_stride + row % B * row_stride + channel_XGK
    first = (block - E) * C
    for t in range(tl.maximum(first, 0), tl.minimum((block + 1) * C, T)):
        k_XGK = tl.load(k_ptr + pairs_at_XGK + t * D)
        v_XGK = tl.load(v_ptr + pairs_at_XGK + t * D)
        bias_XG = tl.load(bias_ptr + (M + t - first) * I * H, live_X[:, None], 0.0)
        m_XG, l_XG, o_XGK = _softmax_step(q_XGK, k_XGK, v_XGK, bias_XG, m_XG, l_XG, o_XGK)

    # 4. Outputs.
    tl.store(a_ptr + at_XGK, o_XGK / l_XG[:, :, None], live_X[:, None, None])
    tl.store(lse_ptr + (row * Q + t_X)[:, None] * H + head_XG, m_XG + tl.log2(l_XG), live_X[:, None])


@triton.jit(do_not_specialize=["Q", "T", "I", "M", "C", "E"])
def block_query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    memory_k_ptr: tl.tensor,
    memory_v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    da_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    B: tl.tensor,
    run_stride: tl.tensor,
    row_stride: tl.tensor,
    Q: tl.tensor,
    T: tl.tensor,
    I: tl.tensor,
    M: tl.tensor,
    C: tl.tensor,
    E: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    G: tl.constexpr,
):
    """Gradients of X queries of one block in G heads.

    1. Read the queries; write delta = da . a of each head.
    2. For each memory token of the block: dq += ds k, with the gradients of the logits ds = p (da . v - delta) and the
       attention weights p = exp2(s - lse).
    3. For each position of the blocks in reach: the same.
    4. Write dq.
    """
    # 1. Queries.
    H: tl.constexpr = D // K
    row, block, i_X, head_XG, channel_XGK = _place(I, D, K, X, G)
    t_X = block * I + i_X
    live_X = (i_X < I) & (t_X < Q)
    at_XGK = (row * Q + t_X)[:, None, None] * D + channel_XGK
    at_XG = (row * Q + t_X)[:, None] * H + head_XG
    q_XGK = tl.load(q_ptr + at_XGK, live_X[:, None, None], 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    da_XGK = tl.load(da_ptr + at_XGK, live_X[:, None, None], 0.0).to(tl.float32)
    a_XGK = tl.load(a_ptr + at_XGK, live_X[:, None, None], 0.0).to(tl.float32)
    delta_XG = tl.sum(da_XGK * a_XGK, 2)
    tl.store(delta_ptr + at_XG, delta_XG, live_X[:, None])
    lse_XG = tl.load(lse_ptr + at_XG, live_X[:, None], 0.0)
    bias_ptr += i_X[:, None] * H + head_XG

    # 2. Memory.
    dq_XGK = tl.zeros([X, G, K], tl.float32)
    memory_at_XGK = (row * tl.cdiv(Q, I) + block) * M * D + channel_XGK
    for j in range(M):
        k_XGK = tl.load(memory_k_ptr + memory_at_XGK + j * D)
        v_XGK = tl.load(memory_v_ptr + memory_at_XGK + j * D)
        bias_XG = tl.load(bias_ptr + j * I * H, live_X[:, None], 0.0)
        dq_XGK = _query_step(q_XGK, k_XGK, v_XGK, bias_XG, da_XGK, lse_XG, delta_XG, dq_XGK)

    # 3. Positions.
    pairs_at_XGK = row // B * run_stride + row % B * row_stride + channel_XGK
    first = (block - E) * C
    for t in range(tl.maximum(first, 0), tl.minimum((block + 1) * C, T)):
        k_XGK = tl.load(k_ptr + pairs_at_XGK + t * D)
        v_XGK = tl.load(v_ptr + pairs_at_XGK + t * D)
        bias_XG = tl.load(bias_ptr + (M + t - first) * I * H, live_X[:, None], 0.0)
        dq_XGK = _query_step(q_XGK, k_XGK, v_XGK, bias_XG, da_XGK, lse_XG, delta_XG, dq_XGK)

    # 4. Outputs.
    tl.store(dq_ptr + at_XGK, dq_XGK * K**-0.5, live_X[:, None, None])


@triton.jit(do_not_specialize=["Q", "T", "I", "P", "E", "first"])
def block_pair_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    B: tl.tensor,
    run_stride: tl.tensor,
    row_stride: tl.tensor,
    Q: tl.tensor,
    T: tl.tensor,
    I: tl.tensor,
    P: tl.tensor,
    E: tl.tensor,
    first: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    G: tl.constexpr,
    ADD: tl.constexpr,
):
    """Gradients of X pairs of one block in G heads; of T pairs, P per block, all positions or all memory tokens.

    The queries of the next E blocks see them, too. For queries of the same block, the pairs' bias begins at ``first``.
    With ADD, the gradients are added to what dk and dv hold.

    1. Read the pairs.
    2. For each query of the blocks that see them:
       a. compute its logits s and attention weights p = exp2(s - lse) again;
       b. dv += p da, and dk += ds q with the gradients of the logits ds = p (da . v - delta).
    3. Write dk and dv.
    """
    # 1. Pairs.
    H: tl.constexpr = D // K
    row, block, p_X, head_XG, channel_XGK = _place(P, D, K, X, G)
    t_X = block * P + p_X
    live_X = (p_X < P) & (t_X < T)
    pairs_at_XGK = row // B * run_stride + row % B * row_stride + t_X[:, None, None] * D + channel_XGK
    k_XGK = tl.load(k_ptr + pairs_at_XGK, live_X[:, None, None], 0.0).to(tl.float32) * (K**-0.5 * LOG2E)
    v_XGK = tl.load(v_ptr + pairs_at_XGK, live_X[:, None, None], 0.0).to(tl.float32)
    bias_ptr += (first + p_X)[:, None] * I * H + head_XG

    dk_XGK = tl.zeros([X, G, K], tl.float32)
    dv_XGK = tl.zeros([X, G, K], tl.float32)
    for t in range(block * I, tl.minimum((block + E + 1) * I, Q)):
        # 2a. Attention weights.
        q_XGK = tl.load(q_ptr + (row * Q + t) * D + channel_XGK).to(tl.float32)
        da_XGK = tl.load(da_ptr + (row * Q + t) * D + channel_XGK).to(tl.float32)
        lse_XG = tl.load(lse_ptr + (row * Q + t) * H + head_XG)
        delta_XG = tl.load(delta_ptr + (row * Q + t) * H + head_XG)
        behind = t // I - block
        bias_XG = tl.load(bias_ptr + (t % I - behind * P * I) * H, live_X[:, None], 0.0)
        p_XG = tl.exp2(_logits(q_XGK, k_XGK, bias_XG) - lse_XG)

        # 2b. Gradients.
        ds_XG = p_XG * (tl.sum(da_XGK * v_XGK, 2) - delta_XG)
        dv_XGK += p_XG[:, :, None] * da_XGK
        dk_XGK += ds_XG[:, :, None] * q_XGK

    # 3. Outputs.
    to_XGK = (row * T + t_X)[:, None, None] * D + channel_XGK
    dk_XGK *= K**-0.5
    if ADD:
        dk_XGK += tl.load(dk_ptr + to_XGK, live_X[:, None, None], 0.0).to(tl.float32)
        dv_XGK += tl.load(dv_ptr + to_XGK, live_X[:, None, None], 0.0).to(tl.float32)
    tl.store(dk_ptr + to_XGK, dk_XGK, live_X[:, None, None])
    tl.store(dv_ptr + to_XGK, dv_XGK, live_X[:, None, None])


@kernels_take("attention in blocks", "heads of 8, 16, 32, 64 or 128 channels")
def fits_block_attention(D: int, H: int) -> bool:
    """Whether ``block_attention_method`` takes H heads of this width."""
    return D % H == 0 and D // H in (8, 16, 32, 64, 128)


def block_attention_method(heads: int, queries: int, keys: int, memory: int, earlier: int) -> Method:
    """Attention of blocks to ``memory`` tokens and to the positions of the own block and ``earlier`` blocks.

    Tensors: q (R, B, Q, D), k, v (R, B, T, D), memory_k, memory_v (R, B, N M, D), heads concatenated; bias
    (R, keys, queries, heads) in float32, the same in all runs, which gets no gradient.
    """
    block = (keys - memory) // (earlier + 1)

    def prepared(q: Tensor, k: Tensor, v: Tensor, memory_k: Tensor, memory_v: Tensor, bias: Tensor) -> Tensors:
        """Tensors as the kernels read them."""
        if k.stride() != v.stride() or k.stride()[2:] != (k.shape[3], 1):
            k, v = k.contiguous(), v.contiguous()
        return q.contiguous(), k, v, *contiguous(memory_k, memory_v, bias[0])

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        q, k, *_ = tensors = prepared(*tensors)
        R, B, Q, _ = q.shape
        a = torch.empty_like(q)
        lse = q.new_empty(R, B, Q, heads, dtype=torch.float32)

        sizes = Q, k.shape[2], queries, memory, block, earlier
        programs, tile = _grid(q, heads, triton.cdiv(Q, queries), queries)
        block_fwd_kernel[programs](*tensors, a, lse, B, *k.stride()[:2], *sizes, **tile)
        return (a,), (lse,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        da, a, lse = (y.contiguous() for y in (*gradients, *outputs, *saved))
        q, k, v, *tokens, bias = tensors = prepared(*tensors)
        B, Q, T = q.shape[1], q.shape[2], k.shape[2]

        # Queries.
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        sizes = Q, T, queries, memory, block, earlier
        programs, tile = _grid(q, heads, triton.cdiv(Q, queries), queries)
        block_query_bwd_kernel[programs](*tensors, da, a, lse, dq, delta, B, *k.stride()[:2], *sizes, **tile)

        # Positions, then memory tokens.
        softmax = da, lse, delta
        dpairs = pair_gradients((k, v), q, bias, softmax, size=block, earlier=earlier, first=memory + earlier * block)
        dtokens = pair_gradients(tokens, q, bias, softmax, size=memory, earlier=0, first=0)
        return dq, *dpairs, *dtokens, None

    return Method(forward, backward)


def pair_gradients(
    pairs: Sequence[Tensor],
    q: Tensor,
    bias: Tensor,
    softmax: Sequence[Tensor],
    *,
    size: int,
    earlier: int,
    first: int,
    onto: Optionals = (),
) -> list[Any]:
    """Gradients of keys and values (R, B, T, D), ``size`` of each block.

    Args:
        pairs: keys and values; runs and sequences may be strided.
        q: queries (R, B, Q, D) of all blocks, as many of each as the bias has.
        bias: bias (J, I, H) of the logits.
        softmax: gradients da (R, B, Q, D) of the outputs, and lse and delta (R, B, Q, H).
        earlier: blocks before the own one that a query sees.
        first: place of the pairs' bias for queries of the same block.
        onto: contiguous gradients of the keys and the values, to which these are added in place.
    """
    queries, heads = bias.shape[1:]
    B, Q, T = q.shape[1], q.shape[2], pairs[0].shape[2]
    dpairs = list(onto) or [torch.empty_like(y, memory_format=torch.contiguous_format) for y in pairs]
    programs, tile = _grid(q, heads, triton.cdiv(T, size), size)
    strides, sizes = pairs[0].stride()[:2], (Q, T, queries, size, earlier, first)
    block_pair_bwd_kernel[programs](q, *pairs, bias, *softmax, *dpairs, B, *strides, *sizes, **tile, ADD=bool(onto))
    return dpairs


def _grid(q: Tensor, heads: int, blocks: int, size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid, and compile-time settings of a kernel that serves ``size`` rows of each block."""
    R, B, _, D = q.shape
    K = D // heads
    G = next(n for n in (16, 8, 4, 2, 1) if heads % n == 0 and n * K <= CHANNELS)
    X = min(triton.next_power_of_2(size), ROWS)
    warps = max(1, X * G * K // WARP_ELEMENTS)
    programs = R * B * heads // G, blocks * triton.cdiv(size, X)
    return programs, {"D": D, "K": K, "X": X, "G": G, "num_warps": warps}
