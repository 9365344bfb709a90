"""M²RNN: a nonlinear recurrent net with a matrix state."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.mamba2 import ScalarDecay
from mixers.ops.m2rnn import m2rnn, m2rnn_step
from mixers.parts import MixerLayer, RMSNorm, ShortConvolution, check_at_least, check_heads, linear


class M2RNN(MixerLayer):
    """S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_t^T), y_t = S_t^T q_t + D v_t, with a state (K, V) a head.

    All heads share q and k. The kept shares f = exp(-exp(a) softplus(·)) are parametrised as the decays of Mamba-2. Of
    W, each head has a matrix (V, V), at first the identity. q, k and v go through a short causal convolution and SiLU,
    and y through a gate and an RMS norm.

    Positions are computed one after the other. The recurrence and the convolution distinguish positions. State: for
    each head a matrix (K, V), and the newest inputs of the convolution.

    Differs from the reference:
        Mishra et al. 2026 and https://github.com/open-lm-engine/lm-engine,
        lm_engine/hf_models/modeling_utils/sequence_mixer_blocks/m2rnn.py with configs/research/m2rnn.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 8 heads of D/8 channels; theirs has heads of 16 channels (the same heads at D = 128), 1.3 D in all.
        - computation: the kept shares are in float32, theirs are rounded to bfloat16. The norm of the outputs has
          ε 1e-6; theirs has 1e-5.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions; here the
          convolutions have 1/√W, W = 4. Theirs divides the output map by √(2 L), where here the branch has the factor
          1/√L.
        - training: theirs clamps the gradient of the state to ±1 at each position.
    """

    family: ClassVar[str] = "recurrent net"
    paper: ClassVar[str] = "Mishra et al. 2026, arXiv:2603.14360"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of M²RNN.

        Attributes:
            heads: number of heads; must divide the model width.
            key_size: number K of rows of a head's state.
            convolution: positions that the short convolution spans.
        """

        heads: int = 8
        key_size: int = 64
        convolution: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        check_at_least(1, config, "key_size")

        width, heads, keys = shape.width, config.heads, config.key_size
        size = width // heads
        self.sizes = [2 * keys + width, heads, width]

        # One map gives q, k and v, then the kept shares, then the gate.
        self.inputs = linear(width, sum(self.sizes))
        self.convolution = ShortConvolution(self.sizes[0], config.convolution, silu=True)
        self.decay = ScalarDecay(heads, least=0.0)
        self.state_HVV = nn.Parameter(torch.eye(size).repeat(heads, 1, 1))
        self.skip_D = nn.Parameter(torch.ones(width))
        self.norm = RMSNorm(width)
        self.out = linear(width, width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        qkv, kept, gate = self.inputs(x_BTD).split(self.sizes, dim=-1)
        q, k, v, f = self._recurrence(self.convolution(qkv), kept)
        return self._output(m2rnn(q, k, v, f, self.state_HVV), v, gate)

    def init_state(self, batch: int) -> State:
        heads, keys = self.config.heads, self.config.key_size
        return {
            "S": self.state_HVV.new_zeros(batch, heads, keys, self.shape.width // heads),
            "convolution": self.convolution.init_state(batch),
        }

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        qkv, kept, gate = self.inputs(x_BD).split(self.sizes, dim=-1)
        qkv, convolution = self.convolution.step(qkv, state["convolution"])

        q, k, v, f = self._recurrence(qkv, kept)
        y_BHV, S_BHKV = m2rnn_step(state["S"], q, k, v, f, self.state_HVV)
        return self._output(y_BHV, v, gate), {"S": S_BHKV, "convolution": convolution}

    @classmethod
    def loop_period(cls, config: Config) -> int:
        return 1

    def _recurrence(self, qkv: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries and keys (..., K), values (..., H, V) and kept shares (..., H)."""
        q, k, v = qkv.split([self.config.key_size, self.config.key_size, self.shape.width], dim=-1)
        return q, k, rearrange(v, "... (h v) -> ... h v", h=self.config.heads), self.decay(kept)[1].exp()

    def _output(self, y: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from the outputs (..., H, V) of the recurrence."""
        read = y.flatten(-2) + self.skip_D * v.flatten(-2)
        return self.out(self.norm(read * F.silu(gate)))
