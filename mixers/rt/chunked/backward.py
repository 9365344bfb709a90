"""Backward pass in chunks, the mirror image of ``mixers.rt.chunked.forward``."""

from typing import Any

import torch
from torch import Tensor

from mixers.rt.chunked.forward import CHUNK, Activations
from mixers.rt.chunked.parts import (
    ColumnNorm,
    Matrices,
    columns,
    joined,
    own_logits,
    per_head,
    rows,
    scaled_queries,
)
from mixers.rt.chunked.past import Past, PastGradients, pull_from_later
from mixers.rt.naive import Weights


def chunked_backward(
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
    saved: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Weights]:
    """Gradients of x, q, k, v (each R, B, T, D) and of the weights.

    1. For each chunk, last first:
       a. gradients of its persistent pairs from the queries of later chunks;
       b. for each position, last first, ``_WalkBack.finish`` and ``_WalkBack.attend``;
       c. arrange the gradients of its attention outputs by head, for earlier chunks.
    2. Gradients of the temporary pairs, all positions at once.
    3. Gradients of the queries: from temporary keys, earlier chunks and their own chunk.
    4. Gradients of weights from those of the matrices.

    Arguments are the gradient of the outputs, the arguments of ``chunked_forward``, its outputs, and its saved tensors.
    """
    T, H = x_RBTD.shape[2], len(slopes_H)
    *activations, k, v, lse = saved
    queries = scaled_queries(q_RBTD, weights, H)
    past = Past(per_head(queries.past, H), k, v, slopes_H.to(x_RBTD))
    gradients = PastGradients(torch.empty_like(k), torch.zeros_like(k), lse, torch.empty_like(lse))

    # 1. Chunks.
    walk = _WalkBack(columns(dz_RBTD).clone(), Activations(*activations), weights, scale)
    for start in reversed(range(0, T, CHUNK)):
        here = slice(start, min(start + CHUNK, T))
        walk.begin_chunk(here, pull_from_later(past, gradients, here) if here.stop < T else None)  # a
        for t in reversed(range(here.start, here.stop)):
            walk.finish(t)
            walk.attend(t)  # b

        count = here.stop - start
        gradients.da[..., here, :] = per_head(rows(walk.da[:count]), H)
        gradients.delta[..., here] = walk.delta[:count].squeeze(-2).permute(1, 3, 2, 0)  # c

    # 2. Temporary pairs.
    k_own, v_own = per_head(k_RBTD, H), per_head(v_RBTD, H)
    p_own = (own_logits(queries, k_RBTD, H) - lse).exp_()
    dv_own = p_own[..., None] * gradients.da
    dlogits = p_own * ((gradients.da * v_own).sum(-1) - gradients.delta)
    dk_own = dlogits[..., None] * per_head(queries.own, H)

    # 3. Queries.
    dq_own = joined(dlogits[..., None] * k_own)
    dq_past = joined(gradients.dq) + rows(walk.dq)
    dk_norm = None
    if weights.k_norm_D is not None:
        dk_norm = (dq_past * queries.own).sum((1, 2))
        dq_past.mul_(weights.k_norm_D[:, None, None])
    dq = dq_past.add_(dq_own).mul_((q_RBTD.shape[-1] // H) ** -0.5)

    # 4. Weights.
    dweights = walk.dmatrices.through(weights, scale, dk_norm)
    return rows(walk.dz), dq, joined(dk_own), joined(dv_own), dweights


class _WalkBack:
    """The positions one after another, last first.

    Attributes:
        dz: gradients of the outputs (T, R, D, B), which become those of the inputs.
        dq: gradients of the queries (T, R, D, B) from keys of their own chunk.
        dmatrices: gradients of the matrices, sums over the positions so far.
        da: gradients of the attention outputs of a chunk (C, R, D, B).
        delta: inner products of a chunk's attention outputs and their gradients (C, R, H, 1, B).
    """

    def __init__(self, dz: Tensor, kept: Activations, weights: Weights, scale: float) -> None:
        """Take the gradients of the outputs (T, R, D, B), which are changed in place."""
        R, D, B = dz.shape[1:]
        C, H, K = kept.p.shape[1] - 1, *kept.q.shape[2:4]
        self._kv_norm, self._k_norm = weights.kv_norm_D is not None, weights.k_norm_D is not None
        matrices = Matrices.of(weights, scale)
        self._transposed = Matrices._make(y.mT for y in matrices)
        self.dmatrices = Matrices._make(torch.zeros_like(y) for y in matrices)

        # Position by position.
        self.dz, self.dq = dz, torch.empty_like(dz)
        self._h, self._kept = kept.h, list(kept.positions())
        self._k, self._v = kept.pairs
        self._keys = kept.kv[:, :, :D].unbind()
        self._dz, self._dq = dz.unbind(), self.dq.unflatten(2, (H, K)).unbind()

        # Of one chunk; prefixes are the pairs before a position.
        self._dkv, self.da, self.delta = dz.new_empty(C, R, 2 * D, B), dz[:C].clone(), dz.new_empty(C, R, H, 1, B)
        self._dkeys = self._dkv[:, :, :D].unbind()
        self._da_heads = self.da.unflatten(2, (H, K)).unbind()
        self._ones = torch.ones_like(kept.h[:C])
        dk, dv = self._dkv.unflatten(2, (2, H, K)).unbind(2)
        products, dlogits = dz.new_empty(C, R, H, K, B), dz.new_empty(C, R, H, 1, B)
        self._prefixes: Any = [tuple(y[:i] for y in (dk, dv, products, dlogits)) for i in range(C)]

        # Of one position.
        self._dn, self._dh = torch.empty_like(dz[0]), torch.empty_like(kept.h[0])
        self._norm = ColumnNorm(self._dn)

    def begin_chunk(self, here: slice, pairs: tuple[Tensor, Tensor] | None) -> None:
        """Take the gradients (R, B, H, C, K) of a chunk's keys and values from later chunks; None for the last."""
        self._start, count = here.start, here.stop - here.start
        self._slope = torch.ops.aten.gelu_backward(self._ones[:count], self._h[here]).unbind()

        if pairs is None:
            self._dkv.zero_()
        else:
            for into, y in zip(self._dkv[:count].chunk(2, dim=2), pairs, strict=True):
                into.copy_(columns(joined(y)))

    def finish(self, t: int) -> None:
        """Reverse of ``_Walk.finish``: gradients of x and a at position t, and of the matrices.

        1. dz gets what the persistent pair sends back.
        2. du = dz + what the MLP sends back.
        3. da = s Wo^T du; dx is du.
        """
        kept, w, dw, dn = self._kept[t], self._transposed, self.dmatrices, self._dn
        i, dz = t - self._start, self._dz[t]

        # 1. Persistent pair.
        if self._k_norm:
            self._norm.backward(self._dkeys[i], self._keys[t])
            self._dkeys[i].mul_(kept.rk)
        torch.bmm(w.wkv_RED, self._dkv[i], out=dn)
        dw.wkv_RED.baddbmm_(self._dkv[i], kept.nz.mT)
        if self._kv_norm:
            self._norm.backward(dn, kept.nz)
            dz.addcmul_(dn, kept.rz)
        else:
            dz.add_(dn)

        # 2. MLP.
        torch.bmm(w.down_RDF, dz, out=self._dh)
        dw.down_RDF.baddbmm_(dz, kept.g.mT)
        self._dh.mul_(self._slope[i])
        torch.bmm(w.up_RFD, self._dh, out=dn)
        dw.up_RFD.baddbmm_(self._dh, kept.n.mT)
        self._norm.backward(dn, kept.n)
        dz.addcmul_(dn, kept.r)

        # 3. Output projection.
        torch.bmm(w.wo_RDD, dz, out=self.da[i])
        dw.wo_RDD.baddbmm_(dz, kept.a.mT)

    def attend(self, t: int) -> None:
        """Reverse of ``_Walk.attend``: gradients of the query at t, and of the chunk's pairs before it.

        1. delta = sum of a da over the channels of a head.
        2. Gradients of logits: p (v da - delta).
        3. dk += q dlogits, dv += p da, dq = sum of k dlogits.
        """
        kept, start, da = self._kept[t], self._start, self._da_heads[t - self._start]
        i = t - start
        dk, dv, products, dlogits = self._prefixes[i]
        p = kept.p[1 : i + 1]

        torch.mul(da, kept.a.view_as(da), out=self._dn.view_as(da))
        torch.sum(self._dn.view_as(da), -2, keepdim=True, out=self.delta[i])  # 1
        torch.mul(self._v[start:t], da, out=products)
        torch.sum(products, -2, keepdim=True, out=dlogits)
        dlogits.sub_(self.delta[i]).mul_(p)  # 2
        dk.addcmul_(dlogits, kept.q)
        dv.addcmul_(p, da)
        torch.mul(self._k[start:t], dlogits, out=products)
        torch.sum(products, 0, out=self._dq[t])  # 3
