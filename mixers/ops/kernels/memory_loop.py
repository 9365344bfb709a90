"""Memory tokens that pass through a layer after each segment, launch by launch, for any width.

The loops over segments are those of ``mixers.ops.kernels.memory``, whose kernels read the weights of a layer that is
narrow enough. Here the library takes the products. A trace has one operation for all segments, and one backward. Only
gradients of activations are computed in the loop; those of weights are products over all segments after it.

Dimensions: N segments of C positions, P memory tokens of each of B sequences, M = B P rows of a segment.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mixers.ops.kernels.block_attention import block_attention_method
from mixers.ops.kernels.common import contiguous
from mixers.ops.kernels.norm import norm_gradients, rms_norm_method
from mixers.ops.kernels.products import group_sum, rows_products
from mixers.ops.method import Method, Optionals, Recipe, Tensors
from mixers.ops.weights import LayerWeights


class _Inputs(NamedTuple):
    """Tensors of ``memory_loop_method``; the matrices among the weights stand once more in the dtype of products."""

    k: Tensor
    v: Tensor
    memory: Tensor
    bias: Tensor
    output_norm: Tensor
    weights: LayerWeights
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(*tensors: Any) -> "_Inputs":
        return _Inputs._make((*contiguous(*tensors[:2]), *tensors[2:5], LayerWeights(*tensors[5:-4]), *tensors[-4:]))

    def segments(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (R, B, C, D) of the positions of each segment."""
        size = self.bias.shape[1] - self.memory.shape[2]
        return list(zip(self.k.split(size, 2), self.v.split(size, 2), strict=True))

    def qk_gain(self) -> Tensor | None:
        """Gains (2 R, D) of queries and keys."""
        q_norm, k_norm = self.weights.q_norm_D, self.weights.k_norm_D
        return None if q_norm is None or k_norm is None else torch.stack([q_norm, k_norm], 1).flatten(0, 1)


