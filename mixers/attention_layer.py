"""The common part of the Transformer, the Recurrent Transformer and their relatives."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixers.base import Layer, Shape, State
from mixers.ops.attention import alibi_slopes
from mixers.ops.projection import normed_qkv
from mixers.ops.weights import LayerWeights
from mixers.parts import MLP, RMSNorm, check_heads, linear, with_mlp


class AttentionLayer(Layer):
    """Parameters and position-wise parts of a pre-norm layer with softmax attention."""

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
    slopes_H: Tensor

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)
        width = shape.width

        # Attention.
        self.attention_norm = RMSNorm(width)
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.q_norm = RMSNorm(width) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width) if config.qk_norm else nn.Identity()
        self.register_buffer("slopes_H", alibi_slopes(config.heads), persistent=False)

        # MLP.
        if shape.mlp_width:
            self.mlp_norm = RMSNorm(width)
            self.mlp = MLP(shape)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value (..., D) of inputs ``x`` (..., D), heads concatenated.

        A subclass may replace it. Kernels that project inputs themselves do not run then: those of RT for whole layers
        (native, wavefront), and the static cache of decoding.
        """
        q_DD, k_DD, v_DD = self.q.weight, self.k.weight, self.v.weight
        return normed_qkv(x, self.attention_norm.gain, gain(self.q_norm), gain(self.k_norm), q_DD, k_DD, v_DD)

    def finish(self, x: Tensor, a: Tensor) -> Tensor:
        """Return the layer's output from its input and the attention output ``a`` (..., D), heads concatenated."""
        return with_mlp(self, x, self.out(a))

    def weights(self) -> LayerWeights:
        """Return all weights of the layer."""
        return LayerWeights(
            norm_D=self.attention_norm.gain,
            wq_DD=self.q.weight,
            wk_DD=self.k.weight,
            wv_DD=self.v.weight,
            q_norm_D=gain(self.q_norm),
            k_norm_D=gain(self.k_norm),
            wo_DD=self.out.weight,
            mlp_norm_D=self.mlp_norm.gain,
            up_FD=self.mlp.up.weight,
            down_DF=self.mlp.down.weight,
        )

    def init_state(self, batch: int) -> State:
        """Return empty ``k`` and ``v`` (B, 0, D)."""
        weight = self.k.weight
        return {name: weight.new_empty(batch, 0, self.shape.width) for name in ("k", "v")}


def gain(norm: nn.Module) -> Tensor | None:
    """Return the gain of a norm; None if there is no norm."""
    return norm.gain if isinstance(norm, RMSNorm) else None


def with_newest(state: State, k_BD: Tensor, v_BD: Tensor) -> State:
    """Return ``k`` and ``v`` (B, J, D) of a state with the newest position's pair appended."""
    return {
        "k": torch.cat([state["k"], k_BD[:, None]], dim=1),
        "v": torch.cat([state["v"], v_BD[:, None]], dim=1),
    }
