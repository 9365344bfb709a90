"""The Recurrent Memory Transformer."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mixers.attention_layer import AttentionLayer
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.deep import DeepLayer, TransformerStack
from mixers.ops.attention import masked_alibi
from mixers.ops.loops import loop_of
from mixers.ops.memory import memory_attention
from mixers.parts import RMSNorm, check_at_least
from mixers.transformer import Transformer


class RecurrentMemoryTransformer(DeepLayer):
    """Transformer layers over one segment at a time, with memory tokens before and after it (section 3.2 of the paper).

    Both groups of tokens have the memory as their input. The group after the segment sees the whole segment; its
    outputs are the memory of the next segment. All tokens attend causally, with ALiBi over the longer sequence, and
    gradients flow through the memory. State: the memory, and the pairs of its tokens and of the current segment.

    The paper does not specify the scale of the memory that enters the next segment. Here an RMS norm with a gain is
    applied before every segment, including the first. Without it, the memory grows without bound, because the residual
    branches of pre-norm layers add to it at each segment (to 24 times the scale of the inputs after 32 segments, with
    the initial weights), so that the contributions of later segments become relatively small.

    Differs from the reference:
        Bulatov et al. 2022, section 3.2, and https://github.com/booydar/recurrent-memory-transformer,
        modeling_rmt/language_modeling.py, with a GPT-2 as its model.

        - block: theirs is that of the model it wraps: GPT-2 has layer norms, biases, and the tanh approximation of
          GELU.
        - sizes: segments of 8 and 4 memory tokens, for sequences of 128; both are settings of each experiment in
          theirs.
        - positions: ALiBi over memory and segment; theirs are those of the model: learned codes of absolute positions
          for GPT-2.
        - computation: an RMS norm with a gain of its own stands before the memory of every segment, the first one
          included; in theirs a memory that comes back has passed the model's final norm, and the first one no norm.
          Queries and keys pass through an RMS norm.
        - initialisation: theirs starts from a trained model; the memory is drawn with the standard deviation of the
          embeddings, as here, where that is 1.
        - training: gradients flow through all segments; theirs can stop them after ``k2`` segments.
    """

    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Bulatov et al. 2022, arXiv:2207.06881"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of the Recurrent Memory Transformer.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            segment: positions of a segment; longer are faster: at width 1,024, 32 take about half the time of 8.
            memory: number of memory tokens.
        """

        segment: int = 8
        memory: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, shape, "mlp_width")
        check_at_least(1, config, "segment", "memory")

        self.stack = TransformerStack(config, shape)
        self.memory_MD = nn.Parameter(torch.randn(config.memory, shape.width))
        self.memory_norm = RMSNorm(shape.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if len(self.stack.blocks) == 1:
            return self._through_one_layer(x_BTD)
        return loop_of(self, (self.config, self.shape), self._by_segments, x_BTD)

    def _by_segments(self, x_BTD: Tensor) -> Tensor:
        tokens = self.config.memory
        memory_BMD, outputs = self.memory_norm(self.memory_MD).expand(len(x_BTD), -1, -1), []

        *complete, last_BCD = x_BTD.split(self.config.segment, dim=1)
        for x_BCD in complete:
            z = self.stack(torch.cat([memory_BMD, x_BCD, memory_BMD], dim=1))
            outputs.append(z[:, tokens:-tokens])
            memory_BMD = self.memory_norm(z[:, -tokens:])

        # The last segment, complete or not, needs no memory tokens after it.
        outputs.append(self.stack(torch.cat([memory_BMD, last_BCD], dim=1))[:, tokens:])
        return torch.cat(outputs, dim=1)

    def _through_one_layer(self, x_BTD: Tensor) -> Tensor:
        """Return the same as ``forward`` for a single layer, where only the memory needs a loop over segments."""
        layer = cast(Transformer, self.stack.blocks[0])
        q_BTD, k_BTD, v_BTD = layer.project(x_BTD)
        memory_BMD = self.memory_norm(self.memory_MD).expand(len(x_BTD), -1, -1)
        biases, gain_D, scale = self._biases(layer.slopes_H), self.memory_norm.gain, layer.shape.residual_scale
        a_BTD = memory_attention(q_BTD, k_BTD, v_BTD, memory_BMD, biases, layer.weights(), gain_D, scale)
        return layer.finish(x_BTD, a_BTD)

    def _biases(self, slopes_H: Tensor) -> tuple[Tensor, Tensor]:
        """Return the biases of attention to memory and segment: of positions, and of the tokens after the segment."""
        tokens, size = self.config.memory, self.config.segment
        place = torch.arange(tokens + size + tokens, device=slopes_H.device)
        distance = place[:, None] - place
        bias = masked_alibi(slopes_H, distance, distance >= 0)
        bias_HCJ, bias_HMJ = bias[:, tokens:-tokens, :-tokens], bias[:, -tokens:, :-tokens]

        # The tokens after the segment have the same pairs as the tokens before it, so the weights of both add up.
        behind_HMM = bias[:, -tokens:, -tokens:]
        both_HMM = torch.logaddexp(bias_HMJ[..., :tokens], behind_HMM)
        return bias_HCJ, torch.cat([both_HMM, bias_HMJ[..., tokens:]], dim=2)

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.segment >= length else None

    def init_state(self, batch: int) -> State:
        return self._begin(self.memory_MD.expand(batch, -1, -1))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        z_BD, pairs = self.stack.step(x_BD, {"k": state["k"], "v": state["v"]})

        # At the end of a segment, the memory tokens after it are computed, and begin the next segment.
        if pairs["k"].shape[1] == self.config.memory + self.config.segment:
            return z_BD, self._begin(self._read(state["memory"], pairs)[0])
        return z_BD, {"memory": state["memory"], **pairs}

    def _begin(self, memory_BMD: Tensor) -> State:
        """Return the state before the first position of a segment, from a memory that is not normed yet."""
        memory_BMD = self.memory_norm(memory_BMD)
        return {"memory": memory_BMD, **self._read(memory_BMD, self.stack.init_state(len(memory_BMD)))[1]}

    def _read(self, memory_BMD: Tensor, pairs: State) -> tuple[Tensor, State]:
        """Return the outputs (B, M, D) of the memory tokens after the pairs, and the pairs with those of the tokens."""
        outputs = []
        for token_BD in memory_BMD.unbind(1):
            z_BD, pairs = self.stack.step(token_BD, pairs)
            outputs.append(z_BD)
        return torch.stack(outputs, dim=1), pairs
