"""Sliding-window attention."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import NO_WINDOW, Shape, State
from mixers.ops.attention import attention, attention_step
from mixers.parts import check_at_least


class SlidingAttention(AttentionLayer):
    """The Transformer layer with attention only to the last positions, the query's own included.

    ALiBi distinguishes positions. State: the pairs of the window.

    Differs from the reference:
        Beltagy et al. 2020, section 3.1, and https://github.com/allenai/longformer, longformer/longformer.py
        (``LongformerSelfAttention`` in RoBERTa).

        - block: theirs is RoBERTa's: layer norms after the residual additions, a GELU MLP and projections with biases,
          dropout.
        - sizes: one window of 8 positions, a query's own included; theirs has a window for each layer, counted on each
          side of the query (``attention_window``).
        - positions: ALiBi; theirs adds learned codes of absolute positions to the embedding.
        - computation: queries see no later position; theirs sees both sides unless ``autoregressive`` is set. Queries
          and keys pass through an RMS norm.
        - initialisation: theirs is normal with standard deviation 0.02 (RoBERTa's ``initializer_range``).
        - left out: dilated windows; global attention with projections of its own.
    """

    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150; ALiBi: Press et al. 2022, arXiv:2108.12409"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of sliding-window attention.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            window: positions that a query sees, the last of which is its own.
        """

        window: int = 8

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "window")

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.project(x_BTD)
        return self.finish(x_BTD, attention(q_BTD, k_BTD, v_BTD, self.slopes_H, self.config.window))

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        return NO_WINDOW if config.window >= length else None

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        pairs = {name: y_BJD[:, -self.config.window :] for name, y_BJD in with_newest(state, k_BD, v_BD).items()}
        return self.finish(x_BD, attention_step(q_BD, pairs["k"], pairs["v"], self.slopes_H)), pairs
