"""Layers that hold all L layers of a model, because they share memory over the depth."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from mixers.attention_layer import AttentionLayer
from mixers.base import Layer, Shape, State
from mixers.transformer import Transformer


class DeepLayer(Layer):
    """A layer that contains all ``shape.layers`` layers; a model has a single such module."""

    @classmethod
    def members(cls, config: Any, layers: int) -> list[tuple[type[Layer], Any]]:
        return [(cls, config)]


class TransformerStack(nn.Module):
    """``shape.layers`` Transformer layers on top of each other."""

    def __init__(self, config: AttentionLayer.Config, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Transformer(config, shape) for _ in range(shape.layers))

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def init_state(self, batch: int) -> State:
        """Return empty pairs ``k`` and ``v`` (B, J, L, D), J = 0."""
        pairs = cast(Transformer, self.blocks[0]).init_state(batch)
        return {name: y_BJD[:, :, None].expand(-1, -1, len(self.blocks), -1) for name, y_BJD in pairs.items()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position; return ``(z_BD, next state)``."""
        after: list[State] = []
        for layer, block in enumerate(self.blocks):
            pairs = {name: y_BJLD[:, :, layer] for name, y_BJLD in state.items()}
            x_BD, pairs = cast(Transformer, block).step(x_BD, pairs)
            after.append(pairs)

        return x_BD, {name: torch.stack([pairs[name] for pairs in after], dim=2) for name in state}
