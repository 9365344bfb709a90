"""Multi-head softmax attention with ALiBi and QK-norm, and the Transformer layer made of it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.base import MLP, Layer, RMSNorm, Shape, State, linear, over_batch


def alibi_slopes(heads: int) -> Tensor:
    """Slopes 2^(-8h/H) of heads h = 1..H, float32 (Press et al. 2022, arXiv:2108.12409; max bias 8)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads).float()


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
        if config.heads < 1 or shape.width % config.heads:
            raise ValueError(f"heads: {config.heads} must divide the model width {shape.width}")
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
        normed = self.attention_norm(x)
        return self.q_norm(self.q(normed)), self.k_norm(self.k(normed)), self.v(normed)

    def finish(self, x: Tensor, a: Tensor) -> Tensor:
        """Layer output from its input and the attention output ``a`` (..., D), heads concatenated."""
        scale = self.shape.residual_scale
        u = x + scale * self.out(a)
        return u + scale * self.mlp(self.mlp_norm(u))

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

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762; ALiBi: Press et al. 2022, arXiv:2108.12409"

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.config.heads
        q_BHTK, k_BHTK, v_BHTK = (rearrange(y, "b t (h k) -> b h t k", h=heads) for y in self.project(x_BTD))
        position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        distance_TT = position_T - position_T[:, None]
        bias_HTT = (self.slopes_H[:, None, None] * distance_TT).masked_fill(distance_TT > 0, -torch.inf)
        attend = partial(F.scaled_dot_product_attention, attn_mask=bias_HTT.to(q_BHTK))
        a_BHTK = over_batch(attend, q_BHTK, k_BHTK, v_BHTK)
        return self.finish(x_BTD, rearrange(a_BHTK, "b h t k -> b t (h k)"))

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        q_BD, k_BD, v_BD = self.project(x_BD)
        state = {
            "k": torch.cat([state["k"], k_BD[:, None]], dim=1),
            "v": torch.cat([state["v"], v_BD[:, None]], dim=1),
        }
        return self.finish(x_BD, self.attend_one(q_BD, state["k"], state["v"])), state
