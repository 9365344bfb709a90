"""Forward and backward of the published training method: exact tiling, in PyTorch.

Oncescu et al. 2026 (arXiv:2604.21215), Algorithms 1 and 2 and section "The backward pass". The key-value cache is
preallocated and written in place, which autograd does not support; therefore the backward pass is written by hand. Its
reverse loop computes only the gradients on which the previous position depends.

All tensors have a run axis. Inside this package, the first axis is that of positions: (T, R, B, D).
"""

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor
from torch.func import vmap

from mixers.ops.numerics import no_autocast
from mixers.rt import naive
from mixers.rt.naive import Weights
from mixers.rt.tiled.attention import (
    QueryGradients,
    Tile,
    add_query_gradients,
    attend_own_block,
    own_block_gradients,
    update_tile,
    update_tile_backward,
)
from mixers.rt.tiled.positionwise import PositionwiseBackward, feed_forward, key_value

Saved = tuple[Tensor, ...]


def tiles(blocks: int) -> Iterator[Tile]:
    """Yield for t = 1..blocks-1 the tile, in blocks, that opens when t blocks are done (Algorithm 1).

    With P the largest power of two that divides t, the next P blocks of queries attend to the last P blocks of keys.
    """
    for t in range(1, blocks):
        size = t & -t
        yield Tile(keys=slice(t - size, t), queries=slice(t, min(t + size, blocks)))


def tiled_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, Saved]:
    """Algorithm 1, in blocks of b positions (section 9); b = 1 is the algorithm as published.

    1. Scale the queries.
    2. Let every query attend to the temporary pairs of its own block, which does not depend on the loop.
    3. For each block:
       a. let the tile's queries attend to the persistent pairs that are complete since the last block (Algorithm 2);
       b. attention outputs a = o / l;
       c. outputs z, by the output projection and the MLP;
       d. persistent pairs k, v of z.
    4. Keep the logarithms of the softmax's denominators for the backward.

    Args:
        x_RBTD, q_RBTD, k_RBTD, v_RBTD, weights: as in ``naive_recurrence``, each with a leading run axis.
        slopes_H, scale, block: as in ``naive_recurrence``.

    Returns:
        Outputs z (R, B, T, D), and tensors that ``tiled_backward`` takes as ``saved``.
    """
    # 1. Queries.
    q = _positions_first(_scaled(q_RBTD, len(slopes_H)))
    x, k_temp, v_temp = (_positions_first(y) for y in (x_RBTD, k_RBTD, v_RBTD))
    low = weights.map(lambda w: w.to(q.dtype))

    # 2. Own block.
    state = attend_own_block(q, k_temp, v_temp, slopes_H, block)

    # 3. Blocks in turn.
    a, z = torch.empty_like(x), torch.empty_like(x)
    k, v = torch.empty_like(k_temp), torch.empty_like(v_temp)
    blocks = _block_ranges(len(x), block)
    openings = [tile.in_positions(block, len(x)) for tile in tiles(len(blocks))]
    for c, here in enumerate(blocks):
        if c > 0:
            update_tile(state, q, k, v, slopes_H, openings[c - 1])  # a
        a[here] = (state.o_TRBHK[here] / state.l_TRBH[here, ..., None]).flatten(-2)  # b
        z[here] = feed_forward(x[here], a[here], low, scale)  # c
        k[here], v[here] = key_value(z[here], low)  # d

    # 4. Denominators.
    lse_TRBH = state.m_TRBH + state.l_TRBH.log()
    return _batch_first(z), (a, lse_TRBH, k, v)


