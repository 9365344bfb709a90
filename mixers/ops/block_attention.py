"""Attention of blocks of queries to memory tokens and to the positions of blocks in reach.

Dimensions beside those of ``mixers.base``: N blocks, I queries of a block, C positions of a block, M memory tokens of a
block, J keys that a block sees.
"""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def block_attention(
    q_BTD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    memory: tuple[Tensor, Tensor],
    bias_HIJ: Tensor,
    earlier: int = 0,
) -> Tensor:
    """Return softmax attention (B, T, D), heads concatenated.

    Args:
        q_BTD: queries, I of each block; the last block may have fewer.
        k_BTD, v_BTD: pairs of positions, C of each block; the last block may have fewer.
        memory: keys and values (B, N M, D) of the memory tokens, M for each block.
        bias_HIJ: bias of the logits, the same in all blocks, minus infinity where a query does not see a key. The keys
            of a block are its memory tokens, then the positions of the ``earlier`` blocks before it, then its own.
        earlier: blocks in reach before the own one.
    """
    heads, queries, keys = bias_HIJ.shape
    blocks = -(-q_BTD.shape[1] // queries)
    tokens = memory[0].shape[1] // blocks
    if runs_fused(q_BTD):
        from mixers.ops.kernels.block_attention import block_attention_method, fits_block_attention

        if fits_block_attention(q_BTD.shape[-1], heads):
            method = block_attention_method(heads, queries, keys, tokens, earlier)
            bias_JIH = bias_HIJ.float().permute(2, 1, 0).contiguous()  # here, so that a compiled step does it once
            return over_runs(method, q_BTD, k_BTD, v_BTD, *memory, bias_JIH)[0]

    # Keys and values of each block, zeros in place of blocks before the first.
    size = (keys - tokens) // (earlier + 1)
    pairs = []
    for y_BTD, memory_BJD in zip((k_BTD, v_BTD), memory, strict=True):
        y_BNCD = _split(y_BTD, blocks, size)
        reach = [F.pad(y_BNCD, (0, 0, 0, 0, n, 0))[:, :blocks] for n in range(earlier, -1, -1)]
        pairs.append(torch.cat([_split(memory_BJD, blocks, tokens), *reach], dim=2))
    q_BNHIK, k_BNHJK, v_BNHJK = (
        rearrange(y, "b n j (h k) -> b n h j k", h=heads) for y in (_split(q_BTD, blocks, queries), *pairs)
    )

    # Logits; before the first block there is nothing.
    device = q_BTD.device
    behind_J = torch.arange(earlier, -1, -1, device=device).repeat_interleave(size)
    missing_NJ = torch.arange(blocks, device=device)[:, None] < F.pad(behind_J, (tokens, 0))
    logits_BNHIJ = q_BNHIK @ k_BNHJK.mT * q_BNHIK.shape[-1] ** -0.5 + bias_HIJ
    logits_BNHIJ = logits_BNHIJ.masked_fill(missing_NJ[:, None, None], -torch.inf)

    a_BNHIK = logits_BNHIJ.softmax(-1).to(v_BNHJK.dtype) @ v_BNHJK
    return rearrange(a_BNHIK, "b n h i k -> b (n i) (h k)")[:, : q_BTD.shape[1]]


def _split(y_BTD: Tensor, blocks: int, size: int) -> Tensor:
    """Return the blocks (B, N, C, D) of a sequence, which ends with zeros where it is too short."""
    padded = F.pad(y_BTD, (0, 0, 0, blocks * size - y_BTD.shape[1]))
    return rearrange(padded, "b (n c) d -> b n c d", n=blocks)
