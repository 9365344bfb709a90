"""The matrices of the wavefront's products, made from the weights of layers, and their gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixers.ops.kernels.products import through_gain
from mixers.ops.weights import LayerWeights


class Operands(NamedTuple):
    """Matrices of the products (L, outputs, inputs), with the gains of the norms before them folded in.

    Attributes:
        qkv: queries, temporary keys and temporary values of inputs (L, 3 D, D).
        out: output projection of attention (L, D, D).
        up: first matrix of the MLP (L, F, D).
        down: second matrix of the MLP (L, D, F).
        kv: persistent keys and values of outputs (L, 2 D, D).
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    kv: Tensor

    def layers(self, lo: int, hi: int) -> "Operands":
        """Return the matrices of layers lo to hi - 1."""
        return Operands(*(w[lo:hi] for w in self))


def operands_of(weights: LayerWeights, persistent_norm: bool, dtype: torch.dtype) -> Operands:
    """Return the matrices in the dtype of products; without ``persistent_norm``, no gain is folded into ``kv``."""
    D = weights.norm_D.shape[1]

    qkv = torch.cat([weights.wq_DD, weights.wk_DD, weights.wv_DD], dim=1)
    qkv_with_gain = (qkv * weights.norm_D[:, None]).to(dtype)
    kv = (qkv_with_gain if persistent_norm else qkv.to(dtype))[:, D:]

    return Operands(
        qkv=qkv_with_gain,
        out=weights.wo_DD.to(dtype).contiguous(),
        up=(weights.up_FD * weights.mlp_norm_D[:, None]).to(dtype),
        down=weights.down_DF.to(dtype).contiguous(),
        kv=kv,
    )


def key_gain(weights: LayerWeights) -> Tensor:
    """Return the gain of queries times the gain of keys (L, D), which is applied to queries.

    Without norms of queries and keys, return any tensor, because the kernels need a pointer.
    """
    if weights.q_norm_D is None or weights.k_norm_D is None:
        return weights.norm_D
    return (weights.q_norm_D * weights.k_norm_D).contiguous()


def weight_gradients(weights: LayerWeights, persistent_norm: bool, dgain: Tensor, doperands: Operands) -> LayerWeights:
    """Return the gradients of the weights, given those of ``key_gain`` (L, D) and of the matrices; None for None."""
    D = weights.norm_D.shape[1]
    wkv = torch.cat([weights.wk_DD, weights.wv_DD], dim=1)

    # Products of normed inputs and normed outputs share weights and gain.
    dwqkv, dnorm = through_gain(doperands.qkv, torch.cat([weights.wq_DD, wkv], dim=1), weights.norm_D)
    if persistent_norm:
        dwkv, dnorm_of_outputs = through_gain(doperands.kv, wkv, weights.norm_D)
        dnorm += dnorm_of_outputs
    else:
        dwkv = doperands.kv
    dwqkv[:, D:] += dwkv
    dwq, dwk, dwv = dwqkv.split(D, dim=1)

    dup, dmlp_norm = through_gain(doperands.up, weights.up_FD, weights.mlp_norm_D)
    return LayerWeights(
        norm_D=dnorm,
        wq_DD=dwq,
        wk_DD=dwk,
        wv_DD=dwv,
        q_norm_D=None if weights.k_norm_D is None else dgain * weights.k_norm_D,
        k_norm_D=None if weights.q_norm_D is None else dgain * weights.q_norm_D,
        wo_DD=doperands.out,
        mlp_norm_D=dmlp_norm,
        up_FD=dup,
        down_DF=doperands.down,
    )
