"""The Transformer in PyTorch's own operations."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS
from mixers.parts import RMSNorm
from mixers.transformer import Transformer


class PlainTransformer(Transformer):
    """The Transformer in PyTorch's own operations, so that ``torch.compile`` sees and fuses all of them."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        scale, heads = self.shape.residual_scale, self.config.heads

        # Queries, keys and values.
        normed_BTD = _normed(x_BTD, self.attention_norm)
        q_BTD = _normed(self.q(normed_BTD), self.q_norm)
        k_BTD = _normed(self.k(normed_BTD), self.k_norm)
        v_BTD = self.v(normed_BTD)
        q_BHTK, k_BHTK, v_BHTK = (rearrange(y, "b t (h k) -> b h t k", h=heads) for y in (q_BTD, k_BTD, v_BTD))

        # Causal attention with ALiBi.
        position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        ahead_TT = position_T - position_T[:, None]
        bias_HTT = (self.slopes_H[:, None, None] * ahead_TT).masked_fill(ahead_TT > 0, -torch.inf)
        a_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias_HTT.to(q_BHTK))

        # Residual branches.
        u_BTD = x_BTD + scale * self.out(rearrange(a_BHTK, "b h t k -> b t (h k)"))
        return u_BTD + scale * self.mlp(_normed(u_BTD, self.mlp_norm))


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Return ``norm(x)`` in the dtype of ``x``."""
    normed = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS).type_as(x)
    return normed * norm.gain.type_as(x) if isinstance(norm, RMSNorm) else x
