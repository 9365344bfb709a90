"""Fused kernels of the loop over positions of xLSTM's scalar memory.

    name        shape                 written by    read by
    inputs      (R, B, T, 4K)         caller        slstm_fwd         share of the inputs in the gates
    w           (R, 4, K, K)          caller        both kernels      weights of the previous output, a gate each
    bias        (R, 4, K)             caller        slstm_fwd         float32
    h           (R, B, T, K)          slstm_fwd     caller            outputs
    gates       (R, B, T, 4K)         slstm_fwd     slstm_bwd         gates before their activations; see below
    u           (R, B, T, K)          slstm_fwd     slstm_bwd         cells over their normalisers
    dh          (R, B, T, K)          caller        slstm_bwd         gradient of h
    dgates      (R, B, T, 4K)         slstm_bwd     caller            gradient of the gates and of inputs
    dbias       (R, programs, 4, K)   slstm_bwd     group_sum         float32

Heads do not read each other, so that they are runs of their own: here R is runs times heads. Tensors without "float32"
have the dtype of the products. Gates are in the order input, forget, cell and output. With l the logarithm of the
normaliser (see ``mixers.ops.slstm``), the share of the old memory is sigmoid(s) with s = log sigmoid(f) + l - i. In
place of the input gate, ``gates`` holds s, which is all that the backward pass needs of i and l.

A program loops over all positions of M sequences of one head. The memory stays in registers, in float32, and the
weights on the chip; the frame is that of ``mixers.ops.kernels.lstm``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.common import kernels_take, product
from mixers.ops.kernels.lstm import four, four_weights, sequences, tanh, tiles
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Tensors


@triton.jit
def _softplus(y: tl.tensor):
    """log(1 + exp(y)), without overflow."""
    return tl.maximum(y, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(y)))


@triton.jit(do_not_specialize=["B", "T"])
def slstm_fwd_kernel(
    inputs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    h_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    u_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    M: tl.constexpr,
    PINNED: tl.constexpr,
):
    """Walk through all positions of M sequences of one head of D = K channels.

    1. Find the sequences; load the weights, the biases and the inputs of the first position.
    2. For t in 0, 1, ..., T - 1:
       a. read the inputs of the next position ahead;
       b. add up the gates: inputs + bias + W h;
       c. update the memory: s = log sigmoid(f) + l - i, l = i + softplus(s), u = tanh(z) + sigmoid(s) (u - tanh(z));
       d. compute the outputs h = sigmoid(o) u; write s, the other gates, u and h.
    """
    # 1. Sequences, weights and biases.
    run, at_MD, at_MG, live_M1 = sequences(B, T, D, M)
    dtype = h_ptr.dtype.element_ty
    w_ptr += run * 4 * D * D
    wi_DD, wf_DD, wz_DD, wo_DD = four_weights(w_ptr, D, PINNED, True)
    bi_D, bf_D, bz_D, bo_D = four(bias_ptr + run * 4 * D + tl.arange(0, D), D)

    # 1. Inputs of the first position, and the empty memory.
    inputs = four(inputs_ptr + at_MG, D)
    u_MD = tl.zeros([M, D], tl.float32)
    l_MD = tl.full([M, D], float("-inf"), tl.float32)
    h_MD = tl.zeros([M, D], dtype)

    for t in tl.range(T, num_stages=1):
        # 2a. Inputs.
        xi_MD, xf_MD, xz_MD, xo_MD = inputs
        inputs = four(inputs_ptr + at_MG + tl.minimum(t + 1, T - 1) * 4 * D, D)

        # 2b. Gates.
        i_MD = product(h_MD, xi_MD.to(tl.float32) + bi_D[None, :], w_ptr, wi_DD, D, PINNED, True)
        f_MD = product(h_MD, xf_MD.to(tl.float32) + bf_D[None, :], w_ptr + D * D, wf_DD, D, PINNED, True)
        z_MD = product(h_MD, xz_MD.to(tl.float32) + bz_D[None, :], w_ptr + 2 * D * D, wz_DD, D, PINNED, True)
        o_MD = product(h_MD, xo_MD.to(tl.float32) + bo_D[None, :], w_ptr + 3 * D * D, wo_DD, D, PINNED, True)

        # 2c. Memory.
        s_MD = l_MD - i_MD - _softplus(-f_MD)
        l_MD = i_MD + _softplus(s_MD)
        tanh_MD = tanh(z_MD)
        u_MD = tanh_MD + tl.sigmoid(s_MD) * (u_MD - tanh_MD)

        # 2d. Outputs.
        h_MD = (tl.sigmoid(o_MD) * u_MD).to(dtype)
        gates_ptrs = gates_ptr + at_MG + t * 4 * D
        tl.store(gates_ptrs, s_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + D, f_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + 2 * D, z_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + 3 * D, o_MD.to(dtype), live_M1)
        tl.store(u_ptr + at_MD + t * D, u_MD.to(dtype), live_M1)
        tl.store(h_ptr + at_MD + t * D, h_MD, live_M1)


@triton.jit
def _bwd_inputs(
    dh_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    u_ptr: tl.tensor,
    at_MD: tl.tensor,
    at_MG: tl.tensor,
    t: tl.tensor,
    D: tl.constexpr,
):
    """Gradient of the outputs at position t, what ``gates`` holds there, and the cells before it."""
    dh_MD = tl.load(dh_ptr + at_MD + t * D)
    s_MD, f_MD, z_MD, o_MD = four(gates_ptr + at_MG + t * 4 * D, D)
    before_MD = tl.load(u_ptr + at_MD + tl.maximum(t - 1, 0) * D)
    return dh_MD, s_MD, f_MD, z_MD, o_MD, before_MD


@triton.jit(do_not_specialize=["B", "T"])
def slstm_bwd_kernel(
    dh_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    u_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dgates_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    M: tl.constexpr,
    PINNED: tl.constexpr,
):
    """Walk back through all positions of M sequences of one head of D = K channels.

    1. Find the sequences; load the weights and what the last position reads.
    2. For t in T - 1, T - 2, ..., 0:
       a. read what the position before reads, ahead; cells before the first position are zeros;
       b. add the gradient of h from the position after to that of the caller;
       c. go back through h = sigmoid(o) u, u = tanh(z) + sigmoid(s) (before - tanh(z)), l = i + softplus(s) and
          s = log sigmoid(f) + l - i, and write the gradients of the gates;
       d. add them to those of the biases;
       e. take the products with the weights: the gradient of h for the position before.
    3. Write the sums for the biases.
    """
    # 1. Sequences and weights.
    run, at_MD, at_MG, live_M1 = sequences(B, T, D, M)
    dtype = u_ptr.dtype.element_ty
    w_ptr += run * 4 * D * D
    wi_DD, wf_DD, wz_DD, wo_DD = four_weights(w_ptr, D, PINNED, False)

    # 1. What the last position reads, and what is after it.
    inputs = _bwd_inputs(dh_ptr, gates_ptr, u_ptr, at_MD, at_MG, T - 1, D)
    u_MD = tl.load(u_ptr + at_MD + (T - 1) * D).to(tl.float32)
    du_MD = tl.zeros([M, D], tl.float32)
    dl_MD = tl.zeros([M, D], tl.float32)
    after_MD = tl.zeros([M, D], tl.float32)
    dbi_MD = tl.zeros([M, D], tl.float32)
    dbf_MD = tl.zeros([M, D], tl.float32)
    dbz_MD = tl.zeros([M, D], tl.float32)
    dbo_MD = tl.zeros([M, D], tl.float32)

    for back in tl.range(T, num_stages=1):
        # 2a. Inputs.
        t = T - 1 - back
        dh_MD, s_MD, f_MD, z_MD, o_MD, before_MD = inputs
        inputs = _bwd_inputs(dh_ptr, gates_ptr, u_ptr, at_MD, at_MG, tl.maximum(t - 1, 0), D)
        before_MD = tl.where(t > 0, before_MD.to(tl.float32), 0.0)

        # 2b. Outputs.
        dh_MD = dh_MD.to(tl.float32) + after_MD

        # 2c. Activations.
        kept_MD = tl.sigmoid(s_MD.to(tl.float32))
        tanh_MD = tanh(z_MD.to(tl.float32))
        o_MD = tl.sigmoid(o_MD.to(tl.float32))

        # 2c. Gradients of the memory and the gates.
        du_MD += dh_MD * o_MD
        do_MD = dh_MD * u_MD * o_MD * (1.0 - o_MD)
        dz_MD = du_MD * (1.0 - kept_MD) * (1.0 - tanh_MD * tanh_MD)
        ds_MD = kept_MD * (dl_MD + du_MD * (before_MD - tanh_MD) * (1.0 - kept_MD))
        di_MD = dl_MD - ds_MD
        df_MD = ds_MD * tl.sigmoid(-f_MD.to(tl.float32))
        du_MD *= kept_MD
        dl_MD = ds_MD
        u_MD = before_MD
        dgates_ptrs = dgates_ptr + at_MG + t * 4 * D
        tl.store(dgates_ptrs, di_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + D, df_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + 2 * D, dz_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + 3 * D, do_MD.to(dtype), live_M1)

        # 2d. Biases.
        dbi_MD += di_MD
        dbf_MD += df_MD
        dbz_MD += dz_MD
        dbo_MD += do_MD

        # 2e. Products.
        after_MD = tl.zeros([M, D], tl.float32)
        after_MD = product(di_MD.to(dtype), after_MD, w_ptr, wi_DD, D, PINNED, False)
        after_MD = product(df_MD.to(dtype), after_MD, w_ptr + D * D, wf_DD, D, PINNED, False)
        after_MD = product(dz_MD.to(dtype), after_MD, w_ptr + 2 * D * D, wz_DD, D, PINNED, False)
        after_MD = product(do_MD.to(dtype), after_MD, w_ptr + 3 * D * D, wo_DD, D, PINNED, False)

    # 3. Biases.
    to_ptrs = dbias_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * 4 * D + tl.arange(0, D)
    tl.store(to_ptrs, tl.sum(tl.where(live_M1, dbi_MD, 0.0), 0))
    tl.store(to_ptrs + D, tl.sum(tl.where(live_M1, dbf_MD, 0.0), 0))
    tl.store(to_ptrs + 2 * D, tl.sum(tl.where(live_M1, dbz_MD, 0.0), 0))
    tl.store(to_ptrs + 3 * D, tl.sum(tl.where(live_M1, dbo_MD, 0.0), 0))


@kernels_take("sLSTM", "heads of 16, 32, 64, 128 or 256 channels")
def fits_slstm(K: int) -> bool:
    """Whether ``slstm_method`` takes heads of this size."""
    return K in (16, 32, 64, 128, 256)


def slstm_method(dtype: torch.dtype) -> Method:
    """Outputs of the scalar memory (R, H, B, T, K) in ``dtype``.

    Tensors: share of the inputs in the gates (R, H, B, T, 4K), weight of the previous output (R, H, 4K, K), bias
    (R, H, 4K).
    """

    def forward(inputs: Tensor, recurrent: Tensor, bias: Tensor) -> tuple[Tensors, Tensors]:
        inputs, w = inputs.to(dtype).contiguous(), recurrent.to(dtype).contiguous()
        R, H, B, T, G = inputs.shape
        programs, settings = _settings(R * H, B, w)

        h, u = (inputs.new_empty(R, H, B, T, G // 4) for _ in range(2))
        gates = torch.empty_like(inputs)
        slstm_fwd_kernel[programs, R * H](inputs, w, bias.contiguous(), h, gates, u, B, T, **settings)
        return (h,), (gates, u)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        dh, h, gates, u = (y.contiguous() for y in (*gradients, *outputs, *saved))
        w = tensors[1].to(dtype).contiguous()
        R, H, B, T, K = h.shape
        programs, settings = _settings(R * H, B, w)

        dgates = torch.empty_like(gates)
        dbias = dh.new_empty(R * H, programs, 4 * K, dtype=torch.float32)
        slstm_bwd_kernel[programs, R * H](dh, gates, u, w, dgates, dbias, B, T, **settings)

        # Products of the gates' gradients with the outputs of the positions before.
        before = F.pad(h[:, :, :, :-1], (0, 0, 1, 0))
        (drecurrent,) = rows_products((dgates.flatten(0, 1), before.flatten(0, 1)))
        return dgates, drecurrent.view(R, H, 4 * K, K), group_sum(dbias).view(R, H, 4 * K)

    return Method(forward, backward)


def _settings(R: int, B: int, w: Tensor) -> tuple[int, dict[str, Any]]:
    """Programs of a head, and compile-time settings.

    A program has tiles of 16 sequences, because those of 32 leave registers for few programs at a time. A warp has 8
    columns of a product, up to 8 warps.
    """
    settings = tiles(R, B, w.flatten(0, 1))[1]
    return triton.cdiv(B, 16), {**settings, "M": 16, "num_warps": min(8, w.shape[-1] // 8)}
