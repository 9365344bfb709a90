"""Memory tokens that pass through a layer after each segment, launch by launch, for any width.

The loops over segments are those of ``mixers.ops.kernels.memory``, whose kernels read the weights of a layer that is
narrow enough. Here the layer is that of ``mixers.ops.kernels.layer_loop``.

Dimensions: N segments of C positions, P memory tokens of each of B sequences, M = B P rows of a segment.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.block_attention import block_attention_method
from mixers.ops.kernels.common import contiguous
from mixers.ops.kernels.layer_loop import LoopedLayer, qkv_of
from mixers.ops.kernels.norm import norm_gradients, normed
from mixers.ops.kernels.products import group_sum
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
        return _Inputs._make((*contiguous(*tensors[:2]), *tensors[2:5], LoopedLayer.of(tensors[5:])))

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (R, B, C, D) of the positions of each segment."""
        size = self.bias.shape[1] - self.memory.shape[2]
        return list(zip(self.k.split(size, 2), self.v.split(size, 2), strict=True))


def memory_loop_method(heads: int, scale: float) -> Method:
    """Keys, then values, (R, 2, B, N P, D) of the memory tokens at the beginning of each of at least two segments.

    Tensors: k, v (R, B, T, D) of the positions and the memory (R, B, P, D) of the first segment in the dtype of
    products; bias (R, P + C, P, H) of the memory tokens, float32, the same in all runs; gain of the norm of the
    outputs, and those of ``LoopedLayer.of``. The bias and the maps in the dtype of products get no gradient.
    """

    def attention_of(y: _Inputs) -> Method:
        keys, queries = y.bias.shape[1:3]
        return block_attention_method(heads, queries, keys, queries, 0)

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        y = _Inputs.of(*tensors)
        B, P = y.memory.shape[1:3]
        x, segments, attention = y.memory.flatten(1, 2), y.segments(), attention_of(y)
        inputs, kept = [], []
        for n, segment in enumerate(segments):
            raw, qk = y.layer.project(x)
            inputs.append((x, raw, qk))
            if n + 1 < len(segments):
                q, k, v = qkv_of(raw, qk, B)
                (a,), (lse,) = attention.forward(q, *segment, k, v, y.bias)
                u, h, z = y.layer.finish(x, a.flatten(1, 2))
                kept.append((a, lse, u, h, z))
                x = normed(z, y.output_norm, z.dtype)

        saved = *map(torch.stack, zip(*inputs, strict=True)), *map(torch.stack, zip(*kept, strict=True))
        pairs = (
            pair.unflatten(2, (B, P)).movedim(0, 2).flatten(2, 3) for pair in (saved[2][:, :, 1], saved[1][:, :, 2])
        )
        return (torch.stack([*pairs], 1),), saved

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        y = _Inputs.of(*tensors)
        B, P = y.memory.shape[1:3]
        segments, attention = y.segments(), attention_of(y)
        xs, raws, qks, *kept = saved
        dx: Any = None
        du: Tensor | None = None
        found: list[Any] = []
        inputs: list[Any] = []
        for n in reversed(range(len(segments))):
            dk, dv = gradients[0].unflatten(3, (-1, P))[:, :, :, n].unbind(1)
            dq: Any = torch.zeros_like(dk)
            if dx is not None:
                a, lse, u, h, z = (part[n] for part in kept)
                dz, doutput = norm_gradients(z, y.output_norm, dx)
                drows, du, da, dmlp = y.layer.finish_gradients(dz, u, h)
                q, k, v = qkv_of(raws[n], qks[n], B)
                attended = q, *segments[n], k, v, y.bias
                dq, dk_C, dv_C, dk_P, dv_P, _ = attention.backward((da.view_as(a),), attended, (a,), (lse,))
                dk, dv = dk + dk_P, dv + dv_P
                found.append((dk_C, dv_C, *drows, doutput, dmlp))

            draw, dx, dgains = y.layer.project_gradients(xs[n], raws[n], (dq, dk, dv), du)
            inputs.append((draw, *dgains))

        # Weights.
        a, _, u, h, _ = map(_rows, kept)
        dk_N, dv_N, *inner, doutputs, dmlps = (parts[::-1] for parts in zip(*found, strict=True))
        draws, *gains = (parts[::-1] for parts in zip(*inputs, strict=True))
        rows = [torch.cat(parts, 1) for parts in (*inner, draws)]
        dlayer = y.layer.gradients(scale, (_rows(xs), a, u, h), rows, (*gains, dmlps))

        # Positions; nothing of the last segment is read.
        rest = segments[-1][0].shape[2]
        dk, dv = (F.pad(torch.cat(parts, 2), (0, 0, 0, rest)) for parts in (dk_N, dv_N))
        return dk, dv, dx.view_as(y.memory), None, group_sum(torch.cat(doutputs, 1)), *dlayer

    return Method(forward, backward, recipe=Recipe(("memory loop", heads, scale)))


def _rows(y: Tensor) -> Tensor:
    """Rows (R, N M, W) of all segments, from (N, R, ..., W)."""
    return y.transpose(0, 1).reshape(y.shape[1], -1, y.shape[-1])
