"""Mamba."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.numerics import at_least_float32
from mixers.ops.scan import linear_scan
from mixers.parts import MixerLayer, ShortConvolution, check_at_least, linear

DT_MIN, DT_MAX = 0.001, 0.1


class Mamba(MixerLayer):
    """Selective state-space layer: E channels of N states, whose time steps, inputs and outputs depend on the token.

    Positions are told apart by the short convolution and the decay of the states. State: E N numbers and the newest
    inputs of the convolution.

    Dimensions beside those of ``mixers.base``: E inner width, N states of a channel.

    Differs from the reference:
        Gu & Dao 2023, section 3, and https://github.com/state-spaces/mamba, mamba_ssm/modules/mamba_simple.py and
        mamba_ssm/models/mixer_seq_simple.py.

        - block: theirs has no MLP: a Mamba layer stands in place of both attention and MLP.
        - initialisation: theirs has PyTorch's default for linear maps (uniform, standard deviation 1/√(3 inputs)), and
          for the short convolution and its bias (uniform in ±1/√W, W = 4); here the convolution is normal with 1/√W and
          its bias zero. Theirs divides the output map by √L, where here the branch has the factor 1/√L.
    """

    family: ClassVar[str] = "state space"
    paper: ClassVar[str] = "Gu & Dao 2023, arXiv:2312.00752"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of Mamba.

        Attributes:
            expand: inner width E over the model width.
            state_size: number of states of each inner channel.
            convolution: positions that the short convolution spans.
        """

        expand: int = 2
        state_size: int = 16
        convolution: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "expand", "state_size")

        inner, rank = config.expand * shape.width, math.ceil(shape.width / 16)
        self.project, self.out = linear(shape.width, 2 * inner), linear(inner, shape.width)
        self.convolution = ShortConvolution(inner, config.convolution, bias=True)
        self.select = linear(inner, rank + 2 * config.state_size)

        # Time steps log-uniform in [DT_MIN, DT_MAX] at the start.
        self.dt = nn.Linear(rank, inner)
        nn.init.uniform_(self.dt.weight, -(rank**-0.5), rank**-0.5)
        dt_E = DT_MIN * (DT_MAX / DT_MIN) ** torch.rand(inner)
        self.dt.bias.data = dt_E.expm1().log()  # inverse of softplus

        # Decays; a vector, because weight decay applies to tensors of two axes.
        self.A_log = nn.Parameter(torch.arange(1.0, config.state_size + 1).log().repeat(inner))
        self.skip = nn.Parameter(torch.ones(inner))

    def mix(self, x_BTD: Tensor) -> Tensor:
        u_BTE, z_BTE = self.project(x_BTD).chunk(2, dim=-1)
        u_BTE = F.silu(self.convolution(u_BTE))
        dt_BTE, B_BTN, C_BTN = self._select(u_BTE)
        return self._gated(selective_scan(u_BTE, dt_BTE, self._A(), B_BTN, C_BTN), u_BTE, z_BTE)

    def init_state(self, batch: int) -> State:
        h_BEN = self.skip.new_zeros(batch, len(self.skip), self.config.state_size)
        return {"h": h_BEN, "convolution": self.convolution.init_state(batch)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        u_BE, z_BE = self.project(x_BD).chunk(2, dim=-1)
        u_BE, inputs_BWE = self.convolution.step(u_BE, state["convolution"])
        u_BE = F.silu(u_BE)

        # One position of the scan.
        dt_BE, B_BN, C_BN = self._select(u_BE)
        decay_BEN, input_BEN = discretise(u_BE, dt_BE, self._A(), B_BN)
        h_BEN = decay_BEN * state["h"] + input_BEN
        y_BE = (h_BEN * C_BN[:, None]).sum(-1)

        return self._gated(y_BE, u_BE, z_BE), {"h": h_BEN, "convolution": inputs_BWE}

    def _A(self) -> Tensor:
        """Return the continuous decay rates (E, N), all negative."""
        return -self.A_log.exp().unflatten(0, (-1, self.config.state_size))

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return time steps (..., E), input maps (..., N) and output maps (..., N)."""
        states = self.config.state_size
        dt, B, C = self.select(u).split([self.dt.in_features, states, states], dim=-1)
        return F.softplus(at_least_float32(self.dt(dt))), at_least_float32(B), at_least_float32(C)

    def _gated(self, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
        """Return the mixer's output from the scan's outputs y, its inputs u and the gates z, each (..., E)."""
        return self.out((y + self.skip * u) * F.silu(z))


def discretise(u: Tensor, dt: Tensor, A_EN: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return decays exp(dt A) and inputs dt B u (..., E, N): zero-order hold of A, Euler's rule for B.

    The authors' code does the same.
    """
    return torch.exp(dt[..., None] * A_EN), (dt * u)[..., None] * B[..., None, :]


def selective_scan(u_BTE: Tensor, dt_BTE: Tensor, A_EN: Tensor, B_BTN: Tensor, C_BTN: Tensor) -> Tensor:
    """Return the outputs (B, T, E) of ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t``, ``y_t = C_t h_t`` (algorithm 2)."""
    with torch.autocast(u_BTE.device.type, enabled=False):
        h_BTEN = linear_scan(*discretise(u_BTE, dt_BTE, A_EN, B_BTN))
        return (h_BTEN @ C_BTN[..., None]).squeeze(-1)
