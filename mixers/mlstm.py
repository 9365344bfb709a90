"""mLSTM, the layer of xLSTM with a matrix as its memory."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import Shape, State
from mixers.ops.block_maps import block_maps
from mixers.ops.linear_recurrence import matrix_step, weighted_recurrence, with_ones
from mixers.ops.numerics import at_least_float32
from mixers.parts import MixerLayer, ShortConvolution, check_at_least, check_heads, linear

HEAD_EPS = 1e-5
"""Epsilon of the norm of each head."""
BLOCK = 128
"""Positions of a block of ``running_sum``."""


class MLSTM(MixerLayer):
    """Exponential gates over a matrix: C_t = f_t C_{t-1} + i_t k_t v_t^T, n_t = f_t n_{t-1} + i_t k_t.

    The forget gate is f = sigmoid, the input gate i = exp, and a head's output q_t^T C_t / max(|q_t^T n_t|, 1). So that
    nothing overflows, state and normaliser are stored divided by exp(m_t), with the running maximum
    m_t = max(log f_t + m_{t-1}, log i_t) and m_0 = 0. With the products F of the forget gates, it equals
    log F_t + max(0, max_{s<=t} (log i_s - log F_s)), which needs no loop over positions. Outputs do not depend on m, so
    it has no gradient.

    The input is mapped to 4 D numbers. One half passes a short causal convolution with SiLU, from which queries and
    keys come by maps of blocks of channels; values come from this half without the convolution, and the gates from all
    three. The heads' outputs are normed, the convolution's is added with learned factors, and the other half is the
    output gate. The decays and the convolution distinguish positions. State: for each head a matrix (K, K + 1), of
    which the last column is n, and m; and the newest inputs of the convolution.

    Differs from the reference:
        Beck et al. 2024, sections 2.3 and 2.4, and https://github.com/NX-AI/xlstm, xlstm/blocks/mlstm/layer.py, cell.py
        and backends.py.

        - block: theirs has no MLP: an mLSTM layer stands in place of both attention and MLP. Its norm before the layer
          subtracts the mean.
        - computation: theirs adds 1e-6 to the divisor, and m begins at 0 when it decodes and at minus infinity
          otherwise, which matters only for that 1e-6.
        - initialisation: theirs is normal with standard deviation √(2/(5 D)) for the map in, as the maps of blocks are
          here, and 2/(L √D) for the map out, where here the branch has the factor 1/√L; the short convolution and its
          bias have PyTorch's default (uniform in ±1/√W, W = 4), where here the convolution is normal with 1/√W and its
          bias zero.
    """

    family: ClassVar[str] = "linear attention"
    paper: ClassVar[str] = "Beck et al. 2024, arXiv:2405.04517"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerLayer.Config):
        """Settings of mLSTM.

        Attributes:
            heads: number of heads; must divide the model width.
            expand: width inside the mixer, in model widths.
            convolution: positions that the short convolution spans.
            block: channels of a block of the maps to queries, keys and values; must divide the width inside the mixer.
        """

        heads: int = 4
        expand: int = 2
        convolution: int = 4
        block: int = 4

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        check_at_least(1, config, "expand", "block")
        heads, block, inner = config.heads, config.block, config.expand * shape.width
        if inner % block:
            raise ValueError(f"block: {block} must divide the width inside the mixer, {inner}")

        self.inputs = linear(shape.width, 2 * inner)
        self.convolution = ShortConvolution(inner, config.convolution, bias=True, silu=True)
        self.qkv = nn.Parameter(torch.randn(3, inner // block, block, block) * (2 / (5 * shape.width)) ** 0.5)

        # Input and forget gates of all heads read queries, keys and values.
        self.gates = nn.Parameter(torch.zeros(2 * heads, 3 * inner))
        self.input_bias_H = nn.Parameter(0.1 * torch.randn(heads))
        self.forget_bias_H = nn.Parameter(torch.linspace(3, 6, heads))

        self.gain, self.skip = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.ones(inner))
        self.out = linear(inner, shape.width)

    def mix(self, x_BTD: Tensor) -> Tensor:
        x, gate = self.inputs(x_BTD).chunk(2, dim=-1)
        convolved = self.convolution(x)
        q, k, v, log_i, log_f = self._project(convolved, x)

        # The running maximum.
        total = running_sum(log_f.detach())
        m_BTH = total + (log_i.detach() - total).cummax(1).values.clamp(min=0)
        before_BTH = F.pad(m_BTH[:, :-1], (0, 0, 1, 0))

        g, i = log_f + (before_BTH - m_BTH), math.log(self._scale(q)) + (log_i - m_BTH)
        o, n = weighted_recurrence(q, k, v, g[..., None], i[..., None])
        return self._output(o, n, m_BTH, convolved, gate)

    def init_state(self, batch: int) -> State:
        heads, weight = self.config.heads, self.out.weight
        size = self.config.expand * self.shape.width // heads
        return {
            "S": weight.new_zeros(batch, heads, size, size + 1),
            "m": weight.new_zeros(batch, heads),
            "convolution": self.convolution.init_state(batch),
        }

    def mix_one(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        x, gate = self.inputs(x_BD).chunk(2, dim=-1)
        convolved, newest = self.convolution.step(x, state["convolution"])
        q, k, v, log_i, log_f = self._project(convolved, x)

        m_BH = torch.maximum(log_f + state["m"], log_i)
        g, i = log_f + (state["m"] - m_BH), self._scale(q) * (log_i - m_BH).exp()
        o, S_BHKV = matrix_step(state["S"], q, k, i[..., None] * with_ones(v), g[..., None])
        y = self._output(o[..., :-1], o[..., -1:], m_BH, convolved, gate)
        return y, {"S": S_BHKV, "m": m_BH, "convolution": newest}

    def _project(self, convolved: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values (..., H, K), and logarithms of input and forget gates (..., H)."""
        heads = self.config.heads

        # Gates read maps of the inputs, so they are maps of the inputs themselves.
        gates_G3NO = self.gates.unflatten(1, self.qkv.shape[:3])
        of_q, of_k, of_v = (gates_G3NO[..., None] * self.qkv).sum(-2).flatten(2).unbind(1)
        gates = at_least_float32(F.linear(convolved, of_q + of_k)) + at_least_float32(F.linear(x, of_v))

        log_i, log_f = gates.chunk(2, dim=-1)
        q, k, v = (rearrange(y, "... (h k) -> ... h k", h=heads) for y in block_maps(convolved, x, self.qkv))
        return q, k, v, log_i + self.input_bias_H, F.logsigmoid(log_f + self.forget_bias_H)

    @staticmethod
    def _scale(q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5)

    def _output(self, o: Tensor, n: Tensor, m: Tensor, convolved: Tensor, gate: Tensor) -> Tensor:
        """Return the mixer's output from reads (..., H, K) and their sums of weights (..., H, 1), both over exp(m)."""
        # The norm of the reads over the divisor: of the reads alone, with an epsilon that the divisor scales.
        divisor = torch.maximum(at_least_float32(n).abs(), (-m).exp()[..., None])
        o = at_least_float32(o)
        centred = o - o.mean(-1, keepdim=True)
        h = centred * (centred.square().mean(-1, keepdim=True) + HEAD_EPS * divisor.square()).rsqrt()
        return self.out((self.gain * h.flatten(-2) + self.skip * convolved) * F.silu(gate))


def running_sum(x_BTH: Tensor) -> Tensor:
    """Return the sums over the positions up to each (B, T, H).

    Over more than 128 positions, TorchInductor of PyTorch 2.11 fails at the sum of what a bias was added to
    (https://github.com/pytorch/pytorch/issues/180221). So blocks of 128 are summed, then what is before each.
    """
    length = x_BTH.shape[1]
    if length <= BLOCK:
        return x_BTH.cumsum(1)
    within_BNTH = F.pad(x_BTH, (0, 0, 0, -length % BLOCK)).unflatten(1, (-1, BLOCK)).cumsum(2)
    before_BNH = F.pad(within_BNTH[:, :-1, -1].cumsum(1), (0, 0, 1, 0))
    return (within_BNTH + before_BNH[:, :, None]).flatten(1, 2)[:, :length]
