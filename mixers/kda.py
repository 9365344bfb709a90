"""Kimi Delta Attention: the delta rule with a decay of each channel of a key."""

from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.deltanet import EPS_RATIO, DeltaNet
from mixers.mamba2 import step_bias
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step, unit
from mixers.ops.numerics import at_least_float32
from mixers.parts import Linear, linear

SECOND = 0.02 * 128**0.5
"""Standard deviation of a second factor's outputs for inputs of 1, as in the authors' models: 0.02 at rank 128."""

Pairs = tuple[Tensor, Tensor, Tensor, Tensor, None, Tensor]
"""The arguments q, k, v, g, a, b of ``matrix_recurrence``."""


def second_factor(rank: int, width: int, bias: bool = False) -> nn.Linear:
    """Return the second map of a low-rank map, whose outputs start small; a bias starts at zero."""
    factor = Linear(rank, width, bias=bias)
    nn.init.normal_(factor.weight, std=SECOND * rank**-0.5)
    if bias:
        nn.init.zeros_(factor.bias)
    return factor


class ChannelDecay(nn.Module):
    """Logarithms -exp(a) softplus(W y + b) of the decays of all channels, from y of a few numbers.

    Parameters: a of each head, b of each channel, and the second factor W. Initially softplus(b) is log-uniform in
    [0.001, 0.1], exp(a) is uniform in [1, 16], and W y is small.
    """

    def __init__(self, heads: int, rank: int, width: int) -> None:
        super().__init__()
        self.log_rate_H = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.bias_D = nn.Parameter(step_bias(width))
        self.up = second_factor(rank, width)

    def forward(self, y: Tensor) -> Tensor:
        """Return the logarithms (..., H, K)."""
        step = F.softplus(at_least_float32(self.up(y)) + self.bias_D)
        return -self.log_rate_H.exp()[:, None] * rearrange(step, "... (h k) -> ... h k", h=len(self.log_rate_H))


class KimiDeltaAttention(DeltaNet):
    """S_t = (I - β_t k_t k_t^T) diag(α_t) S_{t-1} + β_t k_t v_t^T with β = sigmoid and keys of length one.

    Every channel of a key has a decay, α = exp(-exp(a) softplus(W_2 W_1 x + b)), with a of each head, b of each channel
    and a low-rank map. The outputs q^T S pass an RMS norm and a sigmoid gate with a low-rank map. The transition matrix
    is similar to the symmetric √α (I - β k k^T) √α. Its eigenvalues are in (0, 1), or in (-1, 1) with
    ``negative_eigenvalues``.

    Queries, keys and values go through a short causal convolution and SiLU. The decays, the convolution and causality
    distinguish positions. State: for each head a matrix (K, K), and the newest inputs of the convolution.

    Differs from the reference:
        Kimi Team 2025, sections 3 and 4, and https://github.com/fla-org/flash-linear-attention, fla/layers/kda.py and
        fla/models/kda.

        - block: theirs has a gated MLP (SwiGLU), a mixture of experts in the paper, where each fourth layer is
          attention.
        - sizes: 4 heads of D/4 channels, for which the kernels here are made; theirs has 16 heads of 128 at D = 2048.
          Low-rank maps have the rank of a head's channels, as theirs.
        - computation: the norm of the outputs has the ε 1e-5 of their layer's default; their language model sets 1e-6.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions; here the
          convolutions have 1/√W, W = 4, and the second factors of low-rank maps 0.226/√rank, which is theirs at rank
          128.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Kimi Team 2025, arXiv:2510.26692"

    def __init__(self, config: DeltaNet.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        rank = shape.width // config.heads
        self.low = linear(shape.width, 2 * rank)
        self.decay = ChannelDecay(config.heads, rank, shape.width)
        self.gate = second_factor(rank, shape.width, bias=True)

    def mix(self, x_BTD: Tensor) -> Tensor:
        tensors, gate = self._project(x_BTD, self.convolution(self.qkv(x_BTD)))
        return self._gated(matrix_recurrence(*tensors), gate)

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        qkv_BD, convolution = self.convolution.step(self.qkv(x_BD), state["convolution"])
        tensors, gate = self._project(x_BD, qkv_BD)
        o_BHK, S_BHKK = matrix_step(state["S"], *tensors)
        return self._gated(o_BHK, gate), {"S": S_BHKK, "convolution": convolution}

    def _project(self, x: Tensor, qkv: Tensor) -> tuple[Pairs, Tensor]:
        """Return the arguments of ``matrix_recurrence``, and the output gate (..., D)."""
        q, k, v = rearrange(qkv, "... (n h k) -> n ... h k", n=3, h=self.config.heads)
        k, v, erased = self._edit(x, unit(k), v)

        # Decays and gate, whose first factors are one map.
        decay, gate = self.low(x).chunk(2, dim=-1)
        q = unit(q) * (EPS_RATIO / q.shape[-1]) ** 0.5
        return (q, k, v, self.decay(decay), None, erased), self._opened(self.gate(gate))

    def _edit(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is written, a key and a value, and the key whose value is erased, (..., H, K) each."""
        strength = self.strength(x).sigmoid()
        if self.config.negative_eigenvalues:
            strength = 2 * strength
        return strength[..., None] * k, v, k

    def _opened(self, gate: Tensor) -> Tensor:
        """Return the output gate from its logits."""
        return gate.sigmoid()

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from the outputs ``o`` (..., H, K) of the recurrence."""
        return self.out(gate * self.norm(o).flatten(-2))
