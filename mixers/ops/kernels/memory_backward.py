"""The loop over segments of ``mixers.ops.kernels.memory``, backward, as a Triton kernel; tensors: see there."""

import triton
import triton.language as tl

from mixers.ops.kernels.common import LOG2E, MASKED, product, rms_bwd, square
from mixers.ops.kernels.memory_rows import matrices, program_rows


@triton.jit
def _query_steps(
    q_HMK: tl.tensor,
    da_HMK: tl.tensor,
    lse_HM: tl.tensor,
    delta_HM: tl.tensor,
    k_HMK_ptrs: tl.tensor,
    v_HMK_ptrs: tl.tensor,
    bias_HM_ptrs: tl.tensor,
    dq_HMK: tl.tensor,
    count: tl.tensor,
    bias_stride: tl.tensor,
    D: tl.constexpr,
    J: tl.constexpr,
):
    """Gradient of the queries after ``count`` more pairs, J at a time."""
    for first in tl.range(0, count, J, num_stages=1):
        j = first + tl.arange(0, J)
        j_J = tl.minimum(j, count - 1)
        at_HMJK = (j_J * D)[None, None, :, None]
        k_HMJK = tl.load(k_HMK_ptrs[:, :, None, :] + at_HMJK).to(tl.float32)
        v_HMJK = tl.load(v_HMK_ptrs[:, :, None, :] + at_HMJK).to(tl.float32)
        bias_HMJ = tl.load(bias_HM_ptrs[:, :, None] + (j_J * bias_stride)[None, None, :])

        s_HMJ = tl.sum(k_HMJK * q_HMK[:, :, None, :], 3) + tl.maximum(bias_HMJ * LOG2E, MASKED)
        p_HMJ = tl.where((j < count)[None, None, :], tl.exp2(s_HMJ - lse_HM[:, :, None]), 0.0)
        ds_HMJ = p_HMJ * (tl.sum(da_HMK[:, :, None, :] * v_HMJK, 3) - delta_HM[:, :, None])
        dq_HMK += tl.sum(ds_HMJ[:, :, :, None] * k_HMJK, 2)
    return dq_HMK


