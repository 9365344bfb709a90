"""The loop over segments of ``mixers.ops.kernels.memory``, forward, as a Triton kernel; tensors: see there."""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED, gelu_slope, normal_cdf, product, rms, square
from mixers.ops.kernels.memory_rows import matrices, program_rows


@triton.jit
def _softmax_steps(
    q_HMK: tl.tensor,
    k_HMK_ptrs: tl.tensor,
    v_HMK_ptrs: tl.tensor,
    bias_HM_ptrs: tl.tensor,
    m_HM: tl.tensor,
    l_HM: tl.tensor,
    o_HMK: tl.tensor,
    count: tl.tensor,
    bias_stride: tl.tensor,
    D: tl.constexpr,
    J: tl.constexpr,
):
    """Maximum, sum and numerator of the softmax after ``count`` more pairs, J at a time."""
    for first in tl.range(0, count, J, num_stages=1):
        j = first + tl.arange(0, J)
        j_J = tl.minimum(j, count - 1)
        at_HMJK = (j_J * D)[None, None, :, None]
        k_HMJK = tl.load(k_HMK_ptrs[:, :, None, :] + at_HMJK).to(tl.float32)
        v_HMJK = tl.load(v_HMK_ptrs[:, :, None, :] + at_HMJK).to(tl.float32)
        bias_HMJ = tl.load(bias_HM_ptrs[:, :, None] + (j_J * bias_stride)[None, None, :])

        s_HMJ = tl.sum(k_HMJK * q_HMK[:, :, None, :], 3) + tl.maximum(bias_HMJ * LOG2E, MASKED)
        s_HMJ = tl.where((j < count)[None, None, :], s_HMJ, MASKED)
        top_HM = tl.maximum(m_HM, tl.max(s_HMJ, 2))
        p_HMJ = tl.exp2(s_HMJ - top_HM[:, :, None])
        shrink_HM = tl.exp2(m_HM - top_HM)
        l_HM = l_HM * shrink_HM + tl.sum(p_HMJ, 2)
        o_HMK = o_HMK * shrink_HM[:, :, None] + tl.sum(p_HMJ[:, :, :, None] * v_HMJK, 2)
        m_HM = top_HM
    return m_HM, l_HM, o_HMK


