"""Fused kernels of the residual MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import cast_like, normal_cdf, rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.runs import Method, Optionals, Tensors

MLP_FWD = {"M": 64, "W": 64, "num_warps": 4}

MLP_BWD = {"M": 64, "W": 32, "num_warps": 4}


@triton.jit
def mlp_fwd_kernel(
    x_ptr, y_ptr, gain_ptr, up_ptr, down_ptr, z_ptr, rows, scale,
    D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """u = x + scale y; z = u + scale mlp(norm(u)) for M rows, W columns of the hidden layer at a time."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    live_M1 = (m < rows)[:, None]
    at_MD = (run * rows + m)[:, None] * D + d[None, :]
    u_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    u_MD += scale * tl.load(y_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    n_MD = (u_MD * rms(u_MD, D)[:, None] * gain_D[None, :]).to(up_ptr.dtype.element_ty)
    up_ptr += run * F * D
    down_ptr += run * F * D
    out_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        up_DW = tl.load(up_ptr + (f + w)[None, :] * D + d[:, None])
        h_MW = tl.dot(n_MD, up_DW, input_precision="ieee")
        below_MW, _ = normal_cdf(h_MW)
        down_WD = tl.load(down_ptr + d[None, :] * F + (f + w)[:, None])
        out_MD = tl.dot((h_MW * below_MW).to(n_MD.dtype), down_WD, out_MD, input_precision="ieee")
    tl.store(z_ptr + at_MD, u_MD + scale * out_MD, live_M1)


@triton.jit
def mlp_bwd_kernel(
    x_ptr, y_ptr, gain_ptr, up_ptr, down_ptr, dz_ptr, dx_ptr, dy_ptr, n_ptr, dh_ptr, dout_ptr, g_ptr, dgain_ptr,
    rows, scale, D: tl.constexpr, F: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Gradients of x and y; (dh, n) and (dout, g), whose products are those of up and down; sums for the gain's."""
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
    u_MD *= r_M[:, None]
    cd = up_ptr.dtype.element_ty
    n_MD = (u_MD * gain_D[None, :]).to(cd)
    tl.store(n_ptr + at_MD, n_MD, live_M1)
    dz_MD = tl.load(dz_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    dout_MD = (dz_MD * scale).to(cd)
    tl.store(dout_ptr + at_MD, dout_MD, live_M1)
    up_ptr += run * F * D
    down_ptr += run * F * D
    dn_MD = tl.zeros([M, D], tl.float32)
    for f in range(0, F, W):
        up_WD = tl.load(up_ptr + (f + w)[:, None] * D + d[None, :])
        down_DW = tl.load(down_ptr + d[:, None] * F + (f + w)[None, :])
        h_MW = tl.dot(n_MD, tl.trans(up_WD), input_precision="ieee")
        dg_MW = tl.dot(dout_MD, down_DW, input_precision="ieee")
        below_MW, bell_MW = normal_cdf(h_MW)
        at_MW = row_M1 * F + (f + w)[None, :]
        tl.store(g_ptr + at_MW, h_MW * below_MW, live_M1)
        dh_MW = (dg_MW * (below_MW + h_MW * bell_MW * 0.3989422804014327)).to(cd)
        tl.store(dh_ptr + at_MW, dh_MW, live_M1)
        dn_MD = tl.dot(dh_MW, up_WD, dn_MD, input_precision="ieee")
    tl.store(dgain_ptr + (run * tl.num_programs(0) + tl.program_id(0)) * D + d, tl.sum(dn_MD * u_MD, 0))
    dx_MD = dz_MD + rms_bwd(dn_MD * gain_D[None, :], u_MD, r_M, D)
    tl.store(dx_ptr + at_MD, dx_MD, live_M1)
    tl.store(dy_ptr + at_MD, dx_MD * scale, live_M1)


def fits_mlp(D: int, F: int) -> bool:
    """Whether ``mlp_method`` takes these widths."""
    return D in (32, 64, 128) and F % 64 == 0


def mlp_method(scale: float) -> Method:
    """u = x + scale y; z = u + scale mlp(norm(u)), in the dtype of x, products in that of y.

    Tensors: x and y (R, ..., D), gain (R, D), weights of up (R, F, D) and down (R, D, F).
    """

    def forward(x: Tensor, y: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> tuple[Tensors, Tensors]:
        x, y, gain = x.contiguous(), y.contiguous(), gain.contiguous()
        z, rows, tile = torch.empty_like(x), rows_of(x), MLP_FWD
        mlp_fwd_kernel[triton.cdiv(rows, tile["M"]), len(x)](
            x, y, gain, cast_like(up, y), cast_like(down, y), z, rows, scale, D=x.shape[-1], F=up.shape[1], **tile
        )
        return (z,), ()

    def backward(gradients: Tensors, tensors: Tensors, outputs: Tensors, saved: Tensors) -> Optionals:
        dz, x, y, gain = (y.contiguous() for y in (*gradients, *tensors[:3]))
        up, down = (cast_like(w, y) for w in tensors[3:])
        rows, F, tile = rows_of(x), up.shape[1], MLP_BWD
        programs = triton.cdiv(rows, tile["M"])
        dx, (dy, n, dout) = torch.empty_like(x), (torch.empty_like(y) for _ in range(3))
        dh, g = (y.new_empty(*y.shape[:-1], F) for _ in range(2))
        dgain = gain.new_empty(len(x), programs, x.shape[-1])
        mlp_bwd_kernel[programs, len(x)](
            x, y, gain, up, down, dz, dx, dy, n, dh, dout, g, dgain, rows, scale, D=x.shape[-1], F=F, **tile
        )
        return dx, dy, group_sum(dgain), *rows_products((dh, n), (dout, g))

    return Method(forward, backward)
