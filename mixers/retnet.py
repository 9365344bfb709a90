"""RetNet: linear attention with rotations and one fixed decay per head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step
from mixers.ops.numerics import at_least_float32
from mixers.parts import HeadNorm, MixerLayer, check_heads, linear


class RetNet(MixerLayer):
    """Multi-scale retention: linear attention without a softmax, in which head h decays by 1 - 2^(-5-h) per position.

    That decay and the rotation of queries and keys, as in xPos, distinguish positions. State: for each head a matrix
    (K, K), and the position.

    Differs from the reference:
        Sun et al. 2023, section 2, and https://github.com/microsoft/torchscale,
        torchscale/component/multiscale_retention.py and torchscale/architecture/retnet.py.

        - block: theirs has a gated MLP (``GLU``), whose hidden width is smaller by as much as the values are wider.
        - sizes: 4 heads of D/4 channels for keys and for values, as in equation 8; theirs takes the width of the values
          as a setting (``decoder_value_embed_dim``), which is 2 D in the paper's language models.
        - computation: the norm of a head subtracts the mean and has gains and biases (the paper's group norm, ε 1e-5);
          in the code it is an RMS norm without gain. The score normalisations of section 2.1 are left out: up to ε the
          norm removes them.
        - initialisation: theirs is Xavier-uniform, with gain 2^-2.5 for queries, keys, values and gate, and 1 for the
          output.
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Sun et al. 2023, arXiv:2307.08621"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of RetNet.

        Attributes:
            heads: number of heads; must divide the model width into heads of even size.
        """

        heads: int = 4

    config: Config
    log_decay_H: Tensor
    frequency_K: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)

        width, size = shape.width, shape.width // config.heads
        if size % 2:
            raise ValueError(f"heads: {config.heads} must leave heads of even size, not {size}, for the rotations")

        self.q, self.k, self.v, self.gate, self.out = (linear(width, width) for _ in range(5))
        self.norm = HeadNorm(config.heads, width)

        log_decay_H = torch.log1p(-torch.exp2(-5.0 - torch.arange(config.heads)))
        self.register_buffer("log_decay_H", log_decay_H, persistent=False)
        self.register_buffer("frequency_K", 1e4 ** -torch.linspace(0, 1, size // 2), persistent=False)

    def mix(self, x_BTD: Tensor) -> Tensor:
        position_T1 = torch.arange(x_BTD.shape[1], device=x_BTD.device)[:, None]
        return self._output(x_BTD, matrix_recurrence(*self._project(x_BTD, position_T1)))

    def init_state(self, batch: int) -> State:
        heads, weight = self.config.heads, self.q.weight
        size = self.shape.width // heads
        position_B1 = weight.new_zeros(batch, 1, dtype=torch.int64)  # bfloat16 would stop counting at 256
        return {"S": weight.new_zeros(batch, heads, size, size), "position": position_B1}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        o_BHK, S_BHKK = matrix_step(state["S"], *self._project(x_BD, state["position"]))
        return self._output(x_BD, o_BHK), {"S": S_BHKK, "position": state["position"] + 1}

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and logarithms of decays.

        Args:
            x: inputs (..., D).
            position: their positions, which broadcast to (..., 1).
        """
        q, k, v = (rearrange(f(x), "... (h k) -> ... h k", h=self.config.heads) for f in (self.q, self.k, self.v))

        angle = position[..., None] * at_least_float32(self.frequency_K)
        q, k = rotate(q * q.shape[-1] ** -0.5, angle), rotate(k, angle)
        return q, k, v, self.log_decay_H[:, None].expand(*q.shape[:-1], 1)

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.norm(o.reshape(-1, self.shape.width)).view_as(x))


def rotate(y: Tensor, angle: Tensor) -> Tensor:
    """Return ``y`` (..., K) times ``exp(1j * angle)``; channels i and i + K/2 are one complex number."""
    real, imaginary = y.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
