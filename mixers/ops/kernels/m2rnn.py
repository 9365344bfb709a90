"""Fused kernels of the loop over positions of the recurrent net with a matrix state.

    name        shape                    written by    read by
    q           (R, B, T, K)             caller        both kernels    queries of all heads
    k           (R, B, T, K)             caller        both kernels    keys of all heads
    v           (R, B, T, H, V)          caller        both kernels    values
    f           (R, B, T, H)             caller        both kernels    share of the state that is kept, float32
    w           (R, H, V, V)             caller        both kernels    recurrent weights
    y           (R, B, T, H, V)          m2rnn_fwd     caller          outputs
    states      (R, B, H, T / 2, K, V)   m2rnn_fwd     m2rnn_bwd       states before positions 0, 2, 4, ...
    dy          (R, B, T, H, V)          caller        m2rnn_bwd       gradient of y
    dq, dk      (R, B, T, H, K)          m2rnn_bwd     caller          gradients of q and k, a head each
    dv          (R, B, T, H, V)          m2rnn_bwd     caller          gradient of v
    df          (R, B, T, H)             m2rnn_bwd     caller          gradient of f, float32
    dw          (R, B, H, V, V)          m2rnn_bwd     group_sum       gradient of w, float32

Tensors without "float32" have the dtype of the products; T / 2 is rounded up. A program loops over all positions of one
head of one sequence, with the state in registers, in float32. At the default sizes it is a single warp, so that no
product and no sum waits for other warps.

The backward pass needs the state and the tanh of every position. It computes them again from every second state, in
registers: to store all states would take twice the memory, and save no operation but an update.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import contiguous, kernels_take, square
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

ELEMENTS = 1024
"""Number of a state's elements that a warp holds."""


@triton.jit
def _tanh(y: tl.tensor, QUICK: tl.constexpr):
    """Hyperbolic tangent; if QUICK, one instruction of NVIDIA's GPUs, with a relative error below 2^-10."""
    if QUICK:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return 2.0 * tl.sigmoid(2.0 * y) - 1.0