def tiled_backward(
    dz_RBTD: Tensor,
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
    z_RBTD: Tensor,
    saved: Saved,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Section "The backward pass", in blocks of b positions.

    1. Compute all factors of the positionwise steps that depend only on the forward pass.
    2. For each block, last first:
       a. let the keys of the tile that opened after it collect dk, dv from the tile's queries;
       b. add the contribution of the block's persistent pairs to dz;
       c. gradients dx and da from dz;
       d. delta = sum of a da over the channels of a head.
    3. Gradients of queries and temporary pairs, all positions at once.
    4. Gradients of weights, all positions at once.

    Args:
        dz_RBTD: gradients of the outputs.
        x_RBTD, q_RBTD, k_RBTD, v_RBTD, weights, slopes_H, scale, block: as in ``tiled_forward``.
        z_RBTD: outputs of ``tiled_forward``.
        saved: further results of ``tiled_forward``.

    Returns:
        Gradients of x, q, k, v (each R, B, T, D) and of the weights.
    """
    heads = len(slopes_H)
    q = _positions_first(_scaled(q_RBTD, heads))
    x, z, k_temp, v_temp = (_positions_first(y) for y in (x_RBTD, z_RBTD, k_RBTD, v_RBTD))
    a, lse_TRBH, k, v = saved
    dz = _positions_first(dz_RBTD).to(a.dtype, copy=True)

    # 1. Factors that depend only on the forward pass.
    positionwise = PositionwiseBackward(x, a, z, weights.map(lambda w: w.to(q.dtype)), scale)

    # 2. Blocks in reverse.
    dk, dv = torch.zeros_like(k, dtype=a.dtype), torch.zeros_like(v, dtype=a.dtype)
    dx = torch.empty_like(a)
    queries = QueryGradients(q, lse_TRBH, da_TRBD=torch.empty_like(a), delta_TRBH=torch.empty_like(lse_TRBH))
    blocks = _block_ranges(len(x), block)
    openings = [tile.in_positions(block, len(x)) for tile in tiles(len(blocks))]
    for c, here in reversed(list(enumerate(blocks))):
        if c + 1 < len(blocks):
            update_tile_backward(dk, dv, queries, k, v, slopes_H, openings[c])  # a
        dz[here] += positionwise.through_key_value(here, dk[here], dv[here])  # b
        dx[here], queries.da_TRBD[here] = positionwise.through_feed_forward(here, dz[here])  # c
        a_da_RBD = queries.da_TRBD[here] * a[here]
        queries.delta_TRBH[here] = a_da_RBD.unflatten(-1, (heads, -1)).sum(-1)  # d

    # 3. Queries and temporary pairs.
    dq, dk_temp, dv_temp = own_block_gradients(queries, k_temp, v_temp, slopes_H, block)
    add_query_gradients(dq, queries, k, v, slopes_H, block)
    dq = _scaled(dq, heads)

    # 4. Weights.
    dweights = _weight_gradients(
        x=x, a=a, z=z, dz=dz, dk=dk, dv=dv, weights=weights, scale=scale, product_dtype=q.dtype
    )
    return _batch_first(dx), _batch_first(dq.to(q)), _batch_first(dk_temp.to(q)), _batch_first(dv_temp.to(q)), dweights


def _weight_gradients(
    *,
    x: Tensor,
    a: Tensor,
    z: Tensor,
    dz: Tensor,
    dk: Tensor,
    dv: Tensor,
    weights: Weights,
    scale: float,
    product_dtype: torch.dtype,
) -> Weights:
    """Return the gradients of the weights by one backward pass of the oracle's formulas over all positions.

    Args:
        x, a, z: inputs, attention outputs and outputs, (T, R, B, D).
        dz: complete gradients of the outputs, after the reverse loop.
        dk, dv: gradients of the persistent pairs.
        weights: weights, with a leading run axis.
        scale: factor of the residual branches.
        product_dtype: precision of the products.
    """
    x, a, z, dz, dk, dv = (rearrange(y, "t r b d -> r (b t) d") for y in (x, a, z, dz, dk, dv))
    run_axis = weights.map(lambda _: 0)
    low = product_dtype == torch.bfloat16
    products = torch.autocast(x.device.type, dtype=product_dtype) if low else no_autocast(x.device)

    with torch.enable_grad(), products:
        leaves = weights.map(lambda w: w.detach().requires_grad_())
        out = vmap(naive.feed_forward, (0, 0, run_axis, None))(x, a, leaves, scale)
        k, v = vmap(naive.key_value, (0, run_axis))(z, leaves)

    present = [w for w in leaves if w is not None]
    gradients = iter(torch.autograd.grad((out, k, v), present, (dz.to(out), dk.to(k), dv.to(v))))
    return leaves.map(lambda _: next(gradients))


def _block_ranges(length: int, block: int) -> list[slice]:
    """Positions of each block; the last block may be shorter."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _positions_first(y_RBTD: Tensor) -> Tensor:
    return rearrange(y_RBTD, "r b t d -> t r b d").contiguous()


def _batch_first(y_TRBD: Tensor) -> Tensor:
    return rearrange(y_TRBD, "t r b d -> r b t d")


def _scaled(q: Tensor, heads: int) -> Tensor:
    """Queries (..., D), or their gradients, times 1/sqrt(K)."""
    return q * (q.shape[-1] // heads) ** -0.5
