"""Fused kernels of rotated queries and keys, one pair of them a position.

    name       shape                 written by     read by
    q, k       (R, B, T, N)          caller         both kernels    shared by the heads
    biases     (R, H, N)             caller         both kernels    float32, of q and of k
    angle      (R, B, T, H, A)       caller         both kernels    float32
    turned     (R, B, T, H, N)       rotate_fwd     caller          q; and k of the position before
    product    (R, B, T, H)          rotate_fwd     caller          of q and k of a position, float32
    dbiases    (R, tiles, 2, H, N)   rotate_bwd     group_sum       of q and of k, float32

Gradients have the names of what they belong to, with a d. A program takes M rows, positions of any sequence, head by
head. A channel i and its partner i + N / 2 are in two tiles (M, E), where E is N / 2 padded to a power of two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixers.ops.kernels.products import group_sum
from mixers.ops.method import Method, Optionals, Tensors


@triton.jit
def _halves(ptr: tl.tensor, here: tl.tensor, N: tl.constexpr):
    """Load channels and their partners in float32."""
    return tl.load(ptr, here, 0.0).to(tl.float32), tl.load(ptr + N // 2, here, 0.0).to(tl.float32)


@triton.jit
def _rows(rows: tl.tensor, N: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """Run, rows of a program, their numbers among those of all runs, channels, and whether they exist."""
    run = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    e_1E = tl.arange(0, E)[None, :]
    return run, m, (run * rows + m)[:, None], e_1E, (m < rows)[:, None] & (e_1E < N // 2)


@triton.jit
def _turned(y_ME: tl.tensor, z_ME: tl.tensor, cos_ME: tl.tensor, sin_ME: tl.tensor):
    """Channels and their partners after the rotation."""
    return y_ME * cos_ME - z_ME * sin_ME, z_ME * cos_ME + y_ME * sin_ME


@triton.jit(do_not_specialize=["rows", "T"])
def rotate_fwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_bias_ptr: tl.tensor,
    k_bias_ptr: tl.tensor,
    angle_ptr: tl.tensor,
    turned_q_ptr: tl.tensor,
    turned_k_ptr: tl.tensor,
    product_ptr: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Rotate M queries, and the keys of the rows before them.

    1. Read queries and keys of the rows, and keys of the rows before, which the first row of a sequence lacks.
    2. For each head:
       a. add the biases, and write the products;
       b. rotate and write the queries;
       c. rotate the keys before by their own angles and write them, zeros at the first row.
    """
    # 1. Rows.
    run, m, row_M1, e_1E, here_ME = _rows(rows, N, E, M)
    later_ME = here_ME & (m % T > 0)[:, None]
    qy_ME, qz_ME = _halves(q_ptr + row_M1 * N + e_1E, here_ME, N)
    ky_ME, kz_ME = _halves(k_ptr + row_M1 * N + e_1E, here_ME, N)
    by_ME, bz_ME = _halves(k_ptr + (row_M1 - 1) * N + e_1E, later_ME, N)

    for h in range(H):
        # 2a. Products.
        at_1E = (run * H + h) * N + e_1E
        q_bias_y, q_bias_z = _halves(q_bias_ptr + at_1E, e_1E < N // 2, N)
        k_bias_y, k_bias_z = _halves(k_bias_ptr + at_1E, e_1E < N // 2, N)
        y_ME, z_ME = qy_ME + q_bias_y, qz_ME + q_bias_z
        product_M = tl.sum(y_ME * (ky_ME + k_bias_y) + z_ME * (kz_ME + k_bias_z), 1)
        tl.store(product_ptr + (run * rows + m) * H + h, product_M, m < rows)

        # 2b. Queries.
        angle_ME = tl.load(angle_ptr + (row_M1 * H + h) * A + e_1E, here_ME & (e_1E < A), 0.0)
        y_ME, z_ME = _turned(y_ME, z_ME, tl.cos(angle_ME), tl.sin(angle_ME))
        to_ME = (row_M1 * H + h) * N + e_1E
        tl.store(turned_q_ptr + to_ME, y_ME, here_ME)
        tl.store(turned_q_ptr + to_ME + N // 2, z_ME, here_ME)

        # 2c. Keys.
        angle_ME = tl.load(angle_ptr + ((row_M1 - 1) * H + h) * A + e_1E, later_ME & (e_1E < A), 0.0)
        y_ME, z_ME = _turned(by_ME + k_bias_y, bz_ME + k_bias_z, tl.cos(angle_ME), tl.sin(angle_ME))
        tl.store(turned_k_ptr + to_ME, tl.where(later_ME, y_ME, 0.0), here_ME)
        tl.store(turned_k_ptr + to_ME + N // 2, tl.where(later_ME, z_ME, 0.0), here_ME)


@triton.jit(do_not_specialize=["rows", "T"])
def rotate_bwd_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_bias_ptr: tl.tensor,
    k_bias_ptr: tl.tensor,
    angle_ptr: tl.tensor,
    dturned_q_ptr: tl.tensor,
    dturned_k_ptr: tl.tensor,
    dproduct_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dbiases_ptr: tl.tensor,
    dangle_ptr: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    A: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """Gradients of M rows; those of their keys come from the rows after, which the last row of a sequence lacks.

    1. Read queries and keys.
    2. For each head:
       a. add the biases;
       b. turn the gradients of the rotated queries and keys back;
       c. write the gradients of the angles, y dz - z dy for a channel y with its partner z;
       d. add those of the products;
       e. add the gradients to those of queries and keys, and write their sums over the rows for the biases.
    3. Write the gradients of queries and keys.
    """
    # 1. Rows.
    run, m, row_M1, e_1E, here_ME = _rows(rows, N, E, M)
    earlier_ME = here_ME & (m % T < T - 1)[:, None]
    at_ME = row_M1 * N + e_1E
    qy_ME, qz_ME = _halves(q_ptr + at_ME, here_ME, N)
    ky_ME, kz_ME = _halves(k_ptr + at_ME, here_ME, N)
    dqy_ME = tl.zeros([M, E], tl.float32)
    dqz_ME = tl.zeros([M, E], tl.float32)
    dky_ME = tl.zeros([M, E], tl.float32)
    dkz_ME = tl.zeros([M, E], tl.float32)

    for h in range(H):
        # 2a. Biases.
        at_1E = (run * H + h) * N + e_1E
        q_bias_y, q_bias_z = _halves(q_bias_ptr + at_1E, e_1E < N // 2, N)
        k_bias_y, k_bias_z = _halves(k_bias_ptr + at_1E, e_1E < N // 2, N)
        y_ME, z_ME, v_ME, w_ME = qy_ME + q_bias_y, qz_ME + q_bias_z, ky_ME + k_bias_y, kz_ME + k_bias_z

        # 2b. Rotations.
        to_ME = (row_M1 * H + h) * N + e_1E
        angle_ME = tl.load(angle_ptr + (row_M1 * H + h) * A + e_1E, here_ME & (e_1E < A), 0.0)
        cos_ME, sin_ME = tl.cos(angle_ME), -tl.sin(angle_ME)
        dy_ME, dz_ME = _halves(dturned_q_ptr + to_ME, here_ME, N)
        dv_ME, dw_ME = _halves(dturned_k_ptr + to_ME + H * N, earlier_ME, N)
        dy_ME, dz_ME = _turned(dy_ME, dz_ME, cos_ME, sin_ME)
        dv_ME, dw_ME = _turned(dv_ME, dw_ME, cos_ME, sin_ME)

        # 2c. Angles.
        dangle_ME = y_ME * dz_ME - z_ME * dy_ME + v_ME * dw_ME - w_ME * dv_ME
        tl.store(dangle_ptr + (row_M1 * H + h) * A + e_1E, dangle_ME, here_ME & (e_1E < A))

        # 2d. Products.
        dproduct_M1 = tl.load(dproduct_ptr + (run * rows + m) * H + h, m < rows, 0.0)[:, None]
        dy_ME, dz_ME = dy_ME + dproduct_M1 * v_ME, dz_ME + dproduct_M1 * w_ME
        dv_ME, dw_ME = dv_ME + dproduct_M1 * y_ME, dw_ME + dproduct_M1 * z_ME

        # 2e. Sums.
        dqy_ME, dqz_ME, dky_ME, dkz_ME = dqy_ME + dy_ME, dqz_ME + dz_ME, dky_ME + dv_ME, dkz_ME + dw_ME
        e = tl.arange(0, E)
        to_ptr = dbiases_ptr + ((run * tl.num_programs(0) + tl.program_id(0)) * 2 * H + h) * N + e
        tl.store(to_ptr, tl.sum(dy_ME, 0), e < N // 2)
        tl.store(to_ptr + N // 2, tl.sum(dz_ME, 0), e < N // 2)
        tl.store(to_ptr + H * N, tl.sum(dv_ME, 0), e < N // 2)
        tl.store(to_ptr + H * N + N // 2, tl.sum(dw_ME, 0), e < N // 2)

    # 3. Queries and keys.
    tl.store(dq_ptr + at_ME, dqy_ME, here_ME)
    tl.store(dq_ptr + at_ME + N // 2, dqz_ME, here_ME)
    tl.store(dk_ptr + at_ME, dky_ME, here_ME)
    tl.store(dk_ptr + at_ME + N // 2, dkz_ME, here_ME)


def rotated_pairs_method(dtype: torch.dtype) -> Method:
    """Rotated queries, and rotated keys of the position before, in ``dtype``; products of a position's query and key.

    Tensors: q, k (R, B, T, N); their biases (R, H, N) float32; angles (R, B, T, H, A) float32.
    """

    def forward(*tensors: Tensor) -> tuple[Tensors, Tensors]:
        q, k, q_bias, k_bias, angle = (y.contiguous() for y in tensors)
        tiles, settings = _launch(q, angle)
        shape = (*angle.shape[:-1], q.shape[-1])
        turned = [q.new_empty(shape, dtype=dtype) for _ in range(2)]
        product = angle.new_empty(angle.shape[:-1])
        rotate_fwd_kernel[tiles, len(q)](q, k, q_bias, k_bias, angle, *turned, product, **settings)
        return (*turned, product), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        given = q, k, q_bias, _, angle = [y.contiguous() for y in tensors]
        tiles, settings = _launch(q, angle)
        dq, dk, dangle = (torch.empty_like(y) for y in (q, k, angle))
        dbiases = angle.new_empty(len(q), tiles, 2, *q_bias.shape[1:])
        dresults = [y.contiguous() for y in gradients]
        rotate_bwd_kernel[tiles, len(q)](*given, *dresults, dq, dk, dbiases, dangle, **settings)
        return dq, dk, *group_sum(dbiases).unbind(1), dangle

    return Method(forward, backward, outputs=3)


def _launch(q: Tensor, angle: Tensor) -> tuple[int, dict[str, int]]:
    """Tiles of a run, and arguments of both kernels."""
    _, B, T, N = q.shape
    E = triton.next_power_of_2(N // 2)
    M = max(1, 1024 // E)
    sizes = {"H": angle.shape[-2], "N": N, "A": angle.shape[-1], "E": E, "M": M}
    return triton.cdiv(B * T, M), {"rows": B * T, "T": T, **sizes}
