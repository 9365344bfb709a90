"""Attention with relative positions to segments: Dai et al. 2019, arXiv:1901.02860, section 3.3.

Dimensions beside those of ``mixers.base``: N segments of C positions, I queries, J pairs or distances.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def relative_attention(
    q_BTD: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    code_JD: Tensor,
    heads: int,
    segment: int,
) -> Tensor:
    """Return causal softmax attention (B, T, D) of each position to its own segment and the segment before.

    Args:
        q_BTD: queries.
        near: keys and values (B, T, D) for queries of the same segment.
        far: keys and values (B, T, D) for queries of the next segment.
        biases: vectors u and w (D,), see ``relative_attend``.
        code_JD: codes of the distances 0 to J - 1, where J is twice the number of positions of a segment.
        heads: number of heads, concatenated in all tensors.
        segment: positions C of a segment.
    """
    if runs_fused(q_BTD):
        from mixers.ops.kernels.relative_attention import fits_relative_attention, relative_attention_method

        if fits_relative_attention(q_BTD.shape[-1], heads):
            method = relative_attention_method(heads, segment)
            return over_runs(method, q_BTD, *near, *far, *biases, code_JD)[0]

    # Pairs of each segment and of the one before it, zeros before the first.
    length = q_BTD.shape[1]
    q_BNCD, *pairs = (
        rearrange(F.pad(y, (0, 0, 0, -length % segment)), "b (n c) d -> b n c d", c=segment)
        for y in (q_BTD, *near, *far)
    )
    k_BNJD, v_BNJD = (
        torch.cat([F.pad(before[:, :-1], (0, 0, 0, 0, 1, 0)), here], dim=2)
        for here, before in zip(pairs[:2], pairs[2:], strict=True)
    )

    # Keys that each query sees.
    position_J = torch.arange(-segment, segment, device=q_BTD.device)
    distance_CJ = position_J[segment:, None] - position_J
    first_N = segment * torch.arange(q_BNCD.shape[1], device=q_BTD.device)
    exists_NJ = first_N[:, None] + position_J >= 0
    seen_N1CJ = ((distance_CJ >= 0) & exists_NJ[:, None])[:, None]

    a_BNCD = relative_attend(q_BNCD, k_BNJD, v_BNJD, biases, code_JD, heads, distance_CJ, seen_N1CJ)
    return rearrange(a_BNCD, "b n c d -> b (n c) d")[:, :length]


def relative_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: tuple[Tensor, Tensor],
    code_JD: Tensor,
    heads: int,
    distance_IJ: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return the attention output (..., I, D) of queries to pairs (..., J, D), heads concatenated.

    The logit of query i and key j is ``((q_i + u)·k_j + (q_i + w)·code_{i-j}) / sqrt(K)``.

    Args:
        q, k, v: queries, keys and values.
        biases: vectors u and w (D,).
        code_JD: codes of distances from 0 on.
        heads: number of heads, concatenated in all tensors.
        distance_IJ: distances; below J where the query sees the key.
        seen: true where a query sees a key; its shape is (..., H, I, J) or expands to it.
    """
    u_D, w_D = biases
    content, place, k, v, code_HNK = (
        rearrange(y, "... i (h k) -> ... h i k", h=heads) for y in (q + u_D, q + w_D, k, v, code_JD)
    )

    # Logits by content, and logits by distance, which are gathered from one logit per query and distance.
    by_distance = place @ code_HNK.mT
    index_IJ = distance_IJ.clamp(0, len(code_JD) - 1)
    logits = content @ k.mT + by_distance.gather(-1, index_IJ.expand_as(by_distance))

    weights = (logits * content.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return rearrange(weights.to(v.dtype) @ v, "... h i k -> ... i (h k)")
