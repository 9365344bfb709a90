"""The Recurrent Transformer's recurrence, directly from its equations: the oracle of every faster implementation.

Its norm is ``mixers.ops.norm.rms_norm``, which has an oracle of its own and runs in C or Triton where these exist.

The layer computes everything that depends only on ``x`` (queries, temporary pairs) for all positions at once. This file
has the sequential part: attention, output projection, MLP, and the persistent pairs of the layer's own outputs (Oncescu
et al. 2026, arXiv:2604.21215, section 2.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.norm import rms_norm


class Weights(NamedTuple):
    """Weights inside the recurrence, linear maps as (outputs, inputs).

    ``kv_norm_D`` is None in the RMSNorm ablation (paper, appendix "RMSNorm Ablation"): persistent pairs without the
    RMS norm of z. ``k_norm_D`` is None if keys are not normalised. With ``share`` (1,), persistent pairs are computed
    from the mixture ``x + share (z - x)`` instead of z. These are the memory vectors of a Feedback Transformer
    (arXiv:2002.09402) of one layer. Only ``naive`` and ``fused`` support ``share``.
    """

    wo_DD: Tensor
    mlp_norm_D: Tensor
    up_FD: Tensor
    down_DF: Tensor
    kv_norm_D: Tensor | None
    wk_DD: Tensor
    k_norm_D: Tensor | None
    wv_DD: Tensor
    share: Tensor | None = None

    def map(self, function: Callable[[Tensor], Any]) -> "Weights":
        """Apply ``function`` to each weight that is not None."""
        return Weights._make(None if weight is None else function(weight) for weight in self)


def key_value(z: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Persistent pair of outputs ``z`` (..., D): ``k = RMS[K RMS(z)]``, ``v = V RMS(z)``."""
    normed = z if weights.kv_norm_D is None else rms_norm(z, weights.kv_norm_D)
    k = F.linear(normed, weights.wk_DD)
    if weights.k_norm_D is not None:
        k = rms_norm(k, weights.k_norm_D)
    return k, F.linear(normed, weights.wv_DD)


def feed_forward(x: Tensor, a: Tensor, weights: Weights, scale: float) -> Tensor:
    """``u = x + s Wo a``, ``z = u + s MLP(RMS(u))`` for attention outputs ``a`` with heads concatenated."""
    u = x + scale * F.linear(a, weights.wo_DD)
    hidden = F.gelu(F.linear(rms_norm(u, weights.mlp_norm_D), weights.up_FD))
    return u + scale * F.linear(hidden, weights.down_DF)


def naive_recurrence(
    x_BTD: Tensor,
    q_BTD: Tensor,
    k_BTD: Tensor | None,
    v_BTD: Tensor | None,
    weights: Weights,
    slopes_H: Tensor,
    scale: float,
    block: int = 1,
) -> Tensor:
    """Outputs z (B, T, D) of one layer.

    Args:
        x_BTD: inputs of the layer.
        q_BTD: queries, heads concatenated, normalised, not yet scaled by 1/sqrt(K).
        k_BTD: temporary keys, normalised; None stands for zeros, which only ``naive`` and ``fused`` support.
        v_BTD: temporary values, or None.
        weights: weights inside the recurrence.
        slopes_H: ALiBi slope of each head, added as slope * (j - i).
        scale: factor s of the residual branches.
        block: number b of positions that are computed at once. A position attends to the temporary pairs of its own
            block up to itself, and to the persistent pairs of all earlier blocks (paper, section 9).
    """
    length, heads = x_BTD.shape[1], len(slopes_H)
    slopes_H = slopes_H.to(x_BTD)
    if k_BTD is None or v_BTD is None:
        k_BTD = v_BTD = torch.zeros_like(q_BTD)

    def split(y_BTD: Tensor) -> Tensor:
        return y_BTD.unflatten(-1, (heads, -1))

    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for start in range(0, length, block):
        here = slice(start, min(start + block, length))

        # Persistent pairs of earlier blocks, then temporary pairs of this one.
        k_BJHK = split(torch.cat([*keys, k_BTD[:, here]], dim=1))
        v_BJHK = split(torch.cat([*values, v_BTD[:, here]], dim=1))
        q_BIHK = split(q_BTD[:, here])

        # Attention with ALiBi.
        i = torch.arange(here.start, here.stop, device=x_BTD.device)
        j = torch.arange(here.stop, device=x_BTD.device)
        distance_IJ = j - i[:, None]
        logits_BHIJ = torch.einsum("bihk,bjhk->bhij", q_BIHK, k_BJHK) * q_BIHK.shape[-1] ** -0.5
        biased_BHIJ = logits_BHIJ + slopes_H[:, None, None] * distance_IJ
        weights_BHIJ = biased_BHIJ.masked_fill(distance_IJ > 0, -torch.inf).softmax(-1)
        a_BID = torch.einsum("bhij,bjhk->bihk", weights_BHIJ, v_BJHK).flatten(-2)

        # Outputs, and their persistent pairs.
        z_BID = feed_forward(x_BTD[:, here], a_BID, weights, scale)
        memory_BID = z_BID
        if weights.share is not None:
            memory_BID = x_BTD[:, here] + weights.share * (z_BID - x_BTD[:, here])
        k_BID, v_BID = key_value(memory_BID, weights)

        keys.append(k_BID)
        values.append(v_BID)
        outputs.append(z_BID)

    return torch.cat(outputs, dim=1)
