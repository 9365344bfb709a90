"""The memory of layers that read a sequence segment by segment, in a loop over segments.

Dimensions beside those of ``mixers.base``: N segments, C positions of a segment, M memory tokens, J = M + C keys.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.block_attention import block_attention
from mixers.ops.loops import loop
from mixers.ops.mlp import residual_mlp
from mixers.ops.norm import rms_norm
from mixers.ops.numerics import runs_fused
from mixers.ops.projection import normed_qkv
from mixers.ops.runs import over_runs
from mixers.ops.weights import LayerWeights


def memory_attention(
    q_BTD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    memory_BMD: Tensor,
    biases: tuple[Tensor, Tensor],
    weights: LayerWeights,
    memory_norm_D: Tensor,
    scale: float,
    earlier: int = 0,
) -> Tensor:
    """Return attention (B, T, D) of positions to the memory at the beginning of their segment and to the positions.

    At the end of a segment the memory tokens pass through the layer: as queries they attend to themselves and to the
    positions of the segment. The RMS norm of their outputs is the memory at the beginning of the next segment.

    Args:
        q_BTD, k_BTD, v_BTD: queries, keys and values of the positions; the last segment may be shorter than the others.
        memory_BMD: memory at the beginning of the first segment.
        biases: biases of the logits: (H, C, J) of the positions, to the memory tokens, then to the positions of the
            ``earlier`` segments and of their own; (H, M, M + C) of the memory tokens, to themselves, then to the
            positions of the segment.
        weights: weights of the layer.
        memory_norm_D: gain of the norm of the outputs.
        scale: factor of both residual branches.
        earlier: segments before the own one in reach of the positions.
    """
    bias_HCJ, bias_HMJ = biases
    heads, tokens, keys = bias_HMJ.shape
    width, hidden = weights.down_DF.shape
    if k_BTD.shape[1] > keys - tokens and runs_fused(memory_BMD):
        from mixers.ops.kernels.block_attention import fits_block_attention
        from mixers.ops.kernels.layer_loop import rounded_maps
        from mixers.ops.kernels.memory import fits_memory, memory_attention_method
        from mixers.ops.kernels.memory_loop import memory_loop_method

        # Weights and biases as the kernels want them; made here, so that a compiled step does it once.
        bias_JCH, bias_JMH = (y.float().permute(2, 1, 0).contiguous() for y in biases)
        if fits_memory(width, heads, hidden, tokens):
            matrices = weights.wq_DD, weights.wk_DD, weights.wv_DD, weights.wo_DD, weights.up_FD, weights.down_DF
            w = torch.cat([y.detach().bfloat16().flatten() for y in matrices])
            method = memory_attention_method(heads, scale, earlier)
            constants = bias_JCH, bias_JMH, memory_norm_D
            return over_runs(method, q_BTD, k_BTD, v_BTD, memory_BMD, *constants, *weights, w)[0]

        if fits_block_attention(width, heads):
            method, layer = memory_loop_method(heads, scale), (*weights, *rounded_maps(weights, scale))
            rows = k_BTD, v_BTD, memory_BMD.bfloat16()
            keys, values = over_runs(method, *rows, bias_JMH, memory_norm_D, *layer)[0]
            return block_attention(q_BTD, k_BTD, v_BTD, (keys, values), bias_HCJ, earlier)

    memory = loop(
        ("memory", scale),
        partial(_memory_pairs, scale),
        k_BTD,
        v_BTD,
        memory_BMD,
        bias_HMJ,
        memory_norm_D,
        *weights,
        outputs=2,
    )
    return block_attention(q_BTD, k_BTD, v_BTD, (memory[0], memory[1]), bias_HCJ, earlier)


def _memory_pairs(
    scale: float,
    k_BTD: Tensor,
    v_BTD: Tensor,
    memory_BMD: Tensor,
    bias_HMJ: Tensor,
    memory_norm_D: Tensor,
    *fields: Any,
) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, N M, D) of the memory tokens at the beginning of each segment."""
    weights = LayerWeights(*fields)
    size = bias_HMJ.shape[2] - bias_HMJ.shape[1]
    segments = -(-k_BTD.shape[1] // size)
    norms_and_maps = weights.norm_D, weights.q_norm_D, weights.k_norm_D, weights.wq_DD, weights.wk_DD, weights.wv_DD
    keys_of_segments, values_of_segments = [], []
    for n, (k_BCD, v_BCD) in enumerate(zip(k_BTD.split(size, dim=1), v_BTD.split(size, dim=1), strict=True)):
        q_BMD, k_BMD, v_BMD = normed_qkv(memory_BMD, *norms_and_maps)
        keys_of_segments.append(k_BMD)
        values_of_segments.append(v_BMD)

        if n + 1 < segments:
            a_BMD = block_attention(q_BMD, k_BCD, v_BCD, (k_BMD, v_BMD), bias_HMJ)
            y_BMD = F.linear(a_BMD, weights.wo_DD)
            z_BMD = residual_mlp(memory_BMD, y_BMD, weights.mlp_norm_D, weights.up_FD, weights.down_DF, scale)
            memory_BMD = rms_norm(z_BMD, memory_norm_D)
    return torch.cat(keys_of_segments, dim=1), torch.cat(values_of_segments, dim=1)
