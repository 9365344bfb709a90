"""Attention between chunks, as products: tensors are (R, B, H, T, K), queries are scaled and have the keys' gain."""

from typing import NamedTuple

import torch
from torch import Tensor


class Past(NamedTuple):
    """Queries and persistent pairs of whole sequences; keys before their gain.

    Attributes:
        q, k, v: queries, keys and values (R, B, H, T, K).
        slopes_H: ALiBi slopes, in the dtype of the rest.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes_H: Tensor


class PastGradients(NamedTuple):
    """What gradients of pairs need of later queries, and the gradients of queries that add up on the way.

    Attributes:
        da: gradients of attention outputs (R, B, H, T, K).
        dq: gradients of queries (R, B, H, T, K).
        lse: logarithms of the softmax's denominators (R, B, H, T).
        delta: inner products of attention outputs and their gradients (R, B, H, T).
    """

    da: Tensor
    dq: Tensor
    lse: Tensor
    delta: Tensor


def attend_past(past: Past, own: Tensor, v_own: Tensor, here: slice) -> tuple[Tensor, Tensor]:
    """Let the queries of a chunk attend to all earlier chunks and to their own temporary pairs.

    Args:
        past: queries and pairs, complete up to the chunk.
        own: logits (R, B, H, C) of the own pairs.
        v_own: temporary values (R, B, H, C, K).
        here: the chunk's positions.

    Returns:
        Logarithms of the denominators (R, B, H, C), and means of the values (R, B, H, C, K).
    """
    before = slice(0, here.start)
    logits = past.q[..., here, :] @ past.k[..., before, :].mT
    logits += _alibi(past.slopes_H, here, before)

    # Softmax over earlier pairs and the own one.
    m = torch.maximum(logits.amax(-1), own)
    p = logits.sub_(m[..., None]).exp_()
    p_own = (own - m).exp_()
    l = p.sum(-1) + p_own

    o = (p @ past.v[..., before, :]).addcmul_(p_own[..., None], v_own)
    return m + l.log(), o.div_(l[..., None])


def pull_from_later(past: Past, gradients: PastGradients, here: slice) -> tuple[Tensor, Tensor]:
    """Return the gradients (R, B, H, C, K) of a chunk's keys and values from the queries of all later chunks.

    Gradients of those queries from these pairs are added to ``gradients.dq``.
    """
    later = slice(here.stop, past.q.shape[-2])
    q, k, v, da = past.q[..., later, :], past.k[..., here, :], past.v[..., here, :], gradients.da[..., later, :]

    p = q @ k.mT
    p += _alibi(past.slopes_H, later, here)
    p.sub_(gradients.lse[..., later, None]).exp_()
    dlogits = da @ v.mT
    dlogits.sub_(gradients.delta[..., later, None]).mul_(p)

    gradients.dq[..., later, :] += dlogits @ k
    return dlogits.mT @ q, p.mT @ da


def _alibi(slopes_H: Tensor, queries: slice, keys: slice) -> Tensor:
    """Return ALiBi's bias (H, I, J) of queries and keys at these positions."""
    i, j = (torch.arange(y.start, y.stop, device=slopes_H.device) for y in (queries, keys))
    return slopes_H[:, None, None] * (j - i[:, None])
