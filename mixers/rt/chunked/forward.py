"""Forward pass in chunks (Oncescu et al. 2026, arXiv:2604.21215, section 2.2), for the CPU.

At the widths of the diagnostics a CPU loses its time in the start of small operations, in tiny matrix products, one for
each head of each sequence, and in strided access. Three things avoid them:

- Sequences stand last. A vector of a position is a column, and attention within a chunk is elementwise work on columns
  that lie side by side in memory.
- Constant factors are in the matrices (``Matrices``); the gain of the keys is in the queries.
- The schedule is that of ``fused``. Queries of a chunk attend to all earlier chunks at once, as products. The result
  takes part in the softmax of the chunk as one more pair: its logit is the logarithm of the denominator so far, its
  value the mean of the values so far.

The run axis is R; E = 2 D, and C positions are a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

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
from mixers.rt.chunked.past import Past, attend_past
from mixers.rt.naive import Weights

CHUNK = 16
"""Positions of a chunk."""


class Activations(NamedTuple):
    """What the forward pass keeps of all positions; keys are normed and have no gain.

    Attributes:
        q: queries (T, R, H, K, B), scaled, times the gain of the keys.
        p: attention weights (T, C + 1, R, H, 1, B): of all that was seen before the chunk, then of the chunk's pairs.
        a: attention outputs (T, R, D, B).
        n, r: normed inputs of the MLP (T, R, D, B) before their gain, and inverse root mean squares (T, R, 1, B).
        h, g: hidden layer of the MLP (T, R, F, B) before and after its GELU.
        nz, rz: the same as n and r of the outputs; without that norm nz are the outputs.
        kv: persistent keys above values (T, R, E, B).
        rk: inverse root mean squares of keys (T, R, 1, B).
    """

    q: Tensor
    p: Tensor
    a: Tensor
    n: Tensor
    r: Tensor
    h: Tensor
    g: Tensor
    nz: Tensor
    rz: Tensor
    kv: Tensor
    rk: Tensor

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Persistent keys and values (T, R, H, K, B)."""
        k, v = self.kv.unflatten(2, (2, self.q.shape[2], -1)).unbind(2)
        return k, v

    def positions(self) -> Iterator["Activations"]:
        """Return the same of each position."""
        return map(Activations._make, zip(*self, strict=True))


