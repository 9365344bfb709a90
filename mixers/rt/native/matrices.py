"""The matrices inside the recurrence, with the constant factors that surround them."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixers.rt.naive import Weights


class Matrices(NamedTuple):
    """Matrices of all runs with their factors folded in, or the gradients of these matrices.

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
