"""What ``pretraining`` times: a layer to compile, training steps as ``runners.c4`` takes them, and decoding."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mixers.ops.numerics import NORM_EPS
from mixers.parts import RMSNorm
from mixers.transformer import Transformer
from runners.bench.timing import Work
from runners.c4.config import Config
from runners.c4.distributed import World
from runners.c4.model import build
from runners.c4.step import Stepper

LEARNING_RATE = 1e-6
"""Small, so that steps on random tokens stay finite."""


class PlainTransformer(Transformer):
    """The Transformer in PyTorch's own operations, so that ``torch.compile`` sees and fuses them all."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        scale, heads = self.shape.residual_scale, self.config.heads
        normed_BTD = _normed(x_BTD, self.attention_norm)
        q_BTD, k_BTD = _normed(self.q(normed_BTD), self.q_norm), _normed(self.k(normed_BTD), self.k_norm)
        pairs = (q_BTD, k_BTD, self.v(normed_BTD))
        q_BHTK, k_BHTK, v_BHTK = (rearrange(y, "b t (h k) -> b h t k", h=heads) for y in pairs)
        position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        ahead_TT = position_T - position_T[:, None]
        bias_HTT = (self.slopes_H[:, None, None] * ahead_TT).masked_fill(ahead_TT > 0, -torch.inf)
        a_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=bias_HTT.to(q_BHTK))
        u_BTD = x_BTD + scale * self.out(rearrange(a_BHTK, "b h t k -> b t (h k)"))
        return u_BTD + scale * self.mlp(_normed(u_BTD, self.mlp_norm))


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    normed = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS).type_as(x)
    return normed * norm.gain.type_as(x) if isinstance(norm, RMSNorm) else x


class TrainingWork(Work):
    """Optimizer steps in one process on random tokens; the layers are CUDA graphs where ``runners.c4`` makes them so.

    Args:
        config: the model and its batch.
        options: settings of the layer.
        vocab_size: tokens of the vocabulary.
        device: where to train.
    """

    def __init__(self, config: Config, options: dict[str, str], vocab_size: int, device: torch.device) -> None:
        self.config = config
        model = build(config, options, vocab_size).to(device)
        self.stepper = Stepper(model, config, World(rank=0, size=1, device=device))
        generator = torch.Generator().manual_seed(0)
        shape = (config.batch_size, config.seq_len + 1)
        self.tokens_BT = torch.randint(vocab_size, shape, generator=generator).to(device)
        self.loss = torch.zeros((), device=device)
        self.facts = {"parameters": sum(p.numel() for p in model.parameters())}
        self.stepper.keep_gradients()

    def once(self) -> None:
        self.loss, _ = self.stepper.step(self.tokens_BT)

    def finite(self) -> bool:
        return bool(self.loss.isfinite())


class DecodeWork(Work):
    """The token at position ``context`` of each sequence, after random keys and values; float32, as in ``generate``."""

    def __init__(self, config: Config, vocab_size: int, context: int, device: torch.device) -> None:
        with torch.device(device):
            self.model = build(config, {}, vocab_size).requires_grad_(False)
            self.tokens_B = torch.zeros(config.batch_size, dtype=torch.long)
            self.states = self.model.init_state(config.batch_size)
            for state in self.states:
                for name in ("k", "v"):
                    batch, _, width = state[name].shape
                    state[name] = torch.randn(batch, context - 1, width)
        self.logits_BV, after = self.model.step(self.tokens_B, self.states)
        self.facts = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "cache_bytes": sum(y.nbytes for state in after for y in state.values()),
        }

    def once(self) -> None:
        self.logits_BV, _ = self.model.step(self.tokens_B, self.states)

    def finite(self) -> bool:
        return bool(self.logits_BV.isfinite().all())
