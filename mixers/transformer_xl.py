"""The Transformer-XL layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.ops.relative_attention import relative_attend, relative_attention
from mixers.parts import check_at_least, linear, sinusoids


class TransformerXL(AttentionLayer):
    """Attention inside a segment and to all inputs of the segment before, through which no gradient flows.

    The paper's relative encoding (section 3.3) distinguishes positions: the logit of query i and key j is
    (q_i + u)·k_j + (q_i + v)·(W r_{i-j}) with sinusoids r. State: the pairs of the previous and the current segment.

    Differs from the reference:
        Dai et al. 2019, section 3, and https://github.com/kimiyoung/transformer-xl, pytorch/mem_transformer.py
        (``RelPartialLearnableDecoderLayer``) and train.py.

        - block: theirs has layer norms after the residual additions (before them with ``pre_lnorm``), a ReLU MLP with
          biases, and dropout.
        - sizes: 16 heads of D/16 channels and segments of 8; theirs has 10 heads of 50, segments of 70 (``tgt_len``),
          and a memory of any length (``mem_len``), here one segment.
        - computation: queries and keys pass through an RMS norm, before u and v are added; theirs are not normed. Each
          layer has its own u and v; theirs are common to all layers.
        - initialisation: u and v start at zero; theirs start normal with standard deviation 0.02, as do all linear
          maps.
        - training: one step trains all segments of a sequence; theirs makes a step for each segment and keeps the
          memory for the next step.
    """

    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of Transformer-XL.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            segment: positions of a segment.
        """

        segment: int = 8

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "segment")

        self.r = linear(shape.width, shape.width)
        self.u_D = nn.Parameter(torch.zeros(shape.width))
        self.v_D = nn.Parameter(torch.zeros(shape.width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        segment = min(self.config.segment, x_BTD.shape[1])
        q_BTD, k_BTD, v_BTD = self.project(x_BTD)

        # The maps get gradients from the pairs of the segment before, but its inputs do not.
        _, far_k_BTD, far_v_BTD = self.project(x_BTD.detach())

        near, far, biases = (k_BTD, v_BTD), (far_k_BTD, far_v_BTD), (self.u_D, self.v_D)
        code_JD = self._codes(2 * segment, x_BTD.device)
        a_BTD = relative_attention(q_BTD, near, far, biases, code_JD, self.config.heads, segment)
        return self.finish(x_BTD, a_BTD)

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.segment >= length else None

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        pairs = with_newest(state, k_BD, v_BD)

        count = pairs["k"].shape[1]
        distance_1J = torch.arange(count - 1, -1, -1, device=x_BD.device)[None]
        code_JD = self._codes(count, x_BD.device)
        k_BJD, v_BJD, biases = pairs["k"], pairs["v"], (self.u_D, self.v_D)
        a_B1D = relative_attend(
            q_BD[:, None], k_BJD, v_BJD, biases, code_JD, self.config.heads, distance_1J, distance_1J >= 0
        )

        # At the end of a segment, the segment before it is dropped from the state.
        if count == 2 * self.config.segment:
            pairs = {name: y_BJD[:, self.config.segment :] for name, y_BJD in pairs.items()}
        return self.finish(x_BD, a_B1D[:, 0]), pairs

    def _codes(self, distances: int, device: torch.device) -> Tensor:
        """Return the codes (J, D) of the distances from 0 on."""
        weight_DD = self.r.weight
        code_JD: Tensor = self.r(sinusoids(distances, self.shape.width, device).to(weight_DD.dtype))
        return code_JD
