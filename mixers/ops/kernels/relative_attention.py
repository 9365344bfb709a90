"""Fused kernels of attention with relative positions to the own segment and to the one before (Transformer-XL).

    name              shape                     written by              read by
    q, k, v           (R, B, T, D)              caller                  all kernels            k, v: of the own segment
    far_k, far_v      (R, B, T, D)              caller                  all kernels            of the segment before
    u, w              (R, D)                    caller                  all kernels            biases of queries
    code              (R, J, D)                 caller                  all kernels            of distances 0 .. J - 1
    a                 (R, B, T, D)              relative_fwd            relative_query_bwd     outputs
    lse               (R, B, T, H)              relative_fwd            both backward kernels  log2 of sum of weights
    da                (R, B, T, D)              caller                  both backward kernels  gradient of a
    delta             (R, B, T, H)              relative_query_bwd      relative_pair_bwd      da . a of each head
    dq                (R, B, T, D)              relative_query_bwd      caller
    sums              (R, programs, J + 2, D)   relative_query_bwd      group_sum              for code, u, w
    dk, dv            (R, B, T, D)              relative_pair_bwd       caller                 once near, once far

lse, delta and sums are float32. The logit of query i and key j is ((q_i + u) . k_j + (q_i + w) . code_{i-j}) / sqrt(K).

A program serves C positions of one sequence in G heads of K channels, and loops over the distances between queries and
pairs. Segments are short, so tensor cores would mostly compute pairs that no query sees. At a given distance, all
queries of a run read the same code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import LOG2E, MASKED, kernels_take
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

RELATIVE = {"C": 16, "num_warps": 8}

CHANNELS = 128
"""Largest total number of channels of a program's heads."""


@triton.jit
def _place(
    T: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
):
    """Sequence and positions of a program; its heads (C, G) and channels (C, G, K), the same for all positions."""
    groups: tl.constexpr = D // (G * K)
    row = (tl.program_id(0) // groups).to(tl.int64)
    t_C = tl.program_id(1) * C + tl.arange(0, C)
    head_CG = tl.program_id(0) % groups * G + tl.arange(0, G)[None, :] + tl.zeros([C, 1], tl.int32)
    channel_CGK = head_CG[:, :, None] * K + tl.arange(0, K)[None, None, :]
    return row, t_C, head_CG, channel_CGK


@triton.jit
def _pair(
    near_ptr: tl.tensor,
    far_ptr: tl.tensor,
    at_CGK: tl.tensor,
    near_C: tl.tensor,
    far_C: tl.tensor,
):
    """Keys or values, from the own segment or the one before."""
    near_CGK = tl.load(near_ptr + at_CGK, near_C[:, None, None], 0.0).to(tl.float32)
    return near_CGK + tl.load(far_ptr + at_CGK, far_C[:, None, None], 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "J"])
