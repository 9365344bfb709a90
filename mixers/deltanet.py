"""DeltaNet and Gated DeltaNet: linear attention that overwrites the value stored under a key."""

from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.mamba2 import ScalarDecay
from mixers.ops.linear_recurrence import matrix_recurrence, matrix_step, unit
from mixers.options import switch
from mixers.parts import MixerLayer, RMSNorm, ShortConvolution, check_heads, linear

EPS_RATIO = 0.1
"""Epsilon of the norms in this project (1e-6), divided by the epsilon of the authors' norm of the outputs (1e-5).

The authors use queries q / √K and a norm with 1e-5. Here queries are scaled by √(EPS_RATIO / K), so that a norm with
1e-6 gives the same results: both equal o / √(mean(o²) + 1e-5 K) for the outputs o of unscaled queries.
"""


class DeltaNet(MixerLayer):
    """The delta rule S_t = (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T with β = sigmoid and keys of length one.

    The transition matrix I - β k k^T has the eigenvalue 1 - β on the key, in (0, 1), and 1 elsewhere. With
    ``negative_eigenvalues`` β = 2 sigmoid, and 1 - β is in (-1, 1) (Grazzi et al. 2024, arXiv:2411.12537). Where β is
    near 2, a write changes the sign of the state along its key, which parity needs.

    Queries, keys and values go through a short causal convolution and SiLU. The convolution and causality distinguish
    positions. State: for each head a matrix (K, K), and the newest inputs of the convolution.

    Differs from the reference:
        Yang et al. 2024, section 3, and https://github.com/fla-org/flash-linear-attention, fla/layers/delta_net.py and
        fla/models/delta_net.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 4 heads of D/4 channels, the default of their layer; their language model has 16 of 128.
        - computation: the norm of the outputs has the ε 1e-5 of their layer's default; their language model sets 1e-6.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions; here the
          convolutions have 1/√W, W = 4.
    """

    family: ClassVar[str] = "delta rule"
    paper: ClassVar[str] = "Yang et al. 2024, arXiv:2406.06484"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of DeltaNet.

        Attributes:
            heads: number of heads; must divide the model width.
            convolution: positions that the short convolution spans.
            negative_eigenvalues: double the write strength, for eigenvalues of the state's transition between -1 and 1
                in place of 0 and 1.
        """

        heads: int = 4
        convolution: int = 4
        negative_eigenvalues: bool = switch(False)

    config: Config

    def __init__(self, config: Config, shape: Shape, pairs: int = 1) -> None:
        """Build the layer; ``pairs`` is the number of keys, and of values, of a head at each position."""
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)

        inner = (1 + 2 * pairs) * shape.width
        self.qkv = linear(shape.width, inner)
        self.convolution = ShortConvolution(inner, config.convolution, silu=True)
        self.strength = linear(shape.width, pairs * config.heads)
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

        # Keys times the write strength β, and decays.
        strength = self.strength(x).sigmoid()
        if self.config.negative_eigenvalues:
            strength = 2 * strength
        strong = strength[..., None] * k
        g = self._log_decay(x)
        return q, strong, v, g, -strong if g is None else -g.exp() * strong, k

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """Return the logarithms of the decays (..., H, 1); None without decays."""
        return None

    def _output(self, x: Tensor, o: Tensor) -> Tensor:
        """Return the mixer's output from its input and the outputs ``o`` (..., H, K) of the recurrence."""
        return self.out(self.norm(o).flatten(-2))


class GatedDeltaNet(DeltaNet):
    """The delta rule with a decay, S_t = α_t (I - β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T, and an output gate.

    The decays α are parametrised as in Mamba-2. The transition matrix has the eigenvalues α and α (1 - β), the latter
    in (0, 1), or in (-1, 1) with ``negative_eigenvalues``. Everything else is as in DeltaNet, including the state. The
    values are D wide (the paper's language models have keys of 3/4 D and values of 3/2 D).

    Differs from the reference:
        Yang et al. 2024, section 3, and https://github.com/fla-org/flash-linear-attention, fla/layers/gated_deltanet.py
        and fla/models/gated_deltanet.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 4 heads with keys and values of D/4 channels; theirs has 6 heads with keys of D/8 and values of D/4, so
          keys are 3/4 D and values 3/2 D wide.
        - computation: the norm of the outputs has the ε 1e-5 of their layer's default; their language model sets 1e-6.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions; here the
          convolutions have 1/√W, W = 4.
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
