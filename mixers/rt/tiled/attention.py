"""Attention of the tiled method: the contribution of a tile of keys to the outputs of queries, and its gradients.

Oncescu et al. 2026 (arXiv:2604.21215), Algorithm 2 and section "The backward pass". Positions are the first axis, so
that the slices of a tile are contiguous: (T, R, B, D) with heads concatenated. Queries are already scaled by 1/sqrt(K).
Dimensions beside those of ``mixers.base``: C blocks of b positions; I queries and J keys of a tile.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from mixers.ops.numerics import at_least_float32

QUERY_CHUNK = 128
"""Number of queries whose attention weights exist at once after the reverse loop, to limit memory."""


class Tile(NamedTuple):
    """Queries that attend to keys, both as ranges of blocks or both as ranges of positions."""

    keys: slice
    queries: slice

    def in_positions(self, block: int, length: int) -> "Tile":
        """Return a tile of blocks as a tile of positions; the sequence has ``length`` positions."""
        keys, queries = (slice(y.start * block, min(y.stop * block, length)) for y in self)
        return Tile(keys, queries)


class SoftmaxState(NamedTuple):
    """Statistics of the online softmax of all queries over the keys seen so far, in at least float32.

    Attributes:
        m_TRBH: largest logit.
        l_TRBH: sum of exp(logit - m).
        o_TRBHK: sum of v exp(logit - m).
    """

    m_TRBH: Tensor
    l_TRBH: Tensor
    o_TRBHK: Tensor


class QueryGradients(NamedTuple):
    """Tensors of the queries from which the gradients of logits are computed.

    Attributes:
        q_TRBD: scaled queries.
        lse_TRBH: logarithm of the softmax's denominator.
        da_TRBD: gradients of attention outputs.
        delta_TRBH: inner products of attention outputs and their gradients.
    """

    q_TRBD: Tensor
    lse_TRBH: Tensor
    da_TRBD: Tensor
    delta_TRBH: Tensor


def attend_own_block(
    q_TRBD: Tensor, k_temp_TRBD: Tensor, v_temp_TRBD: Tensor, slopes_H: Tensor, block: int
) -> SoftmaxState:
    """Return the state of all queries after each has seen the temporary pairs of its own block up to itself."""
    heads, length = len(slopes_H), len(q_TRBD)

    logits_CRBHIJ = _own_block_logits(q_TRBD, k_temp_TRBD, slopes_H, block)
    m_CRBHI = logits_CRBHIJ.amax(-1)
    p_CRBHIJ = (logits_CRBHIJ - m_CRBHI[..., None]).exp()

    v_CJRBHK = _blocks(v_temp_TRBD, heads, block)
    o_CIRBHK = torch.einsum("crbhij,cjrbhk->cirbhk", p_CRBHIJ.to(v_CJRBHK), v_CJRBHK).to(m_CRBHI)

    m_TRBH, l_TRBH = (
        rearrange(y, "c r b h i -> (c i) r b h")[:length].contiguous() for y in (m_CRBHI, p_CRBHIJ.sum(-1))
    )
    return SoftmaxState(m_TRBH, l_TRBH, o_CIRBHK.flatten(0, 1)[:length].contiguous())


def update_tile(
    state: SoftmaxState, q_TRBD: Tensor, k_TRBD: Tensor, v_TRBD: Tensor, slopes_H: Tensor, tile: Tile
) -> None:
    """Let a tile of queries attend to persistent pairs: Algorithm 2, "UpdateTile". Changes ``state`` in place.

    1. Logits of the tile's queries and keys.
    2. m_new = max(m, largest logit of the tile).
    3. shrink = exp(m - m_new), the factor that moves old sums to the new maximum.
    4. o = o * shrink + sum of v exp(logit - m_new).
    5. l = l * shrink + sum of exp(logit - m_new).
    6. m = m_new.
    """
    keys, queries = tile
    m_TRBH, l_TRBH, o_TRBHK = state

    # 1. Logits.
    logits_RBHIJ = _tile_logits(q_TRBD, k_TRBD, slopes_H, tile)

    # 2. New maxima.
    m_old_RBHI = m_TRBH[queries].permute(1, 2, 3, 0)
    m_new_RBHI = torch.maximum(m_old_RBHI, logits_RBHIJ.amax(-1))

    # 3. Factor of the old sums.
    shrink_IRBH = (m_old_RBHI - m_new_RBHI).exp().permute(3, 0, 1, 2)

    # 4. Numerators.
    p_RBHIJ = (logits_RBHIJ - m_new_RBHI[..., None]).exp()
    added_RBHIK = torch.matmul(p_RBHIJ.to(v_TRBD), _per_head(v_TRBD[keys], len(slopes_H)))
    o_TRBHK[queries] = o_TRBHK[queries] * shrink_IRBH[..., None] + added_RBHIK.permute(3, 0, 1, 2, 4)

    # 5. Denominators.
    l_TRBH[queries] = l_TRBH[queries] * shrink_IRBH + p_RBHIJ.sum(-1).permute(3, 0, 1, 2)

    # 6. Maxima.
    m_TRBH[queries] = m_new_RBHI.permute(3, 0, 1, 2)


def update_tile_backward(
    dk_TRBD: Tensor,
    dv_TRBD: Tensor,
    queries: QueryGradients,
    k_TRBD: Tensor,
    v_TRBD: Tensor,
    slopes_H: Tensor,
    tile: Tile,
) -> None:
    """Reverse of ``update_tile``: add, in place, the contribution of the tile's queries to dk and dv of its keys."""
    heads = len(slopes_H)
    p_RBHIJ, dlogits_RBHIJ = _logit_gradients(queries, k_TRBD, v_TRBD, slopes_H, tile)

    q = queries.q_TRBD
    q_RBHIK = _per_head(q[tile.queries], heads)
    da_RBHIK = _per_head(queries.da_TRBD[tile.queries].to(q), heads)

    dv_TRBD[tile.keys] += _heads_joined(torch.matmul(p_RBHIJ.to(q).mT, da_RBHIK))
    dk_TRBD[tile.keys] += _heads_joined(torch.matmul(dlogits_RBHIJ.to(q).mT, q_RBHIK))


