"""The operations of a decoding step with a static key-value cache: products of few rows, and attention to the cache.

All shapes are static, and the position is a tensor, so that one CUDA graph serves all positions.

Dimensions beside those of ``mixers.base``: I inputs and O outputs of a map, W maps of one input, J positions of the
cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.norm import rms_norm
from mixers.ops.numerics import has_triton


def runs_in_kernels(x: Tensor) -> bool:
    """Return whether the operations of this file run in Triton kernels: on a GPU, with activations in float32."""
    return x.is_cuda and x.dtype == torch.float32 and has_triton()


def row_products(
    x_BI: Tensor,
    *weights_OI: Tensor,
    gain_I: Tensor | None = None,
    gelu: bool = False,
    residual_BO: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``residual + scale act(weight rms_norm(x))`` (W, B, O) of one to three maps, in the dtype of x.

    Args:
        x_BI: inputs.
        weights_OI: weights of the maps.
        gain_I: gain of the norm; None leaves out the norm.
        gelu: whether act is the GELU, not the identity.
        residual_BO: what is added; None stands for zeros.
        scale: factor of the products.
        out: where to write the result, without gaps in memory; None allocates it.
    """
    y_WBO = x_BI.new_empty(len(weights_OI), len(x_BI), len(weights_OI[0])) if out is None else out
    if runs_in_kernels(x_BI):
        from mixers.ops.kernels import decoding as kernels

        if len(x_BI) <= kernels.MOST_ROWS:
            kernels.row_products(x_BI, weights_OI, gain_I, gelu, residual_BO, scale, y_WBO)
            return y_WBO

    return y_WBO.copy_(naive_row_products(x_BI, weights_OI, gain_I, gelu, residual_BO, scale))


def naive_row_products(
    x_BI: Tensor,
    weights_OI: Sequence[Tensor],
    gain_I: Tensor | None,
    gelu: bool,
    residual_BO: Tensor | None,
    scale: float,
) -> Tensor:
    """Return ``row_products`` by PyTorch's own operations; inputs of products are rounded to the weights' dtype."""
    normed_BI = x_BI if gain_I is None else rms_norm(x_BI, gain_I)
    y_WBO = torch.stack([F.linear(normed_BI.to(weight_OI), weight_OI) for weight_OI in weights_OI]).to(x_BI)
    y_WBO = scale * (F.gelu(y_WBO) if gelu else y_WBO)
    return y_WBO if residual_BO is None else residual_BO + y_WBO


def cached_attention(
    q_BD: Tensor,
    kept_2BD: Tensor,
    temporary_2BD: Tensor | None,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    slopes_H: Tensor,
    cache_2BJD: Tensor,
    position: Tensor,
) -> Tensor:
    """Return softmax attention (B, D) with ALiBi at the newest position, heads concatenated.

    A position may attend to a temporary pair of its own, which the cache never holds. Its persistent pair is then kept
    one step later. Queries, keys and values are given before QK-norm.

    Args:
        q_BD: queries.
        kept_2BD: keys and values of the pair to write into the cache before attention: that of the newest position
            or, beside a temporary pair, of the one before it, which does not exist at position 0.
        temporary_2BD: temporary key and value of the newest position, or None.
        q_gain_D, k_gain_D: gains of QK-norm over the full width; None leaves it out.
        slopes_H: slopes of the heads.
        cache_2BJD: normed keys and values, without gaps in memory; changed in place. What lies beyond the kept pair is
            not used.
        position: number of positions (1,) before the newest, an integer less than J.
    """
    if runs_in_kernels(q_BD):
        from mixers.ops.kernels import decoding as kernels

        attend = kernels.cached_attention
    else:
        attend = naive_cached_attention
    return attend(q_BD, kept_2BD, temporary_2BD, q_gain_D, k_gain_D, slopes_H, cache_2BJD, position)


def naive_cached_attention(
    q_BD: Tensor,
    kept_2BD: Tensor,
    temporary_2BD: Tensor | None,
    q_gain_D: Tensor | None,
    k_gain_D: Tensor | None,
    slopes_H: Tensor,
    cache_2BJD: Tensor,
    position: Tensor,
) -> Tensor:
    """Return ``cached_attention`` by PyTorch's own operations, over the whole cache."""
    heads = len(slopes_H)

    def normed(y_BD: Tensor, gain_D: Tensor | None) -> Tensor:
        return y_BD if gain_D is None else rms_norm(y_BD, gain_D)

    # Keep a pair.
    j = torch.arange(cache_2BJD.shape[2], device=position.device)
    newest = position if temporary_2BD is None else position - 1
    pair_2BD = torch.stack([normed(kept_2BD[0], k_gain_D), kept_2BD[1]])
    cache_2BJD.copy_(torch.where((j == newest)[:, None], pair_2BD[:, :, None].to(cache_2BJD), cache_2BJD))

    # Pairs and their distances.
    distance_J = position - j
    pairs_2BJD = cache_2BJD.masked_fill((j > newest)[:, None], 0.0).to(q_BD)
    seen_J = j <= newest
    if temporary_2BD is not None:
        pair_2BD = torch.stack([normed(temporary_2BD[0], k_gain_D), temporary_2BD[1]])
        pairs_2BJD = torch.cat([pairs_2BJD, pair_2BD[:, :, None]], dim=2)
        distance_J = torch.cat([distance_J, torch.zeros_like(position)])
        seen_J = torch.cat([seen_J, torch.ones_like(position, dtype=torch.bool)])

    # Attention with ALiBi.
    q_BHK = normed(q_BD, q_gain_D).unflatten(-1, (heads, -1))
    k_BJHK, v_BJHK = pairs_2BJD.unflatten(-1, (heads, -1))
    logits_BHJ = torch.einsum("bhk,bjhk->bhj", q_BHK, k_BJHK) * q_BHK.shape[-1] ** -0.5
    biased_BHJ = logits_BHJ - slopes_H.to(q_BD)[:, None] * distance_J
    weights_BHJ = biased_BHJ.masked_fill(~seen_J, -torch.inf).softmax(-1)
    return torch.einsum("bhj,bjhk->bhk", weights_BHJ, v_BJHK).flatten(1)
