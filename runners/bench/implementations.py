"""Implementations of a layer that can be timed, and the shape for which they are built."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mixers.base import Layer, Shape
from mixers.models import Stack
from mixers.options import override
from mixers.rt.dispatch import Implementation as RecurrenceMethod
from mixers.rt.dispatch import choose
from mixers.rt.layer import RecurrentTransformer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Shape of a layer, or of a stack of layers, and of a batch; ``heads`` is 0 for the layer's default."""

    width: int
    heads: int
    mlp_width: int
    batch_size: int
    layers: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(width=self.width, mlp_width=self.mlp_width, layers=self.layers)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A way to compute a layer.

    Attributes:
        label: its name in tables.
        layer: class of the layer.
        method: method of the recurrence; None for the layer's default.
        graph: whether a pass is captured as one CUDA graph.
        form: how the layer is called. "stacked": on all runs, by ``vmap``; "single": on the only run, without
            ``vmap``; "compiled": the same under ``torch.compile``; "step": position by position in the step form;
            "static-cache": position by position with a static key-value cache, without gradients.
    """

    label: str
    layer: type[Layer]
    method: RecurrenceMethod | None = None
    graph: bool = False
    form: Literal["stacked", "single", "compiled", "step", "static-cache"] = "stacked"

    @property
    def parallel(self) -> bool:
        """Whether this is the Transformer, which is the Recurrent Transformer with all positions in one block."""
        return not issubclass(self.layer, RecurrentTransformer)

    @property
    def stepwise(self) -> bool:
        """Whether Python loops over the positions, so that an eager pass takes time in proportion to N."""
        return self.method in ("naive", "tiled", "wavefront")

    def config(self, setting: Setting) -> Any:
        """Return the ``Config`` of the layer."""
        values: dict[str, Any] = {"heads": setting.heads} if setting.heads else {}
        if self.method is not None:
            values["implementation"] = self.method
        return override(self.layer.Config, values)

    def build(self, setting: Setting) -> nn.Module:
        """Return the layer or layers of one run, with parameters from torch's global generator.

        Raises:
            ValueError: the heads do not divide the width.
        """
        return stack([self.layer(self.config(setting), setting.shape) for _ in range(setting.layers)])

    def has_kernel(self, setting: Setting, device: torch.device) -> bool:
        """Return whether the layer runs the named method; without a kernel for the shape it would run another one."""
        if self.method not in ("native", "wavefront", "fused"):
            return True
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        q_BTD = torch.empty(1, 1, setting.width, dtype=dtype, device=device)
        return choose(self.method, q_BTD, setting.mlp_width, setting.heads, 1) == self.method


def stack(layers: Sequence[Layer]) -> nn.Module:
    """Return the layers on top of each other; a single layer as it is."""
    return layers[0] if len(layers) == 1 else Stack(layers)
