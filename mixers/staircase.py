"""The Staircase Transformer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixers.attention_layer import AttentionLayer
from mixers.base import Shape, State
from mixers.deep import DeepLayer, TransformerStack


class Staircase(DeepLayer):
    """The same Transformer layers again and again over a window of chunks that a new chunk enters each time.

    A chunk leaves the window after ``steps`` passes; in each it attends causally to itself and to the chunks before
    that are still in the window, which have had more passes. Positions are told apart by ALiBi. State: the pairs of
    the passes that the chunk under way takes part in, as far as they have come.
    """

    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Ju et al. 2021, arXiv:2106.04279"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of the Staircase Transformer.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            chunk: positions that enter at each step.
            steps: passes of a chunk through the layers, and chunks of the window.
        """

        chunk: int = 16
        steps: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        for name in ("chunk", "steps"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name}: {getattr(config, name)} must be at least 1")
        self.stack = TransformerStack(config, shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        chunks, last = x_BTD.split(self.config.chunk, dim=1), self.config.steps - 1
        window: list[Tensor] = []
        outputs = []
        for n in range(len(chunks) + last):
            window += chunks[n : n + 1]
            z_BJD = self.stack(torch.cat(window, dim=1))
            window = list(z_BJD.split([y_BCD.shape[1] for y_BCD in window], dim=1))
            if n >= last:
                outputs.append(window.pop(0))
        return torch.cat(outputs, dim=1)

    def init_state(self, batch: int) -> State:
        """Pairs ``k0``, ``v0``, ``k1``, ... of the passes, the chunk's first pass first."""
        pairs = self.stack.init_state(batch)
        return {f"{name}{n}": y for n in range(self.config.steps) for name, y in pairs.items()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one position through all its passes; where a chunk begins, the second pass of the last is its first."""
        steps = self.config.steps
        if state[f"k{steps - 1}"].shape[1] == self.config.chunk:
            later = {f"{name}{n}": state[f"{name}{n + 1}"] for n in range(steps - 1) for name in "kv"}
            state = {**self.init_state(len(x_BD)), **later}
        after: State = {}
        for n in range(steps):
            x_BD, pairs = self.stack.step(x_BD, {name: state[f"{name}{n}"] for name in "kv"})
            after |= {f"{name}{n}": y for name, y in pairs.items()}
        return x_BD, after
