"""The LSTM's loop over positions, launch by launch, for any width.

The tensors are those of ``mixers.ops.kernels.lstm``. The library takes the products with the recurrent weights, and a
kernel does the rest of a position. Beside them:

    name        shape          written by    read by
    recurrent   (R, B, 4D)     library       cell_fwd    W h of the position before
    state       (R, B, D)      cell_fwd      cell_fwd    cells, float32
    after       (R, B, D)      library       cell_bwd    gradient of h from the position after
    dstate      (R, B, D)      cell_bwd      cell_bwd    gradient of the cells, float32
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.ahead import repeated
from mixers.ops.kernels.lstm import cell_gradients, four, tanh
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Recipe, Tensors

CELL = {"W": 512, "num_warps": 4}
"""Settings of the launches; W channels are those of a program."""


@triton.jit
def _channels(D: tl.constexpr, W: tl.constexpr):
    """Row of a program, its channels, and whether they exist."""
    d_W = tl.program_id(1) * W + tl.arange(0, W)
    return tl.program_id(0).to(tl.int64), tl.minimum(d_W, D - 1), d_W < D


@triton.jit(do_not_specialize=["t", "T", "B"])
def cell_fwd_kernel(
    inputs_ptr: tl.tensor,
    recurrent_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    c_ptr: tl.tensor,
    h_ptr: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    B: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
):
    """Add up the gates of W channels of a sequence at position t, write them, and update cells and outputs."""
    row, d_W, here_W = _channels(D, W)
    at_G, at_W = (row * T + t) * 4 * D + d_W, (row * T + t) * D + d_W
    xi_W, xf_W, xg_W, xo_W = four(inputs_ptr + at_G, D)
    ri_W, rf_W, rg_W, ro_W = four(recurrent_ptr + row * 4 * D + d_W, D)
    bi_W, bf_W, bg_W, bo_W = four(bias_ptr + row // B * 4 * D + d_W, D)
    i_W = xi_W.to(tl.float32) + ri_W.to(tl.float32) + bi_W
    f_W = xf_W.to(tl.float32) + rf_W.to(tl.float32) + bf_W
    g_W = xg_W.to(tl.float32) + rg_W.to(tl.float32) + bg_W
    o_W = xo_W.to(tl.float32) + ro_W.to(tl.float32) + bo_W
    tl.store(gates_ptr + at_G, i_W, here_W)
    tl.store(gates_ptr + at_G + D, f_W, here_W)
    tl.store(gates_ptr + at_G + 2 * D, g_W, here_W)
    tl.store(gates_ptr + at_G + 3 * D, o_W, here_W)

    c_W = tl.sigmoid(f_W) * tl.load(state_ptr + row * D + d_W) + tl.sigmoid(i_W) * tanh(g_W)
    tl.store(state_ptr + row * D + d_W, c_W, here_W)
    tl.store(c_ptr + at_W, c_W, here_W)
    tl.store(h_ptr + at_W, tl.sigmoid(o_W) * tanh(c_W), here_W)


@triton.jit(do_not_specialize=["t", "T"])
def cell_bwd_kernel(
    dh_ptr: tl.tensor,
    after_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    c_ptr: tl.tensor,
    dstate_ptr: tl.tensor,
    dgates_ptr: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    W: tl.constexpr,
):
    """Write the gradients of the gates of W channels of a sequence at position t, and update that of the cells."""
    row, d_W, here_W = _channels(D, W)
    at_G, at_W = (row * T + t) * 4 * D + d_W, (row * T + t) * D + d_W
    dh_W = tl.load(dh_ptr + at_W).to(tl.float32) + tl.load(after_ptr + row * D + d_W).to(tl.float32)
    i_W, f_W, g_W, o_W = four(gates_ptr + at_G, D)
    c_W = tl.load(c_ptr + at_W).to(tl.float32)
    before_W = tl.load(c_ptr + at_W - D, (t > 0) & here_W, 0.0).to(tl.float32)
    dc_W = tl.load(dstate_ptr + row * D + d_W)
    di_W, df_W, dg_W, do_W, dc_W = cell_gradients(dh_W, i_W, f_W, g_W, o_W, c_W, before_W, dc_W)

    tl.store(dgates_ptr + at_G, di_W, here_W)
    tl.store(dgates_ptr + at_G + D, df_W, here_W)
    tl.store(dgates_ptr + at_G + 2 * D, dg_W, here_W)
    tl.store(dgates_ptr + at_G + 3 * D, do_W, here_W)
    tl.store(dstate_ptr + row * D + d_W, dc_W, here_W)


def lstm_loop_method(dtype: torch.dtype) -> Method:
    """Outputs of an LSTM; tensors as of ``lstm_method``."""

    def forward(inputs: Tensor, recurrent: Tensor, bias: Tensor) -> tuple[Tensors, Tensors]:
        inputs, w, bias = inputs.to(dtype).contiguous(), recurrent.to(dtype), bias.contiguous()
        R, B, T, G = inputs.shape
        D = G // 4

        h, c = (inputs.new_empty(R, B, T, D) for _ in range(2))
        gates, products = torch.empty_like(inputs), inputs.new_zeros(R, B, G)
        state = inputs.new_zeros(R, B, D, dtype=torch.float32)
        for t in repeated(range(T)):
            if t > 0:
                torch.bmm(h[:, :, t - 1], w.mT, out=products)
            programs = R * B, triton.cdiv(D, CELL["W"])
            cell_fwd_kernel[programs](inputs, products, bias, state, gates, c, h, t, T, B, D, **CELL)
        return (h,), (gates, c)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        dh, h, gates, c = (y.contiguous() for y in (*gradients, *outputs, *saved))
        w = tensors[1].to(dtype)
        R, B, T, D = h.shape

        dgates, after = torch.empty_like(gates), h.new_zeros(R, B, D)
        dstate = h.new_zeros(R, B, D, dtype=torch.float32)
        for t in repeated(range(T - 1, -1, -1)):
            if t + 1 < T:
                torch.bmm(dgates[:, :, t + 1], w, out=after)
            programs = R * B, triton.cdiv(D, CELL["W"])
            cell_bwd_kernel[programs](dh, after, gates, c, dstate, dgates, t, T, D, **CELL)

        # Products of the gates' gradients with the outputs of the positions before.
        before = F.pad(h[:, :, :-1], (0, 0, 1, 0))
        return dgates, rows_products((dgates, before))[0], group_sum(dgates.flatten(1, 2).float())

    return Method(forward, backward, recipe=Recipe(("lstm loop", dtype)))
