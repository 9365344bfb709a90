"""Fused kernels of the LSTM's loop over positions.

    name        shape                 written by    read by
    inputs      (R, B, T, 4D)         caller        lstm_fwd          share of the inputs in the gates
    w           (R, 4, D, D)          caller        both kernels      weights of the previous output, a gate each
    bias        (R, 4, D)             caller        lstm_fwd          float32
    h           (R, B, T, D)          lstm_fwd      caller            outputs
    gates       (R, B, T, 4D)         lstm_fwd      lstm_bwd          gates before their activations
    c           (R, B, T, D)          lstm_fwd      lstm_bwd          cells
    dh          (R, B, T, D)          caller        lstm_bwd          gradient of h
    dgates      (R, B, T, 4D)         lstm_bwd      caller            gradient of gates and of inputs
    dbias       (R, programs, 4, D)   lstm_bwd      group_sum         float32

Tensors without "float32" have the dtype of the products. Gates are in the order input, forget, cell, output.

A program loops over all positions of M sequences of one run. Cells stay in registers, in float32. The weights stay on
the chip if they fit (PINNED), as in FlashRNN (Poeppel et al. 2024, arXiv:2412.07752); else they are read at every
position. Only gradients of activations are sequential; the weights' gradient is one product over all positions.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.common import gpu_limits, kernels_take, product, square
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Tensors

PINNED_BYTES = 131072
"""Largest size in bytes of weights that stay on the chip; a program needs up to 32 KiB in addition."""


@triton.jit
def tanh(y: tl.tensor):
    """Hyperbolic tangent."""
    return 2.0 * tl.sigmoid(2.0 * y) - 1.0


@triton.jit
def sequences(B: tl.tensor, T: tl.tensor, D: tl.constexpr, M: tl.constexpr):
    """Run, offsets of the sequences in tensors of D and of 4D channels, and whether they belong to the batch."""
    run = tl.program_id(1).to(tl.int64)
    sequence_M = tl.program_id(0) * M + tl.arange(0, M)
    first_M1 = ((run * B + tl.minimum(sequence_M, B - 1)) * T)[:, None]
    d_1D = tl.arange(0, D)[None, :]
    return run, first_M1 * D + d_1D, first_M1 * 4 * D + d_1D, (sequence_M < B)[:, None]


@triton.jit
def four(ptrs: tl.tensor, D: tl.constexpr):
    """Load the values of the four gates."""
    return tl.load(ptrs), tl.load(ptrs + D), tl.load(ptrs + 2 * D), tl.load(ptrs + 3 * D)


@triton.jit
def four_weights(w_ptr: tl.tensor, D: tl.constexpr, PINNED: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Weights of the four gates for ``product``, if they stay on the chip."""
    wi_DD = square(w_ptr, D, 0, D, TRANSPOSED) if PINNED else 0
    wf_DD = square(w_ptr + D * D, D, 0, D, TRANSPOSED) if PINNED else 0
    wg_DD = square(w_ptr + 2 * D * D, D, 0, D, TRANSPOSED) if PINNED else 0
    wo_DD = square(w_ptr + 3 * D * D, D, 0, D, TRANSPOSED) if PINNED else 0
    return wi_DD, wf_DD, wg_DD, wo_DD


@triton.jit(do_not_specialize=["B", "T"])
def lstm_fwd_kernel(
    inputs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    h_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    c_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    M: tl.constexpr,
    PINNED: tl.constexpr,
):
    """Walk through all positions of M sequences of one run.

    1. Find the sequences; load the weights, the biases and the inputs of the first position.
    2. For t in 0, 1, ..., T - 1:
       a. read the inputs of the next position ahead;
       b. add up the gates: inputs + bias + W h, and write them;
       c. update the cells: c = sigmoid(f) c + sigmoid(i) tanh(g);
       d. compute the outputs: h = sigmoid(o) tanh(c); write both.
    """
    # 1. Sequences, weights and biases.
    run, at_MD, at_MG, live_M1 = sequences(B, T, D, M)
    dtype = h_ptr.dtype.element_ty
    w_ptr += run * 4 * D * D
    wi_DD, wf_DD, wg_DD, wo_DD = four_weights(w_ptr, D, PINNED, True)
    bi_D, bf_D, bg_D, bo_D = four(bias_ptr + run * 4 * D + tl.arange(0, D), D)

    # 1. Inputs of the first position, and the initial state.
    inputs = four(inputs_ptr + at_MG, D)
    c_MD = tl.zeros([M, D], tl.float32)
    h_MD = tl.zeros([M, D], dtype)

    for t in tl.range(T, num_stages=1):
        # 2a. Inputs.
        xi_MD, xf_MD, xg_MD, xo_MD = inputs
        inputs = four(inputs_ptr + at_MG + tl.minimum(t + 1, T - 1) * 4 * D, D)

        # 2b. Gates.
        i_MD = product(h_MD, xi_MD.to(tl.float32) + bi_D[None, :], w_ptr, wi_DD, D, PINNED, True)
        f_MD = product(h_MD, xf_MD.to(tl.float32) + bf_D[None, :], w_ptr + D * D, wf_DD, D, PINNED, True)
        g_MD = product(h_MD, xg_MD.to(tl.float32) + bg_D[None, :], w_ptr + 2 * D * D, wg_DD, D, PINNED, True)
        o_MD = product(h_MD, xo_MD.to(tl.float32) + bo_D[None, :], w_ptr + 3 * D * D, wo_DD, D, PINNED, True)
        gates_ptrs = gates_ptr + at_MG + t * 4 * D
        tl.store(gates_ptrs, i_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + D, f_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + 2 * D, g_MD.to(dtype), live_M1)
        tl.store(gates_ptrs + 3 * D, o_MD.to(dtype), live_M1)

        # 2c. Cells.
        c_MD = tl.sigmoid(f_MD) * c_MD + tl.sigmoid(i_MD) * tanh(g_MD)
        tl.store(c_ptr + at_MD + t * D, c_MD.to(dtype), live_M1)

        # 2d. Outputs.
        h_MD = (tl.sigmoid(o_MD) * tanh(c_MD)).to(dtype)
        tl.store(h_ptr + at_MD + t * D, h_MD, live_M1)


