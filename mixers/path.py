"""PaTH attention: position encoding by accumulated Householder-like matrices."""

from dataclasses import dataclass
from typing import Any, ClassVar

from einops import rearrange
from torch import Tensor, nn

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import Shape, State
from mixers.fox import ForgetGate, Gate, nothing_passed, with_passed
from mixers.ops.attention import newest_logits, newest_mean
from mixers.ops.linear_recurrence import unit
from mixers.ops.numerics import at_least_float32
from mixers.ops.path_attention import path_attention, transported
from mixers.options import switch
from mixers.parts import ShortConvolution, check_at_least, linear


class PaTH(AttentionLayer):
    """Softmax attention with the logits q_i^T H_i ... H_{j+1} k_j / √K, where H_s = I - β_s w_s w_s^T.

    The directions w have length one and come from a low-rank map, a short causal convolution and SiLU; β = 2 sigmoid of
    a linear map, so H has the eigenvalue 1 - β in (-1, 1) on w and 1 elsewhere. These products alone distinguish
    positions. With ``forget_gate``, the sums of log f of the Forgetting Transformer are added to the logits (PaTH-FoX).
    State: all pairs, the keys multiplied by the H of every position since; the newest inputs of the convolution; and
    with gates the sums since each pair.

    Differs from the reference:
        Yang et al. 2025, section 3, and https://github.com/fla-org/flash-linear-attention, fla/layers/path_attn.py and
        fla/models/path_attn.

        - block: theirs has a gated MLP (SwiGLU).
        - sizes: 4 heads of D/4 channels; theirs has heads of 64. Chunks have 32 positions, theirs 64.
        - computation: queries and keys pass through an RMS norm over the full width, an option of theirs
          (``use_qk_norm``) that its language models leave off. With gates, theirs divides their logarithms, too, by √K.
        - initialisation: theirs is normal with standard deviation 0.02 for linear maps and short convolutions. Here it
          is for the maps to β and to the gates alone; the convolution has 1/√W, W = 3.
    """

    compile_step: ClassVar[bool] = False
    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Yang et al. 2025, arXiv:2505.16381"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of PaTH attention.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            rank: rank of the map that gives the directions.
            convolution: positions that the short convolution of the directions spans.
            forget_gate: add the forget gates of the Forgetting Transformer.
        """

        heads: int = 4
        rank: int = 32
        convolution: int = 3
        forget_gate: bool = switch(False)

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, config, "rank")
        width = shape.width

        self.w = nn.Sequential(linear(width, config.rank), linear(config.rank, width))
        self.convolution = ShortConvolution(width, config.convolution, silu=True)
        self.strength = Gate(width, config.heads)
        self.forget = ForgetGate(width, config.heads) if config.forget_gate else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        w_BTD = self.convolution(self.w(normed_BTD))
        log_f_BTH = None if self.forget is None else self.forget(normed_BTD)
        a_BTD = path_attention(*self.project(x_BTD), w_BTD, self._beta(normed_BTD), log_f_BTH)
        return self.finish(x_BTD, a_BTD)

    def init_state(self, batch: int) -> State:
        pairs = super().init_state(batch)
        passed = {} if self.forget is None else nothing_passed(self.k.weight, batch, self.config.heads)
        convolution = self.convolution.init_state(batch)
        return {"k": at_least_float32(pairs["k"]), "v": pairs["v"], "convolution": convolution, **passed}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        normed_BD, heads = self.attention_norm(x_BD), self.config.heads
        w_BD, convolution = self.convolution.step(self.w(normed_BD), state["convolution"])
        q_BD, k_BD, v_BD = self.project(x_BD)

        # All earlier keys go through the matrix of this position.
        w_BHK = unit(rearrange(w_BD, "b (h k) -> b h k", h=heads))
        k_BJHK = rearrange(state["k"], "b j (h k) -> b j h k", h=heads)
        earlier_BJD = transported(k_BJHK, w_BHK, self._beta(normed_BD)).flatten(2)
        state = {**state, **with_newest({"k": earlier_BJD, "v": state["v"]}, k_BD, v_BD), "convolution": convolution}

        logits_BHJ = newest_logits(at_least_float32(q_BD), state["k"], heads)
        if self.forget is not None:
            state |= with_passed(state, self.forget(normed_BD))
            logits_BHJ = logits_BHJ + state["passed"].mT
        return self.finish(x_BD, newest_mean(logits_BHJ, state["v"])), state

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1

    def _beta(self, normed: Tensor) -> Tensor:
        """Return the strengths β (..., H), in at least float32."""
        return 2 * at_least_float32(self.strength(normed)).sigmoid()
