"""Fused kernels of the scan with constant complex decays.

name       shape                  written by          read by
x          (R, B, T, 2 N)         caller              both kernels        inputs; rows at equal distances
dynamics   (R, 4, N)              caller              both kernels        decay and gain, real and imaginary, float32
h          (R, B, T, 2 N)         diagonal_fwd        caller
dh         (R, B, T, 2 N)         caller              diagonal_bwd
dx         (R, B, T, 2 N)         diagonal_bwd        caller
dsums      (R, B, 4, N)           diagonal_bwd        group_sum           of dynamics, float32

Rows hold the real parts of all states, then the imaginary parts. A program loops over one sequence with W states in its
registers. Neither pass reads stored states: with inputs b and gradients g_t of the states, the gradient of the decay is
the sum over t of ``conj(h_{t-1}) g_t``, or of ``conj(b_t) G_t`` with ``G_t = g_{t+1} + conj(decay) G_{t+1}``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import evenly_spaced
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors

DIAGONAL = {"num_warps": 1}


@triton.jit
def _pair(ptr: tl.tensor, row: tl.tensor, distance: tl.tensor, n: tl.tensor, N: tl.constexpr):
    """Real and imaginary parts of states n in a row, as they are in memory."""
    real_N = tl.load(ptr + row * distance + n, n < N, 0.0)
    imag_N = tl.load(ptr + row * distance + N + n, n < N, 0.0)
    return real_N, imag_N


@triton.jit
def _store_pair(ptr: tl.tensor, row: tl.tensor, n: tl.tensor, real_N: tl.tensor, imag_N: tl.tensor, N: tl.constexpr):
    tl.store(ptr + row * 2 * N + n, real_N, n < N)
    tl.store(ptr + row * 2 * N + N + n, imag_N, n < N)


@triton.jit
def _product(a_re: tl.tensor, a_im: tl.tensor, b_re: tl.tensor, b_im: tl.tensor):
    """a b, in float32."""
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def diagonal_fwd_kernel(
    x_ptr: tl.tensor,
    dynamics_ptr: tl.tensor,
    h_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    distance: tl.tensor,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Walk through one sequence with W states.

    1. Read decays and gains.
    2. For t = 0, ..., T - 1:
       a. read x, one step ahead;
       b. write h = decay h + gain x.
    """
    # 1. Decays and gains.
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * W + tl.arange(0, W)
    dynamics_ptr += sequence // B * 4 * N
    decay_re, decay_im = _pair(dynamics_ptr, 0, N, n, N)
    gain_re, gain_im = _pair(dynamics_ptr, 2, N, n, N)

    row = sequence * T
    ahead = _pair(x_ptr, row, distance, n, N)
    h_re = tl.zeros([W], tl.float32)
    h_im = tl.zeros([W], tl.float32)
    for t in range(T):
        # 2a. Input.
        x_re, x_im = ahead
        ahead = _pair(x_ptr, row + tl.minimum(t + 1, T - 1), distance, n, N)

        # 2b. States.
        b_re, b_im = _product(gain_re, gain_im, x_re.to(tl.float32), x_im.to(tl.float32))
        h_re, h_im = _product(decay_re, decay_im, h_re, h_im)
        h_re += b_re
        h_im += b_im
        _store_pair(h_ptr, row + t, n, h_re, h_im, N)


