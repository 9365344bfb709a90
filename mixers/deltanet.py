"""DeltaNet and Gated DeltaNet: linear attention that overwrites the value stored under a key."""

from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.mamba2 import ScalarDecay
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step, unit
from mixers.parts import MixerLayer, RMSNorm, ShortConvolution, check_heads, linear

EPS_RATIO = 0.1
"""What the norms here add to the mean square (1e-6), over what the authors' norm of the outputs adds (1e-5).

The authors read with q / √K and norm with 1e-5. Here the queries are scaled by √(EPS_RATIO / K), so that a norm with
1e-6 has the same results: both are o / √(mean(o²) + 1e-5 K) of the outputs o of unscaled queries.
"""


class DeltaNet(MixerLayer):
    """The delta rule S_t = (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T with β = sigmoid and keys of length one.

    Queries, keys and values go through a short causal convolution and SiLU. Positions are told apart by the convolution
    and by causality. State: for each head a matrix (K, K), and the newest inputs of the convolution.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv:2406.06484"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of DeltaNet.

        Attributes:
            heads: number of heads; must divide the model width.
            convolution: positions that the short convolution spans.
        """

        heads: int = 4
        convolution: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)

        self.qkv = linear(shape.width, 3 * shape.width)
        self.convolution = ShortConvolution(3 * shape.width, config.convolution, silu=True)
        self.strength = linear(shape.width, config.heads)
        self.norm = RMSNorm(shape.width // config.heads)
        self.out = linear(shape.width, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        tensors = self._recurrence(x_BTD, self.convolution(self.qkv(x_BTD)))
        return self._output(x_BTD, matrix_recurrence(*tensors))

    def init_state(self, batch: int) -> State:
        heads, size = self.config.heads, self.shape.width // self.config.heads
        return {
            "S": self.out.weight.new_zeros(batch, heads, size, size),
            "convolution": self.convolution.init_state(batch),
        }

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        qkv_BD, convolution = self.convolution.step(self.qkv(x_BD), state["convolution"])
        o_BHK, S_BHKK = matrix_step(state["S"], *self._recurrence(x_BD, qkv_BD))
        return self._output(x_BD, o_BHK), {"S": S_BHKK, "convolution": convolution}

    def _recurrence(self, x: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Return the arguments q, k, v, g, a, b of ``matrix_recurrence``."""
        q, k, v = rearrange(qkv, "... (n h k) -> n ... h k", n=3, h=self.config.heads)
        q, k = unit(q) * (EPS_RATIO / q.shape[-1]) ** 0.5, unit(k)

        # Write strength β, on the keys, and decays.
        strong = self.strength(x).sigmoid()[..., None] * k
        g = self._log_decay(x)
        return q, strong, v, g, -strong if g is None else -g.exp() * strong, k

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Return the logarithms of the decays (..., H, 1), if there are any."""
        return None

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        """Return the mixer's output from its input and the outputs ``o`` (..., H, K) of the recurrence."""
        return self.out(self.norm(o).flatten(-2))


class GatedDeltaNet(DeltaNet):
    """The delta rule with a decay, S_t = α_t (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T, and an output gate.

    The decays α are parametrised as in Mamba-2. All else is as in DeltaNet, the state included. The values are D wide
    (the paper's language models have keys of 3/4 D and values of 3/2 D).
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv:2412.06464"

    def __init__(self, config: DeltaNet.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.step_size = linear(shape.width, config.heads)
        self.decay = ScalarDecay(config.heads, least=0.0)
        self.gate = linear(shape.width, shape.width)

    def _log_decay(self, x: Tensor) -> Tensor:
        return self.decay(self.step_size(x))[1][..., None]

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.norm(o).flatten(-2))