@triton.jit
def _program(B_H: tl.tensor, T: tl.tensor, H: tl.constexpr):
    """Head and sequence of this program, numbered through all runs, and the row of the first position."""
    run = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % H
    sequence = run * (B_H // H) + tl.program_id(0) // H
    return run * H + head, head, sequence, sequence * T


@triton.jit
def _inputs(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    row: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Query, key, value and kept share at position t; beyond the last one, the whole state is kept."""
    at = row + tl.minimum(t, T - 1)
    n_K = tl.arange(0, K)
    q_K = tl.load(q_ptr + at * K + n_K)
    k_K = tl.load(k_ptr + at * K + n_K)
    v_V = tl.load(v_ptr + (at * H + head) * V + tl.arange(0, V))
    f = tl.load(f_ptr + at * H + head)
    return q_K, k_K, v_V, tl.where(t < T, f, 1.0)


@triton.jit
def _new(s_KV: tl.tensor, k_K: tl.tensor, v_V: tl.tensor, w_VV: tl.tensor, QUICK: tl.constexpr):
    """tanh(S W + k v^T)."""
    written_KV = k_K.to(tl.float32)[:, None] * v_V.to(tl.float32)[None, :]
    return _tanh(tl.dot(s_KV.to(w_VV.dtype), w_VV, written_KV, input_precision="ieee"), QUICK)


@triton.jit(do_not_specialize=["T"])
def m2rnn_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
    states_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    QUICK: tl.constexpr,
):
    """Walk through all positions of one head of one sequence.

    1. Find the head; load its weight and the inputs of the first position.
    2. For t in 0, 1, ..., T - 1:
       a. read the inputs of the next position ahead;
       b. write the state if t is even;
       c. update the state: S = f S + (1 - f) tanh(S W + k v^T);
       d. write the output y = q^T S.
    """
    # 1. Head, weight, inputs and initial state.
    of_weight, head, sequence, row = _program(tl.num_programs(0), T, H)
    n_V = tl.arange(0, V)
    at_KV = tl.arange(0, K)[:, None] * V + n_V[None, :]
    states_ptr += (sequence * H + head) * ((T + 1) // 2) * K * V
    w_VV = square(w_ptr + of_weight * V * V, V, 0, V, False)
    inputs = _inputs(q_ptr, k_ptr, v_ptr, f_ptr, row, 0, T, head, H, K, V)
    s_KV = tl.zeros([K, V], tl.float32)

    for t in tl.range(T, num_stages=1):
        # 2a. Inputs.
        q_K, k_K, v_V, f = inputs
        inputs = _inputs(q_ptr, k_ptr, v_ptr, f_ptr, row, t + 1, T, head, H, K, V)

        # 2b. State before the position.
        if t % 2 == 0:
            tl.store(states_ptr + (t // 2) * K * V + at_KV, s_KV.to(w_VV.dtype))

        # 2c. State.
        new_KV = _new(s_KV, k_K, v_V, w_VV, QUICK)
        s_KV = new_KV + f * (s_KV - new_KV)

        # 2d. Output.
        y_V = tl.sum(q_K.to(tl.float32)[:, None] * s_KV, 0)
        tl.store(y_ptr + ((row + t) * H + head) * V + n_V, y_V.to(w_VV.dtype))


@triton.jit
def _bwd_inputs(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    row: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """``_inputs``, and the gradient of the output at position t, which is 0 beyond the last one."""
    q_K, k_K, v_V, f = _inputs(q_ptr, k_ptr, v_ptr, f_ptr, row, t, T, head, H, K, V)
    n_V = tl.arange(0, V)
    dy_V = tl.load(dy_ptr + ((row + tl.minimum(t, T - 1)) * H + head) * V + n_V)
    return q_K, k_K, v_V, f, tl.where(t < T, dy_V, 0.0)


@triton.jit
def _bwd_position(
    inputs: tl.tuple,
    before_KV: tl.tensor,
    new_KV: tl.tensor,
    ds_KV: tl.tensor,
    dw_VV: tl.tensor,
    w_VV: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    df_ptr: tl.tensor,
    at: tl.tensor,
    live: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Go back through one position: write its gradients; return those of the state before it and of the weight.

    ``at`` is the position and head; gradients are written only if ``live``.
    """
    q_K, k_K, v_V, f, dy_V = inputs
    q_K, k_K, v_V, dy_V = q_K.to(tl.float32), k_K.to(tl.float32), v_V.to(tl.float32), dy_V.to(tl.float32)
    dtype = w_VV.dtype
    n_K, n_V = tl.arange(0, K), tl.arange(0, V)

    # y = q^T S.
    s_KV = new_KV + f * (before_KV - new_KV)
    ds_KV += q_K[:, None] * dy_V[None, :]
    dq_K = tl.sum(s_KV * dy_V[None, :], 1)

    # S = f before + (1 - f) new, new = tanh(x).
    df = tl.sum(tl.sum(ds_KV * (before_KV - new_KV), 1), 0)
    dx_KV = ds_KV * (1.0 - f) * (1.0 - new_KV * new_KV)

    # x = before W + k v^T.
    dk_K = tl.sum(dx_KV * v_V[None, :], 1)
    dv_V = tl.sum(dx_KV * k_K[:, None], 0)
    low_KV = dx_KV.to(dtype)
    dw_VV = tl.dot(tl.trans(before_KV.to(dtype)), low_KV, dw_VV, input_precision="ieee")
    ds_KV = tl.dot(low_KV, tl.trans(w_VV), f * ds_KV, input_precision="ieee")

    tl.store(dq_ptr + at * K + n_K, dq_K.to(dtype), live)
    tl.store(dk_ptr + at * K + n_K, dk_K.to(dtype), live)
    tl.store(dv_ptr + at * V + n_V, dv_V.to(dtype), live)
    tl.store(df_ptr + at, df, live)
    return ds_KV, dw_VV


@triton.jit(do_not_specialize=["T"])
def m2rnn_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    w_ptr: tl.tensor,
    states_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    df_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    QUICK: tl.constexpr,
):
    """Walk back through all positions of one head of one sequence, two at a time.

    1. Find the head; load its weight and what the last two positions read.
    2. For each two positions, from the last ones to the first ones:
       a. read what the two before them read, ahead;
       b. compute the states and the tanh of both;
       c. go back through the later position, then through the earlier one (``_bwd_position``).
    3. Write the gradient of the weight.
    """
    # 1. Head, weight and gradients after the last position.
    of_weight, head, sequence, row = _program(tl.num_programs(0), T, H)
    pairs = (T + 1) // 2
    at_KV = tl.arange(0, K)[:, None] * V + tl.arange(0, V)[None, :]
    states_ptr += (sequence * H + head) * pairs * K * V
    w_VV = square(w_ptr + of_weight * V * V, V, 0, V, False)
    ds_KV = tl.zeros([K, V], tl.float32)
    dw_VV = tl.zeros([V, V], tl.float32)

    # 1. What the last two positions read.
    t = 2 * (pairs - 1)
    first = _bwd_inputs(q_ptr, k_ptr, v_ptr, f_ptr, dy_ptr, row, t, T, head, H, K, V)
    second = _bwd_inputs(q_ptr, k_ptr, v_ptr, f_ptr, dy_ptr, row, t + 1, T, head, H, K, V)
    state_KV = tl.load(states_ptr + (pairs - 1) * K * V + at_KV)

    for back in tl.range(pairs, num_stages=1):
        # 2a. Inputs.
        pair = pairs - 1 - back
        earlier, later = first, second
        before_KV = state_KV.to(tl.float32)
        ahead = tl.maximum(pair - 1, 0)
        first = _bwd_inputs(q_ptr, k_ptr, v_ptr, f_ptr, dy_ptr, row, 2 * ahead, T, head, H, K, V)
        second = _bwd_inputs(q_ptr, k_ptr, v_ptr, f_ptr, dy_ptr, row, 2 * ahead + 1, T, head, H, K, V)
        state_KV = tl.load(states_ptr + ahead * K * V + at_KV)

        # 2b. States.
        new_KV = _new(before_KV, earlier[1], earlier[2], w_VV, QUICK)
        between_KV = new_KV + earlier[3] * (before_KV - new_KV)
        newest_KV = _new(between_KV, later[1], later[2], w_VV, QUICK)

        # 2c. Later position, then earlier one.
        at = (row + 2 * pair) * H + head
        live = 2 * pair + 1 < T
        ds_KV, dw_VV = _bwd_position(
            later, between_KV, newest_KV, ds_KV, dw_VV, w_VV, dq_ptr, dk_ptr, dv_ptr, df_ptr, at + H, live, K, V
        )
        ds_KV, dw_VV = _bwd_position(
            earlier, before_KV, new_KV, ds_KV, dw_VV, w_VV, dq_ptr, dk_ptr, dv_ptr, df_ptr, at, True, K, V
        )

    # 3. Weight.
    n_V = tl.arange(0, V)
    tl.store(dw_ptr + (sequence * H + head) * V * V + n_V[:, None] * V + n_V[None, :], dw_VV)


@kernels_take("M²RNN", "keys of 16, 32, 64 or 128 channels and values of 16, 32 or 64")
def fits_m2rnn(K: int, V: int) -> bool:
    """Whether ``m2rnn_method`` takes heads with K keys and V values."""
    return K in (16, 32, 64, 128) and V in (16, 32, 64)


def m2rnn_method(dtype: torch.dtype) -> Method:
    """Outputs (R, B, T, H, V) in ``dtype``.

    Tensors: queries and keys (R, B, T, K), values (R, B, T, H, V), kept shares (R, B, T, H), weights (R, H, V, V).
    """

    def prepared(q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor) -> tuple[Any, ...]:
        return contiguous(q.to(dtype), k.to(dtype), v.to(dtype), f.float(), w.to(dtype))

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        inputs = prepared(*tensors)
        grid, settings = _settings(*inputs)
        R, B, T, H, V = inputs[2].shape

        y = torch.empty_like(inputs[2])
        states = y.new_empty(R, B, H, triton.cdiv(T, 2), settings["K"], V)
        m2rnn_fwd_kernel[grid](*inputs, y, states, T, **settings)
        return (y,), (states,)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        inputs = prepared(*tensors)
        grid, settings = _settings(*inputs)
        R, B, T, H, V = inputs[2].shape

        dq, dk = (outputs[0].new_empty(R, B, T, H, settings["K"]) for _ in range(2))
        dv, df = torch.empty_like(inputs[2]), torch.empty_like(inputs[3])
        dw = df.new_empty(R, B, H, V, V)
        m2rnn_bwd_kernel[grid](*inputs, *saved, *contiguous(*gradients), dq, dk, dv, df, dw, T, **settings)
        return dq.sum(3), dk.sum(3), dv, df, group_sum(dw)

    return Method(forward, backward)


def _settings(q: Tensor, k: Tensor, v: Tensor, f: Tensor, w: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs, and compile-time settings."""
    R, B, _, H, V = v.shape
    K, quick = q.shape[-1], q.dtype == torch.bfloat16 and torch.version.hip is None
    return (B * H, R), {"H": H, "K": K, "V": V, "QUICK": quick, "num_warps": max(1, K * V // ELEMENTS)}