def own_block_gradients(
    queries: QueryGradients, k_temp_TRBD: Tensor, v_temp_TRBD: Tensor, slopes_H: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse of ``attend_own_block``: gradients of scaled queries and of temporary keys and values, (T, R, B, D)."""
    heads, q_TRBD, da_TRBD = len(slopes_H), queries.q_TRBD, queries.da_TRBD
    q_CIRBHK, k_CJRBHK, v_CJRBHK, da_CIRBHK = (
        _blocks(y, heads, block) for y in (q_TRBD, k_temp_TRBD, v_temp_TRBD, da_TRBD.to(q_TRBD))
    )
    lse_CRBHI1, delta_CRBHI1 = (
        rearrange(_padded(y, block), "(c i) r b h -> c r b h i 1", i=block)
        for y in (queries.lse_TRBH, queries.delta_TRBH)
    )

    # Attention weights, and gradients of logits.
    logits_CRBHIJ = _own_block_logits(q_TRBD, k_temp_TRBD, slopes_H, block)
    p_CRBHIJ = (logits_CRBHIJ - lse_CRBHI1).exp()
    dp_CRBHIJ = torch.einsum("cirbhk,cjrbhk->crbhij", da_CIRBHK, v_CJRBHK)
    dlogits_CRBHIJ = (p_CRBHIJ * (dp_CRBHIJ - delta_CRBHI1)).to(q_TRBD)

    # Gradients of queries, keys and values.
    dq = torch.einsum("crbhij,cjrbhk->cirbhk", dlogits_CRBHIJ, k_CJRBHK)
    dk = torch.einsum("crbhij,cirbhk->cjrbhk", dlogits_CRBHIJ, q_CIRBHK)
    dv = torch.einsum("crbhij,cirbhk->cjrbhk", p_CRBHIJ.to(q_TRBD), da_CIRBHK)

    dq, dk, dv = (y.flatten(0, 1)[: len(q_TRBD)].flatten(-2).to(da_TRBD) for y in (dq, dk, dv))
    return dq, dk, dv


def add_query_gradients(
    dq_TRBD: Tensor, queries: QueryGradients, k_TRBD: Tensor, v_TRBD: Tensor, slopes_H: Tensor, block: int
) -> None:
    """Add, in place, the contribution of the persistent pairs of earlier blocks to the gradients of scaled queries."""
    heads, length = len(slopes_H), len(dq_TRBD)
    q_TRBD = queries.q_TRBD

    for start in range(block, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        tile = Tile(keys=slice(0, stop - 1), queries=slice(start, stop))
        _, dlogits_RBHIJ = _logit_gradients(queries, k_TRBD, v_TRBD, slopes_H, tile)

        # A query does not see persistent pairs of its own block or of later ones.
        i = torch.arange(start, stop, device=q_TRBD.device)
        j = torch.arange(stop - 1, device=q_TRBD.device)
        unseen_IJ = j >= i[:, None] // block * block
        dlogits_RBHIJ = dlogits_RBHIJ.masked_fill(unseen_IJ, 0.0).to(q_TRBD)

        dq_TRBD[tile.queries] += _heads_joined(torch.matmul(dlogits_RBHIJ, _per_head(k_TRBD[tile.keys], heads)))


def _logit_gradients(
    queries: QueryGradients, k_TRBD: Tensor, v_TRBD: Tensor, slopes_H: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Attention weights of a tile, and gradients of its logits, (R, B, H, I, J) each."""
    heads = len(slopes_H)
    lse_RBHI1, delta_RBHI1 = (
        y[tile.queries].permute(1, 2, 3, 0)[..., None] for y in (queries.lse_TRBH, queries.delta_TRBH)
    )

    p_RBHIJ = (_tile_logits(queries.q_TRBD, k_TRBD, slopes_H, tile) - lse_RBHI1).exp()

    da_RBHIK = _per_head(queries.da_TRBD[tile.queries].to(queries.q_TRBD), heads)
    dp_RBHIJ = torch.matmul(da_RBHIK, _per_head(v_TRBD[tile.keys], heads).mT)
    return p_RBHIJ, p_RBHIJ * (dp_RBHIJ - delta_RBHI1)


def _tile_logits(q_TRBD: Tensor, k_TRBD: Tensor, slopes_H: Tensor, tile: Tile) -> Tensor:
    """Logits (R, B, H, I, J) of a tile, with ALiBi."""
    keys, queries = tile
    heads = len(slopes_H)

    logits_RBHIJ = torch.matmul(_per_head(q_TRBD[queries], heads), _per_head(k_TRBD[keys], heads).mT)
    distance_IJ = _distance(
        queries=queries.stop - queries.start,
        keys=keys.stop - keys.start,
        offset=keys.start - queries.start,
        device=q_TRBD.device,
    )
    return _with_alibi(logits_RBHIJ, slopes_H, distance_IJ)


def _own_block_logits(q_TRBD: Tensor, k_TRBD: Tensor, slopes_H: Tensor, block: int) -> Tensor:
    """Logits (C, R, B, H, I, J) of queries and temporary keys of their own block, -inf for later keys; I = J = b."""
    heads = len(slopes_H)
    q_CIRBHK, k_CJRBHK = (_blocks(y, heads, block) for y in (q_TRBD, k_TRBD))

    logits_CRBHIJ = torch.einsum("cirbhk,cjrbhk->crbhij", q_CIRBHK, k_CJRBHK)
    distance_IJ = _distance(queries=block, keys=block, offset=0, device=q_TRBD.device)
    return _with_alibi(logits_CRBHIJ, slopes_H, distance_IJ).masked_fill(distance_IJ > 0, -torch.inf)


def _with_alibi(logits: Tensor, slopes_H: Tensor, distance_IJ: Tensor) -> Tensor:
    """Logits (..., H, I, J) plus ALiBi's bias, in the precision of their softmax: at least float32."""
    wide = at_least_float32(logits)
    return wide + slopes_H.to(wide)[:, None, None] * distance_IJ


def _distance(*, queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Key position minus query position (I, J); the first key is ``offset`` positions after the first query."""
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] + offset


def _blocks(y_TRBD: Tensor, heads: int, block: int) -> Tensor:
    """(T, R, B, D) -> (C, b, R, B, H, K), the last block padded with zeros."""
    return _padded(y_TRBD, block).unflatten(0, (-1, block)).unflatten(-1, (heads, -1))


def _padded(y: Tensor, block: int) -> Tensor:
    """``y`` (T, ...) with zeros appended up to a multiple of ``block`` positions."""
    missing = -len(y) % block
    return torch.cat([y, y.new_zeros(missing, *y.shape[1:])]) if missing else y


def _per_head(y_TRBD: Tensor, heads: int) -> Tensor:
    """(T, R, B, D) -> (R, B, H, T, K)."""
    return rearrange(y_TRBD, "t r b (h k) -> r b h t k", h=heads)


def _heads_joined(y_RBHTK: Tensor) -> Tensor:
    """(R, B, H, T, K) -> (T, R, B, D)."""
    return y_RBHTK.permute(3, 0, 1, 2, 4).flatten(-2)
