"""The Staircase Transformer."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mixers.attention_layer import AttentionLayer
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.deep import DeepLayer, TransformerStack
from mixers.ops.loops import is_known, loop_of
from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs
from mixers.parts import check_at_least
from mixers.transformer import Transformer


class Staircase(DeepLayer):
    """The same Transformer layers, applied several times to a moving window of chunks.

    A new chunk enters the window before each pass and leaves it after ``steps`` passes. In each pass it attends
    causally to itself and to the earlier chunks in the window, which have had more passes. ALiBi distinguishes
    positions. State: the pairs of all passes of the current chunk.

    Differs from the reference:
        Ju et al. 2021, and https://github.com/facebookresearch/transformer-sequential, models/staircase.py.

        - block: theirs has layer norms, before the branches with ``pre_norm`` and else after the additions, a ReLU MLP
          with biases, and dropout.
        - sizes: chunks of 16, 4 passes, 16 heads; theirs has chunks of 64, 2 passes and 4 heads of 64
          (experiments/staircase/algorithmic_3var.sh).
        - positions: ALiBi; theirs learns a code of each distance, common to all layers (``key_pe``).
        - computation: the window holds only the chunks that there are; theirs is filled with a cache, at first zeros,
          which is attended to. Queries and keys pass through an RMS norm.
        - initialisation: theirs divides the maps out of attention and MLP by √(2L) with ``pre_norm``, where here the
          branches have the factor 1/√L; its other maps have PyTorch's default.
        - training: theirs carries the cache from one training sequence to the next, without gradients.
        - left out: the paper's Cached and Global Cached Staircase. Its Ladder is this layer with one chunk.
    """

    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Ju et al. 2021, arXiv:2106.04279"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of the Staircase Transformer.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            chunk: positions of a chunk.
            steps: passes of a chunk through the layers, and chunks of the window.
        """

        chunk: int = 16
        steps: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "chunk", "steps")
        self.stack = TransformerStack(config, shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.shape.mlp_width and runs_fused(x_BTD) and is_known(self):
            from mixers.ops.kernels.attention import fits_attention
            from mixers.ops.kernels.layer_loop import rounded_maps
            from mixers.ops.kernels.projection import fits_project
            from mixers.ops.kernels.staircase_loop import staircase_loop_method

            width, heads, scale = self.shape.width, self.config.heads, self.shape.residual_scale
            if not fits_project(width) and fits_attention(width, heads):
                blocks = [cast(Transformer, block) for block in self.stack.blocks]
                layers = [y for block in blocks for y in (*block.weights(), *rounded_maps(block.weights(), scale))]
                method = staircase_loop_method(heads, self.config.chunk, self.config.steps, scale)
                return over_runs(method, x_BTD, blocks[0].slopes_H.float(), *layers)[0]
        return loop_of(self, (self.config, self.shape), self._by_chunks, x_BTD)

    def _by_chunks(self, x_BTD: Tensor) -> Tensor:
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

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.chunk >= length else None

    def init_state(self, batch: int) -> State:
        """Return empty pairs ``k0``, ``v0``, ``k1``, ... of the passes, in order."""
        pairs = self.stack.init_state(batch)
        return {f"{name}{n}": y for n in range(self.config.steps) for name, y in pairs.items()}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one position through all its passes."""
        steps = self.config.steps

        # At the start of a chunk, each pass takes over the pairs of the next pass of the chunk before.
        if state[f"k{steps - 1}"].shape[1] == self.config.chunk:
            later = {f"{name}{n}": state[f"{name}{n + 1}"] for n in range(steps - 1) for name in "kv"}
            state = {**self.init_state(len(x_BD)), **later}

        after: State = {}
        for n in range(steps):
            x_BD, pairs = self.stack.step(x_BD, {name: state[f"{name}{n}"] for name in "kv"})
            after |= {f"{name}{n}": y for name, y in pairs.items()}
        return x_BD, after
