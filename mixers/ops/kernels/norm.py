"""Fused kernels of RMS normalisation.

name      shape                  written by           read by
x         (R, rows, D)           caller               both kernels         norm_fwd: or parts of it, as of dy
gain      (R, D)                 caller               both kernels         float32
addend    (R, rows, D)           caller               norm_fwd             is added to x, where there is one
sum       (R, rows, D)           norm_fwd             caller               x with the addend
y         (R, rows, D)           norm_fwd             caller
dy        (parts, R, rows, D)    caller               norm_bwd             sums to the gradient of y
rest      (R, rows, D)           caller               norm_bwd             further gradient of x, where there is one
z         (R, rows, D)           caller               norm_bwd             where x itself is the norm of z
z_gain    (R, D)                 caller               norm_bwd             float32, of that norm
dx        (R, rows, D)           norm_bwd             caller               gradient of x, or of z if there is one
dgain     (R, programs, D)       norm_bwd             group_sum            float32
dz_gain   (R, programs, D)       norm_bwd             group_sum            float32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import Settings, contiguous, rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors


@triton.jit
def _sum_of_parts(y_ptr: tl.tensor, at: tl.tensor, here: tl.tensor, size: tl.tensor, PARTS: tl.constexpr):
    """Sum of the parts of a tensor, ``size`` numbers of a run each."""
    y = tl.load(y_ptr + at, here, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(y_ptr + part * tl.num_programs(1) * size + at, here, 0.0).to(tl.float32)
    return y


@triton.jit
def norm_fwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    addend_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Normalise M rows.

    1. Read the rows and the gain; add and write what is to be added.
    2. Write y = gain x / rms(x).
    """
    # 1. Rows and gain.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E)
    here_ME = (m < rows)[:, None] & (e < D)[None, :]
    at_ME = (run * rows + m)[:, None] * D + e[None, :]
    x_ME = _sum_of_parts(x_ptr, at_ME, here_ME, rows * D, PARTS)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    if addend_ptr is not None:
        sum_ME = (x_ME + tl.load(addend_ptr + at_ME, here_ME, 0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at_ME, sum_ME, here_ME)
        x_ME = sum_ME.to(tl.float32)

    # 2. Outputs.
    tl.store(y_ptr + at_ME, x_ME * rms(x_ME, D)[:, None] * gain_E[None, :], here_ME)


@triton.jit
def norm_bwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    z_ptr: tl.tensor,
    z_gain_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    dz_gain_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradients of every n-th tile of M rows, for n programs, and their sum for the gain.

    1. For each tile of the program:
       a. read x and dy;
       b. normalise again: n = x / rms(x);
       c. add dy n to the gradient of the gain;
       d. compute dx, the gradient of gain dy through the norm, plus the rest;
       e. if x is the norm of z, do the same with dx for z;
       f. write the gradient.
    2. Write the sums.
    """
    run = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, E)
    gain_E = tl.load(gain_ptr + run * D + e, e < D, 0.0)
    dgain_E = tl.zeros([E], tl.float32)
    if z_ptr is not None:
        z_gain_E = tl.load(z_gain_ptr + run * D + e, e < D, 0.0)
        dz_gain_E = tl.zeros([E], tl.float32)
    for first in range(tl.program_id(0) * M, rows, tl.num_programs(0) * M):
        # 1a. Rows.
        m = first + tl.arange(0, M)
        here_ME = (m < rows)[:, None] & (e < D)[None, :]
        at_ME = (run * rows + m)[:, None] * D + e[None, :]
        x_ME = tl.load(x_ptr + at_ME, here_ME, 0.0).to(tl.float32)
        dy_ME = _sum_of_parts(dy_ptr, at_ME, here_ME, rows * D, PARTS)

        # 1b. Norm.
        r_M = rms(x_ME, D)
        n_ME = x_ME * r_M[:, None]

        # 1c, 1d. Gradients.
        dgain_E += tl.sum(dy_ME * n_ME, 0)
        dx_ME = rms_bwd(dy_ME * gain_E[None, :], n_ME, r_M, D)
        if rest_ptr is not None:
            dx_ME += tl.load(rest_ptr + at_ME, here_ME, 0.0).to(tl.float32)

        # 1e. Norm of z.
        if z_ptr is not None:
            z_ME = tl.load(z_ptr + at_ME, here_ME, 0.0).to(tl.float32)
            r_M = rms(z_ME, D)
            n_ME = z_ME * r_M[:, None]
            dz_gain_E += tl.sum(dx_ME * n_ME, 0)
            dx_ME = rms_bwd(dx_ME * z_gain_E[None, :], n_ME, r_M, D)

        # 1f. Gradient.
        tl.store(dx_ptr + at_ME, dx_ME, here_ME)

    # 2. Sums of the program.
    to_E = (run * tl.num_programs(0) + tl.program_id(0)) * D + e
    tl.store(dgain_ptr + to_E, dgain_E, e < D)
    if z_ptr is not None:
        tl.store(dz_gain_ptr + to_E, dz_gain_E, e < D)


def rms_norm_method(dtype: torch.dtype, branching: bool = False) -> Method:
    """``gain * x / rms(x)`` in ``dtype``. Tensors: x (R, ..., D) of any width, gain (R, D) float32.

    A branching method also returns x. Then the backward kernel adds both gradients of x: through the norm and past it.
    """

    def forward(x: Tensor, gain: Tensor) -> tuple[Tensors, Tensors]:
        x = x.contiguous()
        y = normed(x, gain, dtype)
        return (y, x) if branching else (y,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dx, dgain = norm_gradients(*tensors, *gradients)
        return dx, group_sum(dgain)

    return Method(forward, backward, outputs=2 if branching else 1)


def normed(x: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """``gain * x / rms(x)`` in ``dtype``."""
    x, gain = x.contiguous(), gain.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    rows, settings = rows_of(x), _settings(x)
    norm_fwd_kernel[triton.cdiv(rows, settings["M"]), len(x)](x, gain, None, None, y, rows, **settings, PARTS=1)
    return y


def normed_sum(parts: Tensor, addend: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the parts (parts, R, rows, D) with the addend, and its norm, in the addend's dtype.

    Args:
        addend: contiguous.
        gain: as of ``normed``.
    """
    z, y = torch.empty_like(addend), torch.empty_like(addend)
    rows, settings = rows_of(y), _settings(y)
    tensors = parts, gain.contiguous(), addend, z, y
    norm_fwd_kernel[triton.cdiv(rows, settings["M"]), len(y)](*tensors, rows, **settings, PARTS=len(parts))
    return z, y


def norm_gradients(
    x: Tensor,
    gain: Tensor,
    dy: Tensor,
    rest: Tensor | None = None,
    *,
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of x, plus the rest, and of the gain; the latter are parts (R, programs, D) of a sum.

    Args:
        x, gain: as of ``normed``.
        dy: gradient of the result, or parts of it with a leading axis.
        rest: further gradient of x.
        before: z and a gain, if x is the norm of z. Then the gradient of z takes the place of that of x, and parts of
            the gradient of this gain follow.
    """
    x, gain, dy, rest = contiguous(x, gain, dy, rest)
    z, z_gain = contiguous(*before) if before else (None, None)
    rows, settings = rows_of(x), _settings(x)
    programs = min(triton.cdiv(rows, settings["M"]), triton.cdiv(1024, len(x)))
    dx = torch.empty_like(x)
    dgains = [gain.new_empty(len(x), programs, x.shape[-1]) for _ in range(2 if before else 1)]
    norm_bwd_kernel[programs, len(x)](
        *(x, gain, dy, rest, z, z_gain, dx, *(*dgains, None)[:2], rows),
        **settings,
        PARTS=dy.numel() // x.numel(),
    )
    return dx, *dgains


def _settings(x: Tensor) -> Settings:
    """Settings of a launch over the rows of x."""
    D = x.shape[-1]
    E = triton.next_power_of_2(D)
    return {"D": D, "E": E, "M": max(1, 4096 // E)}
