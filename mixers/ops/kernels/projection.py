"""Fused kernels of the projections to queries, keys and values.

name              shape                    written by          read by
x                 (R, rows, D)             caller              both kernels
gain              (R, D)                   caller              both kernels        of the norm of x, float32
w                 (R, 3, D, D)             caller              both kernels        weights of q, k, v
q_gain, k_gain    (R, D)                   caller              both kernels        with QK_NORM, float32
qkv               (3, R, rows, D)          project_fwd         caller
dq, dk, dv        (R, rows, D)             caller              project_bwd
dx                (R, rows, D)             project_bwd         caller
n                 (R, rows, D)             project_bwd         rows_products       normed rows of x
draw              (R, rows, 3 D)           project_bwd         rows_products       gradients of the products w n
dgain             (R, programs, 3, D)      project_bwd         group_sum           of all gains; of x's alone: 1, D
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.common import rms, rms_bwd, rows_of
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Tensors

PROJECT_FWD = {"M": 64, "num_warps": 4}

PROJECT_BWD = {"M": 32, "num_warps": 4}


@triton.jit
def project_fwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    w_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    D: tl.constexpr,
    QK_NORM: tl.constexpr,
    M: tl.constexpr,
):
    """Queries, keys and values of M rows; each has ``total`` elements in all.

    1. Read the rows and normalise them: n = gain x / rms(x).
    2. For q, k and v:
       a. take the product: y = w n;
       b. with QK_NORM, normalise queries and keys: y = y_gain y / rms(y);
       c. write y.
    """
    # 1. Normed rows.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    live_M1 = (m < rows)[:, None]
    at_MD = (run * rows + m)[:, None] * D + d[None, :]
    x_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    n_MD = (x_MD * rms(x_MD, D)[:, None] * gain_D[None, :]).to(w_ptr.dtype.element_ty)

    for i in tl.static_range(3):
        # 2a. Product.
        w_DD = tl.load(w_ptr + (run * 3 + i) * D * D + d[None, :] * D + d[:, None])
        y_MD = tl.dot(n_MD, w_DD, input_precision="ieee")

        # 2b. QK-norm.
        if QK_NORM and i < 2:
            y_gain_ptr = q_gain_ptr if i == 0 else k_gain_ptr
            y_MD *= rms(y_MD, D)[:, None] * tl.load(y_gain_ptr + run * D + d)[None, :]

        # 2c. Outputs.
        tl.store(qkv_ptr + i * total.to(tl.int64) + at_MD, y_MD, live_M1)


@triton.jit
def project_bwd_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    w_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    n_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    dgain_ptr: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    QK_NORM: tl.constexpr,
    M: tl.constexpr,
):
    """Gradient of M rows; the products of (draw, n) are the gradients of the weights.

    1. Read the rows and normalise them again; write n.
    2. For q, k and v:
       a. read the gradient dy of y;
       b. with QK_NORM, for queries and keys: compute y / rms(y) again, write the sum for the gain, and go back through
          the norm;
       c. write draw, the gradient of w n, and add w^T draw to the gradient of n.
    3. Write the sum for the gain of x's norm, and dx.
    """
    # 1. Normed rows.
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    live_M1 = (m < rows)[:, None]
    row_M1 = (run * rows + m)[:, None]
    at_MD = row_M1 * D + d[None, :]
    x_MD = tl.load(x_ptr + at_MD, live_M1, 0.0).to(tl.float32)
    gain_D = tl.load(gain_ptr + run * D + d)
    r_M = rms(x_MD, D)
    normed_MD = x_MD * r_M[:, None]
    n_MD = (normed_MD * gain_D[None, :]).to(w_ptr.dtype.element_ty)
    tl.store(n_ptr + at_MD, n_MD, live_M1)

    to_D = (run * tl.num_programs(0) + tl.program_id(0)) * (3 if QK_NORM else 1) * D + d
    dn_MD = tl.zeros([M, D], tl.float32)
    for i in tl.static_range(3):
        # 2a. Gradient.
        w_DD = tl.load(w_ptr + (run * 3 + i) * D * D + d[:, None] * D + d[None, :])
        dy_ptr = dq_ptr if i == 0 else (dk_ptr if i == 1 else dv_ptr)
        dy_MD = tl.load(dy_ptr + at_MD, live_M1, 0.0).to(tl.float32)

        # 2b. QK-norm.
        draw_MD = dy_MD
        if QK_NORM and i < 2:
            y_gain_ptr = q_gain_ptr if i == 0 else k_gain_ptr
            y_MD = tl.dot(n_MD, tl.trans(w_DD), input_precision="ieee")
            ry_M = rms(y_MD, D)
            normed_y_MD = y_MD * ry_M[:, None]
            tl.store(dgain_ptr + to_D + (i + 1) * D, tl.sum(dy_MD * normed_y_MD, 0))
            dnormed_y_MD = dy_MD * tl.load(y_gain_ptr + run * D + d)[None, :]
            draw_MD = rms_bwd(dnormed_y_MD, normed_y_MD, ry_M, D)

        # 2c. Product.
        draw_MD = draw_MD.to(w_DD.dtype)
        tl.store(draw_ptr + row_M1 * 3 * D + i * D + d[None, :], draw_MD, live_M1)
        dn_MD = tl.dot(draw_MD, w_DD, dn_MD, input_precision="ieee")

    # 3. Norm of x.
    tl.store(dgain_ptr + to_D, tl.sum(dn_MD * normed_MD, 0))
    tl.store(dx_ptr + at_MD, rms_bwd(dn_MD * gain_D[None, :], normed_MD, r_M, D), live_M1)


def fits_project(D: int) -> bool:
    """Whether ``project_method`` takes this width."""
    return D in (32, 64, 128)


def project_method() -> Method:
    """Queries, keys and values (R, B, T, D) in the dtype of w.

    Tensors: x (R, B, T, D), gain of its norm, gains of the norms of q and k (both None: no norm), weights of q, k, v,
    which get the gradients, and w (R, 3, D, D), the three of them in the dtype of products.
    """

    def norms(gain: Tensor, others: Sequence[Tensor | None]) -> tuple[bool, tuple[Tensor, ...]]:
        """Whether q and k are normed, and three gains; in place of an absent gain, any tensor."""
        return others[0] is not None, tuple((gain if y is None else y).contiguous() for y in (gain, *others[:2]))

    def forward(x: Tensor, gain: Tensor, *others: Any) -> tuple[Tensors, Tensors]:
        x = x.contiguous()
        normed, gains = norms(gain, others)
        w = others[-1].contiguous()
        qkv = w.new_empty(3, *x.shape)

        gain, q_gain, k_gain = gains
        rows, D = rows_of(x), x.shape[-1]
        project_fwd_kernel[triton.cdiv(rows, PROJECT_FWD["M"]), len(x)](
            x, gain, w, q_gain, k_gain, qkv, rows, x.numel(), D=D, QK_NORM=normed, **PROJECT_FWD
        )
        return qkv.unbind(), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, gain, *others = tensors
        x, w = x.contiguous(), others[-1].contiguous()
        normed, gains = norms(gain, others)
        rows, D = rows_of(x), x.shape[-1]
        programs = triton.cdiv(rows, PROJECT_BWD["M"])

        dx = torch.empty_like(x)
        n = w.new_empty(x.shape)
        draw = w.new_empty(*x.shape[:-1], 3 * D)
        dgain = gain.new_empty(len(x), programs, 3 if normed else 1, D)

        gain, q_gain, k_gain = gains
        dq, dk, dv = (y.contiguous() for y in gradients)
        inputs = x, gain, w, q_gain, k_gain, dq, dk, dv
        project_bwd_kernel[programs, len(x)](*inputs, dx, n, draw, dgain, rows, D=D, QK_NORM=normed, **PROJECT_BWD)

        dgain_x, *dgain_qk = group_sum(dgain).unbind(1)
        return dx, dgain_x, *(dgain_qk or (None, None)), *rows_products((draw, n))[0].split(D, dim=1), None

    return Method(forward, backward, outputs=3)
