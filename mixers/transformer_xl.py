"""The Transformer-XL layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import NO_RECURRENCE, Shape, State
from mixers.parts import check_at_least, linear, sinusoids


class TransformerXL(AttentionLayer):
    """Attention inside a segment and to all inputs of the segment before, through which no gradient flows.

    Positions are told apart by the paper's relative encoding (section 3.3): the logit of query i and key j is
    (q_i + u)·k_j + (q_i + v)·(W r_{i-j}) with sinusoids r. State: the pairs of the segment before and of the current
    one.

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
        """Compute all N segments of C positions at once, each with the pairs of the one before in front of its own."""
        length = x_BTD.shape[1]
        segment = min(self.config.segment, length)

        # Pairs of each segment and of the one before it, zeros before the first.
        x_BNCD = rearrange(F.pad(x_BTD, (0, 0, 0, -length % segment)), "b (n c) d -> b n c d", c=segment)
        q_BNCD, *own = self.project(x_BNCD)
        _, *memory = self.project(x_BNCD.detach())
        k_BNJD, v_BNJD = (
            torch.cat([F.pad(before[:, :-1], (0, 0, 0, 0, 1, 0)), here], dim=2)
            for before, here in zip(memory, own, strict=True)
        )

        # Keys that each query sees.
        position_J = torch.arange(-segment, segment, device=x_BTD.device)
        distance_CJ = position_J[segment:, None] - position_J
        first_N = segment * torch.arange(x_BNCD.shape[1], device=x_BTD.device)
        exists_NJ = first_N[:, None] + position_J >= 0
        seen_N1CJ = ((distance_CJ >= 0) & exists_NJ[:, None])[:, None]

        a_BNCD = self._attend(q_BNCD, k_BNJD, v_BNJD, distance_CJ, seen_N1CJ)
        return self.finish(x_BTD, rearrange(a_BNCD, "b n c d -> b (n c) d")[:, :length])

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_RECURRENCE if config.segment >= length else None

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        pairs = with_newest(state, k_BD, v_BD)

        count = pairs["k"].shape[1]
        distance_1J = torch.arange(count - 1, -1, -1, device=x_BD.device)[None]
        a_BD = self._attend(q_BD[:, None], pairs["k"], pairs["v"], distance_1J, distance_1J >= 0)[:, 0]

        # The segment ends, and the one before it is forgotten.
        if count == 2 * self.config.segment:
            pairs = {name: y_BJD[:, self.config.segment :] for name, y_BJD in pairs.items()}
        return self.finish(x_BD, a_BD), pairs

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, distance_IJ: Tensor, seen: Tensor) -> Tensor:
        """Return the attention output (..., I, D) of queries to pairs (..., J, D); distances seen are below J."""
        heads, distances = self.config.heads, distance_IJ.shape[1]
        code_ND = self.r(sinusoids(distances, self.shape.width, q.device).to(self.r.weight.dtype))
        content, position, k, v, code_HNK = (
            rearrange(y, "... i (h k) -> ... h i k", h=heads) for y in (q + self.u_D, q + self.v_D, k, v, code_ND)
        )

        # Logits by content, and by distance: one for each distance, read at that of each pair.
        by_distance = position @ code_HNK.mT
        index_IJ = distance_IJ.clamp(0, distances - 1)
        logits = content @ k.mT + by_distance.gather(-1, index_IJ.expand_as(by_distance))

        weights = (logits * content.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        return rearrange(weights.to(v.dtype) @ v, "... h i k -> ... i (h k)")
