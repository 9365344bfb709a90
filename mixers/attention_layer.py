"""What the Transformer and the Recurrent Transformer have in common."""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from mixers.base import Layer, Shape, State
from mixers.ops.attention import alibi_slopes
from mixers.ops.mlp import residual_mlp
from mixers.ops.projection import normed_qkv
from mixers.parts import MLP, RMSNorm, check_heads, linear


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
        q_gain, k_gain = (norm.gain if isinstance(norm, RMSNorm) else None for norm in (self.q_norm, self.k_norm))
        q_DD, k_DD, v_DD = self.q.weight, self.k.weight, self.v.weight
        return normed_qkv(x, self.attention_norm.gain, q_gain, k_gain, q_DD, k_DD, v_DD)

    def finish(self, x: Tensor, a: Tensor) -> Tensor:
        """Layer output from its input and the attention output ``a`` (..., D), heads concatenated."""
        gain_D, up_FD, down_DF = self.mlp_norm.gain, self.mlp.up.weight, self.mlp.down.weight
        return residual_mlp(x, self.out(a), gain_D, up_FD, down_DF, self.shape.residual_scale)

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
