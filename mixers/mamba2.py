"""Mamba-2."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step
from mixers.parts import MixerLayer, RMSNorm, ShortConvolution, check_at_least, check_heads, linear


def step_bias(count: int) -> Tensor:
    """Return random biases with which the step sizes, softplus(bias), are log-uniform in [0.001, 0.1]."""
    step = torch.empty(count).uniform_(math.log(0.001), math.log(0.1)).exp()
    return step + torch.log(-torch.expm1(-step))


class ScalarDecay(nn.Module):
    """Step size Δ = softplus(y + b) and logarithm of the decay, -exp(a) Δ, of each head, with parameters a and b.

    Initially, softplus(b) is log-uniform in [0.001, 0.1], and exp(a) is uniform in [least, 16], where least is 1 in the
    code of Mamba-2 and 0 in the code of Gated DeltaNet.
    """

    def __init__(self, heads: int, least: float = 1.0) -> None:
        super().__init__()
        self.log_rate_H = nn.Parameter(torch.empty(heads).uniform_(least, 16).log())
        self.bias_H = nn.Parameter(step_bias(heads))

    def forward(self, y_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step sizes and the logarithms of the decays."""
        step_BTH = F.softplus(y_BTH + self.bias_H)
        return step_BTH, -self.log_rate_H.exp() * step_BTH


class Mamba2(MixerLayer):
    """State space duality: h_t = exp(A Δ_t) h_{t-1} + Δ_t B_t x_t^T, y_t = C_t^T h_t + D x_t, with scalars A, Δ_t, D.

    B and C are shared by all heads; x, B and C go through a short causal convolution, and y through a gate and an RMS
    norm. The decays and the convolution distinguish positions. State: for each head a matrix (N, 2 D / H), and the
    newest inputs of the convolution.

    Differs from the reference:
        Dao & Gu 2024, section 7, and https://github.com/state-spaces/mamba, mamba_ssm/modules/mamba2.py and
        mamba_ssm/models/mixer_seq_simple.py.

        - block: theirs has no MLP: a Mamba-2 layer stands in place of both attention and MLP.
        - sizes: 64 states and 4 heads of D/2 channels; theirs has 128 states and heads of 64 channels (the same heads
          at D = 128).
        - computation: the norm of the outputs has ε 1e-6; theirs has 1e-5.
        - initialisation: theirs has PyTorch's default for linear maps (uniform, standard deviation 1/√(3 inputs)), and
          for the short convolution and its bias (uniform in ±1/√W, W = 4); here the convolution is normal with 1/√W and
          its bias zero. Theirs divides the output map by √L, where here the branch has the factor 1/√L.
    """

    family: ClassVar[str] = "state space"
    paper: ClassVar[str] = "Dao & Gu 2024, arXiv:2405.21060"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of Mamba-2.

        Attributes:
            heads: number of heads; must divide the model width.
            state_size: number of rows N of a head's state.
            expand: width inside the mixer, in model widths.
            convolution: positions that the short convolution spans.
        """

        heads: int = 4
        state_size: int = 64
        expand: int = 2
        convolution: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        check_at_least(1, config, "state_size", "expand")

        inner = config.expand * shape.width
        convolved = inner + 2 * config.state_size
        self.sizes = [inner, convolved, config.heads]

        # One map gives the gate, then x, B and C, then the step sizes.
        self.inputs = linear(shape.width, sum(self.sizes))
        self.convolution = ShortConvolution(convolved, config.convolution, bias=True, silu=True)
        self.decay = ScalarDecay(config.heads)
        self.skip_H = nn.Parameter(torch.ones(config.heads))
        self.norm = RMSNorm(inner)
        self.out = linear(inner, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        gate, xBC, step = self.inputs(x_BTD).split(self.sizes, dim=-1)
        tensors = self._recurrence(self.convolution(xBC), step)
        return self._output(matrix_recurrence(*tensors[:4]), tensors[4], gate)

    def init_state(self, batch: int) -> State:
        config, weight = self.config, self.inputs.weight
        size = config.expand * self.shape.width // config.heads
        return {
            "S": weight.new_zeros(batch, config.heads, config.state_size, size),
            "convolution": self.convolution.init_state(batch),
        }

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        gate, xBC, step = self.inputs(x_BD).split(self.sizes, dim=-1)
        xBC, convolution = self.convolution.step(xBC, state["convolution"])

        tensors = self._recurrence(xBC, step)
        o_BHV, S_BHKV = matrix_step(state["S"], *tensors[:4])
        return self._output(o_BHV, tensors[4], gate), {"S": S_BHKV, "convolution": convolution}

    def _recurrence(self, xBC: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries C and keys B of all heads, and values Δ x, logarithms of decays, and x of each head."""
        heads, state_size = self.config.heads, self.config.state_size
        x, B, C = xBC.split([self.sizes[0], state_size, state_size], dim=-1)
        x = rearrange(x, "... (h v) -> ... h v", h=heads)
        step, log_decay = self.decay(step)

        # All heads share B and C.
        B, C = B[..., None, :], C[..., None, :]
        return C, B, step[..., None] * x, log_decay[..., None], x

    def _output(self, o: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        y = (o + self.skip_H[:, None] * x).flatten(-2)
        return self.out(self.norm(y * F.silu(gate)))
