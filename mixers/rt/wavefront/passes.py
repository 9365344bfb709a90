"""Recurrent Transformer layers of wide models: all layers of a stack work at the same time, on different positions.

This is for models whose matrix products fill a GPU (Oncescu et al. 2026, arXiv:2604.21215, "C4 pretraining"). Matrix
products use the library; everything between them is fused in Triton kernels.

*Waves.* Time is split into groups of 32 or 64 positions. A layer can process a group when the layer before has finished
it. So layers form a wavefront, each one group behind the layer before it. A column of this drawing is a wave: each
product and each kernel computes all its layers at once. The backward pass runs the same waves in reverse order.

               forward                          backward
    wave       0   1   2   3   4   5            5   4   3   2   1   0
    layer 0    g0  g1  g2  g3  .   .            .   .   g3  g2  g1  g0
    layer 1    .   g0  g1  g2  g3  .            .   g3  g2  g1  g0  .
    layer 2    .   .   g0  g1  g2  g3           g3  g2  g1  g0  .   .

*Groups.* A group is split into chunks of 16 positions. Queries attend to keys in the largest tiles that the recurrence
allows. The drawing shows the queries of a group, here of two chunks of three positions, and the keys they see:

                   earlier groups   chunk 0   chunk 1
               0   P P P P P P P    t                   t  begin: temporary pairs, once a group
    chunk 0    1   P P P P P P P    a t                 P  past: all earlier groups, once a group
               2   P P P P P P P    a a t               p  past: the group's earlier chunks, once a chunk
               3   P P P P P P P    p p p     t         a  attend: the chunk's earlier positions, once a position
    chunk 1    4   P P P P P P P    p p p     a t
               5   P P P P P P P    p p p     a a t

The backward pass takes the same tiles in reverse: the pairs of a tile pull their gradients from its queries. Nothing in
the loop depends on the gradients of queries and temporary pairs, which are computed for a whole group at its end.

*Positions.* A position takes four matrix products (in brackets) and five kernels:

    forward     attend [out] add_norm [up] gelu [down] add_norm [kv] pair
    backward    attend pair [kv] add_norm [down] gelu [up] add_norm [out]

The backward pass recomputes the hidden layer group by group, and accumulates the weights' gradients group by group.
There are no atomics, so results are bitwise reproducible. A pass consists of thousands of small launches, which
a caller captures in a CUDA graph, or else ``mixers.ops.replay``.

*Chunk kernels.* On Hopper GPUs, ``chunk`` computes all positions of a chunk in one launch, for models of width 256 or
384 with few sequences.

*Blocks.* With a block of 2, 4, 8 or 16 positions, its positions take the place of one: a chunk has fewer steps, each of
more rows. Temporary pairs are kept for a whole group, and ``past_kernels`` let the queries of a block attend to them.

For runs that are trained together, the runs take the place of the layers of a wave, without a shift in time, and the
layers are computed one after the other.

Tensors have a leading axis L of layers or runs and, except at the interface, positions before sequences: (L, T, B, D).
T is a multiple of the group's length; positions past the end of the sequence are zero. ``n`` is a normed row and ``r``
the reciprocal of its root mean square. Logits are kept in units of log2. ``buffers`` lists every tensor.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from mixers.ops.method import Method, Optionals, Recipe, Tensors
from mixers.ops.weights import LayerWeights
from mixers.rt.wavefront.backward import Backward
from mixers.rt.wavefront.forward import Forward
from mixers.rt.wavefront.schedule import CHUNK
from mixers.rt.wavefront.setup import WavefrontSetting

HEAD_DIMS = (16, 32, 64, 128)


def unsupported(D: int, H: int, block: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the wavefront does not support a case; None if it does.

    Args:
        D: model width.
        H: heads.
        block: positions that attend to each other's temporary pairs.
        dtype: dtype of matrix products.
        device: device of the inputs.
    """
    if CHUNK % block:
        return f"blocks of {block} positions (kernels: divisors of {CHUNK})"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"{dtype} (kernels compute in float32 or bfloat16)"
    if D % H or D // H not in HEAD_DIMS:
        return f"{H} heads of width {D} (kernels: head dim {', '.join(map(str, HEAD_DIMS))})"
    if device.type != "cuda" and not (triton.knobs.runtime.interpret and dtype == torch.float32):
        return f"{dtype} on {device.type} (kernels: cuda; TRITON_INTERPRET=1 lends them the CPU in float32 alone)"
    return None


def layers_method(layers: int, setting: WavefrontSetting) -> Method:
    """Return a stack of layers as an operation on inputs and weights, which returns outputs (R, B, T, D), all float32.

    The operation takes inputs (R, B, T, D), then each field of ``LayerWeights`` for all layers in order.

    Raises:
        ValueError: when the operation is called on a case that is ``unsupported``.
    """

    def forward(x_RBTD: Tensor, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        _check(x_RBTD, setting)
        saved: list[Tensor] = []
        for weights in _passes(layers, len(x_RBTD), tensors):
            x_RBTD, kept = Forward(x_RBTD, weights, setting).run()
            saved += kept
        return (x_RBTD,), tuple(saved)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        (d_RBTD,), (x_RBTD, *weights) = gradients, tensors
        passes = _passes(layers, len(x_RBTD), weights)
        size = len(saved) // len(passes)

        each: list[LayerWeights] = []
        for i in reversed(range(len(passes))):
            kept = saved[i * size : (i + 1) * size]
            d_RBTD, dweights = Backward(d_RBTD, passes[i], setting, kept).run()
            each.insert(0, dweights)

        if len(x_RBTD) == 1:
            each = _layers_apart(each[0], layers)
        return d_RBTD, *(y for field in zip(*each, strict=True) for y in field)

    def make(slopes_H: Tensor) -> Method:
        return layers_method(layers, replace(setting, slopes_H=slopes_H))

    key = "rt wavefront", layers, setting.scale, setting.persistent_norm, setting.block, setting.dtype
    return Method(forward, backward, label="rt wavefront", recipe=Recipe(key, (setting.slopes_H,), make))


def _check(x_RBTD: Tensor, setting: WavefrontSetting) -> None:
    reason = unsupported(x_RBTD.shape[-1], len(setting.slopes_H), setting.block, setting.dtype, x_RBTD.device)
    if reason is not None:
        raise ValueError(f"no kernel for {reason}")


def _passes(layers: int, runs: int, tensors: Sequence[Any]) -> list[LayerWeights]:
    """Return the weights of each pass: one pass for all layers of one run, or one pass per layer for several runs."""
    each = [LayerWeights(*tensors[i::layers]) for i in range(layers)]
    if runs > 1:
        return each
    return [LayerWeights._make(None if ws[0] is None else torch.cat(ws) for ws in zip(*each, strict=True))]


def _layers_apart(weights: LayerWeights, layers: int) -> list[LayerWeights]:
    """Weights of each layer (1, ...) from those of the stack (L, ...)."""
    return [LayerWeights._make(y if y is None else y[i : i + 1] for y in weights) for i in range(layers)]
