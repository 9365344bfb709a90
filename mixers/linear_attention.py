"""Linear attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, check_heads, linear


class LinearAttention(MixerLayer):
    """Attention with the feature map elu + 1 in place of the softmax, normalised by the sum of its weights.

    Positions are told apart by causality alone. State: for each head a matrix (K, K) and a vector (K).
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Katharopoulos et al. 2020, arXiv:2006.16236"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of linear attention.

        Attributes:
            heads: number of heads; must divide the model width.
        """

        heads: int = 16

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        self.q, self.k, self.v, self.out = (linear(shape.width, shape.width) for _ in range(4))

    def mix(self, x_BTD: Tensor) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = self._project(x_BTD)
        a_BTHK = matrix_recurrence(q_BTHK, k_BTHK, v_BTHK)
        return self.out(normalised(a_BTHK, q_BTHK, k_BTHK.cumsum(1)).flatten(2))

    def init_state(self, batch: int) -> State:
        heads, weight = self.config.heads, self.q.weight
        size = self.shape.width // heads
        return {"S": weight.new_zeros(batch, heads, size, size), "k": weight.new_zeros(batch, heads, size)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BHK, k_BHK, v_BHK = self._project(x_BD)

        a_BHK, S_BHKK = matrix_step(state["S"], q_BHK, k_BHK, v_BHK)
        sum_BHK = state["k"] + k_BHK

        return self.out(normalised(a_BHK, q_BHK, sum_BHK).flatten(1)), {"S": S_BHKK, "k": sum_BHK}

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return features of queries and keys, and values (..., H, K)."""
        q, k, v = features(self.q(x)), features(self.k(x)), self.v(x)
        return [rearrange(y, "... (h k) -> ... h k", h=self.config.heads) for y in (q, k, v)]


def features(y: Tensor) -> Tensor:
    """Return elu + 1, at least float32, without the subtraction that would round small features to 0."""
    y = at_least_float32(y)
    return torch.where(y > 0, y + 1, y.clamp(max=0).exp())


def normalised(a: Tensor, q: Tensor, k_sum: Tensor) -> Tensor:
    """Return outputs (..., H, K) divided by the sum of their weights, which is 0 if all features of a head vanish."""
    return a / (q * k_sum).sum(-1, keepdim=True).clamp(min=1e-6)
