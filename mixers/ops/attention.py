"""Multi-head softmax attention with ALiBi or any other bias.

Dimensions beside those of ``mixers.base``: I queries, J keys.
"""

from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_batch, over_runs


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes 2^(-8h/H) of heads h = 1..H, float32 (Press et al. 2022, arXiv:2108.12409; max bias 8)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads).float()


def attention(q_BTD: Tensor, k_BTD: Tensor, v_BTD: Tensor, slopes_H: Tensor, window: int | None = None) -> Tensor:
    """Return causal softmax attention (B, T, D) with ALiBi, heads concatenated.

    Args:
        q_BTD, k_BTD, v_BTD: queries, keys and values.
        slopes_H: slopes of the heads.
        window: number of positions that a query sees, its own included; None for all earlier positions.
    """
    if runs_fused(q_BTD):
        from mixers.ops.kernels.attention import attention_method, fits_attention

        if fits_attention(q_BTD.shape[-1], len(slopes_H)):
            return over_runs(attention_method(slopes_H, window), q_BTD, k_BTD, v_BTD)[0]

    position_T = torch.arange(q_BTD.shape[1], device=q_BTD.device)
    distance_TT = position_T[:, None] - position_T
    seen_TT = distance_TT >= 0
    if window is not None:
        seen_TT = seen_TT & (distance_TT < window)
    return attend(q_BTD, k_BTD, v_BTD, masked_alibi(slopes_H, distance_TT, seen_TT))


def attention_step(q_BD: Tensor, k_BJD: Tensor, v_BJD: Tensor, slopes_H: Tensor) -> Tensor:
    """Return the output (B, D) of ``attention`` at the newest position; its own pair is the last of the J pairs."""
    heads = len(slopes_H)
    q_BHK = rearrange(q_BD, "b (h k) -> b h k", h=heads)
    k_BJHK, v_BJHK = (rearrange(y, "b j (h k) -> b j h k", h=heads) for y in (k_BJD, v_BJD))

    logits_BHJ = torch.einsum("bhk,bjhk->bhj", q_BHK, k_BJHK) * q_BHK.shape[-1] ** -0.5
    distance_J = torch.arange(1 - k_BJD.shape[1], 1, device=q_BD.device)
    weights_BHJ = (logits_BHJ + slopes_H.to(logits_BHJ)[:, None] * distance_J).softmax(-1)
    return torch.einsum("bhj,bjhk->bhk", weights_BHJ, v_BJHK).flatten(1)


def masked_alibi(slopes_H: Tensor, distance_IJ: Tensor, seen_IJ: Tensor) -> Tensor:
    """Return the bias (H, I, J) of ALiBi, minus infinity where a query does not see a key.

    Args:
        slopes_H: slopes of the heads.
        distance_IJ: positions from each key to each query, at least 0 where the query sees the key.
        seen_IJ: true where the query sees the key.
    """
    return (-slopes_H[:, None, None] * distance_IJ).masked_fill(~seen_IJ, -torch.inf)


def attend(q_BID: Tensor, k_BJD: Tensor, v_BJD: Tensor, bias_HIJ: Tensor) -> Tensor:
    """Return softmax attention (B, I, D) of I queries to J pairs with a bias on the logits, heads concatenated."""
    heads, (k_BJD, v_BJD) = len(bias_HIJ), (y.to(q_BID.dtype) for y in (k_BJD, v_BJD))
    split = (rearrange(y, "b j (h k) -> b h j k", h=heads) for y in (q_BID, k_BJD, v_BJD))
    a_BHIK = over_batch(partial(F.scaled_dot_product_attention, attn_mask=bias_HIJ.to(q_BID)), *split)
    return rearrange(a_BHIK, "b h i k -> b i (h k)")
