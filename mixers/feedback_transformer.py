"""The Feedback Transformer."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.attention_layer import AttentionLayer, with_newest
from mixers.base import Shape, State, log_once
from mixers.deep import DeepLayer
from mixers.ops.attention import alibi_slopes, attend
from mixers.ops.mlp import residual_mlp
from mixers.ops.numerics import product_dtype, runs_fused
from mixers.ops.runs import over_runs
from mixers.parts import MLP, RMSNorm, check_heads, linear
from mixers.rt.dispatch import choose, recurrence
from mixers.rt.naive import Weights


class FeedbackBlock(nn.Module):
    """One of the layers: its queries, and everything after attention; keys and values come from the memory."""

    def __init__(self, config: AttentionLayer.Config, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.residual_scale
        self.attention_norm = RMSNorm(shape.width)
        self.q, self.out = linear(shape.width, shape.width), linear(shape.width, shape.width)
        self.q_norm = RMSNorm(shape.width) if config.qk_norm else nn.Identity()
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x_BD: Tensor, k_BJD: Tensor, v_BJD: Tensor, bias_H1J: Tensor) -> Tensor:
        q_BD = self.q_norm(self.q(self.attention_norm(x_BD)))
        a_BD = attend(q_BD[:, None], k_BJD, v_BJD, bias_H1J)[:, 0]
        gain_D, up_FD, down_DF = self.mlp_norm.gain, self.mlp.up.weight, self.mlp.down.weight
        return residual_mlp(x_BD, self.out(a_BD), gain_D, up_FD, down_DF, self.scale)


class FeedbackTransformer(DeepLayer):
    """Layers that all attend to one memory of earlier positions, which mixes the outputs of every layer.

    The memory vector of a position is m = sum_l softmax(w)_l h_l over the model's input (l = 0) and the outputs of its
    layers. Its key and value are computed from m and are shared by all layers (section 3.2 of the paper). A position
    attends to the memory of earlier positions, and to a pair of zeros at its own position, so that the first position
    has a pair to attend to. ALiBi distinguishes positions. State: the pairs of all positions.

    Differs from the reference:
        Fan et al. 2020, section 3.2, and https://github.com/facebookresearch/transformer-sequential,
        models/feedback.py.

        - block: theirs has layer norms, before the branches with ``pre_norm`` and else after the additions, a ReLU MLP
          with biases, and dropout.
        - sizes: 16 heads of D/16 channels; theirs has 8 heads of 128 at width 512 (experiments/feedback/enwik8.sh).
        - positions: ALiBi; theirs learns a code of each distance, common to all layers (``key_pe``).
        - computation: all earlier positions are in reach, and a pair of zeros at the position itself; theirs reaches
          ``attn_lim`` earlier positions, zeros before the first, and no own position. Keys and values are common to all
          layers, as in the paper; in the code this is the option ``share_proj_kv``. The memory has a norm of its own;
          with ``pre_norm`` theirs takes the norm of the queries. Queries and keys pass through an RMS norm.
        - initialisation: theirs divides the maps out of attention and MLP by √(2L) with ``pre_norm``, where here the
          branches have the factor 1/√L; its other maps have PyTorch's default.
        - training: gradients flow through all positions; in theirs they stop every ``mem_sz`` positions (trainer.py).
        - left out: adaptive attention spans.
    """

    family: ClassVar[str] = "recurrent attention"
    paper: ClassVar[str] = "Fan et al. 2020, arXiv:2002.09402"

    Config = AttentionLayer.Config
    config: AttentionLayer.Config
    slopes_H: Tensor

    def __init__(self, config: AttentionLayer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        check_heads(config.heads, shape.width)

        # The layers.
        self.blocks = nn.ModuleList(FeedbackBlock(config, shape) for _ in range(shape.layers))

        # Their memory.
        self.depth = nn.Parameter(torch.zeros(shape.layers + 1))
        self.memory_norm = RMSNorm(shape.width)
        self.k, self.v = linear(shape.width, shape.width), linear(shape.width, shape.width)
        self.k_norm = RMSNorm(shape.width) if config.qk_norm else nn.Identity()
        self.register_buffer("slopes_H", alibi_slopes(config.heads), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if runs_fused(x_BTD):
            heads, hidden = self.config.heads, self.shape.mlp_width
            if self.shape.layers == 1 and choose("fused", x_BTD, hidden, heads, block=1) == "fused":
                return self._fused(x_BTD)
            if self._is_supported(x_BTD):
                return self._stacked(x_BTD)

        state, outputs = self.init_state(len(x_BTD)), []
        for x_BD in x_BTD.unbind(1):
            z_BD, state = self.step(x_BD, state)
            outputs.append(z_BD)
        return torch.stack(outputs, dim=1)

    def init_state(self, batch: int) -> State:
        return {name: self.k.weight.new_empty(batch, 0, self.shape.width) for name in ("k", "v")}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        # Layer by layer: attention to the memory and a pair of zeros.
        k_BJD, v_BJD = (F.pad(state[name], (0, 0, 0, 1)) for name in ("k", "v"))
        bias_H1J = self.slopes_H[:, None, None] * torch.arange(1 - k_BJD.shape[1], 1, device=x_BD.device)
        hidden = [x_BD]
        for block in self.blocks:
            hidden.append(block(hidden[-1], k_BJD, v_BJD, bias_H1J))

        # Memory of this position.
        memory_BD = (self.depth.softmax(0)[:, None, None] * torch.stack(hidden)).sum(0)
        normed_BD = self.memory_norm(memory_BD)
        k_BD = self.k_norm(self.k(normed_BD))
        return hidden[-1], with_newest(state, k_BD, self.v(normed_BD))

    def _fused(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs of one layer, by the Recurrent Transformer's kernels with zeros for temporary pairs."""
        block = cast(FeedbackBlock, self.blocks[0])
        weights = Weights(
            wo_DD=block.out.weight,
            mlp_norm_D=block.mlp_norm.gain,
            up_FD=block.mlp.up.weight,
            down_DF=block.mlp.down.weight,
            kv_norm_D=self.memory_norm.gain,
            wk_DD=self.k.weight,
            k_norm_D=self.k_norm.gain if isinstance(self.k_norm, RMSNorm) else None,
            wv_DD=self.v.weight,
            share=self.depth.softmax(0)[1:],
        )

        q_BTD = block.q_norm(block.q(block.attention_norm(x_BTD)))
        return recurrence(
            x_BTD=x_BTD,
            q_BTD=q_BTD,
            k_BTD=None,
            v_BTD=None,
            weights=weights,
            slopes_H=self.slopes_H,
            scale=self.shape.residual_scale,
            block=1,
            implementation="fused",
        )

    def _is_supported(self, x_BTD: Tensor) -> bool:
        """Return whether the kernels of several layers support a case; if they do not, the log says why, once."""
        from mixers.feedback.passes import unsupported  # Triton does not exist on every platform

        dtype = product_dtype(x_BTD)
        reason = unsupported(x_BTD.shape[-1], self.config.heads, dtype, x_BTD.device)
        if x_BTD.dtype != torch.float32:
            reason = f"inputs in {x_BTD.dtype} (kernels: float32; torch.autocast computes products in bfloat16)"
        if reason is not None:
            log_once(f"Feedback Transformer: a loop over positions runs, because there is no kernel for {reason}")
        return reason is None

    def _stacked(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs of any number of layers, by kernels that take one position after the other."""
        from mixers.feedback.passes import Setting, StackWeights, stack_method

        blocks = [cast(FeedbackBlock, block) for block in self.blocks]
        gains = None
        if isinstance(self.k_norm, RMSNorm):
            gains = torch.stack([cast(RMSNorm, block.q_norm).gain * self.k_norm.gain for block in blocks])
        weights = StackWeights(
            wq_LDD=torch.stack([block.q.weight * block.attention_norm.gain for block in blocks]),
            gain_LD=gains,
            wo_LDD=torch.stack([block.out.weight for block in blocks]),
            up_LFD=torch.stack([block.mlp.up.weight * block.mlp_norm.gain for block in blocks]),
            down_LDF=torch.stack([block.mlp.down.weight for block in blocks]),
            share=self.depth.softmax(0),
            wkv_ED=torch.cat([self.k.weight, self.v.weight]) * self.memory_norm.gain,
        )
        setting = Setting(slopes_H=self.slopes_H, scale=self.shape.residual_scale, dtype=product_dtype(x_BTD))
        (z_BTD,) = over_runs(stack_method(setting), x_BTD, *weights)
        return z_BTD

    @classmethod
    def growth_period(cls, config: Any) -> int:
        return 1

    @classmethod
    def loop_period(cls, config: Any) -> int:
        return 1
