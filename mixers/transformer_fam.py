"""The TransformerFAM layer: block-wise attention with feedback attention memory (FAM)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.ops.attention import masked_alibi
from mixers.ops.block_attention import block_attention
from mixers.ops.memory import memory_attention
from mixers.parts import RMSNorm, check_at_least


class TransformerFAM(AttentionLayer):
    """Attention to the current block, some blocks before it, and memory tokens that summarise all earlier blocks.

    At the end of a block the memory tokens pass through the layer as queries to the block and to themselves. Their
    outputs are the memory to which the next block attends. ALiBi distinguishes positions. Memory tokens have distance 0
    as keys, and the position at the end of their block as queries. State: the memory and the pairs of the blocks in
    reach.

    The paper adds the loop to pre-trained layers and does not specify the scale of the memory that enters the next
    block. Here the memory passes through the residual branches like positions, and an RMS norm with a gain is applied
    before every block, including the first. Without the norm the memory grows with each block (to 24 times the scale of
    the inputs after 32 blocks, with the initial weights), so that the contributions of later blocks become relatively
    small. The first memory is learned.

    Dimensions beside those of ``mixers.base``: M memory tokens, C positions of a block, J keys, I queries.

    Differs from the reference:
        Hwang et al. 2024, arXiv:2404.09173; no code of the authors is known to us.

        - block: theirs is that of Flan-PaLM models, which are trained already and tuned with LoRA.
        - sizes: blocks of 8, 1 earlier block in reach and 4 memory tokens, for sequences of 128; figure 2 of the paper
          has 2 memory segments.
        - positions: ALiBi, with memory tokens at distance 0; PaLM rotates queries and keys.
        - computation: an RMS norm with a gain of its own stands before the memory of every block, the first one
          included. Queries and keys pass through an RMS norm.
        - left out: random state passing, the paper's training on segments of documents.
        - added: the first memory and the norm are parameters; the paper's abstract counts no additional weights.
    """

    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Hwang et al. 2024, arXiv:2404.09173"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of TransformerFAM.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            block: positions of a block; longer are faster: at width 1,024, 32 take about half the time of 8.
            earlier: blocks before the current one that stay in reach of attention.
            memory: number of memory tokens.
        """

        block: int = 8
        earlier: int = 1
        memory: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, shape, "mlp_width")
        check_at_least(1, config, "block", "memory")
        check_at_least(0, config, "earlier")

        self.memory_MD = nn.Parameter(torch.randn(config.memory, shape.width))
        self.memory_norm = RMSNorm(shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.project(x_BTD)

        biases = self._bias(), self._bias_behind(self.config.memory, self.config.block)
        a_BTD = memory_attention(
            q_BTD,
            k_BTD,
            v_BTD,
            self._first_memory(len(x_BTD)),
            biases,
            self.weights(),
            self.memory_norm.gain,
            self.shape.residual_scale,
            self.config.earlier,
        )
        return self.finish(x_BTD, a_BTD)

    def _bias(self) -> Tensor:
        """Return the bias (H, C, J) of attention in a block to its memory, then to the positions in reach."""
        size, earlier = self.config.block, self.config.earlier
        position_J = torch.arange(-earlier * size, size, device=self.slopes_H.device)
        distance_CJ = position_J[-size:, None] - position_J
        distance_CJ = F.pad(distance_CJ, (self.config.memory, 0))
        return masked_alibi(self.slopes_H, distance_CJ, distance_CJ >= 0)

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.block >= length else None

    def init_state(self, batch: int) -> State:
        return {**super().init_state(batch), "memory": self._first_memory(batch)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        size, memory_BMD = self.config.block, state["memory"]
        q_BD, k_BD, v_BD = self.project(x_BD)
        q_BMD, k_BMD, v_BMD = self.project(memory_BMD)
        k_BJD, v_BJD = with_newest(state, k_BD, v_BD).values()
        bias_H1J = self._bias_behind(1, k_BJD.shape[1])
        a_B1D = block_attention(q_BD[:, None], k_BJD, v_BJD, (k_BMD, v_BMD), bias_H1J)
        z_BD = self.finish(x_BD, a_B1D[:, 0])

        # The block ends.
        if k_BJD.shape[1] % size == 0:
            bias_HMJ = self._bias_behind(self.config.memory, size)
            a_BMD = block_attention(q_BMD, k_BJD[:, -size:], v_BJD[:, -size:], (k_BMD, v_BMD), bias_HMJ)
            memory_BMD = self.memory_norm(self.finish(memory_BMD, a_BMD))
            first = max(0, k_BJD.shape[1] - self.config.earlier * size)
            k_BJD, v_BJD = k_BJD[:, first:], v_BJD[:, first:]

        return z_BD, {"k": k_BJD, "v": v_BJD, "memory": memory_BMD}

    def _first_memory(self, batch: int) -> Tensor:
        """Return the memory (B, M, D) before the first block."""
        return self.memory_norm(self.memory_MD).expand(batch, -1, -1)

    def _bias_behind(self, queries: int, count: int) -> Tensor:
        """Return the bias (H, I, J) of queries at the last of ``count`` positions, to the memory and to them."""
        distance_J = torch.arange(count - 1, -1, -1, device=self.slopes_H.device)
        distance_IJ = F.pad(distance_J, (self.config.memory, 0)).expand(queries, -1)
        return masked_alibi(self.slopes_H, distance_IJ, distance_IJ >= 0)
