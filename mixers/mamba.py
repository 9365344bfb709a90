"""Mamba."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.selective_scan import selective_scan, selective_scan_step
from mixers.options import switch
from mixers.parts import MixerLayer, ShortConvolution, check_at_least, linear

DT_MIN, DT_MAX = 0.001, 0.1


class Mamba(MixerLayer):
    """Selective state-space layer: E channels of N states, whose time steps, inputs and outputs depend on the token.

    With ``negative_eigenvalues`` states decay by 2 exp(Δ A) - 1, in (-1, 1), in place of exp(Δ A) (Grazzi et al. 2024,
    arXiv:2411.12537). The short convolution and the decay of the states distinguish positions. State: E N numbers and
    the newest inputs of the convolution.

    Dimensions beside those of ``mixers.base``: E inner width, N states of a channel, K width of the map to the time
    steps.

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
            negative_eigenvalues: decays of the states between -1 and 1 in place of 0 and 1.
        """

        expand: int = 2
        state_size: int = 16
        convolution: int = 4
        negative_eigenvalues: bool = switch(False)

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "expand", "state_size")

        inner, rank = config.expand * shape.width, math.ceil(shape.width / 16)
        self.project, self.out = linear(shape.width, 2 * inner), linear(inner, shape.width)
        self.convolution = ShortConvolution(inner, config.convolution, bias=True, silu=True)
        self.select = linear(inner, rank + 2 * config.state_size)

        # Time steps log-uniform in [DT_MIN, DT_MAX] at the start.
        self.dt = nn.Linear(rank, inner)
        nn.init.uniform_(self.dt.weight, -(rank**-0.5), rank**-0.5)
        dt_E = DT_MIN * (DT_MAX / DT_MIN) ** torch.rand(inner)
        self.dt.bias.data = dt_E.expm1().log()  # inverse of softplus

        # Decays, stored as a vector, because weight decay applies to tensors of two axes.
        self.A_log = nn.Parameter(torch.arange(1.0, config.state_size + 1).log().repeat(inner))
        self.skip = nn.Parameter(torch.ones(inner))

    def mix(self, x_BTD: Tensor) -> Tensor:
        u_BTE, z_BTE = self.project(x_BTD).chunk(2, dim=-1)
        u_BTE = self.convolution(u_BTE)
        tensors = u_BTE, z_BTE, *self._select(u_BTE), *self._dynamics()
        return self.out(selective_scan(*tensors, negative=self.config.negative_eigenvalues))

    def init_state(self, batch: int) -> State:
        h_BEN = self.skip.new_zeros(batch, len(self.skip), self.config.state_size)
        return {"h": h_BEN, "convolution": self.convolution.init_state(batch)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        u_BE, z_BE = self.project(x_BD).chunk(2, dim=-1)
        u_BE, inputs_BWE = self.convolution.step(u_BE, state["convolution"])
        tensors = u_BE, z_BE, *self._select(u_BE), *self._dynamics(), state["h"]
        y_BE, h_BEN = selective_scan_step(*tensors, negative=self.config.negative_eigenvalues)
        return self.out(y_BE), {"h": h_BEN, "convolution": inputs_BWE}

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs of the time steps (..., K), input maps (..., N) and output maps (..., N)."""
        states = self.config.state_size
        low, B, C = self.select(u).split([self.dt.in_features, states, states], dim=-1)
        return low, B, C

    def _dynamics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rates A (E, N), weights of the bypass, and weights and bias of the time steps."""
        A_EN = -self.A_log.exp().unflatten(0, (-1, self.config.state_size))
        return A_EN, self.skip, self.dt.weight, self.dt.bias
