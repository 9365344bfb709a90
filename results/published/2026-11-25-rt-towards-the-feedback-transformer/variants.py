"""RT with one thing as in the Feedback Transformer: the layers of this record, computed position by position."""

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.attention import attention_step
from mixers.rt.layer import RecurrentTransformer
from mixers.rt.naive import key_value, naive_recurrence


class Mixture(RecurrentTransformer):
    """RT whose persistent pairs are computed from a learned mixture of the layer's input and output."""

    def __init__(self, config: RecurrentTransformer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.depth = nn.Parameter(torch.zeros(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        weights = self._recurrent_weights()._replace(share=self.depth.softmax(0)[1:])
        return naive_recurrence(x_BTD, *self.project(x_BTD), weights, self.slopes_H, self.shape.residual_scale)

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        z_BD, _ = super().step(x_BD, state)
        pair = key_value(torch.lerp(x_BD, z_BD, self.depth.softmax(0)[1]), self._recurrent_weights())
        return z_BD, with_pair(state, *pair)


class Zeros(RecurrentTransformer):
    """RT that attends to a pair of zeros at the position itself, in place of the pair of the input."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, _, _ = self.project(x_BTD)
        weights = self._recurrent_weights()
        return naive_recurrence(x_BTD, q_BTD, None, None, weights, self.slopes_H, self.shape.residual_scale)

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        reached = with_pair(state, torch.zeros_like(k_BD), torch.zeros_like(v_BD))
        z_BD = self.finish(x_BD, attention_step(q_BD, reached["k"], reached["v"], self.slopes_H))
        return z_BD, with_pair(state, *key_value(z_BD, self._recurrent_weights()))


def with_pair(state: State, k_BD: Tensor, v_BD: Tensor) -> State:
    """Return the state with one more pair."""
    k_BJD, v_BJD = (torch.cat([state[name], new[:, None]], dim=1) for name, new in (("k", k_BD), ("v", v_BD)))
    return {**state, "k": k_BJD, "v": v_BJD}