def chunked_forward(
    x_RBTD: Tensor,
    q_RBTD: Tensor,
    k_RBTD: Tensor,
    v_RBTD: Tensor,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs of the recurrence.

    1. Scale the queries; compute the logits of their own temporary keys.
    2. For each chunk:
       a. let its queries attend to their own pairs and to all earlier chunks;
       b. for each position, ``_Walk.attend`` and ``_Walk.finish``;
       c. arrange its persistent pairs by head, for later chunks;
       d. logarithms of the denominators: those of a, less the logarithm of what their pair got of the softmax.

    Args:
        x_RBTD, q_RBTD, k_RBTD, v_RBTD, weights: as in ``naive_recurrence``, each with a leading run axis, all in one
            dtype.
        slopes_H, scale: as in ``naive_recurrence``.
        block: 1.

    Returns:
        Outputs z (R, B, T, D), and tensors that ``chunked_backward`` takes as ``saved``.
    """
    T, H = x_RBTD.shape[2], len(slopes_H)

    # 1. Queries and own pairs.
    queries = scaled_queries(q_RBTD, weights, H)
    own, v_own = own_logits(queries, k_RBTD, H), per_head(v_RBTD, H)
    q_past = per_head(queries.past, H)
    past = Past(q_past, torch.empty_like(q_past), torch.empty_like(q_past), slopes_H.to(x_RBTD))
    lse = torch.empty_like(own)

    # 2. Chunks.
    walk = _Walk(columns(x_RBTD), columns(queries.past), weights, past.slopes_H, scale)
    kept = walk.kept
    for start in range(0, T, CHUNK):
        here = slice(start, min(start + CHUNK, T))
        seen, mean = own[..., here], v_own[..., here, :]
        if start > 0:
            seen, mean = attend_past(past, seen, mean, here)  # a
        walk.begin_chunk(here, seen, mean)
        for t in range(here.start, here.stop):
            walk.attend(t)
            walk.finish(t)  # b

        for y, into in zip(kept.kv[here].chunk(2, dim=2), (past.k, past.v), strict=True):
            into[..., here, :] = per_head(rows(y), H)  # c
        lse[..., here] = seen - kept.p[here, 0].squeeze(-2).log().permute(1, 3, 2, 0)  # d

    return rows(walk.z), (*kept, past.k, past.v, lse)


class _Walk:
    """The positions one after another.

    Attributes:
        kept: what the backward pass reads, position by position.
        z: outputs (T, R, D, B).
    """

    def __init__(self, x: Tensor, q: Tensor, weights: Weights, slopes_H: Tensor, scale: float) -> None:
        """Reserve memory for all positions of inputs and queries (T, R, D, B), and views of each position."""
        T, R, D, B = x.shape
        H, C, F = len(slopes_H), min(CHUNK, T), weights.up_FD.shape[1]
        self._kv_norm, self._k_norm = weights.kv_norm_D is not None, weights.k_norm_D is not None
        self._matrices = Matrices.of(weights, scale)

        # Of all positions.
        self.z, a, n, nz = (torch.empty_like(x) for _ in range(4))
        r, rz, rk = x.new_empty(3, T, R, 1, B)
        h, g = x.new_empty(2, T, R, F, B)
        p, kv = x.new_empty(T, C + 1, R, H, 1, B), x.new_empty(T, R, 2 * D, B)
        self.kept = Activations(q.unflatten(2, (H, -1)), p, a, n, r, h, g, nz, rz, kv, rk)

        # Position by position.
        self._kept, self._x, self._z = list(self.kept.positions()), x.unbind(), self.z.unbind()
        self._k, self._v = self.kept.pairs
        self._keys, self._a_heads = kv[:, :, :D].unbind(), a.unflatten(2, (H, -1)).unbind()

        # Of one chunk. ALiBi's bias of the pairs before position i are its last i entries.
        self._logits = x.new_empty(C, C + 1, R, H, 1, B)
        self._bias = (slopes_H * torch.arange(-C, 0, device=x.device)[:, None])[:, None, :, None, None]
        products = x.new_empty(C, R, H, D // H, B)
        self._products = [products[:i] for i in range(C)]

        # Of one position.
        self._inside, self._u = torch.empty_like(products[0]), torch.empty_like(x[0])
        self._norm = ColumnNorm(self._u)

    def begin_chunk(self, here: slice, seen: Tensor, mean: Tensor) -> None:
        """Take what the queries of a chunk have seen: logits (R, B, H, C) and values (R, B, H, C, K)."""
        self._start = here.start
        self._logits[: here.stop - here.start, 0] = seen.permute(3, 0, 2, 1).unsqueeze(-2)
        self._mean = columns(joined(mean)).unflatten(2, (seen.shape[2], -1))

    def attend(self, t: int) -> None:
        """Attention output of position t.

        1. Logits of the chunk's pairs before t.
        2. Softmax over all that was seen before the chunk, and these pairs.
        3. a = mean of the values.
        """
        kept, start = self._kept[t], self._start
        i = t - start
        logits, p, products = self._logits[i, : i + 1], kept.p[: i + 1], self._products[i]

        torch.mul(self._k[start:t], kept.q, out=products)
        torch.sum(products, -2, keepdim=True, out=logits[1:])
        logits[1:].add_(self._bias[len(self._bias) - i :])  # 1
        torch.softmax(logits, 0, out=p)  # 2
        torch.mul(self._v[start:t], p[1:], out=products)
        torch.sum(products, 0, out=self._inside)
        torch.addcmul(self._inside, self._mean[i], p[0], out=self._a_heads[t])  # 3

    def finish(self, t: int) -> None:
        """Output and persistent pair of position t.

        1. u = x + s Wo a.
        2. z = u + s MLP(RMS(u)).
        3. k = RMS[K RMS(z)], v = V RMS(z).
        """
        kept, matrices, u, z = self._kept[t], self._matrices, self._u, self._z[t]
        torch.baddbmm(self._x[t], matrices.wo_RDD, kept.a, out=u)  # 1
        self._norm.forward(u, kept.n, kept.r)
        torch.bmm(matrices.up_RFD, kept.n, out=kept.h)
        torch.ops.aten.gelu.out(kept.h, out=kept.g)
        torch.baddbmm(u, matrices.down_RDF, kept.g, out=z)  # 2

        if self._kv_norm:
            self._norm.forward(z, kept.nz, kept.rz)
        else:
            kept.nz.copy_(z)
        torch.bmm(matrices.wkv_RED, kept.nz, out=kept.kv)
        if self._k_norm:
            self._norm.forward(self._keys[t], self._keys[t], kept.rk)  # 3
