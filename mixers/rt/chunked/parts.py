"""Parts of both passes: layouts, matrices with constant factors folded in, and RMS norms of columns."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from mixers.ops.numerics import NORM_EPS
from mixers.rt.naive import Weights


def columns(y_RBTD: Tensor) -> Tensor:
    """(R, B, T, D) -> (T, R, D, B); may be a view. Two steps, because PyTorch is fast at swapping two axes only."""
    R, B, T, D = y_RBTD.shape
    swapped = y_RBTD.reshape(R * B, T * D).t().contiguous()
    return swapped.view(T, D, R, B).transpose(1, 2).contiguous()


def rows(y_TRDB: Tensor) -> Tensor:
    """(T, R, D, B) -> (R, B, T, D); may be a view."""
    T, R, D, B = y_TRDB.shape
    swapped = y_TRDB.transpose(1, 2).reshape(T * D, R * B)
    return swapped.t().contiguous().view(R, B, T, D)


def per_head(y_RBTD: Tensor, heads: int) -> Tensor:
    """(R, B, T, D) -> (R, B, H, T, K)."""
    return rearrange(y_RBTD, "r b t (h k) -> r b h t k", h=heads).contiguous()


def joined(y_RBHTK: Tensor) -> Tensor:
    """(R, B, H, T, K) -> (R, B, T, D)."""
    return rearrange(y_RBHTK, "r b h t k -> r b t (h k)").contiguous()


class Queries(NamedTuple):
    """Queries (R, B, T, D), scaled by 1/sqrt(K), for the two kinds of keys.

    Attributes:
        own: for temporary keys.
        past: for persistent keys before their gain, which is a factor here.
    """

    own: Tensor
    past: Tensor


def scaled_queries(q_RBTD: Tensor, weights: Weights, heads: int) -> Queries:
    """Return the queries for both kinds of keys."""
    own = q_RBTD * (q_RBTD.shape[-1] // heads) ** -0.5
    return Queries(own, own if weights.k_norm_D is None else own * weights.k_norm_D[:, None, None])


def own_logits(queries: Queries, k_RBTD: Tensor, heads: int) -> Tensor:
    """Return the logits (R, B, H, T) of each query and its own temporary key."""
    return (queries.own * k_RBTD).unflatten(-1, (heads, -1)).sum(-1).transpose(2, 3).contiguous()


class Matrices(NamedTuple):
    """Matrices inside the recurrence with the factors that surround them, or gradients of these matrices.

    Attributes:
        wo_RDD: s Wo.
        up_RFD: W1 times the gain of the MLP's norm.
        down_RDF: s W2.
        wkv_RED: Wk above Wv, times the gain of their norm; E = 2 D.
    """

    wo_RDD: Tensor
    up_RFD: Tensor
    down_RDF: Tensor
    wkv_RED: Tensor

    @classmethod
    def of(cls, weights: Weights, scale: float) -> "Matrices":
        """Return the matrices of weights that have a leading run axis."""
        wkv = torch.cat([weights.wk_DD, weights.wv_DD], 1)
        return cls(
            wo_RDD=scale * weights.wo_DD,
            up_RFD=weights.up_FD * weights.mlp_norm_D[:, None],
            down_RDF=scale * weights.down_DF,
            wkv_RED=wkv if weights.kv_norm_D is None else wkv * weights.kv_norm_D[:, None],
        )

    def through(self, weights: Weights, scale: float, dk_norm: Tensor | None) -> Weights:
        """Return the gradients of the weights, where ``self`` are those of the matrices.

        Args:
            weights: weights of which the matrices were made.
            scale: factor of the residual branches.
            dk_norm: gradient of the keys' gain.
        """
        dwkv, dkv_norm = self.wkv_RED, None
        if weights.kv_norm_D is not None:
            dkv_norm = (dwkv * torch.cat([weights.wk_DD, weights.wv_DD], 1)).sum(1)
            dwkv = dwkv * weights.kv_norm_D[:, None]

        dwk, dwv = dwkv.chunk(2, dim=1)
        return Weights(
            wo_DD=scale * self.wo_RDD,
            mlp_norm_D=(self.up_RFD * weights.up_FD).sum(1),
            up_FD=self.up_RFD * weights.mlp_norm_D[:, None],
            down_DF=scale * self.down_RDF,
            kv_norm_D=dkv_norm,
            wk_DD=dwk,
            k_norm_D=dk_norm,
            wv_DD=dwv,
        )


class ColumnNorm:
    """RMS norm of columns (R, D, B) without a gain, and its gradient, in place."""

    def __init__(self, like_RDB: Tensor) -> None:
        """Reserve memory for columns such as these."""
        R, D, _ = like_RDB.shape
        self._mean_R1D = like_RDB.new_full((R, 1, D), 1 / D)
        self._eps = like_RDB.new_full((1, 1, 1), NORM_EPS)
        self._products_RDB = torch.empty_like(like_RDB)

    def forward(self, y: Tensor, out: Tensor, r: Tensor) -> None:
        """Write normed columns to ``out``, which may be ``y``, and inverse root mean squares (R, 1, B) to ``r``."""
        torch.mul(y, y, out=self._products_RDB)
        torch.baddbmm(self._eps, self._mean_R1D, self._products_RDB, out=r).rsqrt_()
        torch.mul(y, r, out=out)

    def backward(self, dn: Tensor, n: Tensor) -> None:
        """Turn gradients of normed columns ``n`` into those of the columns but for ``r``: ``dn - n mean(n dn)``."""
        torch.mul(dn, n, out=self._products_RDB)
        dn.addcmul_(n, torch.bmm(self._mean_R1D, self._products_RDB), value=-1)
