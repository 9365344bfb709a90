"""Layers that pass over a moving window of chunks, launch by launch, for any width.

A pass replaces the positions of its window by the layers' outputs; in the backward pass, their gradients by those of
the inputs. What passes leave for later stands side by side in memory, so that products over all of them need no copy.

Dimensions: passes over J positions, M = B J rows, N rows of all passes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mixers.ops.kernels.attention import attention_method
from mixers.ops.kernels.layer_loop import LoopedLayer, qkv_of
from mixers.ops.method import Method, Optionals, Recipe, Tensors

KEPT = 6
"""Tensors that a layer leaves for the backward pass: x, raw, a, lse, u and h of ``LoopedLayer``."""


def staircase_loop_method(heads: int, chunk: int, steps: int, scale: float) -> Method:
    """Outputs (R, B, T, D) of layers as ``mixers.staircase`` applies them.

    Tensors: x (R, B, T, D); slopes (R, H) of ALiBi, float32, the same in all runs; those of ``LoopedLayer.of``, layer
    after layer. The slopes and the maps in the dtype of products get no gradient.
    """

    def windows_of(T: int) -> list[slice]:
        passes = range(-(-T // chunk) + steps - 1)
        return [slice(max(0, n - steps + 1) * chunk, min((n + 1) * chunk, T)) for n in passes]

    def rows_of(x: Tensor) -> list[int]:
        return [x.shape[1] * (window.stop - window.start) for window in windows_of(x.shape[2])]

    def by_passes(together: Sequence[Tensor], x: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of each pass, (R, M, W) but for raw (R, 3, M, D) and lse (R, B, H, J), of tensors (N, R W)."""
        R, B, _, D = x.shape
        shapes = {1: (R, 3, -1, D), 3: (R, B, heads, -1)}
        views = (
            [part.view(shapes.get(n, (R, -1, y.shape[1] // R))) for part in y.split(rows_of(x))]
            for n, y in enumerate(together)
        )
        return list(zip(*views, strict=True))

    def forward(x: Tensor, slopes: Tensor, *fields: Any) -> tuple[Tensors, Tensors]:
        layers, attention = LoopedLayer.several(fields), attention_method(slopes[0])
        (R, B, T, D), low = x.shape, layers[0].qkv
        widths = (x, D), (low, 3 * D), (low, D), (slopes, heads), (x, D), (low, layers[0].up.shape[1])
        saved = [[like.new_empty(sum(rows_of(x)), R * width) for like, width in widths] for _ in layers]
        passes = [by_passes(own, x) for own in saved]

        z = x.clone(memory_format=torch.contiguous_format)
        for n, window in enumerate(windows_of(T)):
            y = z[:, :, window]
            for layer, own in zip(layers, passes, strict=True):
                x_n, raw, a, lse, u, h = own[n]
                x_n.unflatten(1, (B, -1)).copy_(y)
                raw = layer.project(x_n, raw)
                (attended,), (lse_n,) = attention.forward(*qkv_of(raw, layer.normed_qk(raw), B))
                a.copy_(attended.flatten(1, 2))
                lse.copy_(lse_n)
                y = layer.finish(x_n, a, u, h)[2].unflatten(1, (B, -1))
            z[:, :, window] = y
        return (z,), tuple(y for own in saved for y in own)

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        x, slopes, *fields = tensors
        layers, attention = LoopedLayer.several(fields), attention_method(slopes[0])
        (R, B, T, D), low = x.shape, layers[0].qkv
        together, widths = [], (D, layers[0].up.shape[1], D, 3 * D)
        for n in range(0, len(saved), KEPT):
            together.append([*saved[n : n + KEPT], *(low.new_empty(len(saved[n]), R * width) for width in widths)])
        passes = [by_passes(own, x) for own in together]
        dgains: list[list[Any]] = [[] for _ in layers]

        dx = gradients[0].clone(memory_format=torch.contiguous_format)
        for n, window in reversed(list(enumerate(windows_of(T)))):
            dy = dx[:, :, window].flatten(1, 2)
            for layer, own, found in reversed(list(zip(layers, passes, dgains, strict=True))):
                x_n, raw, a, lse, u, h, *places, draw = own[n]
                _, du, da, dmlp = layer.finish_gradients(dy, u, h, places)
                da, a = (part.unflatten(1, (B, -1)) for part in (da, a))
                dqkv = attention.backward((da,), qkv_of(raw, layer.normed_qk(raw), B), (a,), (lse,))
                _, dy, dinputs = layer.project_gradients(x_n, raw, dqkv, du, draw)
                found.append((*dinputs, dmlp))
            dx[:, :, window] = dy.unflatten(1, (B, -1))

        # Weights.
        dlayers: list[Tensor | None] = []
        for layer, own, views, found in zip(layers, together, passes, dgains, strict=True):
            each = [(y, parts) for y, parts in zip(own, zip(*views, strict=True), strict=True) if parts[0].ndim == 3]
            rows = [y[None] if R == 1 else torch.cat(parts, 1) for y, parts in each]
            dlayers += layer.gradients(scale, rows[:4], rows[4:], zip(*found, strict=True))
        return dx, None, *dlayers

    return Method(forward, backward, recipe=Recipe(("staircase loop", heads, chunk, steps, scale)))