@triton.jit
def _bwd_inputs(
    dh_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    c_ptr: tl.tensor,
    at_MD: tl.tensor,
    at_MG: tl.tensor,
    t: tl.tensor,
    D: tl.constexpr,
):
    """Gradient of the outputs at position t, the gates there, and the cells before it."""
    dh_MD = tl.load(dh_ptr + at_MD + t * D)
    i_MD, f_MD, g_MD, o_MD = four(gates_ptr + at_MG + t * 4 * D, D)
    before_MD = tl.load(c_ptr + at_MD + tl.maximum(t - 1, 0) * D)
    return dh_MD, i_MD, f_MD, g_MD, o_MD, before_MD


@triton.jit
def cell_gradients(
    dh: tl.tensor,
    i: tl.tensor,
    f: tl.tensor,
    g: tl.tensor,
    o: tl.tensor,
    c: tl.tensor,
    before: tl.tensor,
    dc: tl.tensor,
):
    """Gradients of the gates, and of the cells before, from those of outputs and cells."""
    # Activations.
    i = tl.sigmoid(i.to(tl.float32))
    f = tl.sigmoid(f.to(tl.float32))
    g = tanh(g.to(tl.float32))
    o = tl.sigmoid(o.to(tl.float32))
    tanh_c = tanh(c)

    # Gradients.
    dc += dh * o * (1.0 - tanh_c * tanh_c)
    di = dc * g * i * (1.0 - i)
    df = dc * before * f * (1.0 - f)
    dg = dc * i * (1.0 - g * g)
    do = dh * tanh_c * o * (1.0 - o)
    return di, df, dg, do, dc * f


