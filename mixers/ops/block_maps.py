"""Maps of blocks of channels, each by a matrix of its own, to queries, keys and values (mLSTM).

Dimensions beside those of ``mixers.base``: N blocks; I channels of a block that go in, O that come out.
"""

import torch
from torch import Tensor

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def block_maps(c_BTD: Tensor, x_BTD: Tensor, blocks_3NOI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys (..., D), maps of ``c``, and values (..., D), maps of ``x``.

    Args:
        c_BTD: what queries and keys are maps of (..., D).
        x_BTD: what values are maps of (..., D).
        blocks_3NOI: matrices of the N blocks, side by side, for queries, keys and values.
    """
    if runs_fused(x_BTD):
        from mixers.ops.kernels.block_maps import block_maps_method, fits_block_maps

        if fits_block_maps(x_BTD.shape[-1], blocks_3NOI.shape[-1]):
            q, k, v = over_runs(block_maps_method(), c_BTD.bfloat16(), x_BTD.bfloat16(), blocks_3NOI)
            return q, k, v

    q, k, v = (
        torch.einsum("...ni,noi->...no", y.unflatten(-1, (len(blocks), -1)), blocks).flatten(-2)
        for y, blocks in zip((c_BTD, c_BTD, x_BTD), blocks_3NOI, strict=True)
    )
    return q, k, v
