"""The Recurrent Transformer's forward loop over positions as a Triton kernel; tensors: ``mixers.rt.fused.loops``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mixers.ops.kernels.common import LOG2E, MASKED, gelu_slope, normal_cdf, product, rms, square
from mixers.rt.fused.exchange import receive, send
from mixers.rt.fused.loops import Addresses, addresses, program, weights, writes


@triton.jit
def _step_inputs(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    o_ptr: tl.tensor,
    at: Addresses,
    t: tl.tensor,
    inside: tl.tensor,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """Load the first inputs of the step at position t, which is position ``inside`` of the chunk."""
    x_MD = tl.load(x_ptr + at.at_MD + t * D)
    q_HMK = tl.load(q_ptr + at.at_HMK + t * D)
    m_HM = tl.load(m_ptr + at.state_HM + inside * H)
    l_HM = tl.load(l_ptr + at.state_HM + inside * H)
    o_HMK = tl.load(o_ptr + at.state_HMK + inside * D)
    return x_MD, q_HMK, m_HM, l_HM, o_HMK


@triton.jit
def _mlp_slice(
    y_MD: tl.tensor,
    input_MD: tl.tensor,
    up_DW: tl.tensor,
    down_WD: tl.tensor,
    g_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    at_MW: tl.tensor,
    live_M1: tl.tensor,
):
    """Add the contribution of a slice of the hidden layer to y; write g, the slice after its GELU, and its slope."""
    h_MW = tl.dot(input_MD, up_DW, input_precision="ieee")
    below_MW, bell_MW = normal_cdf(h_MW)
    g_MW = (h_MW * below_MW).to(input_MD.dtype)
    tl.store(g_ptr + at_MW, g_MW, live_M1)
    tl.store(slope_ptr + at_MW, gelu_slope(h_MW, below_MW, bell_MW).to(input_MD.dtype), live_M1)
    return tl.dot(g_MW, down_WD, y_MD, input_precision="ieee")


@triton.jit(do_not_specialize=["B", "T", "start", "stop"])
def rt_fwd_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    o_ptr: tl.tensor,
    slopes_ptr: tl.tensor,
    w_ptr: tl.tensor,
    mlp_norm_ptr: tl.tensor,
    kv_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    share_ptr: tl.tensor,
    z_ptr: tl.tensor,
    change_ptr: tl.tensor,
    a_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    n_ptr: tl.tensor,
    nz_ptr: tl.tensor,
    nk_ptr: tl.tensor,
    r_ptr: tl.tensor,
    g_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
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
    """Walk through positions start..stop of M / STEP sequences of one run, STEP positions at a time.

    1. Find the addresses, load what stays on the chip, and read the inputs of the first step.
    2. For t in start, start + STEP, ..., stop - STEP:
       a. attend to the chunk's earlier pairs, from the state (m, l, o) that earlier chunks left:
          a = softmax(q k^T / sqrt(K) + ALiBi) v;
       b. add the attention branch: u = x + scale Wo a;
       c. normalise it for the MLP: n = u / rms(u);
       d. sum over the columns of this part: y = down gelu(up (n mlp_norm));
       e. send y to the other parts, read the inputs of the next step, receive the sum over the parts;
       f. add the MLP branch: z = u + scale y;
       g. mix the memory m = x + share (z - x), or z; normalise it for keys and values: nz = m / rms(m), or m;
       h. make the persistent pair: k = Wk (nz kv_norm), v = Wv (nz kv_norm);
       i. normalise the key: nk = k / rms(k), k = nk k_norm.
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
        k_norm_D = tl.load(k_norm_ptr + run * D + at.d_D)
    if share_ptr is not None:
        share = tl.load(share_ptr + run)
    slope_H = tl.load(slopes_ptr + at.head_H) * LOG2E
    if STEP > 1:
        shift_HM = slope_H[:, None] * at.place_M[None, :]

    # 1. What stays on the chip: square weights, and this part's slice of the MLP.
    wo_DD = square(wo_ptr, D, 0, D, True) if PINNED else 0
    wk_DD = square(wk_ptr, D, 0, D, True) if PINNED else 0
    wv_DD = square(wv_ptr, D, 0, D, True) if PINNED else 0
    HELD: tl.constexpr = PINNED and PARTS * W == F
    held_DW = tl.load(up_ptr + at.w_W[None, :] * D + at.d_D[:, None]) if HELD else 0
    held_WD = tl.load(down_ptr + at.d_D[None, :] * F + at.w_W[:, None]) if HELD else 0

    # 1. Inputs of the first step, which the kernel ahead writes.
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    inputs = _step_inputs(x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, at, start, 0, D, H)

    for t in range(start, stop, STEP):
        # 2a. Attention. Distances are counted from t for all rows, which shifts all logits of a row by the same amount.
        x_MD, raw_q_HMK, m_HM, l_HM, o_HMK = inputs
        q_HMK = raw_q_HMK.to(tl.float32) * (UNIT * LOG2E)
        if STEP > 1:
            m_HM += shift_HM
        for first in tl.range(start, t, J, num_stages=1):
            j = first + tl.arange(0, J)
            pair_HMJK = at.sequence_HMK[:, :, None, :] + (tl.minimum(j, t - 1) * D)[None, None, :, None]
            k_HMJK = tl.load(k_ptr + pair_HMJK).to(tl.float32)
            v_HMJK = tl.load(v_ptr + pair_HMJK).to(tl.float32)

            s_HMJ = tl.sum(k_HMJK * q_HMK[:, :, None, :], 3) + slope_H[:, None, None] * (j - t)[None, None, :]
            s_HMJ = tl.where((j < t)[None, None, :], s_HMJ, MASKED)
            top_HM = tl.maximum(m_HM, tl.max(s_HMJ, 2))
            p_HMJ = tl.exp2(s_HMJ - top_HM[:, :, None])
            shrink_HM = tl.exp2(m_HM - top_HM)
            l_HM = l_HM * shrink_HM + tl.sum(p_HMJ, 2)
            o_HMK = o_HMK * shrink_HM[:, :, None] + tl.sum(p_HMJ[:, :, :, None] * v_HMJK, 2)
            m_HM = top_HM
        a_HMK = (o_HMK / l_HM[:, :, None]).to(dtype)
        if STEP > 1:
            m_HM -= shift_HM
        if writes(0, part, PARTS):
            tl.store(a_ptr + at.at_HMK + t * D, a_HMK, at.live_1M1)
            tl.store(lse_ptr + at.at_HM + t * H, m_HM + tl.log2(l_HM), at.live_1M)

        # 2b. Attention branch.
        zero_MD = tl.zeros([M, D], tl.float32)
        a_MD = tl.reshape(tl.permute(a_HMK, [1, 0, 2]), [M, D])
        u_MD = x_MD + scale * product(a_MD, zero_MD, wo_ptr, wo_DD, D, PINNED, True)

        # 2c. Norm of the MLP's input.
        r_mlp_M = rms(u_MD, WIDTH)
        n_MD = u_MD * r_mlp_M[:, None]
        if writes(1, part, PARTS):
            tl.store(n_ptr + at.at_MD + t * D, n_MD.to(dtype), at.live_M1)
            tl.store(r_ptr + at.at_M + t * 3, r_mlp_M, at.live_M)
        mlp_input_MD = (n_MD * mlp_norm_D[None, :]).to(dtype)

        # 2d. MLP.
        y_MD = tl.zeros([M, D], tl.float32)
        if HELD:
            y_MD = _mlp_slice(y_MD, mlp_input_MD, held_DW, held_WD, g_ptr, slope_ptr, at.at_MW + t * F, at.live_M1)
        else:
            for f in tl.range(0, F // PARTS, W, num_stages=STAGES):
                up_DW = tl.load(up_ptr + (f + at.w_W)[None, :] * D + at.d_D[:, None])
                down_WD = tl.load(down_ptr + at.d_D[None, :] * F + (f + at.w_W)[:, None])
                y_MD = _mlp_slice(
                    y_MD, mlp_input_MD, up_DW, down_WD, g_ptr, slope_ptr, at.at_MW + t * F + f, at.live_M1
                )

        # 2e. Sum over the parts; the next step's inputs are read while the other parts are waited for.
        if PARTS > 1:
            word_ME = send(y_MD, mail_ptr, t // STEP, part, M, D, PARTS, WARPS)
        ahead = tl.minimum(t + STEP, stop - STEP)
        inputs = _step_inputs(x_ptr, q_ptr, m_ptr, l_ptr, o_ptr, at, ahead, ahead - start, D, H)
        if PARTS > 1:
            y_MD = receive(word_ME, mail_ptr, t // STEP, M, D, PARTS, WARPS)

        # 2f. MLP branch.
        z_MD = u_MD + scale * y_MD
        if writes(2, part, PARTS):
            tl.store(z_ptr + at.at_MD + t * D, z_MD, at.live_M1)

        # 2g. Norm of the input of keys and values.
        nz_MD = z_MD
        if share_ptr is not None:
            change_MD = z_MD - x_MD
            nz_MD = x_MD + share * change_MD
            if writes(4, part, PARTS):
                tl.store(change_ptr + at.at_MD + t * D, change_MD.to(dtype), at.live_M1)
        if KV_NORM:
            r_kv_M = rms(nz_MD, WIDTH)
            nz_MD = nz_MD * r_kv_M[:, None]
            if writes(3, part, PARTS):
                tl.store(r_ptr + at.at_M + t * 3 + 1, r_kv_M, at.live_M)
        if writes(3, part, PARTS):
            tl.store(nz_ptr + at.at_MD + t * D, nz_MD.to(dtype), at.live_M1)

        # 2h. Persistent pair.
        kv_input_MD = nz_MD
        if KV_NORM:
            kv_input_MD = nz_MD * kv_norm_D[None, :]
        kv_input_MD = kv_input_MD.to(dtype)
        k_MD = product(kv_input_MD, zero_MD, wk_ptr, wk_DD, D, PINNED, True)
        v_MD = product(kv_input_MD, zero_MD, wv_ptr, wv_DD, D, PINNED, True)

        # 2i. Norm of the key. Other threads of this program read the pair from here on, hence the barrier.
        if K_NORM:
            r_k_M = rms(k_MD, WIDTH)
            nk_MD = (k_MD * r_k_M[:, None]).to(dtype)
            if writes(4, part, PARTS):
                tl.store(nk_ptr + at.at_MD + t * D, nk_MD, at.live_M1)
                tl.store(r_ptr + at.at_M + t * 3 + 2, r_k_M, at.live_M)
            k_MD = nk_MD.to(tl.float32) * k_norm_D[None, :]
        tl.store(k_ptr + at.at_MD + t * D, k_MD.to(dtype), at.live_M1)
        tl.store(v_ptr + at.at_MD + t * D, v_MD.to(dtype), at.live_M1)
        tl.debug_barrier()
