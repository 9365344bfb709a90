"""The TransformerFAM layer: block-wise attention with feedback attention memory (FAM)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.ops.attention import attend, masked_alibi
from mixers.parts import RMSNorm, check_at_least


class TransformerFAM(AttentionLayer):
    """Attention to the current block, some blocks before it, and memory tokens that sum up all earlier blocks.

    At the end of a block the memory tokens pass through the layer as queries to the block and to themselves. Their
    outputs are the memory that the next block attends to. Positions are told apart by ALiBi: as keys the memory tokens
    stand at distance 0, as queries at the end of their block. State: the memory and the pairs of the blocks in reach.

    The paper adds the loop to pre-trained layers and does not say at what scale the memory comes back. Here the memory
    passes through the residual branches as positions do, and an RMS norm with a gain stands before every block, the
    first one included. Without the norm the memory grows with each block (to 24 times the scale of the inputs after 32
    blocks, with the initial weights), so that what a later block adds is small beside it. The first memory is learned.

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
            block: positions of a block.
            earlier: blocks before the current one that stay in reach of attention.
            memory: number of memory tokens.
        """

        block: int = 8
        earlier: int = 1
        memory: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "block", "memory")
        check_at_least(0, config, "earlier")

        self.memory_MD = nn.Parameter(torch.randn(config.memory, shape.width))
        self.memory_norm = RMSNorm(shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.project(x_BTD)
        size = self.config.block

        # The memory's pairs for each block: block after block, as each memory needs the one before.
        memory_BMD = self._first_memory(len(x_BTD))
        keys, values = [], []
        for k_BCD, v_BCD in zip(k_BTD.split(size, dim=1), v_BTD.split(size, dim=1), strict=True):
            _, k_BMD, v_BMD = self.project(memory_BMD)
            keys.append(k_BMD)
            values.append(v_BMD)
            if k_BCD.shape[1] == size:
                memory_BMD = self._sum_up(memory_BMD, k_BCD, v_BCD)

        # All positions at once, each with the memory of its own block and the positions in reach.
        bias_HTJ = self._bias(x_BTD.shape[1], len(keys), x_BTD.device)
        k_BJD = torch.cat([*keys, k_BTD], dim=1)
        v_BJD = torch.cat([*values, v_BTD], dim=1)
        return self.finish(x_BTD, attend(q_BTD, k_BJD, v_BJD, bias_HTJ))

    def _bias(self, length: int, blocks: int, device: torch.device) -> Tensor:
        """Return the bias (H, T, J) of attention to the memories of all blocks, then to all positions."""
        position_T = torch.arange(length, device=device)
        distance_TT = position_T[:, None] - position_T
        block_T = position_T // self.config.block

        # Positions see earlier ones of blocks in reach, and the memory of their own block.
        behind_TT = block_T[:, None] - block_T
        seen_TT = (distance_TT >= 0) & (behind_TT <= self.config.earlier)
        own_TS = block_T[:, None] == torch.arange(blocks, device=device)
        own_TM = own_TS.repeat_interleave(self.config.memory, dim=1)

        distance_TJ = torch.cat([torch.zeros_like(own_TM, dtype=torch.long), distance_TT], dim=1)
        return masked_alibi(self.slopes_H, distance_TJ, torch.cat([own_TM, seen_TT], dim=1))

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.block >= length else None

    def init_state(self, batch: int) -> State:
        return {**super().init_state(batch), "memory": self._first_memory(batch)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        size, memory_BMD = self.config.block, state["memory"]
        q_BD, k_BD, v_BD = self.project(x_BD)
        k_BJD, v_BJD = with_newest(state, k_BD, v_BD).values()
        z_BD = self.finish(x_BD, self._attend_behind(memory_BMD, q_BD[:, None], k_BJD, v_BJD)[:, 0])

        # The block ends.
        if k_BJD.shape[1] % size == 0:
            memory_BMD = self._sum_up(memory_BMD, k_BJD[:, -size:], v_BJD[:, -size:])
            first = max(0, k_BJD.shape[1] - self.config.earlier * size)
            k_BJD, v_BJD = k_BJD[:, first:], v_BJD[:, first:]

        return z_BD, {"k": k_BJD, "v": v_BJD, "memory": memory_BMD}

    def _first_memory(self, batch: int) -> Tensor:
        """Return the memory (B, M, D) before the first block."""
        return self.memory_norm(self.memory_MD).expand(batch, -1, -1)

    def _sum_up(self, memory_BMD: Tensor, k_BCD: Tensor, v_BCD: Tensor) -> Tensor:
        """Return the memory after a block with these pairs."""
        q_BMD, _, _ = self.project(memory_BMD)
        return self.memory_norm(self.finish(memory_BMD, self._attend_behind(memory_BMD, q_BMD, k_BCD, v_BCD)))

    def _attend_behind(self, memory_BMD: Tensor, q_BID: Tensor, k_BJD: Tensor, v_BJD: Tensor) -> Tensor:
        """Return the attention output (B, I, D) of queries at the last of J positions, to the memory and to these."""
        _, k_BMD, v_BMD = self.project(memory_BMD)

        count = k_BJD.shape[1]
        distance_J = torch.arange(count - 1, -1, -1, device=q_BID.device)
        distance_IJ = torch.cat([distance_J.new_zeros(k_BMD.shape[1]), distance_J]).expand(q_BID.shape[1], -1)
        bias_HIJ = masked_alibi(self.slopes_H, distance_IJ, distance_IJ >= 0)

        k_BJD = torch.cat([k_BMD, k_BJD], dim=1)
        v_BJD = torch.cat([v_BMD, v_BJD], dim=1)
        return attend(q_BID, k_BJD, v_BJD, bias_HIJ)
