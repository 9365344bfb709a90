"""The Forgetting Transformer (FoX): softmax attention with forget gates."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import Shape, State
from mixers.ops.attention import forgetting_attention, forgetting_step
from mixers.ops.numerics import at_least_float32
from mixers.parts import Linear


class Gate(Linear):
    """Linear map from D channels to a number a head: weights normal with standard deviation 0.02, bias zero."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class ForgetGate(Gate):
    """Logarithms of the gates f = sigmoid(w·x + b) of each head, in at least float32; f starts at about 1/2."""

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(at_least_float32(super().forward(x)))


class ForgettingTransformer(AttentionLayer):
    """Softmax attention in which each head forgets at a rate that depends on the input: no code of positions.

    The logit of query i and key j is q_i·k_j / √K + Σ log f_t over t = j + 1, ..., i, with a gate f_t = sigmoid(w·x_t +
    b) of each head. State: all pairs, and for each the sums of log f since.

    Differs from the reference:
        Lin et al. 2025, section 3, and https://github.com/zhixuan-lin/forgetting-transformer,
        model/forgetting_transformer/modeling_forgetting_transformer.py, without the options of the Pro block
        (configs/experiment/longcrawl64/forgetting_transformer/llama_125m_2b.yaml).

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 16 heads of D/16 channels, as in the Transformer layer here; theirs has heads of 64.
        - computation: queries and keys pass through an RMS norm over the full width; theirs are not normed, and in the
          Pro block normed head by head.
        - initialisation: theirs is normal with standard deviation 0.02 for all linear maps, here only for the gate.
        - left out: the Pro block's output gate, norm of the outputs, and shift of keys and values; the paper reports
          gains over RoPE with either block.
    """

    compile_step: ClassVar[bool] = False
    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Lin et al. 2025, arXiv:2503.02130"

    def __init__(self, config: AttentionLayer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.forget = ForgetGate(shape.width, config.heads)

    def forward(self, x_BTD: Tensor) -> Tensor:
        log_f_BTH = self.forget(self.attention_norm(x_BTD))
        return self.finish(x_BTD, forgetting_attention(*self.project(x_BTD), log_f_BTH))

    def init_state(self, batch: int) -> State:
        return {**super().init_state(batch), **nothing_passed(self.k.weight, batch, self.config.heads)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        pairs = with_newest(state, k_BD, v_BD)
        passed = with_passed(state, self.forget(self.attention_norm(x_BD)))
        return self.finish(x_BD, forgetting_step(q_BD, pairs["k"], pairs["v"], passed["passed"])), {**pairs, **passed}

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1


def nothing_passed(weight: Tensor, batch: int, heads: int) -> State:
    """Return the empty ``passed`` (B, 0, H) for weights of this dtype and device."""
    return {"passed": at_least_float32(weight.new_empty(batch, 0, heads))}


def with_passed(state: State, log_f_BH: Tensor) -> State:
    """Return ``passed`` (B, J, H), the sums of log f since each pair, with the newest position's gate and pair."""
    newest_B1H = log_f_BH[:, None]
    return {"passed": torch.cat([state["passed"] + newest_B1H, torch.zeros_like(newest_B1H)], dim=1)}