@triton.jit(do_not_specialize=["B", "T", "N", "C"])
def memory_fwd_kernel(
    memory_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    w_ptr: tl.tensor,
    gains_ptr: tl.tensor,
    memory_k_ptr: tl.tensor,
    memory_v_ptr: tl.tensor,
    n_ptr: tl.tensor,
    nq_ptr: tl.tensor,
    nk_ptr: tl.tensor,
    r_ptr: tl.tensor,
    q_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    nu_ptr: tl.tensor,
    nz_ptr: tl.tensor,
    g_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    C: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    W: tl.constexpr,
    QK_NORM: tl.constexpr,
    PINNED: tl.constexpr,
):
    """Walk through N segments with the memory tokens of M / P sequences of one run. Grid: (tiles, R).

    1. Read the memory.
    2. For each segment:
       a. normalise the memory: n = memory / rms(memory);
       b. take its products with wq, wk, wv; with QK_NORM, normalise queries and keys; write the pair;
       c. unless it is the last segment:
          i. attend to the pairs of the memory tokens and of the segment: a = softmax(q k^T / sqrt(K) + bias) v;
          ii. add the attention branch: u = memory + scale wo a;
          iii. add the MLP branch: z = u + scale down gelu(up (nu gain)), with nu = u / rms(u);
          iv. normalise: nz = z / rms(z), memory = nz gain.
    """
    # 1. Rows and matrices.
    H: tl.constexpr = D // K
    run, sequence_M, token_M, live_M, head_H = program_rows(B, D, K, P, M)
    live_M1, live_1M, live_1M1 = live_M[:, None], live_M[None, :], live_M[None, :, None]
    d_D = tl.arange(0, D)
    w_W = tl.arange(0, W)
    hk_H1K = head_H[:, None, None] * K + tl.arange(0, K)[None, None, :]
    dtype = w_ptr.dtype.element_ty

    memory_MD = tl.load(memory_ptr + (sequence_M * P + token_M)[:, None] * D + d_D[None, :]).to(tl.float32)
    wq_ptr, wk_ptr, wv_ptr, wo_ptr, up_ptr, down_ptr = matrices(w_ptr, run, D, F)
    wq_DD = square(wq_ptr, D, 0, D, True) if PINNED else 0
    wk_DD = square(wk_ptr, D, 0, D, True) if PINNED else 0
    wv_DD = square(wv_ptr, D, 0, D, True) if PINNED else 0
    wo_DD = square(wo_ptr, D, 0, D, True) if PINNED else 0
    gains_ptr += run * 5 * D
    bias_HM_ptrs = bias_ptr + token_M[None, :] * H + head_H[:, None]
    zero_MD = tl.zeros([M, D], tl.float32)

    for segment in range(N):
        # 2a. Norm of the memory.
        at_M = sequence_M * N * P + segment * P + token_M
        at_MD = at_M[:, None] * D + d_D[None, :]
        r_M = rms(memory_MD, D)
        n_MD = memory_MD * r_M[:, None]
        tl.store(n_ptr + at_MD, n_MD.to(dtype), live_M1)
        tl.store(r_ptr + at_M * 5, r_M, live_M)
        input_MD = (n_MD * tl.load(gains_ptr + d_D)[None, :]).to(dtype)

        # 2b. Queries, keys and values.
        q_MD = product(input_MD, zero_MD, wq_ptr, wq_DD, D, PINNED, True)
        k_MD = product(input_MD, zero_MD, wk_ptr, wk_DD, D, PINNED, True)
        v_MD = product(input_MD, zero_MD, wv_ptr, wv_DD, D, PINNED, True)
        if QK_NORM:
            r_q_M = rms(q_MD, D)
            r_k_M = rms(k_MD, D)
            nq_MD = (q_MD * r_q_M[:, None]).to(dtype)
            nk_MD = (k_MD * r_k_M[:, None]).to(dtype)
            tl.store(nq_ptr + at_MD, nq_MD, live_M1)
            tl.store(nk_ptr + at_MD, nk_MD, live_M1)
            tl.store(r_ptr + at_M * 5 + 1, r_q_M, live_M)
            tl.store(r_ptr + at_M * 5 + 2, r_k_M, live_M)
            q_MD = nq_MD.to(tl.float32) * tl.load(gains_ptr + D + d_D)[None, :]
            k_MD = nk_MD.to(tl.float32) * tl.load(gains_ptr + 2 * D + d_D)[None, :]
        tl.store(memory_k_ptr + at_MD, k_MD.to(dtype), live_M1)
        tl.store(memory_v_ptr + at_MD, v_MD.to(dtype), live_M1)

        if segment + 1 < N:
            # 2c i. Attention. Other threads of this program read the pairs of the memory, hence the barrier.
            to_M = sequence_M * (N - 1) * P + segment * P + token_M
            to_MD = to_M[:, None] * D + d_D[None, :]
            to_HMK = (to_M * D)[None, :, None] + hk_H1K
            q_low_MD = q_MD.to(dtype)
            tl.store(q_ptr + to_MD, q_low_MD, live_M1)
            q_HMK = tl.permute(tl.reshape(q_low_MD, [M, H, K]), [1, 0, 2]).to(tl.float32) * (K**-0.5 * LOG2E)
            tl.debug_barrier()

            m_HM = tl.full([H, M], MASKED, tl.float32)
            l_HM = tl.zeros([H, M], tl.float32)
            o_HMK = tl.zeros([H, M, K], tl.float32)
            own_HMK = ((sequence_M * N + segment) * P * D)[None, :, None] + hk_H1K
            k_ptrs, v_ptrs = memory_k_ptr + own_HMK, memory_v_ptr + own_HMK
            m_HM, l_HM, o_HMK = _softmax_steps(
                q_HMK, k_ptrs, v_ptrs, bias_HM_ptrs, m_HM, l_HM, o_HMK, P, P * H, D, P if P < J else J
            )
            position_HMK = ((sequence_M * T + segment * C) * D)[None, :, None] + hk_H1K
            k_ptrs, v_ptrs = k_ptr + position_HMK, v_ptr + position_HMK
            m_HM, l_HM, o_HMK = _softmax_steps(
                q_HMK, k_ptrs, v_ptrs, bias_HM_ptrs + P * P * H, m_HM, l_HM, o_HMK, C, P * H, D, J
            )
            a_HMK = (o_HMK / l_HM[:, :, None]).to(dtype)
            tl.store(a_ptr + to_HMK, a_HMK, live_1M1)
            tl.store(lse_ptr + (to_M * H)[None, :] + head_H[:, None], m_HM + tl.log2(l_HM), live_1M)

            # 2c ii. Attention branch.
            a_MD = tl.reshape(tl.permute(a_HMK, [1, 0, 2]), [M, D])
            u_MD = memory_MD + scale * product(a_MD, zero_MD, wo_ptr, wo_DD, D, PINNED, True)

            # 2c iii. MLP branch.
            r_u_M = rms(u_MD, D)
            nu_MD = u_MD * r_u_M[:, None]
            tl.store(nu_ptr + to_MD, nu_MD.to(dtype), live_M1)
            tl.store(r_ptr + at_M * 5 + 3, r_u_M, live_M)
            mlp_input_MD = (nu_MD * tl.load(gains_ptr + 3 * D + d_D)[None, :]).to(dtype)
            y_MD = zero_MD
            to_MW = (to_M * F)[:, None] + w_W[None, :]
            for f in tl.range(0, F, W, num_stages=2):
                up_DW = tl.load(up_ptr + (f + w_W)[None, :] * D + d_D[:, None])
                down_WD = tl.load(down_ptr + d_D[None, :] * F + (f + w_W)[:, None])
                h_MW = tl.dot(mlp_input_MD, up_DW, input_precision="ieee")
                below_MW, bell_MW = normal_cdf(h_MW)
                g_MW = (h_MW * below_MW).to(dtype)
                tl.store(g_ptr + to_MW + f, g_MW, live_M1)
                tl.store(slope_ptr + to_MW + f, gelu_slope(h_MW, below_MW, bell_MW).to(dtype), live_M1)
                y_MD = tl.dot(g_MW, down_WD, y_MD, input_precision="ieee")
            z_MD = u_MD + scale * y_MD

            # 2c iv. Norm of the outputs.
            r_z_M = rms(z_MD, D)
            nz_MD = z_MD * r_z_M[:, None]
            tl.store(nz_ptr + to_MD, nz_MD.to(dtype), live_M1)
            tl.store(r_ptr + at_M * 5 + 4, r_z_M, live_M)
            memory_MD = nz_MD * tl.load(gains_ptr + 4 * D + d_D)[None, :]