@triton.jit(do_not_specialize=["B", "T"])
def lstm_bwd_kernel(
    dh_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    c_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dgates_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    M: tl.constexpr,
    PINNED: tl.constexpr,
):
    """Walk back through all positions of M sequences of one run.

    1. Find the sequences; load the weights and what the last position reads.
    2. For t in T - 1, T - 2, ..., 0:
       a. read what the position before reads, ahead; cells before the first position are zeros;
       b. add the gradient of h from the position after to that of the caller;
       c. go back through h = sigmoid(o) tanh(c) and c = sigmoid(f) before + sigmoid(i) tanh(g), and write the
          gradients of the gates;
       d. add them to those of the biases;
       e. take the products with the weights: the gradient of h for the position before.
    3. Write the sums for the biases.
    """
    # 1. Sequences and weights.
    run, at_MD, at_MG, live_M1 = sequences(B, T, D, M)
    dtype = c_ptr.dtype.element_ty
    w_ptr += run * 4 * D * D
    wi_DD, wf_DD, wg_DD, wo_DD = four_weights(w_ptr, D, PINNED, False)

    # 1. What the last position reads, and what is after it.
    inputs = _bwd_inputs(dh_ptr, gates_ptr, c_ptr, at_MD, at_MG, T - 1, D)
    c_MD = tl.load(c_ptr + at_MD + (T - 1) * D).to(tl.float32)
    dc_MD = tl.zeros([M, D], tl.float32)
    after_MD = tl.zeros([M, D], tl.float32)
    dbi_MD = tl.zeros([M, D], tl.float32)
    dbf_MD = tl.zeros([M, D], tl.float32)
    dbg_MD = tl.zeros([M, D], tl.float32)
    dbo_MD = tl.zeros([M, D], tl.float32)

    for back in tl.range(T, num_stages=1):
        # 2a. Inputs.
        t = T - 1 - back
        dh_MD, i_MD, f_MD, g_MD, o_MD, before_MD = inputs
        inputs = _bwd_inputs(dh_ptr, gates_ptr, c_ptr, at_MD, at_MG, tl.maximum(t - 1, 0), D)
        before_MD = tl.where(t > 0, before_MD.to(tl.float32), 0.0)

        # 2b. Outputs.
        dh_MD = dh_MD.to(tl.float32) + after_MD

        # 2c. Cells and gates.
        di_MD, df_MD, dg_MD, do_MD, dc_MD = cell_gradients(dh_MD, i_MD, f_MD, g_MD, o_MD, c_MD, before_MD, dc_MD)
        c_MD = before_MD
        dgates_ptrs = dgates_ptr + at_MG + t * 4 * D
        tl.store(dgates_ptrs, di_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + D, df_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + 2 * D, dg_MD.to(dtype), live_M1)
        tl.store(dgates_ptrs + 3 * D, do_MD.to(dtype), live_M1)

        # 2d. Biases.
        dbi_MD += di_MD
        dbf_MD += df_MD
        dbg_MD += dg_MD
        dbo_MD += do_MD

        # 2e. Products.
        after_MD = tl.zeros([M, D], tl.float32)
        after_MD = product(di_MD.to(dtype), after_MD, w_ptr, wi_DD, D, PINNED, False)
        after_MD = product(df_MD.to(dtype), after_MD, w_ptr + D * D, wf_DD, D, PINNED, False)
        after_MD = product(dg_MD.to(dtype), after_MD, w_ptr + 2 * D * D, wg_DD, D, PINNED, False)
        after_MD = product(do_MD.to(dtype), after_MD, w_ptr + 3 * D * D, wo_DD, D, PINNED, False)

    # 3. Biases.
    to_ptrs = dbias_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * 4 * D + tl.arange(0, D)
    tl.store(to_ptrs, tl.sum(tl.where(live_M1, dbi_MD, 0.0), 0))
    tl.store(to_ptrs + D, tl.sum(tl.where(live_M1, dbf_MD, 0.0), 0))
    tl.store(to_ptrs + 2 * D, tl.sum(tl.where(live_M1, dbg_MD, 0.0), 0))
    tl.store(to_ptrs + 3 * D, tl.sum(tl.where(live_M1, dbo_MD, 0.0), 0))


@kernels_take("LSTM", "widths 32, 64, 128 and 256")
def fits_lstm(D: int) -> bool:
    """Whether ``lstm_method`` takes this width."""
    return D in (32, 64, 128, 256)


def lstm_method(dtype: torch.dtype) -> Method:
    """Outputs of an LSTM (R, B, T, D) in ``dtype``.

    Tensors: share of the inputs in the gates (R, B, T, 4D), weight of the previous output (R, 4D, D), bias (R, 4D).
    """

    def forward(inputs: Tensor, recurrent: Tensor, bias: Tensor) -> tuple[Tensors, Tensors]:
        inputs, w, bias = inputs.to(dtype).contiguous(), recurrent.to(dtype).contiguous(), bias.contiguous()
        R, B, T, _ = inputs.shape
        programs, settings = tiles(R, B, w)

        h, c = (inputs.new_empty(R, B, T, w.shape[-1]) for _ in range(2))
        gates = torch.empty_like(inputs)
        lstm_fwd_kernel[programs, R](inputs, w, bias, h, gates, c, B, T, **settings)
        return (h,), (gates, c)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        dh, h, gates, c = (y.contiguous() for y in (*gradients, *outputs, *saved))
        w = tensors[1].to(dtype).contiguous()
        R, B, T, D = h.shape
        programs, settings = tiles(R, B, w)

        dgates = torch.empty_like(gates)
        dbias = dh.new_empty(R, programs, 4 * D, dtype=torch.float32)
        lstm_bwd_kernel[programs, R](dh, gates, c, w, dgates, dbias, B, T, **settings)

        # Products of the gates' gradients with the outputs of the positions before.
        before = F.pad(h[:, :, :-1], (0, 0, 1, 0))
        return dgates, rows_products((dgates, before))[0], group_sum(dbias)

    return Method(forward, backward)


def tiles(R: int, B: int, w: Tensor) -> tuple[int, dict[str, Any]]:
    """Programs of a run, and compile-time settings.

    Tiles of 16 sequences are the fastest while every program has a multiprocessor. Tiles of 32 leave no registers for
    weights that are read at every position.
    """
    limits, size = gpu_limits(w.device), w[0].nbytes
    pinned = size <= PINNED_BYTES and size + 32768 <= limits.memory
    M = 32 if pinned and R * triton.cdiv(B, 16) > limits.multiprocessors else 16
    return triton.cdiv(B, M), {"D": w.shape[-1], "M": M, "PINNED": pinned, "num_warps": 8}
