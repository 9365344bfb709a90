"""Linear attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, check_heads, linear, sinusoids_at


class LinearAttention(MixerLayer):
    """Attention with the feature map elu + 1 in place of the softmax, normalised by the sum of its weights.

    Sinusoids distinguish positions. They are added to the mixer's normed input, so that queries, keys and values all
    read them. The authors add a position code to the embedding, which only a whole model can do; here every layer adds
    the code, and it does not enter the residual stream. Without a code, one layer sees the earlier positions as a set
    without order. State: for each head a matrix (K, K) and a vector (K), and the position.

    Differs from the reference:
        Katharopoulos et al. 2020, section 3, and https://github.com/idiap/fast-transformers,
        fast_transformers/attention/causal_linear_attention.py, attention_layer.py and transformers.py.

        - block: theirs has layer norms after the residual additions, a ReLU MLP with biases, and dropout 0.1; its
          projections have biases.
        - sizes: 4 heads of D/4 channels; the builder of theirs has 4 heads of 64 by default.
        - positions: sinusoids are added to the mixer's normed input in every layer; theirs leaves codes of positions to
          the model, which adds them to the embedding.
        - computation: the sum of the weights is at least 1e-6; theirs adds 1e-6 to it.
        - initialisation: theirs has PyTorch's default (uniform, standard deviation 1/√(3 inputs)).
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Katharopoulos et al. 2020, arXiv:2006.16236"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of linear attention.

        Attributes:
            heads: number of heads; must divide the model width.
            positions: code of the position that is added to the mixer's input.
        """

        heads: int = 4
        positions: Literal["none", "sinusoidal"] = "sinusoidal"

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        self.q, self.k, self.v, self.out = (linear(shape.width, shape.width) for _ in range(4))

    def mix(self, x_BTD: Tensor) -> Tensor:
        position_T1 = torch.arange(x_BTD.shape[1], device=x_BTD.device)[:, None]
        q_BTHK, k_BTHK, v_BTHK = self._project(x_BTD, position_T1)
        q_BTHK = normalised(q_BTHK, k_BTHK.cumsum(1))
        # The queries' gradient nearly cancels in the division, so that bfloat16 is too coarse for it.
        return self.out(matrix_recurrence(q_BTHK, k_BTHK, v_BTHK, queries=torch.float32).flatten(2))

    def init_state(self, batch: int) -> State:
        heads, weight = self.config.heads, self.q.weight
        size = self.shape.width // heads
        state = {"S": weight.new_zeros(batch, heads, size, size), "k": weight.new_zeros(batch, heads, size)}
        return {**state, "position": weight.new_zeros(batch, 1, dtype=torch.int64)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BHK, k_BHK, v_BHK = self._project(x_BD, state["position"])

        sum_BHK = state["k"] + k_BHK
        o_BHK, S_BHKK = matrix_step(state["S"], normalised(q_BHK, sum_BHK), k_BHK, v_BHK)

        after = {"S": S_BHKK, "k": sum_BHK, "position": state["position"] + 1}
        return self.out(o_BHK.flatten(1)), after

    def _project(self, x: Tensor, position: Tensor) -> list[Tensor]:
        """Return features of queries and keys, and values (..., H, K).

        Args:
            x: inputs (..., D).
            position: their positions, integers, which broadcast to (..., 1).
        """
        if self.config.positions == "sinusoidal":
            x = x + sinusoids_at(position, x.shape[-1]).to(x)

        q, k, v = features(self.q(x)), features(self.k(x)), self.v(x)
        return [rearrange(y, "... (h k) -> ... h k", h=self.config.heads) for y in (q, k, v)]


def features(y: Tensor) -> Tensor:
    """Return elu + 1 in at least float32, without the subtraction of 1, which would round small features to 0."""
    y = at_least_float32(y)
    return torch.where(y > 0, y + 1, y.clamp(max=0).exp())


def normalised(q: Tensor, k_sum: Tensor) -> Tensor:
    """Return queries (..., H, K) divided by the sum of their weights, which may be 0 if all features underflow.

    If the outputs were divided, their rounding and that of their gradients would not cancel in the queries' gradient.
    """
    return q / (q * k_sum).sum(-1, keepdim=True).clamp(min=1e-6)
