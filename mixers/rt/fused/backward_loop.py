"""The Recurrent Transformer's backward loop over positions as a Triton kernel; tensors: ``mixers.rt.fused.loops``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import LOG2E, product, rms_bwd, square
from mixers.rt.fused.exchange import receive, send
from mixers.rt.fused.loops import Addresses, addresses, program, weights, writes


@triton.jit
def _step_inputs(
    dz_ptr: tl.tensor,
    n_ptr: tl.tensor,
    nz_ptr: tl.tensor,
    nk_ptr: tl.tensor,
    r_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    v_ptr: tl.tensor,
    a_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    change_ptr: tl.tensor,
    at: Addresses,
    t: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    F: tl.constexpr,
):
    """Load the first inputs of the step at position t, which is position ``inside`` of the chunk, in the order of use.

    The slope belongs to the part's first columns of the hidden layer. The r of an absent norm is undefined.
    """
    nk_HMK = tl.load(nk_ptr + at.at_HMK + t * D)
    v_HMK = tl.load(v_ptr + at.at_HMK + t * D)
    dk_HMK = tl.load(dk_ptr + at.state_HMK + inside * D)
    dv_HMK = tl.load(dv_ptr + at.state_HMK + inside * D)
    r_k_M = tl.load(r_ptr + at.at_M + t * 3 + 2)

    r_kv_M = tl.load(r_ptr + at.at_M + t * 3 + 1)
    nz_MD = tl.load(nz_ptr + at.at_MD + t * D)
    dz_MD = tl.load(dz_ptr + at.at_MD + t * D)
    change_MD = tl.load(change_ptr + at.at_MD + t * D) if change_ptr is not None else 0

    slope_MW = tl.load(slope_ptr + at.at_MW + t * F)
    r_mlp_M = tl.load(r_ptr + at.at_M + t * 3)
    n_MD = tl.load(n_ptr + at.at_MD + t * D)
    a_HMK = tl.load(a_ptr + at.at_HMK + t * D)
    return nk_HMK, v_HMK, dk_HMK, dv_HMK, r_k_M, r_kv_M, nz_MD, dz_MD, change_MD, slope_MW, r_mlp_M, n_MD, a_HMK


@triton.jit
def _mlp_slice(
    dinput_MD: tl.tensor,
    dy_MD: tl.tensor,
    down_DW: tl.tensor,
    up_WD: tl.tensor,
    slope_MW: tl.tensor,
    dh_ptrs: tl.tensor,
    live_M1: tl.tensor,
):
    """Add the contribution of a slice of the hidden layer to the gradient of the MLP's input; write the slice's dh."""
    dg_MW = tl.dot(dy_MD, down_DW, input_precision="ieee")
    dh_MW = (dg_MW * slope_MW.to(tl.float32)).to(dy_MD.dtype)
    tl.store(dh_ptrs, dh_MW, live_M1)
    return tl.dot(dh_MW, up_WD, dinput_MD, input_precision="ieee")


@triton.jit(do_not_specialize=["B", "T", "start", "stop"])
def rt_bwd_kernel(
    dz_ptr: tl.tensor,
    n_ptr: tl.tensor,
    nz_ptr: tl.tensor,
    nk_ptr: tl.tensor,
    r_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    w_ptr: tl.tensor,
    mlp_norm_ptr: tl.tensor,
    kv_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    share_ptr: tl.tensor,
    change_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    da_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    du_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dkv_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    dshare_ptr: tl.tensor,
    mail_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    STEP: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
    KV_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PINNED: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Walk back through positions start..stop of M / STEP sequences of one run, STEP positions at a time.

    1. Find the addresses, load what stays on the chip, and read the inputs of the first step.
    2. For t in stop - STEP, stop - 2 STEP, ..., start:
       a. let the pair of t pull from the chunk's later queries: dk, dv, to which later chunks have added;
       b. go back through the norm of the key: dk becomes the gradient of Wk (nz kv_norm);
       c. go back through the norm of keys and values: dz += gradient dm of nz = m / rms(m), or share dm;
       d. take the MLP branch: dy = scale dz;
       e. sum over the columns of this part: gradient of the MLP's input;
       f. send it to the other parts, read the inputs of the next step, receive the sum over the parts;
       g. go back through the norm of the MLP's input: dx = dz + gradient of n = u / rms(u); with a share, x is a
          part of the memory as well, so what is written is dx + (1 - share) dm;
       h. take the attention branch: du = scale dx, da = Wo^T du, delta = da . a of each head.
    3. Write the sums for the keys' gain and the share.

    The products of the rows (du, a), (dh, n), (dy, g) and (dkv, nz), summed over all positions, are the gradients of
    the weights.
    """
    # 1. Addresses, weights and gains.
    H: tl.constexpr = D // K
    run, tile, part, mail_ptr = program(mail_ptr, D, M, PARTS)
    at = addresses(run, tile, part, B, T, D, K, F, C, M, STEP, W, PARTS)
    dtype = k_ptr.dtype.element_ty
    wo_ptr, wk_ptr, wv_ptr, up_ptr, down_ptr = weights(w_ptr, run, D, F)
    mlp_norm_D = tl.load(mlp_norm_ptr + run * D + at.d_D)
    if KV_NORM:
        kv_norm_D = tl.load(kv_norm_ptr + run * D + at.d_D)
    if K_NORM:
        k_norm_HK = tl.load(k_norm_ptr + run * D + at.head_H[:, None] * K + tl.arange(0, K)[None, :])
    if share_ptr is not None:
        share = tl.load(share_ptr + run)
        dshare_MD = tl.zeros([M, D], tl.float32)
    slope_H = tl.load(slopes_ptr + at.head_H) * LOG2E
    if STEP > 1:
        shift_HM = slope_H[:, None] * at.place_M[None, :]

    # 1. What stays on the chip: square weights, and this part's slice of the MLP.
    wo_DD = square(wo_ptr, D, 0, D, False) if PINNED else 0
    wk_DD = square(wk_ptr, D, 0, D, False) if PINNED else 0
    wv_DD = square(wv_ptr, D, 0, D, False) if PINNED else 0
    HELD: tl.constexpr = PINNED and PARTS * W == F
    held_DW = tl.load(down_ptr + at.d_D[:, None] * F + at.w_W[None, :]) if HELD else 0
    held_WD = tl.load(up_ptr + at.w_W[:, None] * D + at.d_D[None, :]) if HELD else 0

    # 1. Inputs of the first step, some of which the kernel ahead writes.
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    dk_norm_HMK = tl.zeros([H, M, K], tl.float32)
    inputs = _step_inputs(
        dz_ptr,
        n_ptr,
        nz_ptr,
        nk_ptr,
        r_ptr,
        slope_ptr,
        v_ptr,
        a_ptr,
        dk_ptr,
        dv_ptr,
        change_ptr,
        at,
        stop - STEP,
        stop - STEP - start,
        D,
        F,
    )

    for back in range(0, stop - start, STEP):
        # 2a. The pair, as the queries of the forward pass saw it.
        t = stop - STEP - back
        (
            raw_nk_HMK,
            raw_v_HMK,
            dk_HMK,
            dv_HMK,
            r_k_M,
            r_kv_M,
            nz_MD,
            dz_MD,
            change_MD,
            slope_MW,
            r_mlp_M,
            n_MD,
            a_HMK,
        ) = inputs
        k_HMK = raw_nk_HMK.to(tl.float32)
        if K_NORM:
            k_HMK = (k_HMK * k_norm_HK[:, None, :]).to(dtype).to(tl.float32)
        k_HMK *= UNIT * LOG2E
        v_HMK = raw_v_HMK.to(tl.float32)

        # 2a. Later queries of the chunk.
        for first in tl.range(t + STEP, stop, J, num_stages=1):
            i = first + tl.arange(0, J)
            i_J = tl.minimum(i, stop - 1)
            query_HMJ = at.sequence_HM[:, :, None] + (i_J * H)[None, None, :]
            query_HMJK = at.sequence_HMK[:, :, None, :] + (i_J * D)[None, None, :, None]
            q_HMJK = tl.load(q_ptr + query_HMJK).to(tl.float32)
            da_HMJK = tl.load(da_ptr + query_HMJK).to(tl.float32)
            lse_HMJ = tl.load(lse_ptr + query_HMJ)
            delta_HMJ = tl.load(delta_ptr + query_HMJ)

            s_HMJ = tl.sum(q_HMJK * k_HMK[:, :, None, :], 3) + slope_H[:, None, None] * (t - i)[None, None, :]
            if STEP > 1:
                s_HMJ += shift_HM[:, :, None]
            p_HMJ = tl.where((i < stop)[None, None, :], tl.exp2(s_HMJ - lse_HMJ), 0.0)
            ds_HMJ = p_HMJ * (tl.sum(da_HMJK * v_HMK[:, :, None, :], 3) - delta_HMJ)
            dv_HMK += tl.sum(p_HMJ[:, :, :, None] * da_HMJK, 2)
            dk_HMK += tl.sum(ds_HMJ[:, :, :, None] * q_HMJK, 2)
        dk_HMK *= UNIT

        # 2b. Norm of the key.
        draw_k_HMK = dk_HMK
        if K_NORM:
            nk_HMK = raw_nk_HMK.to(tl.float32)
            dk_norm_HMK += dk_HMK * nk_HMK
            dnk_HMK = dk_HMK * k_norm_HK[:, None, :]
            dot_M = tl.sum(tl.sum(dnk_HMK * nk_HMK, 2), 0) / WIDTH
            draw_k_HMK = r_k_M[None, :, None] * (dnk_HMK - nk_HMK * dot_M[None, :, None])
        dk_MD = tl.reshape(tl.permute(draw_k_HMK.to(dtype), [1, 0, 2]), [M, D])
        dv_MD = tl.reshape(tl.permute(dv_HMK.to(dtype), [1, 0, 2]), [M, D])
        pair_MD = ((at.first_M + t) * 2 * D)[:, None] + at.d_D[None, :]
        if writes(0, part, PARTS):
            tl.store(dkv_ptr + pair_MD, dk_MD, at.live_M1)
        if writes(1, part, PARTS):
            tl.store(dkv_ptr + pair_MD + D, dv_MD, at.live_M1)

        # 2c. Products with Wk and Wv, and the norm of their input.
        dkv_input_MD = tl.zeros([M, D], tl.float32)
        dkv_input_MD = product(dk_MD, dkv_input_MD, wk_ptr, wk_DD, D, PINNED, False)
        dkv_input_MD = product(dv_MD, dkv_input_MD, wv_ptr, wv_DD, D, PINNED, False)
        dm_MD = dkv_input_MD
        if KV_NORM:
            dm_MD = rms_bwd(dkv_input_MD * kv_norm_D[None, :], nz_MD.to(tl.float32), r_kv_M, WIDTH)
        if share_ptr is None:
            dz_MD += dm_MD
        else:
            dz_MD += share * dm_MD
            dshare_MD += dm_MD * change_MD.to(tl.float32)

        # 2d. MLP branch.
        dy_MD = (dz_MD * scale).to(dtype)
        if writes(2, part, PARTS):
            tl.store(dy_ptr + at.at_MD + t * D, dy_MD, at.live_M1)

        # 2e. MLP.
        dmlp_input_MD = tl.zeros([M, D], tl.float32)
        if HELD:
            dmlp_input_MD = _mlp_slice(
                dmlp_input_MD, dy_MD, held_DW, held_WD, slope_MW, dh_ptr + at.at_MW + t * F, at.live_M1
            )
        else:
            for f in tl.range(0, F // PARTS, W, num_stages=STAGES):
                down_DW = tl.load(down_ptr + at.d_D[:, None] * F + (f + at.w_W)[None, :])
                up_WD = tl.load(up_ptr + (f + at.w_W)[:, None] * D + at.d_D[None, :])
                later_slope_MW = tl.load(slope_ptr + at.at_MW + t * F + f)
                dmlp_input_MD = _mlp_slice(
                    dmlp_input_MD, dy_MD, down_DW, up_WD, later_slope_MW, dh_ptr + at.at_MW + t * F + f, at.live_M1
                )

        # 2f. Sum over the parts; the next step's inputs are read while the other parts are waited for.
        if PARTS > 1:
            word_ME = send(dmlp_input_MD, mail_ptr, T // STEP - 1 - t // STEP, part, M, D, PARTS, WARPS)
        ahead = tl.maximum(t - STEP, start)
        inputs = _step_inputs(
            dz_ptr,
            n_ptr,
            nz_ptr,
            nk_ptr,
            r_ptr,
            slope_ptr,
            v_ptr,
            a_ptr,
            dk_ptr,
            dv_ptr,
            change_ptr,
            at,
            ahead,
            ahead - start,
            D,
            F,
        )
        if PARTS > 1:
            dmlp_input_MD = receive(word_ME, mail_ptr, T // STEP - 1 - t // STEP, M, D, PARTS, WARPS)

        # 2g. Norm of the MLP's input.
        dx_MD = dz_MD + rms_bwd(dmlp_input_MD * mlp_norm_D[None, :], n_MD.to(tl.float32), r_mlp_M, WIDTH)
        if writes(3, part, PARTS):
            dinput_MD = dx_MD
            if share_ptr is not None:
                dinput_MD += (1.0 - share) * dm_MD
            tl.store(dx_ptr + at.at_MD + t * D, dinput_MD, at.live_M1)

        # 2h. Attention branch. Other threads of this program read da and delta from here on, hence the barrier.
        du_MD = (dx_MD * scale).to(dtype)
        if writes(4, part, PARTS):
            tl.store(du_ptr + at.at_MD + t * D, du_MD, at.live_M1)
        da_MD = product(du_MD, tl.zeros([M, D], tl.float32), wo_ptr, wo_DD, D, PINNED, False).to(dtype)
        da_HMK = tl.permute(tl.reshape(da_MD, [M, H, K]), [1, 0, 2])
        tl.store(da_ptr + at.at_HMK + t * D, da_HMK, at.live_1M1)
        tl.store(delta_ptr + at.at_HM + t * H, tl.sum(da_HMK.to(tl.float32) * a_HMK.to(tl.float32), 2), at.live_1M)
        tl.debug_barrier()

    # 3. Gradients of the keys' gain and of the share.
    row = (run * tl.cdiv(T, C) + start // C) * (tl.num_programs(0) // PARTS) + tile
    if share_ptr is not None:
        tl.store(dshare_ptr + row * D + at.d_D, tl.sum(tl.where(at.live_M1, dshare_MD, 0.0), 0))
    if K_NORM:
        dk_norm_HMK = tl.where(at.live_1M1, dk_norm_HMK, 0.0)
        tl.store(dgain_ptr + row * D + at.d_D, tl.reshape(tl.sum(dk_norm_HMK, 1), [D]))
