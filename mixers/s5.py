"""The simplified state-space layer S5."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape
from mixers.diagonal import DiagonalLayer
from mixers.ops.numerics import at_least_float32
from mixers.parts import linear


class S5(DiagonalLayer):
    """One state-space model of D inputs and outputs, diagonal, sampled by zero-order hold; GELU and a gate follow.

    ``h' = lambda h + B x``, ``y = Re(C h) + skip x``, with a learnable time step for each state. At the start it is the
    HiPPO-N system in the basis of its eigenvectors. The eigenvalues are conjugate pairs: one of each pair is kept, and
    a factor 2 in ``C`` accounts for the other one (section 3). Rotation and decay of the states distinguish positions.
    State: P = N/2 complex numbers.

    Weight decay applies to ``C`` but not to ``B``, as in the standard setting of the authors' code. Their code has a
    separate learning rate for the state-space parameters; here all parameters have the same learning rate.

    Differs from the reference:
        Smith et al. 2022, section 3, and https://github.com/lindermanlab/S5, s5/ssm.py, ssm_init.py, layers.py
        (``half_glu1``) and run_train.py.

        - block: theirs is a batch norm, the mixer and a skip, without an MLP; its GELU is the tanh approximation, and
          its gate has a bias.
        - sizes: 64 real states in one block at the start; theirs has 256 in 8 blocks by default (``ssm_size_base``,
          ``blocks``).
        - computation: real parts of the eigenvalues are -exp of a parameter, so always negative; theirs are parameters
          themselves, which ``clip_eigs`` keeps below -1e-4. The factor 2 of the conjugate pairs is part of C; theirs
          stands outside.
        - initialisation: B is drawn real with standard deviation 1/√D; theirs is truncated normal with 1/√N, because
          ``lecun_normal`` takes the first axis of (N, D) for the inputs. C is drawn real and normal with standard
          deviation 1/√N; theirs is complex and truncated normal, with 1/√N for each part. Theirs has Flax's default for
          the gate, truncated normal with standard deviation 1/√D.
        - training: one learning rate; theirs has one for B, eigenvalues and time steps (``ssm_lr_base``) and one for
          the rest. Weight decay leaves out B, as theirs does, and the skip, which theirs decays.
    """

    family: ClassVar[str] = "state space"
    paper: ClassVar[str] = "Smith et al. 2022, arXiv:2208.04933"
    undecayed: ClassVar[tuple[str, ...]] = ("B.",)

    @dataclass(frozen=True, kw_only=True)
    class Config(DiagonalLayer.Config):
        """Settings of S5.

        Attributes:
            state_size: number of real states; even, because they form conjugate pairs.
            dt_min: smallest time step at the start.
            dt_max: largest time step at the start. The authors' 0.1 suits thousands of positions; with tens of them,
                memorization needs about 1 (results/notes/2026-11-25.md).
        """

        state_size: int = 64
        dt_min: float = 0.001
        dt_max: float = 0.1

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        if config.state_size < 2 or config.state_size % 2:
            raise ValueError(f"state_size: {config.state_size} must be even and at least 2")
        if not 0 < config.dt_min <= config.dt_max:
            raise ValueError(f"time steps {config.dt_min} to {config.dt_max}: choose 0 < dt_min <= dt_max")

        pairs = config.state_size // 2
        super().__init__(config, shape, pairs)
        self.gate = linear(shape.width, shape.width)

        # Random maps, in the basis of the eigenvectors.
        lambda_P, V_NP = hippo_normal(config.state_size)
        B_ND = torch.randn(config.state_size, shape.width, dtype=torch.float64) * shape.width**-0.5
        C_DN = torch.randn(shape.width, config.state_size, dtype=torch.float64) * config.state_size**-0.5
        B_PD, C_DP = V_NP.mH @ B_ND.to(V_NP), 2 * C_DN.to(V_NP) @ V_NP
        with torch.no_grad():
            self.B.weight.copy_(torch.cat([B_PD.real, B_PD.imag]))
            self.C.weight.copy_(torch.cat([C_DP.real, -C_DP.imag], dim=1))

        # Decays, frequencies and time steps of the states.
        self.log_decay = nn.Parameter((-lambda_P.real).log().float())
        self.frequency = nn.Parameter(lambda_P.imag.float())
        ratio = math.log(config.dt_max / config.dt_min)
        self.log_dt = nn.Parameter(torch.rand(pairs) * ratio + math.log(config.dt_min))

    def dynamics(self) -> tuple[Tensor, Tensor]:
        log_decay_P, frequency_P, log_dt_P = map(at_least_float32, (self.log_decay, self.frequency, self.log_dt))
        lambda_P = torch.complex(-log_decay_P.exp(), frequency_P)
        exponent_P = lambda_P * log_dt_P.exp()
        return exponent_P.exp(), exponent_P.expm1() / lambda_P

    def activate(self, y: Tensor) -> Tensor:
        y = F.gelu(y)
        return y * torch.sigmoid(self.gate(y))


def hippo_normal(states: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (N/2,) of positive imaginary part and eigenvectors (N, N/2) of HiPPO-N, in complex128.

    The matrix is the normal part of HiPPO-LegS: -1/2 on the diagonal plus an antisymmetric matrix with the entries
    -sqrt((2n + 1) (2k + 1)) / 2 below it (Gu et al. 2022, arXiv:2206.11893).
    """
    root_N = (2 * torch.arange(states, dtype=torch.float64) + 1).sqrt()
    below_NN = torch.outer(root_N, root_N).tril(-1) / 2
    frequency_N, V_NN = torch.linalg.eigh(-1j * (below_NN.mT - below_NN))
    return torch.complex(torch.full_like(frequency_N, -0.5), frequency_N)[states // 2 :], V_NN[:, states // 2 :]
