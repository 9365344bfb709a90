"""Products of activations and gradients over all rows, and sums of their groups, as Triton kernels.

They compute the gradients of weights. On small models they are bound by the number of launches and by how many
multiprocessors a product fills. There are no atomics, so results are bitwise reproducible. Tensors carry a leading run
axis R.

    name         shape                         written by               read by
    left_i       (R, rows, I_i)                caller                   rows_products
    right_i      (R, rows, J_i)                caller                   rows_products
    out          (R, groups, sum of I J)       rows_products            group_sum        products side by side, float32
    parts        (R, groups, N)                out or other kernels     group_sum        float32
    sum          (R, N)                        group_sum                caller           float32
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM_ELEMENTS = 8192
"""Number of elements that a program of ``group_sum_kernel`` reads at a time."""
PROGRAMS = 132
"""Number of programs of ``rows_products_kernel`` that run at the same time on an H200."""
ROW_BYTES = 128
"""Rows that ``rows_products_kernel`` reads at a time, times bytes per element; float32 also fits into 99 KiB."""
LEAST_ROWS = 1024
"""Least number of rows of a group in a product by the library; with fewer, the sum over groups costs more time."""
ROWS_PRODUCTS = {"num_warps": 4, "num_stages": 3}


@triton.jit
def group_sum_kernel(
    parts_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    groups: tl.tensor,
    N: tl.tensor,
    G: tl.constexpr,
    W: tl.constexpr,
):
    """Sum W columns of parts over the groups.

    1. Add up G groups at a time.
    2. Write the sum over these G rows.
    """
    # 1. Groups.
    run = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * W + tl.arange(0, W)
    sum_GW = tl.zeros([G, W], tl.float32)
    for first in range(0, groups, G):
        g = first + tl.arange(0, G)
        here_GW = (g < groups)[:, None] & (n < N)[None, :]
        sum_GW += tl.load(parts_ptr + (run * groups + g)[:, None] * N + n[None, :], here_GW, 0.0)

    # 2. Sum.
    tl.store(sum_ptr + run * N + n, tl.sum(sum_GW, 0), n < N)


@triton.jit
def rows_products_kernel(
    left0_ptr: tl.tensor,
    right0_ptr: tl.tensor,
    left1_ptr: tl.tensor,
    right1_ptr: tl.tensor,
    left2_ptr: tl.tensor,
    right2_ptr: tl.tensor,
    left3_ptr: tl.tensor,
    right3_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    I0: tl.tensor,
    J0: tl.tensor,
    I1: tl.tensor,
    J1: tl.tensor,
    I2: tl.tensor,
    J2: tl.tensor,
    I3: tl.tensor,
    J3: tl.tensor,
    S: tl.constexpr,
    N: tl.constexpr,
):
    """Compute a tile of S x S of one of four products left_i^T right_i over the rows of a group.

    1. Find the product to which this program's tile belongs.
    2. Find the rows of this program's group.
    3. Add up the products of N rows at a time.
    4. Write the tile.
    """
    # 1. Product: tiles are numbered through all four.
    tile = tl.program_id(0)
    group = tl.program_id(1)
    run = tl.program_id(2).to(tl.int64)
    out_ptr += (run * tl.num_programs(1) + group) * (I0 * J0 + I1 * J1 + I2 * J2 + I3 * J3)
    left_ptr, right_ptr, I, J = left0_ptr, right0_ptr, I0, J0
    tiles = tl.cdiv(I0, S) * tl.cdiv(J0, S)
    if tile >= tiles:
        tile -= tiles
        out_ptr += I0 * J0
        left_ptr, right_ptr, I, J = left1_ptr, right1_ptr, I1, J1
        tiles = tl.cdiv(I1, S) * tl.cdiv(J1, S)
        if tile >= tiles:
            tile -= tiles
            out_ptr += I1 * J1
            left_ptr, right_ptr, I, J = left2_ptr, right2_ptr, I2, J2
            tiles = tl.cdiv(I2, S) * tl.cdiv(J2, S)
            if tile >= tiles:
                tile -= tiles
                out_ptr += I2 * J2
                left_ptr, right_ptr, I, J = left3_ptr, right3_ptr, I3, J3

    # 2. Rows: groups hold a multiple of N rows, but for the last one.
    size = tl.cdiv(tl.cdiv(rows, tl.num_programs(1)), N) * N
    count = tl.minimum(size, rows - group * size)
    left_ptr += (run * rows + group * size) * I
    right_ptr += (run * rows + group * size) * J

    # 3. Sum over rows.
    i = tile // tl.cdiv(J, S) * S + tl.arange(0, S)
    j = tile % tl.cdiv(J, S) * S + tl.arange(0, S)
    sum_IJ = tl.zeros([S, S], tl.float32)
    n = tl.arange(0, N)
    for first in range(0, count, N):
        here_N1 = (first + n < count)[:, None]
        left_NI = tl.load(left_ptr + (n[:, None] * I + i[None, :]), here_N1 & (i < I)[None, :], 0.0)
        right_NJ = tl.load(right_ptr + (n[:, None] * J + j[None, :]), here_N1 & (j < J)[None, :], 0.0)
        left_ptr += N * I
        right_ptr += N * J
        sum_IJ = tl.dot(tl.trans(left_NI), right_NJ, sum_IJ, input_precision="ieee")

    # 4. Tile.
    tl.store(out_ptr + i[:, None] * J + j[None, :], sum_IJ, (i < I)[:, None] & (j < J)[None, :])


def rows_products(*pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Sums over all rows of the outer products of two tensors' rows, for up to four pairs of tensors.

    Rows are split into groups, so that small products fill a GPU; the sums of the groups are added up afterwards. If
    each product fills the GPU, or there is only one, the library's products are used, which are as fast or faster.

    Args:
        pairs: operands left (R, ..., I) and right (R, ..., J), all with the same number of rows.

    Returns:
        ``left^T right`` (R, I, J) in float32 for each pair.
    """
    R, rows = len(pairs[0][0]), pairs[0][0][0, ..., 0].numel()
    sizes = [(left.shape[-1], right.shape[-1]) for left, right in pairs]
    S = 128 if min(map(min, sizes)) >= 128 else 64
    tiles = sum(triton.cdiv(I, S) * triton.cdiv(J, S) for I, J in sizes)
    if len(pairs) == 1 or tiles * R > PROGRAMS:
        return [_rows_product(*pair) for pair in pairs]

    # One launch for all pairs; absent pairs are replaced by the first pair with sizes of zero.
    groups = min(PROGRAMS // (tiles * R), 32)
    out = pairs[0][0].new_empty(R, groups, sum(I * J for I, J in sizes), dtype=torch.float32)
    operands = [y.contiguous() for pair in pairs for y in pair]
    absent = 4 - len(pairs)
    rows_products_kernel[tiles, groups, R](
        *operands,
        *operands[:2] * absent,
        out,
        rows,
        *(n for size in sizes for n in size),
        *(0, 0) * absent,
        S=S,
        N=ROW_BYTES // operands[0].element_size(),
        **ROWS_PRODUCTS,
    )

    products = group_sum(out).split([I * J for I, J in sizes], 1)
    return [product.unflatten(1, size) for product, size in zip(products, sizes, strict=True)]


def _rows_product(left_RNI: Tensor, right_RNJ: Tensor) -> Tensor:
    """One product (R, I, J) by the library: sums over the rows of each group, then over the groups."""
    R, B = left_RNI.shape[:2]
    rows = left_RNI[0, ..., 0].numel()
    size = R * max(left_RNI.shape[-1] * right_RNJ.shape[-1], 2**16)
    most = max(1, min(2**22 // size, rows // LEAST_ROWS))
    groups = next(n for n in (32, 16, 8, 4, 2, 1) if B % n == 0 and n <= most)
    left, right = (y.reshape(R * groups, -1, y.shape[-1]) for y in (left_RNI, right_RNJ))

    if left.is_cuda and left.dtype != torch.float32:
        out = torch.bmm(left.mT, right, out_dtype=torch.float32)
    else:
        out = torch.bmm(left.mT.float(), right.float())
    return group_sum(out.view(R, groups, *out.shape[1:]))


def group_sum(parts: Tensor) -> Tensor:
    """Sum over the groups of (R, groups, ...), float32."""
    R, groups, *shape = parts.shape
    if groups <= 1:
        return parts[:, 0] if groups else parts.sum(1)

    N, G = parts[0, 0].numel(), min(triton.next_power_of_2(groups), 512)
    W = SUM_ELEMENTS // G
    out = parts.new_empty(R, *shape)
    group_sum_kernel[triton.cdiv(N, W), R](parts, out, groups, N, G=G, W=W)
    return out


def through_gain(product_RED: Tensor, w_RED: Tensor, gain_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a weight and of the gain before it, for y = W (g n).

    Args:
        product_RED: dy n^T, the product of the gradients of y and the normed rows n before their gain.
        w_RED: the weight W.
        gain_RD: the gain g.

    Returns:
        Gradients of W (R, E, D), which is (dy n^T) g, and of g (R, D), which is the column sums of W (dy n^T).
    """
    return product_RED * gain_RD[:, None], group_sum(product_RED * w_RED)
