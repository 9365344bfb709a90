"""The Linear Recurrent Unit."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mixers.base import Shape
from mixers.diagonal import DiagonalLayer
from mixers.ops.numerics import at_least_float32
from mixers.parts import check_at_least


class LRU(DiagonalLayer):
    """Complex diagonal recurrence with decays exp(-exp(nu) + i exp(theta)), inputs scaled by learnable exp(gamma).

    Initially, the decays are uniform over a ring of the complex plane, and gamma normalises the states according to
    their moduli (sections 3.2 to 3.4). The mixer is linear in its input; the MLP of the layer follows. Rotation and
    decay of the states distinguish positions. State: N complex numbers.

    Differs from the reference:
        Orvieto et al. 2023, arXiv:2303.06349, figure 1 and the code of appendix A.

        - block: theirs is norm, recurrence, GLU and skip, with batch or layer norms; here the MLP takes the place of
          the GLU.
        - sizes: 64 complex states, with r_min, r_max and the largest phase of appendix A (0, 1, 2π); in the paper's
          experiments these are settings of each task.
    """

    family: ClassVar[str] = "recurrent net"
    paper: ClassVar[str] = "Orvieto et al. 2023, arXiv:2303.06349"

    @dataclass(frozen=True, kw_only=True)
    class Config(DiagonalLayer.Config):
        """Settings of the Linear Recurrent Unit.

        Attributes:
            state_size: number of complex states.
            r_min: smallest modulus of a decay at the start.
            r_max: largest modulus of a decay at the start.
            max_phase: largest phase of a decay at the start, in radians.
        """

        state_size: int = 64
        r_min: float = 0.0
        r_max: float = 1.0
        max_phase: float = 2 * math.pi

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        check_at_least(1, config, "state_size")
        if not 0 <= config.r_min < config.r_max <= 1:
            raise ValueError(f"ring {config.r_min} to {config.r_max}: choose 0 <= r_min < r_max <= 1")
        if config.max_phase <= 0:
            raise ValueError(f"max_phase: {config.max_phase} must be positive")

        super().__init__(config, shape, config.state_size)

        # Decays, uniform over the ring, and gains of the inputs.
        radius_N, phase_N = torch.rand(2, config.state_size, dtype=torch.float64)
        square_N = radius_N * (config.r_max**2 - config.r_min**2) + config.r_min**2
        self.nu = nn.Parameter((-0.5 * square_N.log()).log().float())
        self.theta = nn.Parameter((config.max_phase * phase_N).log().float())
        self.gamma = nn.Parameter((0.5 * (1 - square_N).log()).float())

        nn.init.normal_(self.B.weight, std=(2 * shape.width) ** -0.5)
        nn.init.normal_(self.C.weight, std=config.state_size**-0.5)

    def dynamics(self) -> tuple[Tensor, Tensor]:
        nu_N, theta_N, gamma_N = map(at_least_float32, (self.nu, self.theta, self.gamma))
        return torch.exp(torch.complex(-nu_N.exp(), theta_N.exp())), gamma_N.exp()
