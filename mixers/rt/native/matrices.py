"""The matrices of a layer with constant factors folded in, and their channels in the order of the C code."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixers.ops.weights import LayerWeights


class NativeSetting(NamedTuple):
    """Settings of a layer.

    Attributes:
        slopes_H: slopes of ALiBi.
        scale: factor s of the residual branches.
        persistent_norm: whether persistent pairs are computed from normed outputs.
    """

    slopes_H: Tensor
    scale: float
    persistent_norm: bool


class Order(NamedTuple):
    """The order of the channels of all heads in the attention of the C code.

    Attributes:
        channels_W: channel at each of its W places; D for a place that holds zero.
        places_D: place of each channel.
    """

    channels_W: Tensor
    places_D: Tensor

    def spread(self, w_RDI: Tensor) -> Tensor:
        """(R, D, ...) -> (R, W, ...), with zeros at places without a channel."""
        padded = torch.cat([w_RDI, torch.zeros_like(w_RDI[:, :1])], 1)
        return padded.index_select(1, self.channels_W)

    def gather(self, w_RWI: Tensor) -> Tensor:
        """(R, W, ...) -> (R, D, ...)."""
        return w_RWI.index_select(1, self.places_D)


class Matrices(NamedTuple):
    """Matrices of all runs with constant factors folded in, or the gradients of these matrices.

    Attributes:
        project_RPD: Wq, Wk and Wv, times the gain of the inputs' norm; P = 3 W.
        out_RDW: s Wo.
        up_RFD: W1 times the gain of the MLP's norm.
        down_RDF: s W2.
        pairs_RED: Wk and Wv, times the gain of the inputs' norm if ``persistent_norm`` is set; E = 2 W.
    """

    project_RPD: Tensor
    out_RDW: Tensor
    up_RFD: Tensor
    down_RDF: Tensor
    pairs_RED: Tensor

    @classmethod
    def of(cls, weights: LayerWeights, setting: NativeSetting, order: Order) -> "Matrices":
        """Return the matrices made from weights with a leading run axis."""
        wqkv = torch.cat([order.spread(w) for w in (weights.wq_DD, weights.wk_DD, weights.wv_DD)], 1)
        project = wqkv * weights.norm_D[:, None]
        size = len(order.channels_W)
        return cls(
            project_RPD=project,
            out_RDW=setting.scale * order.spread(weights.wo_DD.mT).mT,
            up_RFD=weights.up_FD * weights.mlp_norm_D[:, None],
            down_RDF=setting.scale * weights.down_DF,
            pairs_RED=(project if setting.persistent_norm else wqkv)[:, size:],
        )

    def through(self, weights: LayerWeights, setting: NativeSetting, order: Order, dgain_RW: Tensor) -> LayerWeights:
        """Return the gradients of the weights; ``self`` holds the gradients of the matrices.

        Args:
            weights, setting, order: arguments of ``of``.
            dgain_RW: gradient of ``query_gain``.
        """
        D = weights.norm_D.shape[1]
        wqkv = torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], 1)
        dwqkv = torch.cat([order.gather(part) for part in self.project_RPD.chunk(3, 1)], 1)
        dpairs = torch.cat([order.gather(part) for part in self.pairs_RED.chunk(2, 1)], 1)

        # Temporary and persistent pairs share their weights and, with ``persistent_norm``, also the gain.
        if setting.persistent_norm:
            dwqkv[:, D:] += dpairs
        dnorm = (dwqkv * wqkv).sum(1)
        dwqkv *= weights.norm_D[:, None]
        if not setting.persistent_norm:
            dwqkv[:, D:] += dpairs
        dwq, dwk, dwv = dwqkv.chunk(3, 1)

        dgain = order.gather(dgain_RW) * (D // len(setting.slopes_H)) ** -0.5
        q_norm, k_norm = weights.q_norm_D, weights.k_norm_D
        return LayerWeights(
            norm_D=dnorm,
            wq_DD=dwq,
            wk_DD=dwk,
            wv_DD=dwv,
            q_norm_D=None if k_norm is None else dgain * k_norm,
            k_norm_D=None if q_norm is None else dgain * q_norm,
            wo_DD=setting.scale * order.gather(self.out_RDW.mT).mT,
            mlp_norm_D=(self.up_RFD * weights.up_FD).sum(1),
            up_FD=self.up_RFD * weights.mlp_norm_D[:, None],
            down_DF=setting.scale * self.down_RDF,
        )


def query_gain(weights: LayerWeights, setting: NativeSetting, order: Order) -> Tensor:
    """Return the factor (R, W) of normed queries: 1/sqrt(K) times the gains of queries and keys.

    The gain of the keys can be applied to the queries, because logits contain only products of both.
    """
    K = weights.norm_D.shape[1] // len(setting.slopes_H)
    gain = torch.full_like(weights.norm_D, K**-0.5)
    if weights.q_norm_D is not None and weights.k_norm_D is not None:
        gain *= weights.q_norm_D * weights.k_norm_D
    return order.spread(gain)
