"""Multi-head softmax attention with ALiBi, forget gates or any other bias.

Dimensions beside those of ``mixers.base``: I queries, J keys.
"""

import math
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import at_least_float32, runs_fused
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
    logits_BHJ = newest_logits(q_BD, k_BJD, len(slopes_H))
    distance_J = torch.arange(1 - k_BJD.shape[1], 1, device=q_BD.device)
    return newest_mean(logits_BHJ + slopes_H.to(logits_BHJ)[:, None] * distance_J, v_BJD)


def newest_logits(q_BD: Tensor, k_BJD: Tensor, heads: int) -> Tensor:
    """Return the logits (B, H, J) of one query and J keys."""
    q_BHK, k_BJHK = (rearrange(y, "b ... (h k) -> b ... h k", h=heads) for y in (q_BD, k_BJD))
    return torch.einsum("bhk,bjhk->bhj", q_BHK, k_BJHK) * q_BHK.shape[-1] ** -0.5


def newest_mean(logits_BHJ: Tensor, v_BJD: Tensor) -> Tensor:
    """Return the mean (B, D) of J values by softmax of logits, heads concatenated."""
    v_BJHK = rearrange(v_BJD, "b j (h k) -> b j h k", h=logits_BHJ.shape[1])
    return torch.einsum("bhj,bjhk->bhk", logits_BHJ.softmax(-1).to(v_BJD.dtype), v_BJHK).flatten(1)


def forgetting_attention(q_BTD: Tensor, k_BTD: Tensor, v_BTD: Tensor, log_f_BTH: Tensor) -> Tensor:
    """Return causal softmax attention (B, T, D) with forget gates, heads concatenated (Lin et al. 2025, section 3).

    The logit of query i and key j is ``q_i·k_j / sqrt(K) + c_i - c_j``, where c is the running sum of ``log_f``.

    Args:
        q_BTD, k_BTD, v_BTD: queries, keys and values.
        log_f_BTH: logarithms of the gates, in at least float32.
    """
    heads = log_f_BTH.shape[-1]
    if runs_fused(q_BTD):
        from mixers.ops.kernels.attention import fits_attention, forgetting_attention_method

        if fits_attention(q_BTD.shape[-1], heads):
            c_BHT = log_f_BTH.cumsum(1).mT
            return over_runs(forgetting_attention_method(heads), q_BTD, k_BTD, v_BTD, c_BHT)[0]

    q_BHTK, k_BHTK = (rearrange(y, "b t (h k) -> b h t k", h=heads) for y in (q_BTD, k_BTD))
    return forgetting_mean(q_BHTK @ k_BHTK.mT * q_BHTK.shape[-1] ** -0.5, v_BTD, log_f_BTH)


def forgetting_step(q_BD: Tensor, k_BJD: Tensor, v_BJD: Tensor, passed_BJH: Tensor) -> Tensor:
    """Return the output (B, D) of ``forgetting_attention`` at the newest position; its own pair is the last one.

    Args:
        q_BD: query.
        k_BJD, v_BJD: pairs.
        passed_BJH: sums of ``log_f`` over the positions after each pair.
    """
    logits_BHJ = newest_logits(q_BD, k_BJD, passed_BJH.shape[-1])
    return newest_mean(at_least_float32(logits_BHJ) + passed_BJH.mT, v_BJD)


def forgetting_mean(logits_BHTT: Tensor, v_BTD: Tensor, log_f_BTH: Tensor | None) -> Tensor:
    """Return the causal mean (B, T, D) of values by softmax of logits, to which forget gates add ``c_i - c_j``."""
    logits_BHTT = at_least_float32(logits_BHTT)
    if log_f_BTH is not None:
        c_BHT = log_f_BTH.cumsum(1).mT
        logits_BHTT = logits_BHTT + c_BHT[..., :, None] - c_BHT[..., None, :]
    later_TT = logits_BHTT.new_ones(logits_BHTT.shape[-2:], dtype=torch.bool).triu(1)
    weights_BHTT = logits_BHTT.masked_fill(later_TT, -torch.inf).softmax(-1)

    v_BHTK = rearrange(v_BTD, "b t (h k) -> b h t k", h=logits_BHTT.shape[1])
    return rearrange(weights_BHTT.to(v_BTD.dtype) @ v_BHTK, "b h t k -> b t (h k)")


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
    q_BHIK, k_BHJK, v_BHJK = split
    a_BHIK = biased_attention(q_BHIK, k_BHJK, v_BHJK, bias_HIJ.to(q_BID))
    return rearrange(a_BHIK, "b h i k -> b i (h k)")


def biased_attention(q_BHIK: Tensor, k_BHJK: Tensor, v_BHJK: Tensor, bias_HIJ: Tensor) -> Tensor:
    """Return PyTorch's attention with a bias that is minus infinity for some keys of each query, and not for all.

    On a CPU, PyTorch looks for queries without keys, which takes a third of its time. Here the same operations are
    computed without that, and the results are equal bit by bit. The weights are kept for the backward pass, because
    their exponentials take longer than anything else.
    """
    if q_BHIK.device.type != "cpu" or q_BHIK.dtype not in (torch.float32, torch.float64):
        fused = partial(F.scaled_dot_product_attention, attn_mask=bias_HIJ)
        return over_batch(fused, q_BHIK, k_BHJK, v_BHJK)
    scale = math.sqrt(1 / math.sqrt(q_BHIK.shape[-1]))  # of queries and of keys
    logits_BHIJ = (q_BHIK * scale) @ (k_BHJK.mT * scale)
    logits_BHIJ += bias_HIJ
    return logits_BHIJ.softmax(-1) @ v_BHJK
