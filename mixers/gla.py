"""Gated linear attention."""

from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, RMSNorm, check_heads, linear


class GatedLinearAttention(MixerLayer):
    """Linear attention in which every channel of a key decays at a rate that depends on the input.

    The decays are sigmoid(low-rank map of the input)^(1/16). Only the decays and causality distinguish positions.
    State: for each head a matrix (K, V) with H K = D/2 and H V = D.

    Differs from the reference:
        Yang et al. 2023, section 4, and https://github.com/fla-org/flash-linear-attention, fla/layers/gla.py and
        fla/models/gla.

        - block: theirs has a gated MLP (SwiGLU).
        - initialisation: theirs is normal with standard deviation 0.02 for all linear maps, with zero biases. Here the
          second map of the decays and its bias have PyTorch's default.
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Yang et al. 2023, arXiv:2312.06635"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of gated linear attention.

        Attributes:
            heads: number of heads; must divide half the model width, the width of the keys.
            gate_rank: rank of the map that gives the decays.
            gate_temperature: divisor of the logarithms of the decays; the greater, the longer the memory.
        """

        heads: int = 4
        gate_rank: int = 16
        gate_temperature: float = 16.0

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        if shape.width % (2 * config.heads):
            raise ValueError(f"heads: {config.heads} must divide half the model width {shape.width}")
        if config.gate_rank < 1 or config.gate_temperature <= 0:
            raise ValueError(
                f"gate_rank: {config.gate_rank}, gate_temperature: {config.gate_temperature}: give both > 0"
            )

        # Keys are half as wide as values.
        width, key_width = shape.width, shape.width // 2
        self.q, self.k = linear(width, key_width), linear(width, key_width)
        self.v, self.gate, self.out = (linear(width, width) for _ in range(3))
        self.decay = nn.Sequential(linear(width, config.gate_rank), nn.Linear(config.gate_rank, key_width))
        self.norm = RMSNorm(width // config.heads)

    def mix(self, x_BTD: Tensor) -> Tensor:
        return self._output(x_BTD, matrix_recurrence(*self._project(x_BTD)))

    def init_state(self, batch: int) -> State:
        heads, size = self.config.heads, self.shape.width // self.config.heads
        return {"S": self.q.weight.new_zeros(batch, heads, size // 2, size)}

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        o_BHV, S_BHKV = matrix_step(state["S"], *self._project(x_BD))
        return self._output(x_BD, o_BHV), {"S": S_BHKV}

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys, values and logarithms of decays."""
        log_decay = F.logsigmoid(at_least_float32(self.decay(x))) / self.config.gate_temperature
        scale = (self.shape.width // 2 // self.config.heads) ** -0.5
        tensors = (self.q(x) * scale, self.k(x), self.v(x), log_decay)
        return [rearrange(y, "... (h k) -> ... h k", h=self.config.heads) for y in tensors]

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.norm(o).flatten(-2))
