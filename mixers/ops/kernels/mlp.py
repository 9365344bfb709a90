"""Fused kernels of the residual MLP.

name      shape                  written by          read by
x         (R, rows, D)           caller              both kernels        residual stream
y         (R, rows, D)           caller              both kernels        output of the layer's mixer
gain      (R, D)                 caller              both kernels        float32
up        (R, F, D)              caller              both kernels
down      (R, D, F)              caller              both kernels
z         (R, rows, D)           mlp_fwd             caller
dz        (R, rows, D)           caller              mlp_bwd
dx, dy    (R, rows, D)           mlp_bwd             caller
n         (R, rows, D)           mlp_bwd             rows_products       normed input of the MLP
g         (R, rows, F)           mlp_bwd             rows_products       hidden layer after its GELU
dh        (R, rows, F)           mlp_bwd             rows_products       gradient of it before its GELU
dout      (R, rows, D)           mlp_bwd             rows_products       gradient of the MLP's output
dgain     (R, programs, D)       mlp_bwd             group_sum           float32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import contiguous, gelu_slope, normal_cdf, rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Tensors

MLP_FWD = {"M": 64, "W": 64, "num_warps": 4}

MLP_BWD = {"M": 64, "W": 32, "num_warps": 4}


@triton.jit
def mlp_fwd_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    up_ptr: tl.tensor,
    down_ptr: tl.tensor,
    z_ptr: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
):
    """Compute z for M rows, W columns of the hidden layer at a time.

    1. Read the rows: u = x + scale y.
    2. Normalise: n = gain u / rms(u).
    3. For W columns at a time: out += down gelu(up n).
    4. Write z = u + scale out.
    """
    # 1. Rows.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    live_M1 = (m < rows)[:, None]
    at_MD = (run * rows + m)[:, None] * D + d[None, :]
    u_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    u_MD += scale * tl.load(y_ptr + at_MD, live_M1, 0.0).to(tl.float32)

    # 2. Norm.
    gain_D = tl.load(gain_ptr + run * D + d)
    n_MD = (u_MD * rms(u_MD, D)[:, None] * gain_D[None, :]).to(up_ptr.dtype.element_ty)

    # 3. Hidden layer.
    up_ptr += run * F * D
    down_ptr += run * F * D
    out_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        up_DW = tl.load(up_ptr + (f + w)[None, :] * D + d[:, None])
        h_MW = tl.dot(n_MD, up_DW, input_precision="ieee")
        below_MW, _ = normal_cdf(h_MW)
        down_WD = tl.load(down_ptr + d[None, :] * F + (f + w)[:, None])
        out_MD = tl.dot((h_MW * below_MW).to(n_MD.dtype), down_WD, out_MD, input_precision="ieee")

    # 4. Outputs.
    tl.store(z_ptr + at_MD, u_MD + scale * out_MD, live_M1)


@triton.jit
def mlp_bwd_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    up_ptr: tl.tensor,
    down_ptr: tl.tensor,
    dz_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    n_ptr: tl.tensor,
    dh_ptr: tl.tensor,
    dout_ptr: tl.tensor,
    g_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
):
    """Gradients of x and y for M rows; the products of (dh, n) and (dout, g) are those of up and down.

    1. Compute u and n again; write n.
    2. Read dz; write dout = scale dz.
    3. For W columns at a time:
       a. compute h = up n again;
       b. write g = gelu(h) and its gradient times its slope, dh;
       c. add dh to the gradient of n.
    4. Write the sum for the gain, and dx = dz + gradient of u, and dy = scale dx.
    """
    # 1. Norm.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    live_M1 = (m < rows)[:, None]
    row_M1 = (run * rows + m)[:, None]
    at_MD = row_M1 * D + d[None, :]
    u_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    u_MD += scale * tl.load(y_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    r_M = rms(u_MD, D)
    normed_MD = u_MD * r_M[:, None]
    dtype = up_ptr.dtype.element_ty
    n_MD = (normed_MD * gain_D[None, :]).to(dtype)
    tl.store(n_ptr + at_MD, n_MD, live_M1)

    # 2. Gradient of the MLP's output.
    dz_MD = tl.load(dz_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    dout_MD = (dz_MD * scale).to(dtype)
    tl.store(dout_ptr + at_MD, dout_MD, live_M1)

    up_ptr += run * F * D
    down_ptr += run * F * D
    dn_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        # 3a. Hidden layer, and the gradient of g.
        up_WD = tl.load(up_ptr + (f + w)[:, None] * D + d[None, :])
        down_DW = tl.load(down_ptr + d[:, None] * F + (f + w)[None, :])
        h_MW = tl.dot(n_MD, tl.trans(up_WD), input_precision="ieee")
        dg_MW = tl.dot(dout_MD, down_DW, input_precision="ieee")

        # 3b. GELU.
        below_MW, bell_MW = normal_cdf(h_MW)
        at_MW = row_M1 * F + (f + w)[None, :]
        tl.store(g_ptr + at_MW, h_MW * below_MW, live_M1)
        dh_MW = (dg_MW * gelu_slope(h_MW, below_MW, bell_MW)).to(dtype)
        tl.store(dh_ptr + at_MW, dh_MW, live_M1)

        # 3c. Input of the MLP.
        dn_MD = tl.dot(dh_MW, up_WD, dn_MD, input_precision="ieee")

    # 4. Gain, residual stream and mixer.
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + d, tl.sum(dn_MD * normed_MD, 0))
    dx_MD = dz_MD + rms_bwd(dn_MD * gain_D[None, :], normed_MD, r_M, D)
    tl.store(dx_ptr + at_MD, dx_MD, live_M1)
    tl.store(dy_ptr + at_MD, dx_MD * scale, live_M1)


def fits_mlp(D: int, F: int) -> bool:
    """Whether ``mlp_method`` takes these widths."""
    return D in (32, 64, 128) and F % 64 == 0


def mlp_method(scale: float) -> Method:
    """u = x + scale y; z = u + scale mlp(norm(u)), in the dtype of x, products in that of y.

    Tensors: x and y (R, ..., D), gain (R, D), weights of up (R, F, D) and down (R, D, F), which get the gradients, and
    these weights in the dtype of y.
    """

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        x, y, gain, up, down = contiguous(*tensors[:3], *tensors[5:])
        z = torch.empty_like(x)
        rows = rows_of(x)
        mlp_fwd_kernel[triton.cdiv(rows, MLP_FWD["M"]), len(x)](
            x, y, gain, up, down, z, rows, scale, D=x.shape[-1], F=up.shape[1], **MLP_FWD
        )
        return (z,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dz, x, y, gain, up, down = contiguous(*gradients, *tensors[:3], *tensors[5:])
        rows, F = rows_of(x), up.shape[1]
        programs = triton.cdiv(rows, MLP_BWD["M"])

        dx = torch.empty_like(x)
        dy, n, dout = (torch.empty_like(y) for _ in range(3))
        dh, g = (y.new_empty(*y.shape[:-1], F) for _ in range(2))
        dgain = gain.new_empty(len(x), programs, x.shape[-1])
        mlp_bwd_kernel[programs, len(x)](
            x, y, gain, up, down, dz, dx, dy, n, dh, dout, g, dgain, rows, scale, D=x.shape[-1], F=F, **MLP_BWD
        )
        return dx, dy, group_sum(dgain), *rows_products((dh, n), (dout, g)), None, None

    return Method(forward, backward)