def memory_loop_method(heads: int, scale: float) -> Method:
    """Keys, then values, (R, 2, B, N P, D) of the memory tokens at the beginning of each of at least two segments.

    Tensors: k, v (R, B, T, D) of the positions and the memory (R, B, P, D) of the first segment in the dtype of
    products; bias (R, P + C, P, H) of the memory tokens, float32, the same in all runs; gain of the norm of the
    outputs, and the fields of ``LayerWeights``; in the dtype of products the maps to q, k and v (R, 3, D, D), and out,
    up and down, of which out and down are multiplied by ``scale``. The bias and the last four get no gradient.
    """

    def attention_of(y: _Inputs) -> Method:
        keys, queries = y.bias.shape[1:3]
        return block_attention_method(heads, queries, keys, queries, 0)

    def forward(*tensors: Any) -> tuple[Tensors, Tensors]:
        y = _Inputs.of(*tensors)
        (R, B, P, _), weights, qk_gain = y.memory.shape, y.weights, y.qk_gain()
        x, segments, attention = y.memory.flatten(1, 2), y.segments(), attention_of(y)
        inputs, kept = [], []
        for n, segment in enumerate(segments):
            raw = torch.matmul(_normed(x, weights.norm_D)[:, None], y.qkv.mT)  # (R, 3, M, D)
            qk = raw[:, :2].flatten(0, 1)
            qk = qk if qk_gain is None else _normed(qk, qk_gain)
            inputs.append((x, raw, qk))
            if n + 1 < len(segments):
                q, k = qk.view(R, 2, B, P, -1).unbind(1)
                (a,), (lse,) = attention.forward(q, *segment, k, raw[:, 2].view_as(k), y.bias)
                u = torch.baddbmm(x, a.flatten(1, 2), y.out.mT)
                h = torch.bmm(_normed(u, weights.mlp_norm_D), y.up.mT)
                z = torch.baddbmm(u, F.gelu(h), y.down.mT)
                kept.append((a, lse, u, h, z))
                x = _normed(z, y.output_norm)

        saved = *map(torch.stack, zip(*inputs, strict=True)), *map(torch.stack, zip(*kept, strict=True))
        keys, values = saved[2].unflatten(1, (R, 2))[:, :, 1], saved[1][:, :, 2]  # (N, R, M, D)
        pairs = (pair.unflatten(2, (B, P)).movedim(0, 2).flatten(2, 3) for pair in (keys, values))
        return (torch.stack([*pairs], 1),), saved

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        y = _Inputs.of(*tensors)
        (R, B, P, D), weights, qk_gain = y.memory.shape, y.weights, y.qk_gain()
        segments, attention = y.segments(), attention_of(y)
        xs, raws, qks, *kept = saved
        dx: Any = None
        du: Tensor | None = None
        found: list[Any] = []
        draws, dinputs, dqks = [], [], []
        for n in reversed(range(len(segments))):
            dk, dv = gradients[0].unflatten(3, (-1, P))[:, :, :, n].unbind(1)
            dq: Any = torch.zeros_like(dk)
            if dx is not None:
                q, k = qks[n].view(R, 2, B, P, D).unbind(1)
                a, lse, u, h, z = (part[n] for part in kept)
                dz, doutput = norm_gradients(z, y.output_norm, dx)
                dh = torch.ops.aten.gelu_backward(torch.bmm(dz, y.down), h)
                du, dmlp = norm_gradients(u, weights.mlp_norm_D, torch.bmm(dh, y.up), dz)
                attended = q, *segments[n], k, raws[n][:, 2].view_as(k), y.bias
                da = torch.bmm(du, y.out).view_as(a)
                dq, dk_C, dv_C, dk_P, dv_P, _ = attention.backward((da,), attended, (a,), (lse,))
                dk, dv = dk + dk_P, dv + dv_P
                found.append((dk_C, dv_C, dz, dh, du, doutput, dmlp))

            # Queries, keys and values, and the norm before them.
            dqk = torch.stack([dq, dk], 1).view(2 * R, B * P, D)
            if qk_gain is not None:
                dqk, dqk_gain = norm_gradients(raws[n][:, :2].flatten(0, 1), qk_gain, dqk)
                dqks.append(dqk_gain)
            draws.append(torch.cat([*dqk.unflatten(0, (R, 2)).unbind(1), dv.flatten(1, 2)], -1))
            dx, dnorm = norm_gradients(xs[n], weights.norm_D, torch.bmm(draws[-1], y.qkv.flatten(1, 2)), du)
            dinputs.append(dnorm)

        # Weights.
        a, _, u, h, _ = map(_rows, kept)
        x = _rows(xs)
        *dpositions, dzs, dhs, dus, doutputs, dmlps = (parts[::-1] for parts in zip(*found, strict=True))
        (dwqkv,) = rows_products((torch.cat(draws[::-1], 1), _normed(x, weights.norm_D)))
        inner = (dus, a), (dhs, _normed(u, weights.mlp_norm_D)), (dzs, F.gelu(h))
        dwo, dup, ddown = rows_products(*((torch.cat(left, 1), right) for left, right in inner))
        dgains = [group_sum(torch.cat(parts, 1)) for parts in (doutputs, dinputs, dmlps)]
        dqk_norms = group_sum(torch.cat(dqks, 1)).view(R, 2, D).unbind(1) if dqks else (None, None)
        dweights = dgains[1], *dwqkv.split(D, 1), *dqk_norms, scale * dwo, dgains[2], dup, scale * ddown

        # Positions; nothing of the last segment is read.
        rest = segments[-1][0].shape[2]
        dk, dv = (F.pad(torch.cat(parts, 2), (0, 0, 0, rest)) for parts in dpositions)
        return dk, dv, dx.view_as(y.memory), None, dgains[0], *dweights, None, None, None, None

    return Method(forward, backward, recipe=Recipe(("memory loop", heads, scale)))


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm_method(x.dtype).forward(x, gain)[0][0]


def _rows(y: Tensor) -> Tensor:
    """Rows (R, N M, ...) of all segments, from (N, R, ...)."""
    return y.transpose(0, 1).flatten(1, 2)