def relative_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    far_k_ptr: tl.tensor,
    far_v_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    code_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    J: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
):
    """Attention of C positions of one sequence in G heads; segments have S positions.

    1. Read the queries, and add both biases.
    2. For each distance:
       a. find the queries that see a pair at this distance, in their own segment or in the one before;
       b. compute the logits s, and update the softmax state: maximum m, sum l, numerator o.
    3. Write a = o / l and lse = m + log2(l).
    """
    # 1. Queries.
    row, t_C, head_CG, channel_CGK = _place(T, D, K, C, G)
    run = row // B
    live_C = t_C < T
    at_CGK = (row * T + t_C)[:, None, None] * D + channel_CGK
    q_CGK = tl.load(q_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    content_CGK = q_CGK + tl.load(u_ptr + run * D + channel_CGK)
    place_CGK = q_CGK + tl.load(w_ptr + run * D + channel_CGK)

    m_CG = tl.full([C, G], MASKED, tl.float32)
    l_CG = tl.zeros([C, G], tl.float32)
    o_CGK = tl.zeros([C, G, K], tl.float32)
    for d in range(J):
        # 2a. Pairs.
        near_C = live_C & (d <= t_C % S)
        far_C = live_C & (d > t_C % S) & (d <= t_C % S + S) & (d <= t_C)
        k_CGK = _pair(k_ptr, far_k_ptr, at_CGK - d * D, near_C, far_C)
        v_CGK = _pair(v_ptr, far_v_ptr, at_CGK - d * D, near_C, far_C)
        code_CGK = tl.load(code_ptr + (run * J + d) * D + channel_CGK).to(tl.float32)

        # 2b. Softmax state.
        s_CG = tl.sum(content_CGK * k_CGK + place_CGK * code_CGK, 2) * (K**-0.5 * LOG2E)
        s_CG = tl.where((near_C | far_C)[:, None], s_CG, MASKED)
        top_CG = tl.maximum(m_CG, s_CG)
        p_CG = tl.exp2(s_CG - top_CG)
        shrink_CG = tl.exp2(m_CG - top_CG)
        l_CG = l_CG * shrink_CG + p_CG
        o_CGK = o_CGK * shrink_CG[:, :, None] + p_CG[:, :, None] * v_CGK
        m_CG = top_CG

    # 3. Outputs.
    tl.store(a_ptr + at_CGK, o_CGK / l_CG[:, :, None], live_C[:, None, None])
    at_CG = (row * T + t_C)[:, None] * (D // K) + head_CG
    tl.store(lse_ptr + at_CG, m_CG + tl.log2(l_CG), live_C[:, None])


@triton.jit(do_not_specialize=["T", "J"])
def relative_query_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    far_k_ptr: tl.tensor,
    far_v_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    code_ptr: tl.tensor,
    da_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    J: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
):
    """Gradients of C queries of one sequence in G heads, and their contributions to the gradients of codes and biases.

    1. Read the queries, and add both biases.
    2. Write delta = da . a of each head.
    3. For each distance:
       a. compute the logits s and the attention weights p = exp2(s - lse) again;
       b. compute the gradients of the logits, ds = p (da . v - delta), and add to those of the queries: ds k by
          content, ds code by place;
       c. write the sum over the queries for the code.
    4. Write dq, and the sums over the queries for both biases.
    """
    # 1. Queries.
    row, t_C, head_CG, channel_CGK = _place(T, D, K, C, G)
    run = row // B
    live_C = t_C < T
    at_CGK = (row * T + t_C)[:, None, None] * D + channel_CGK
    q_CGK = tl.load(q_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    content_CGK = q_CGK + tl.load(u_ptr + run * D + channel_CGK)
    place_CGK = q_CGK + tl.load(w_ptr + run * D + channel_CGK)

    # 2. Delta.
    da_CGK = tl.load(da_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    a_CGK = tl.load(a_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    delta_CG = tl.sum(da_CGK * a_CGK, 2)
    at_CG = (row * T + t_C)[:, None] * (D // K) + head_CG
    tl.store(delta_ptr + at_CG, delta_CG, live_C[:, None])
    lse_CG = tl.load(lse_ptr + at_CG, live_C[:, None], 0.0)

    # All rows of channels are the same; sums need one of them.
    channel_GK = tl.max(channel_CGK, 0)
    to_GK = (row * tl.num_programs(1) + tl.program_id(1)) * (J + 2) * D + channel_GK
    by_content_CGK = tl.zeros([C, G, K], tl.float32)
    by_place_CGK = tl.zeros([C, G, K], tl.float32)
    for d in range(J):
        # 3a. Attention weights.
        near_C = live_C & (d <= t_C % S)
        far_C = live_C & (d > t_C % S) & (d <= t_C % S + S) & (d <= t_C)
        k_CGK = _pair(k_ptr, far_k_ptr, at_CGK - d * D, near_C, far_C)
        v_CGK = _pair(v_ptr, far_v_ptr, at_CGK - d * D, near_C, far_C)
        code_CGK = tl.load(code_ptr + (run * J + d) * D + channel_CGK).to(tl.float32)
        s_CG = tl.sum(content_CGK * k_CGK + place_CGK * code_CGK, 2) * (K**-0.5 * LOG2E)
        p_CG = tl.where((near_C | far_C)[:, None], tl.exp2(s_CG - lse_CG), 0.0)

        # 3b. Gradients of the queries.
        ds_CG = p_CG * (tl.sum(da_CGK * v_CGK, 2) - delta_CG) * K**-0.5
        by_content_CGK += ds_CG[:, :, None] * k_CGK
        by_place_CGK += ds_CG[:, :, None] * code_CGK

        # 3c. Code.
        tl.store(sums_ptr + to_GK + d * D, tl.sum(ds_CG[:, :, None] * place_CGK, 0))

    # 4. Outputs.
    tl.store(dq_ptr + at_CGK, by_content_CGK + by_place_CGK, live_C[:, None, None])
    tl.store(sums_ptr + to_GK + J * D, tl.sum(by_content_CGK, 0))
    tl.store(sums_ptr + to_GK + (J + 1) * D, tl.sum(by_place_CGK, 0))


@triton.jit(do_not_specialize=["T", "J"])
def relative_pair_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    code_ptr: tl.tensor,
    da_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    J: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    FAR: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
):
    """Gradients of C pairs of one sequence in G heads, from queries of the own segment (FAR 0) or of the next (FAR 1).

    1. Read the pairs and both biases of queries.
    2. For each distance that occurs:
       a. read the queries at this distance with their lse, delta and da;
       b. compute the logits s and the attention weights p = exp2(s - lse) again;
       c. dv += p da, and dk += ds (q + u) with the gradients of the logits ds = p (da . v - delta).
    3. Write dk and dv.
    """
    # 1. Pairs.
    row, t_C, head_CG, channel_CGK = _place(T, D, K, C, G)
    run = row // B
    live_C = t_C < T
    at_CGK = (row * T + t_C)[:, None, None] * D + channel_CGK
    at_CG = (row * T + t_C)[:, None] * (D // K) + head_CG
    k_CGK = tl.load(k_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    v_CGK = tl.load(v_ptr + at_CGK, live_C[:, None, None], 0.0).to(tl.float32)
    u_CGK = tl.load(u_ptr + run * D + channel_CGK)
    w_CGK = tl.load(w_ptr + run * D + channel_CGK)

    dk_CGK = tl.zeros([C, G, K], tl.float32)
    dv_CGK = tl.zeros([C, G, K], tl.float32)
    for d in range(FAR, tl.minimum(J, S + FAR * S)):
        # 2a. Queries.
        seen_C = (t_C + d < T) & ((t_C + d) // S == t_C // S + FAR)
        q_CGK = tl.load(q_ptr + at_CGK + d * D, seen_C[:, None, None], 0.0).to(tl.float32)
        da_CGK = tl.load(da_ptr + at_CGK + d * D, seen_C[:, None, None], 0.0).to(tl.float32)
        lse_CG = tl.load(lse_ptr + at_CG + d * (D // K), seen_C[:, None], 0.0)
        delta_CG = tl.load(delta_ptr + at_CG + d * (D // K), seen_C[:, None], 0.0)

        # 2b. Attention weights.
        code_CGK = tl.load(code_ptr + (run * J + d) * D + channel_CGK).to(tl.float32)
        s_CG = tl.sum((q_CGK + u_CGK) * k_CGK + (q_CGK + w_CGK) * code_CGK, 2) * (K**-0.5 * LOG2E)
        p_CG = tl.where(seen_C[:, None], tl.exp2(s_CG - lse_CG), 0.0)

        # 2c. Gradients.
        ds_CG = p_CG * (tl.sum(da_CGK * v_CGK, 2) - delta_CG)
        dv_CGK += p_CG[:, :, None] * da_CGK
        dk_CGK += ds_CG[:, :, None] * (q_CGK + u_CGK)

    # 3. Outputs.
    tl.store(dk_ptr + at_CGK, dk_CGK * K**-0.5, live_C[:, None, None])
    tl.store(dv_ptr + at_CGK, dv_CGK, live_C[:, None, None])


@kernels_take("relative attention", "heads of 8, 16, 32, 64 or 128 channels")
def fits_relative_attention(D: int, H: int) -> bool:
    """Whether ``relative_attention_method`` takes H heads of this width."""
    return D % H == 0 and D // H in (8, 16, 32, 64, 128)


def relative_attention_method(heads: int, segment: int) -> Method:
    """Attention to the own segment and the one before, with relative positions.

    Tensors: q, k, v, far_k, far_v (R, B, T, D), u and w (R, D), codes (R, J, D) of all distances that occur.
    """

    def launch(q: Tensor, code: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
        """Grid, sizes, and compile-time settings of all kernels."""
        R, B, T, D = q.shape
        K = D // heads
        G = next(n for n in (16, 8, 4, 2, 1) if heads % n == 0 and n * K <= CHANNELS)
        grid = R * B * heads // G, triton.cdiv(T, RELATIVE["C"])
        return grid, (B, T, code.shape[1]), {"D": D, "K": K, "S": segment, "G": G, **RELATIVE}

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        q, *_, code = tensors = tuple(y.contiguous() for y in tensors)
        a = torch.empty_like(q)
        lse = q.new_empty(*q.shape[:3], heads, dtype=torch.float32)

        grid, sizes, tile = launch(q, code)
        relative_fwd_kernel[grid](*tensors, a, lse, *sizes, **tile)
        return (a,), (lse,)

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        da, a, lse = (y.contiguous() for y in (*gradients, *outputs, *saved))
        q, k, v, far_k, far_v, *others = tensors = tuple(y.contiguous() for y in tensors)
        grid, sizes, tile = launch(q, others[-1])
        B, _, J = sizes

        # Queries, biases and codes.
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        sums = lse.new_empty(len(q), B * grid[1], J + 2, q.shape[-1])
        relative_query_bwd_kernel[grid](*tensors, da, a, lse, dq, delta, sums, *sizes, **tile)
        dcode, du, dw = group_sum(sums).split((J, 1, 1), dim=1)

        # Pairs.
        dpairs = [torch.empty_like(y) for y in (k, v, far_k, far_v)]
        left = da, lse, delta
        relative_pair_bwd_kernel[grid](q, k, v, *others, *left, *dpairs[:2], *sizes, FAR=0, **tile)
        relative_pair_bwd_kernel[grid](q, far_k, far_v, *others, *left, *dpairs[2:], *sizes, FAR=1, **tile)
        return dq, *dpairs, du[:, 0], dw[:, 0], dcode

    return Method(forward, backward)