@triton.jit
def diagonal_bwd_kernel(
    x_ptr: tl.tensor,
    dynamics_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dsums_ptr: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    distance: tl.tensor,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Walk backward through one sequence with W states.

    1. Read decays and gains.
    2. For t = T - 1, ..., 0:
       a. read x and dh, one step ahead;
       b. G = g + conj(decay) G, and then g = dh + conj(decay) g;
       c. write dx = conj(gain) g;
       d. add conj(x) g to the gradient of the gain, and conj(x) G to that of the decay.
    3. Write the sums, that of the decay times conj(gain).
    """
    # 1. Decays and gains, conjugated.
    sequence = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * W + tl.arange(0, W)
    dynamics_ptr += sequence // B * 4 * N
    decay_re, decay_im = _pair(dynamics_ptr, 0, N, n, N)
    gain_re, gain_im = _pair(dynamics_ptr, 2, N, n, N)
    decay_im = -decay_im
    gain_im = -gain_im

    row = sequence * T
    x_ahead = _pair(x_ptr, row + T - 1, distance, n, N)
    dh_ahead = _pair(dh_ptr, row + T - 1, 2 * N, n, N)
    g_re = tl.zeros([W], tl.float32)
    g_im = tl.zeros([W], tl.float32)
    G_re = tl.zeros([W], tl.float32)
    G_im = tl.zeros([W], tl.float32)
    dgain_re = tl.zeros([W], tl.float32)
    dgain_im = tl.zeros([W], tl.float32)
    ddecay_re = tl.zeros([W], tl.float32)
    ddecay_im = tl.zeros([W], tl.float32)
    for back in range(T):
        # 2a. Input and gradient.
        t = T - 1 - back
        x_re, x_im = x_ahead
        dh_re, dh_im = dh_ahead
        earlier = row + tl.maximum(t - 1, 0)
        x_ahead = _pair(x_ptr, earlier, distance, n, N)
        dh_ahead = _pair(dh_ptr, earlier, 2 * N, n, N)

        # 2b. Gradients of the states.
        kept_re, kept_im = _product(decay_re, decay_im, G_re, G_im)
        G_re = g_re + kept_re
        G_im = g_im + kept_im
        kept_re, kept_im = _product(decay_re, decay_im, g_re, g_im)
        g_re = dh_re.to(tl.float32) + kept_re
        g_im = dh_im.to(tl.float32) + kept_im

        # 2c. Input.
        dx_re, dx_im = _product(gain_re, gain_im, g_re, g_im)
        _store_pair(dx_ptr, row + t, n, dx_re, dx_im, N)

        # 2d. Gain and decay.
        x_re = x_re.to(tl.float32)
        x_im = -x_im.to(tl.float32)
        added_re, added_im = _product(x_re, x_im, g_re, g_im)
        dgain_re += added_re
        dgain_im += added_im
        added_re, added_im = _product(x_re, x_im, G_re, G_im)
        ddecay_re += added_re
        ddecay_im += added_im

    # 3. Sums of the sequence.
    ddecay_re, ddecay_im = _product(gain_re, gain_im, ddecay_re, ddecay_im)
    dsums_ptr += sequence * 4 * N
    _store_pair(dsums_ptr, 0, n, ddecay_re, ddecay_im, N)
    _store_pair(dsums_ptr, 1, n, dgain_re, dgain_im, N)


def diagonal_scan_method(dtype: torch.dtype) -> Method:
    """States (R, B, T, 2 N) in ``dtype``. Tensors: x (R, B, T, 2 N), dynamics (R, 4, N)."""

    def forward(x: Tensor, dynamics: Tensor) -> tuple[Tensors, Tensors]:
        (x, distance), dynamics = evenly_spaced(x), dynamics.contiguous()
        h = x.new_empty(x.shape, dtype=dtype)
        grid, sizes = _launch(x)
        diagonal_fwd_kernel[grid](x, dynamics, h, *x.shape[1:3], distance, **sizes)
        return (h,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        (x, distance), dynamics = evenly_spaced(tensors[0]), tensors[1].contiguous()
        dh = gradients[0].contiguous()
        dx = x.new_empty(x.shape)
        dsums = dynamics.new_empty(*x.shape[:2], *dynamics.shape[1:])
        grid, sizes = _launch(x)
        diagonal_bwd_kernel[grid](x, dynamics, dh, dx, dsums, *x.shape[1:3], distance, **sizes)
        return dx, group_sum(dsums)

    return Method(forward, backward)


def _launch(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Sequences of all runs and parts of the states; compile-time settings."""
    N = x.shape[-1] // 2
    W = min(triton.next_power_of_2(N), 64)
    return (x.shape[0] * x.shape[1], triton.cdiv(N, W)), {"N": N, "W": W, **DIAGONAL}
