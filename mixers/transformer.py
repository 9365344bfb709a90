"""The Transformer layer."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from mixers.attention_layer import AttentionLayer
from mixers.base import State
from mixers.ops.attention import attention


class Transformer(AttentionLayer):
    """Pre-norm causal Transformer layer (paper section 2.1, "The Transformer layer")."""

    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762; ALiBi: Press et al. 2022, arXiv:2108.12409"

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(x_BTD, attention(*self.project(x_BTD), self.slopes_H))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        state = {
            "k": torch.cat([state["k"], k_BD[:, None]], dim=1),
            "v": torch.cat([state["v"], v_BD[:, None]], dim=1),
        }
        return self.finish(x_BD, self.attend_one(q_BD, state["k"], state["v"])), state
