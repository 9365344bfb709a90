"""Calls of matrix products and kernels on layers that are a stride apart, and the tiles of the kernels."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.rt.wavefront.schedule import CHUNK

# Tiles, the fastest of those tried on an H200.
CHUNK_TILE: dict[str, Any] = {"C": CHUNK, "J": 16, "num_warps": 1}
ATTEND: dict[str, Any] = {"G": 1, "num_warps": 1}
ROW: dict[str, Any] = {"num_warps": 4}
BEGIN_BWD: dict[str, Any] = {"C": 4, "num_warps": 4}
GELU: dict[str, Any] = {"W": 1024, "num_warps": 4}


def row_tile(D: int) -> dict[str, Any]:
    """Tile of kernels that take whole rows of D channels."""
    return {"D": D, "E": triton.next_power_of_2(D), **ROW}


def group_tile(group: int, head_dim: int) -> dict[str, Any]:
    """Tile of a group's queries: as many pairs at once as fit into the shared memory of smaller GPUs."""
    return {"C": group, "J": min(64, 4096 // head_dim), "num_warps": group // 16}


def position_tile(count: int) -> int:
    """Number of positions of the smallest tile for ``count`` positions."""
    return max(2, triton.next_power_of_2(count))


def strided(**tensors: Tensor | None) -> dict[str, Any]:
    """Arguments ``x_ptr`` and ``x_stride`` of a kernel for each tensor x (L, ...); the stride is between layers."""
    arguments: dict[str, Any] = {}
    for name, y in tensors.items():
        arguments[f"{name}_ptr"] = y
        arguments[f"{name}_stride"] = 0 if y is None else y.stride(0)
    return arguments


def product(y: Tensor, w_LIO: Tensor, out: Tensor) -> None:
    """Multiply rows y (L, ..., I) by each layer's matrix, into out (L, ..., O)."""
    y_LMI, out_LMO = _matrices(y), _matrices(out)
    if len(y_LMI) == 1:
        torch.mm(y_LMI[0], w_LIO[0], out=out_LMO[0])
    else:
        torch.bmm(y_LMI, w_LIO, out=out_LMO)


def add_outer_products(total_LIJ: Tensor, left: Tensor, right: Tensor) -> None:
    """Add each layer's sum over rows of ``left_i right_j`` to a float32 total; left (L, ..., I), right (L, ..., J)."""
    left_LMI, right_LMJ = _matrices(left), _matrices(right)
    if left.dtype == torch.float32:
        torch.baddbmm(total_LIJ, left_LMI.mT, right_LMJ, out=total_LIJ)
    elif not isinstance(total_LIJ, FakeTensor):  # whose baddbmm lacks out_dtype
        torch.baddbmm(total_LIJ, left_LMI.mT, right_LMJ, out_dtype=torch.float32, out=total_LIJ)


def copy_positions(out: Tensor, y: Tensor) -> None:
    """Copy the positions (axis 1) that both tensors have; further positions of ``out`` become zero."""
    count = min(out.shape[1], y.shape[1])
    out[:, :count].copy_(y[:, :count])
    out[:, count:].zero_()


def _matrices(y: Tensor) -> Tensor:
    """Each layer's rows as a matrix, without a copy."""
    return y.view(len(y), -1, y.shape[-1])
