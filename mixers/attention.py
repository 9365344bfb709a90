"""Multi-head softmax attention with ALiBi and QK-norm, and the Transformer layer made of it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import MLP, Layer, RMSNorm, Shape, State, check_heads, fused_kernels, linear, residual_mlp
from mixers.runs import over_batch, over_runs


def alibi_slopes(heads: int) -> Tensor:
    """Slopes 2^(-8h/H) of heads h = 1..H, float32 (Press et al. 2022, arXiv:2108.12409; max bias 8)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads).float()


def attention(q_BTD: Tensor, k_BTD: Tensor, v_BTD: Tensor, slopes_H: Tensor) -> Tensor:
    """Causal softmax attention (B, T, D) with ALiBi, heads concatenated."""
    kernels = fused_kernels(q_BTD)
    if kernels and kernels.fits_attention(q_BTD.shape[-1], len(slopes_H)):
        return over_runs(kernels.attention_method(slopes_H), q_BTD, k_BTD, v_BTD)[0]
    position_T = torch.arange(q_BTD.shape[1], device=q_BTD.device)
    distance_TT = position_T[:, None] - position_T
    return attend(q_BTD, k_BTD, v_BTD, masked_alibi(slopes_H, distance_TT, distance_TT >= 0))


def masked_alibi(slopes_H: Tensor, distance_IJ: Tensor, seen_IJ: Tensor) -> Tensor:
    """ALiBi of keys at a distance before their queries, minus infinity where a query does not see a key; (H, I, J)."""
    return (-slopes_H[:, None, None] * distance_IJ).masked_fill(~seen_IJ, -torch.inf)


def attend(q_BID: Tensor, k_BJD: Tensor, v_BJD: Tensor, bias_HIJ: Tensor) -> Tensor:
    """Softmax attention of I queries to J pairs (B, I, D) with a bias added to the logits, heads concatenated."""
    heads, (k_BJD, v_BJD) = len(bias_HIJ), (y.to(q_BID.dtype) for y in (k_BJD, v_BJD))
    split = (rearrange(y, "b j (h k) -> b h j k", h=heads) for y in (q_BID, k_BJD, v_BJD))
    a_BHIK = over_batch(partial(F.scaled_dot_product_attention, attn_mask=bias_HIJ.to(q_BID)), *split)
    return rearrange(a_BHIK, "b h i k -> b i (h k)")


class AttentionLayer(Layer):
    """Parameters and position-wise parts that the Transformer and the Recurrent Transformer have in common."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Layer.Config):
        """Settings of an attention layer.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
        """

        heads: int = 16
        qk_norm: bool = True

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        width = shape.width
        self.attention_norm = RMSNorm(width)
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.q_norm = RMSNorm(width) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width) if config.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(shape)
        self.register_buffer("slopes_H", alibi_slopes(config.heads), persistent=False)

    slopes_H: Tensor

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value of inputs ``x`` (..., D), heads concatenated."""
        kernels = fused_kernels(x)
        if kernels and kernels.fits_project(self.shape.width):
            gains = (norm.gain if isinstance(norm, RMSNorm) else None for norm in (self.q_norm, self.k_norm))
            weights = (linear.weight for linear in (self.q, self.k, self.v))
            q, k, v = over_runs(kernels.project_method(torch.bfloat16), x, self.attention_norm.gain, *gains, *weights)
            return q, k, v
        normed = self.attention_norm(x)
        return self.q_norm(self.q(normed)), self.k_norm(self.k(normed)), self.v(normed)

    def finish(self, x: Tensor, a: Tensor) -> Tensor:
        """Layer output from its input and the attention output ``a`` (..., D), heads concatenated."""
        return residual_mlp(x, self.out(a), self.mlp_norm, self.mlp, self.shape.residual_scale)

    def attend_one(self, q_BD: Tensor, k_BJD: Tensor, v_BJD: Tensor) -> Tensor:
        """Attention output of the newest query over J keys, the last of which stands at its own position."""
        heads = self.config.heads
        q_BHK = rearrange(q_BD, "b (h k) -> b h k", h=heads)
        k_BJHK, v_BJHK = (rearrange(y, "b j (h k) -> b j h k", h=heads) for y in (k_BJD, v_BJD))
        logits_BHJ = torch.einsum("bhk,bjhk->bhj", q_BHK, k_BJHK) * q_BHK.shape[-1] ** -0.5
        distance_J = torch.arange(1 - k_BJD.shape[1], 1, device=q_BD.device)
        weights_BHJ = (logits_BHJ + self.slopes_H.to(logits_BHJ)[:, None] * distance_J).softmax(-1)
        return torch.einsum("bhj,bjhk->bhk", weights_BHJ, v_BJHK).flatten(1)

    def init_state(self, batch: int) -> State:
        weight = self.k.weight
        return {name: weight.new_empty(batch, 0, self.shape.width) for name in ("k", "v")}


class Transformer(AttentionLayer):
    """Pre-norm causal Transformer layer (paper section 2.1, "The Transformer layer")."""

    family: ClassVar[str] = "attention"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762; ALiBi: Press et al. 2022, arXiv:2108.12409"

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(x_BTD, attention(*self.project(x_BTD), self.slopes_H))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        state = {
            "k": torch.cat([state["k"], k_BD[:, None]], dim=1),
            "v": torch.cat([state["v"], v_BD[:, None]], dim=1),
        }
        return self.finish(x_BD, self.attend_one(q_BD, state["k"], state["v"])), state
