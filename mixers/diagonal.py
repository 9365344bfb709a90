"""State-space layers whose decays are constant."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from mixers.base import Shape, State
from mixers.ops.diagonal_scan import diagonal_scan, diagonal_step, to_pairs
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, linear


class DiagonalLayer(MixerLayer):
    """N complex states with constant decays: ``h_t = decay h_{t-1} + gain B x_t``, ``y_t = Re(C h_t) + skip x_t``.

    ``B`` and ``C`` are real maps to and from pairs: real parts of all states, then imaginary parts. So that the output
    is Re(C h), the second half of the weights of ``C`` holds the negative imaginary part. A subclass defines decays and
    gains, initialises ``B`` and ``C``, and may apply an activation to y.

    Dimensions beside those of ``mixers.base``: N states.
    """

    def __init__(self, config: Any, shape: Shape, states: int) -> None:
        super().__init__(config, shape)
        self.B, self.C = linear(shape.width, 2 * states), linear(2 * states, shape.width)
        self.skip = nn.Parameter(torch.randn(shape.width))

    @abstractmethod
    def dynamics(self) -> tuple[Tensor, Tensor]:
        """Return the complex decays (N,), of modulus at most 1, and the gains (N,) of the inputs."""

    def activate(self, y: Tensor) -> Tensor:
        """Return the mixer's output from y (..., D)."""
        return y

    def mix(self, x_BTD: Tensor) -> Tensor:
        return self._read(diagonal_scan(self.B(x_BTD), *self.dynamics()), x_BTD)

    def init_state(self, batch: int) -> State:
        weight = at_least_float32(self.C.weight)
        return {"h": weight.new_zeros(batch, weight.shape[1] // 2, dtype=weight.dtype.to_complex())}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        h_BN = diagonal_step(self.B(x_BD), *self.dynamics(), state["h"])
        return self._read(to_pairs(h_BN), x_BD), {"h": h_BN}

    def _read(self, h: Tensor, x: Tensor) -> Tensor:
        """Return the mixer's output from pairs of states (..., 2 N) and inputs (..., D)."""
        return self.activate(self.C(h) + self.skip * x)
