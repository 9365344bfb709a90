"""The Transformer layer."""

from typing import Any, ClassVar

from torch import Tensor

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import State
from mixers.ops.attention import attention, attention_step


class Transformer(AttentionLayer):
    """Pre-norm causal Transformer layer (paper section 2.1, "The Transformer layer"). State: all pairs.

    Differs from the reference:
        Vaswani et al. 2017, the decoder of section 3 without its attention to an encoder. From the Transformer layer of
        Oncescu et al. 2026 (arXiv:2604.21215, section 2.1) it does not differ.

        - block: theirs has layer norms after the residual additions, a ReLU MLP with biases (section 3.3), and dropout
          0.1 (section 5.4).
        - sizes: 16 heads of D/16 channels, as in the appendix of Oncescu et al.; theirs has 8 heads of 64.
        - positions: ALiBi on the logits (Press et al. 2022); theirs adds sinusoids to the embedding (section 3.5).
        - computation: queries and keys pass through an RMS norm over the full width; theirs are not normed.
    """

    compile_step: ClassVar[bool] = False
    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762; ALiBi: Press et al. 2022, arXiv:2108.12409"

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(x_BTD, attention(*self.project(x_BTD), self.slopes_H))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        pairs = with_newest(state, k_BD, v_BD)
        return self.finish(x_BD, attention_step(q_BD, pairs["k"], pairs["v"], self.slopes_H)), pairs

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1