@triton.jit(do_not_specialize=["B", "T", "N", "C"])
def memory_bwd_kernel(
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
    slope_ptr: tl.tensor,
    dmemory_k_ptr: tl.tensor,
    dmemory_v_ptr: tl.tensor,
    dmemory_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    da_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
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
    """Walk back through N segments with the memory tokens of M / P sequences of one run. Grid: (tiles, R).

    1. Start with no gradient of the memory.
    2. For each segment, from the last one to the first:
       a. read the gradients of the pair;
       b. unless it is the last segment:
          i. go back through the norm of the outputs: dz;
          ii. go back through the MLP branch: du;
          iii. go back through the attention branch: da, and delta = da . a of each head;
          iv. go back through the attention: dq, and further gradients of the pair;
       c. with QK_NORM, go back through the norms of queries and keys;
       d. go back through wq, wk, wv and the norm of the memory.
    3. Write the gradient of the memory and the sums for the gains of queries, keys and outputs.
    """
    # 1. Rows and matrices.
    H: tl.constexpr = D // K
    run, sequence_M, token_M, live_M, head_H = program_rows(B, D, K, P, M)
    live_M1, live_1M, live_1M1 = live_M[:, None], live_M[None, :], live_M[None, :, None]
    d_D = tl.arange(0, D)
    w_W = tl.arange(0, W)
    hk_HK = head_H[:, None] * K + tl.arange(0, K)[None, :]
    hk_H1K = hk_HK[:, None, :]
    dtype = w_ptr.dtype.element_ty

    wq_ptr, wk_ptr, wv_ptr, wo_ptr, up_ptr, down_ptr = matrices(w_ptr, run, D, F)
    wq_DD = square(wq_ptr, D, 0, D, False) if PINNED else 0
    wk_DD = square(wk_ptr, D, 0, D, False) if PINNED else 0
    wv_DD = square(wv_ptr, D, 0, D, False) if PINNED else 0
    wo_DD = square(wo_ptr, D, 0, D, False) if PINNED else 0
    gains_ptr += run * 5 * D
    bias_HM_ptrs = bias_ptr + token_M[None, :] * H + head_H[:, None]
    zero_MD = tl.zeros([M, D], tl.float32)

    dmemory_MD = zero_MD
    dgain_q_HMK = tl.zeros([H, M, K], tl.float32)
    dgain_k_HMK = tl.zeros([H, M, K], tl.float32)
    dgain_z_MD = zero_MD
    for back in range(N):
        # 2a. Gradients of the pair.
        segment = N - 1 - back
        at_M = sequence_M * N * P + segment * P + token_M
        at_MD = at_M[:, None] * D + d_D[None, :]
        at_HMK = (at_M * D)[None, :, None] + hk_H1K
        dk_HMK = tl.load(dmemory_k_ptr + at_HMK).to(tl.float32)
        dv_HMK = tl.load(dmemory_v_ptr + at_HMK).to(tl.float32)
        dq_HMK = tl.zeros([H, M, K], tl.float32)
        du_MD = zero_MD

        if segment + 1 < N:
            # 2b i. Norm of the outputs.
            to_M = sequence_M * (N - 1) * P + segment * P + token_M
            to_MD = to_M[:, None] * D + d_D[None, :]
            to_HM = (to_M * H)[None, :] + head_H[:, None]
            to_HMK = (to_M * D)[None, :, None] + hk_H1K
            nz_MD = tl.load(nz_ptr + to_MD).to(tl.float32)
            dgain_z_MD += dmemory_MD * nz_MD
            dnz_MD = dmemory_MD * tl.load(gains_ptr + 4 * D + d_D)[None, :]
            dz_MD = rms_bwd(dnz_MD, nz_MD, tl.load(r_ptr + at_M * 5 + 4), D)

            # 2b ii. MLP branch.
            dy_MD = (dz_MD * scale).to(dtype)
            tl.store(dy_ptr + to_MD, dy_MD, live_M1)
            nu_MD = tl.load(nu_ptr + to_MD)
            r_u_M = tl.load(r_ptr + at_M * 5 + 3)
            dmlp_input_MD = zero_MD
            to_MW = (to_M * F)[:, None] + w_W[None, :]
            for f in tl.range(0, F, W, num_stages=2):
                down_DW = tl.load(down_ptr + d_D[:, None] * F + (f + w_W)[None, :])
                up_WD = tl.load(up_ptr + (f + w_W)[:, None] * D + d_D[None, :])
                slope_MW = tl.load(slope_ptr + to_MW + f).to(tl.float32)
                dh_MW = (tl.dot(dy_MD, down_DW, input_precision="ieee") * slope_MW).to(dtype)
                tl.store(dh_ptr + to_MW + f, dh_MW, live_M1)
                dmlp_input_MD = tl.dot(dh_MW, up_WD, dmlp_input_MD, input_precision="ieee")
            dnu_MD = dmlp_input_MD * tl.load(gains_ptr + 3 * D + d_D)[None, :]
            du_MD = dz_MD + rms_bwd(dnu_MD, nu_MD.to(tl.float32), r_u_M, D)

            # 2b iii. Attention branch. Other threads of this program read da and delta, hence the barrier.
            du_low_MD = (du_MD * scale).to(dtype)
            tl.store(du_ptr + to_MD, du_low_MD, live_M1)
            a_HMK = tl.load(a_ptr + to_HMK)
            low_q_HMK = tl.load(q_ptr + to_HMK)
            lse_HM = tl.load(lse_ptr + to_HM)
            da_MD = product(du_low_MD, zero_MD, wo_ptr, wo_DD, D, PINNED, False).to(dtype)
            da_HMK = tl.permute(tl.reshape(da_MD, [M, H, K]), [1, 0, 2])
            tl.store(da_ptr + to_HMK, da_HMK, live_1M1)
            da_HMK = da_HMK.to(tl.float32)
            delta_HM = tl.sum(da_HMK * a_HMK.to(tl.float32), 2)
            tl.store(delta_ptr + to_HM, delta_HM, live_1M)
            tl.debug_barrier()

            # 2b iv. Queries.
            q_HMK = low_q_HMK.to(tl.float32) * (K**-0.5 * LOG2E)
            own_HMK = ((sequence_M * N + segment) * P * D)[None, :, None] + hk_H1K
            k_ptrs, v_ptrs = memory_k_ptr + own_HMK, memory_v_ptr + own_HMK
            dq_HMK = _query_steps(
                q_HMK, da_HMK, lse_HM, delta_HM, k_ptrs, v_ptrs, bias_HM_ptrs, dq_HMK, P, P * H, D, P if P < J else J
            )
            position_HMK = ((sequence_M * T + segment * C) * D)[None, :, None] + hk_H1K
            k_ptrs, v_ptrs = k_ptr + position_HMK, v_ptr + position_HMK
            dq_HMK = _query_steps(
                q_HMK, da_HMK, lse_HM, delta_HM, k_ptrs, v_ptrs, bias_HM_ptrs + P * P * H, dq_HMK, C, P * H, D, J
            )
            dq_HMK *= K**-0.5

            # 2b iv. The pair, to which all memory tokens of the sequence attend.
            k_HMK = tl.load(memory_k_ptr + at_HMK).to(tl.float32) * (K**-0.5 * LOG2E)
            v_HMK = tl.load(memory_v_ptr + at_HMK).to(tl.float32)
            dk_past_HMK = tl.zeros([H, M, K], tl.float32)
            first_M = sequence_M * (N - 1) * P + segment * P
            for i in range(P):
                from_HMK = ((first_M + i) * D)[None, :, None] + hk_H1K
                from_HM = ((first_M + i) * H)[None, :] + head_H[:, None]
                q_i_HMK = tl.load(q_ptr + from_HMK).to(tl.float32)
                da_i_HMK = tl.load(da_ptr + from_HMK).to(tl.float32)
                bias_HM = tl.load(bias_ptr + ((token_M * P + i) * H)[None, :] + head_H[:, None])
                s_HM = tl.sum(q_i_HMK * k_HMK, 2) + tl.maximum(bias_HM * LOG2E, MASKED)
                p_HM = tl.exp2(s_HM - tl.load(lse_ptr + from_HM))
                ds_HM = p_HM * (tl.sum(da_i_HMK * v_HMK, 2) - tl.load(delta_ptr + from_HM))
                dv_HMK += p_HM[:, :, None] * da_i_HMK
                dk_past_HMK += ds_HM[:, :, None] * q_i_HMK
            dk_HMK += dk_past_HMK * K**-0.5

        # 2c. Norms of queries and keys.
        if QK_NORM:
            nq_HMK = tl.load(nq_ptr + at_HMK).to(tl.float32)
            nk_HMK = tl.load(nk_ptr + at_HMK).to(tl.float32)
            dgain_q_HMK += dq_HMK * nq_HMK
            dgain_k_HMK += dk_HMK * nk_HMK
            dq_HMK *= tl.load(gains_ptr + D + hk_HK)[:, None, :]
            dk_HMK *= tl.load(gains_ptr + 2 * D + hk_HK)[:, None, :]
            dot_q_M = tl.sum(tl.sum(dq_HMK * nq_HMK, 2), 0) / D
            dot_k_M = tl.sum(tl.sum(dk_HMK * nk_HMK, 2), 0) / D
            r_q_M, r_k_M = tl.load(r_ptr + at_M * 5 + 1), tl.load(r_ptr + at_M * 5 + 2)
            dq_HMK = r_q_M[None, :, None] * (dq_HMK - nq_HMK * dot_q_M[None, :, None])
            dk_HMK = r_k_M[None, :, None] * (dk_HMK - nk_HMK * dot_k_M[None, :, None])

        # 2d. Products and norm of the memory.
        dq_MD = tl.reshape(tl.permute(dq_HMK.to(dtype), [1, 0, 2]), [M, D])
        dk_MD = tl.reshape(tl.permute(dk_HMK.to(dtype), [1, 0, 2]), [M, D])
        dv_MD = tl.reshape(tl.permute(dv_HMK.to(dtype), [1, 0, 2]), [M, D])
        draw_MD_ptrs = draw_ptr + (at_M * 3 * D)[:, None] + d_D[None, :]
        tl.store(draw_MD_ptrs, dq_MD, live_M1)
        tl.store(draw_MD_ptrs + D, dk_MD, live_M1)
        tl.store(draw_MD_ptrs + 2 * D, dv_MD, live_M1)
        dinput_MD = product(dq_MD, zero_MD, wq_ptr, wq_DD, D, PINNED, False)
        dinput_MD = product(dk_MD, dinput_MD, wk_ptr, wk_DD, D, PINNED, False)
        dinput_MD = product(dv_MD, dinput_MD, wv_ptr, wv_DD, D, PINNED, False)
        n_MD = tl.load(n_ptr + at_MD)
        r_M = tl.load(r_ptr + at_M * 5)
        dn_MD = dinput_MD * tl.load(gains_ptr + d_D)[None, :]
        dmemory_MD = du_MD + rms_bwd(dn_MD, n_MD.to(tl.float32), r_M, D)

    # 3. Memory and gains.
    tl.store(dmemory_ptr + (sequence_M * P + token_M)[:, None] * D + d_D[None, :], dmemory_MD, live_M1)
    dgain_ptr += (run * tl.num_programs(0) + tl.program_id(0)) * 3 * D
    tl.store(dgain_ptr + hk_HK, tl.sum(tl.where(live_1M1, dgain_q_HMK, 0.0), 1))
    tl.store(dgain_ptr + D + hk_HK, tl.sum(tl.where(live_1M1, dgain_k_HMK, 0.0), 1))
    tl.store(dgain_ptr + 2 * D + d_D, tl.sum(tl.where(live_M1, dgain_z_MD, 0.0), 0))
