"""The Recurrent Transformer layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from mixers.attention_layer import AttentionLayer, gain
from mixers.base import NO_RECURRENCE, Shape, State, log_once
from mixers.ops.attention import attention_step
from mixers.ops.norm import check_width
from mixers.ops.numerics import HALF, product_dtype
from mixers.ops.runs import over_runs
from mixers.parts import check_at_least
from mixers.rt.dispatch import Chosen, Implementation, choose, recurrence
from mixers.rt.naive import Weights, key_value
from mixers.rt.native.matrices import NativeSetting
from mixers.rt.native.passes import native_method


class RecurrentTransformer(AttentionLayer):
    """Attention to keys and values computed from the layer's own outputs (paper section 2.2).

    Write n_i = RMS(x_i). Position i has the query RMS[Q n_i] and, from its input, the temporary pair
    (RMS[K n_i], V n_i). Its output z_i gives the persistent pair (RMS[K RMS(z_i)], V RMS(z_i)). It attends to the
    persistent pairs of earlier positions j < i and to its own temporary pair, with ALiBi on the logits. The output is
    z_i = u_i + s MLP(RMS(u_i)) with u_i = x_i + s O a_i and s = 1/√L. With blocks, it attends to the persistent pairs
    of earlier blocks and to the temporary pairs of its own block up to itself.

    ``block = 1`` is the Recurrent Transformer. With ``block`` at least the sequence length, the layer equals the
    Transformer layer with the same parameters.

    Differs from the reference:
        Oncescu et al. 2026, section 2.2, from which the layer with ``block = 1`` does not differ, and the authors'
        code, https://github.com/geniucos/recurrent-transformer, to which the points refer.

        - block: theirs has layer norms in place of RMS norms, and no factor 1/√L on the residual branches.
        - initialisation: theirs draws the maps out of attention and MLP in layer l = 0, 1, ... with standard deviation
          1/√(2 inputs (l + 1)).
        - added: blocks of several positions, which the paper's conclusion proposes; off by default.
    """

    compile_step: ClassVar[bool] = False
    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Oncescu et al. 2026, arXiv:2604.21215"

    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionLayer.Config):
        """Settings of the Recurrent Transformer.

        Attributes:
            heads: number of heads; must divide the model width.
            qk_norm: RMS norm of queries and keys over the full width, before the split into heads.
            persistent_norm: RMS norm of the outputs before persistent keys and values; False is the paper's ablation.
            block: positions b computed at once, which attend to each other's temporary pairs (paper section 9). GPU
                kernels take powers of two, at widths beyond 256 only up to 16, and blocks of all positions.
            implementation: how the recurrence is computed: "naive", "tiled", "native", "wavefront", "fused", or
                "auto", which chooses by device and shape. Results agree up to rounding.
        """

        persistent_norm: bool = True
        block: int = 1
        implementation: Implementation = "auto"

    config: Config

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_at_least(1, shape, "mlp_width")
        if config.block < 1:
            raise ValueError(f"block: {config.block} must be at least 1")

    def forward(self, x_BTD: Tensor) -> Tensor:
        chosen = self._choose(x_BTD)
        if chosen == "wavefront":
            return self._wavefront([self], x_BTD)
        if chosen == "native":
            return self._native(x_BTD)

        q_BTD, k_BTD, v_BTD = self.project(x_BTD)
        return recurrence(
            x_BTD=x_BTD,
            q_BTD=q_BTD,
            k_BTD=k_BTD,
            v_BTD=v_BTD,
            weights=self._recurrent_weights(),
            slopes_H=self.slopes_H,
            scale=self.shape.residual_scale,
            block=self._block(x_BTD),
            implementation=chosen,
        )

    @classmethod
    def growth_period(cls, config: Config) -> int:
        return config.block

    @classmethod
    def loop_period(cls, config: Config) -> int:
        return config.block

    @classmethod
    def remark(cls, config: Config, length: int) -> str | None:
        return NO_RECURRENCE if config.block >= length else None

    @classmethod
    def plain_config(cls, config: Config) -> Config:
        return replace(config, implementation="naive")

    @classmethod
    def through(cls, layers: Sequence[Self], x_BTD: Tensor) -> Tensor:
        if len(layers) > 1 and cls.at_once(layers, x_BTD):  # a single one chooses in its own forward pass
            return cls._wavefront(layers, x_BTD)
        return super().through(layers, x_BTD)

    @classmethod
    def at_once(cls, layers: Sequence[Self], x_BTD: Tensor) -> bool:
        first = layers[0]
        alike = all(
            (layer.config, layer.shape) == (first.config, first.shape)
            and getattr(layer.forward, "__func__", None) is RecurrentTransformer.forward
            for layer in layers
        )
        # Computing all layers at the same time needs memory for all of them. With gradients, it is needed anyway.
        return alike and torch.is_grad_enabled() and first._choose(x_BTD) == "wavefront"

    def init_state(self, batch: int) -> State:
        pairs = super().init_state(batch)
        return {**pairs, "k_block": pairs["k"], "v_block": pairs["v"]}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position; ``k_block`` and ``v_block`` hold the temporary pairs of the unfinished block."""
        q_BD, k_temp_BD, v_temp_BD = self.project(x_BD)

        # Persistent pairs of earlier blocks, then temporary pairs of the current block.
        position = state["k"].shape[1]
        inside = position % self.config.block
        earlier = position - inside
        k_block = torch.cat([state["k_block"], k_temp_BD[:, None]], dim=1)
        v_block = torch.cat([state["v_block"], v_temp_BD[:, None]], dim=1)
        k_BJD = torch.cat([state["k"][:, :earlier], k_block], dim=1)
        v_BJD = torch.cat([state["v"][:, :earlier], v_block], dim=1)

        # Output and its persistent pair.
        z_BD = self.finish(x_BD, attention_step(q_BD, k_BJD, v_BJD, self.slopes_H))
        k_BD, v_BD = key_value(z_BD, self._recurrent_weights())

        ends = inside + 1 == self.config.block
        return z_BD, {
            "k": torch.cat([state["k"], k_BD[:, None]], dim=1),
            "v": torch.cat([state["v"], v_BD[:, None]], dim=1),
            "k_block": k_block[:, :0] if ends else k_block,
            "v_block": v_block[:, :0] if ends else v_block,
        }

    def _block(self, x_BTD: Tensor) -> int:
        """Return the positions of a block; a block longer than the sequence becomes a power of two, for the kernels."""
        return min(self.config.block, 1 << (x_BTD.shape[-2] - 1).bit_length())

    def _choose(self, x_BTD: Tensor) -> Chosen:
        """Return the implementation that runs: ``choose`` by device and shape, and tiled for what it cannot know."""
        check_width(x_BTD, self.attention_norm.gain)
        config = self.config
        chosen = choose(config.implementation, x_BTD, self.shape.mlp_width, config.heads, self._block(x_BTD))

        # Kernels keep the residual stream in float32, and need parameters in float32.
        if x_BTD.dtype in HALF and chosen not in ("naive", "tiled"):
            log_once(
                f"Recurrent Transformer: tiled runs, because {chosen} takes inputs and parameters in float32, not "
                f"{x_BTD.dtype}; torch.autocast computes products in bfloat16"
            )
            return "tiled"

        # native and wavefront compute queries and pairs themselves, but a subclass may have its own projection.
        own = type(self).project is not AttentionLayer.project
        return "tiled" if own and chosen in ("native", "wavefront") else chosen

    @staticmethod
    def _wavefront(layers: Sequence["RecurrentTransformer"], x_BTD: Tensor) -> Tensor:
        """Return the outputs of the last layer; a layer works on positions as soon as the layer before has finished."""
        # Triton does not exist on every platform.
        from mixers.rt.wavefront.passes import layers_method
        from mixers.rt.wavefront.setup import WavefrontSetting

        # What the layers share.
        first = layers[0]
        setting = WavefrontSetting(
            slopes_H=first.slopes_H,
            scale=first.shape.residual_scale,
            persistent_norm=first.config.persistent_norm,
            block=first._block(x_BTD),
            dtype=product_dtype(x_BTD),
        )

        # All layers as one operation.
        method = layers_method(len(layers), setting)
        weights = [layer.weights() for layer in layers]
        (z_BTD,) = over_runs(method, x_BTD, *(y for field in zip(*weights, strict=True) for y in field))
        return z_BTD

    def _native(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs, computed in C.

        Raises:
            ValueError: a weight has another dtype or device than the inputs, which the C code would read as its own.
        """
        weights = self.weights()
        for weight in weights:
            if weight is not None and (weight.dtype, weight.device) != (x_BTD.dtype, x_BTD.device):
                raise ValueError(
                    f"inputs are {x_BTD.dtype} on {x_BTD.device}, but the layer is {weight.dtype} on {weight.device}: "
                    "convert one of them with .to(...)"
                )

        setting = NativeSetting(self.slopes_H, self.shape.residual_scale, self.config.persistent_norm)
        (z_BTD,) = over_runs(native_method(setting), x_BTD, *weights)
        return z_BTD

    def _recurrent_weights(self) -> Weights:
        return Weights(
            wo_DD=self.out.weight,
            mlp_norm_D=self.mlp_norm.gain,
            up_FD=self.mlp.up.weight,
            down_DF=self.mlp.down.weight,
            kv_norm_D=self.attention_norm.gain if self.config.persistent_norm else None,
            wk_DD=self.k.weight,
            k_norm_D=gain(self.k_norm),
            wv_DD=self.v.weight,
        )
