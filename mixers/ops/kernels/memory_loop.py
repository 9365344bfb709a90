"""Memory tokens that pass through a layer after each segment, launch by launch, for any width.

The loops over segments are those of ``mixers.ops.kernels.memory``, whose kernels read the weights of a layer that is
narrow enough. Here the layer is that of ``mixers.ops.kernels.layer_loop``.

Dimensions: N segments of C positions, P memory tokens of each of B sequences, M = B P rows of a segment.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.block_attention import pair_gradients
from mixers.ops.kernels.common import contiguous
from mixers.ops.kernels.layer_loop import LoopedLayer
from mixers.ops.kernels.norm import norm_gradients, normed
from mixers.ops.kernels.products import group_sum
from mixers.ops.kernels.token_attention import token_attention, token_gradients
from mixers.ops.method import Method, Optionals, Recipe, Tensors


class _Inputs(NamedTuple):
    """Tensors of ``memory_loop_method``."""

    k: Tensor
    v: Tensor
    memory: Tensor
    bias: Tensor
    output_norm: Tensor
    layer: LoopedLayer

    @staticmethod
    def of(*tensors: Any) -> "_Inputs":
        k, v, memory, bias, *rest = tensors
        return _Inputs._make((*contiguous(k, v, memory, bias[0]), rest[0], LoopedLayer.of(rest[1:])))

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (R, B, C, D) of the positions of each segment."""
        size = self.bias.shape[0] - self.memory.shape[2]
        return list(zip(self.k.split(size, 2), self.v.split(size, 2), strict=True))


def memory_loop_method(heads: int, scale: float) -> Method:
    """Keys, then values, (R, 2, B, N P, D) of the memory tokens at the beginning of each of at least two segments.

    Tensors: k, v (R, B, T, D) of the positions and the memory (R, B, P, D) of the first segment in the dtype of
    products; bias (R, P + C, P, H) of the memory tokens, float32, the same in all runs; gain of the norm of the
    outputs, and those of ``LoopedLayer.of``. The bias and the maps in the dtype of products get no gradient.
    """

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        y = _Inputs.of(*tensors)
        B = y.memory.shape[1]
        x, segments = y.memory.flatten(1, 2), y.segments()
        inputs, kept = [], []
        for n, segment in enumerate(segments):
            raw = y.layer.project(x)
            inputs.append((x, raw))
            if n + 1 < len(segments):
                softmax = token_attention(raw, y.layer.qk_norm, segment, y.bias)
                u, h, z = y.layer.finish(x, softmax[0])
                kept.append((*softmax, u, h, z))
                x = normed(z, y.output_norm, z.dtype)

        saved = *map(torch.stack, zip(*inputs, strict=True)), *map(torch.stack, zip(*kept, strict=True))
        keys, values = (_by_sequences(saved[1][:, :, i], B) for i in (1, 2))
        return (torch.stack([_with_norm(keys, y.layer.weights.k_norm_D), values], 1),), saved

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        y = _Inputs.of(*tensors)
        B, P = y.memory.shape[1:3]
        segments, dpairs_N = y.segments(), gradients[0].contiguous().unflatten(3, (-1, P)).unbind(3)
        xs, raws, *kept = saved
        dx: Any = None
        du: Tensor | None = None
        found: list[Any] = []
        inputs: list[Any] = []
        for n in reversed(range(len(segments))):
            if dx is None:
                dqkv = F.pad(dpairs_N[n], (0, 0, 0, 0, 0, 0, 1, 0)).flatten(2, 3)
            else:
                *softmax, u, h, z = (part[n] for part in kept)
                dz, doutput = norm_gradients(z, y.output_norm, dx)
                drows, du, da, dmlp = y.layer.finish_gradients(dz, u, h)
                dqkv = token_gradients(raws[n], y.layer.qk_norm, segments[n], y.bias, softmax, da, dpairs_N[n])
                found.append((da, *drows, doutput, dmlp))

            draw, dx, dgains = y.layer.project_gradients(xs[n], raws[n], dqkv.unbind(1), du)
            inputs.append((draw, *dgains))

        # Weights.
        a, u, h = (_rows(kept[n]) for n in (0, 3, 4))
        das, *inner, doutputs, dmlps = (parts[::-1] for parts in zip(*found, strict=True))
        draws, *gains = (parts[::-1] for parts in zip(*inputs, strict=True))
        rows = [torch.cat(parts, 1) for parts in (*inner, draws)]
        dlayer = y.layer.gradients(scale, (_rows(xs), a, u, h), rows, (*gains, dmlps))

        # Positions; no token attends to those of the last segment.
        q, da, a, lse = (_by_sequences(part, B) for part in (raws[:-1, :, 0], torch.stack(das), *kept[:2]))
        delta = (da.float() * a.float()).unflatten(-1, (heads, -1)).sum(-1)
        q, size = _with_norm(q, y.layer.weights.q_norm_D), y.bias.shape[0] - P
        dk, dv = pair_gradients((y.k, y.v), q, y.bias, (da, lse, delta), size=size, earlier=0, first=P)
        return dk, dv, dx.view_as(y.memory), None, group_sum(torch.cat(doutputs, 1)), *dlayer

    return Method(forward, backward, recipe=Recipe(("memory loop", heads, scale)))


def _by_sequences(y: Tensor, sequences: int) -> Tensor:
    """Rows (R, B, N P, W) of all segments, from (N, R, B P, W)."""
    return y.unflatten(2, (sequences, -1)).movedim(0, 2).flatten(2, 3).contiguous()


def _with_norm(y: Tensor, gain: Tensor | None) -> Tensor:
    """Rows after their norm, if there is one."""
    return y if gain is None else normed(y, gain, y.dtype)


def _rows(y: Tensor) -> Tensor:
    """Rows (R, N M, W) of all segments, from (N, R, ..., W)."""
    return y.transpose(0, 1).reshape(y.shape[1], -1, y.shape[-1])
