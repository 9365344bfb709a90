"""The language model of a pretraining run: building it, and its cross-entropy in parts."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.base import Layer
from mixers.models import LanguageModel
from mixers.ops.numerics import product_dtype
from mixers.registry import building, find_mixer
from runners.c4.config import Config
from runners.cli import override

LOGITS = 2**28
"""Logits in memory at a time: half a GiB in bfloat16, and a GiB of float32 log-probabilities."""
VOCAB_UNIT = 128


def layer_of(config: Config, options: dict[str, Any]) -> tuple[type[Layer], Any]:
    """Class of the layer and its settings: heads from the paper's table if it has any, ``options`` on top.

    Raises:
        ValueError: no such layer, no such model in the table, or an option is not a finite number.
    """
    layer = find_mixer(config.mixer)
    has_heads = "heads" in {field.name for field in fields(layer.Config)}
    heads = {"heads": config.head_count()} if has_heads and "heads" not in options else {}
    return layer, override(layer.Config, heads | options)


def padded_vocab(size: int) -> int:
    """Rows of embedding and readout for ``size`` tokens: a multiple of 128, which matrix products on a GPU want."""
    return -(-size // VOCAB_UNIT) * VOCAB_UNIT


def build(config: Config, options: dict[str, Any], vocab_size: int) -> LanguageModel:
    """The untrained model of ``config.seed`` for a tokenizer of ``vocab_size`` tokens.

    Raises:
        ValueError: the layer cannot be built in this shape.
    """
    layer, layer_config = layer_of(config, options)
    with torch.random.fork_rng(devices=[]), building(config.mixer):
        torch.default_generator.manual_seed(config.seed)
        model = LanguageModel(layer, layer_config, config.shape(), padded_vocab(vocab_size))
    model.layers.recompute = config.recompute
    return model


def token_losses(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Cross-entropy (B, T) in nats of ``tokens_BT[:, 1:]`` given the tokens before, for windows (B, T + 1).

    float32, or float64 for a model in float64. No more than ``LOGITS`` logits exist at a time, forward and backward;
    their products run in the dtype of autocast where it is on.
    """
    inputs = _readout(model, tokens_BT)
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.view_as(tokens_BT[:, 1:])


def mean_loss(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Mean of ``token_losses``, a scalar in their dtype: what training minimises.

    For bfloat16 products on a GPU, Liger-Kernel computes it where it is installed, in less time and memory. Its
    gradients of logits are divided by the number of tokens before they are rounded; float16 would lose them.
    """
    inputs = hidden_ND, weight_VD, targets_N, dtype = _readout(model, tokens_BT)
    if hidden_ND.is_cuda and dtype == torch.bfloat16 and (fused := _liger()) is not None:
        return fused(weight_VD.to(dtype), hidden_ND.to(dtype), targets_N)
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.mean()


def _readout(model: LanguageModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Hidden vectors (N, D), the readout's weights (V, D), targets (N,), and the dtype of the products of the two."""
    hidden_BTD = model.encode(tokens_BT[:, :-1])
    return hidden_BTD.flatten(0, 1), model.readout.weight, tokens_BT[:, 1:].flatten(), product_dtype(hidden_BTD)


@cache
def _liger() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Liger-Kernel's mean cross-entropy of weights (V, D), hidden vectors (N, D) and targets (N,), if it is installed.

    The weights' gradient is added up in float32: in bfloat16, a sum over 64 chunks of tokens has three times the error.
    """
    if find_spec("liger_kernel") is None:
        return None
    return import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)


class _ReadoutLosses(torch.autograd.Function):
    """Cross-entropies (N,) of the readout of hidden vectors, a chunk of tokens at a time.

    The backward computes the logits of a chunk again. Gradients found in the forward pass, as in Liger-Kernel's fused
    linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989), would save that product, but need every token's weight in
    the loss beforehand. Against ``torch.utils.checkpoint`` around each chunk, the backward goes over the logits
    twice, in their own dtype, not six times in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
        rows, wide = max(1, LOGITS // len(weight_VD)), torch.promote_types(dtype, torch.float32)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            low_ND, low_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
            losses_N = torch.empty(len(low_ND), dtype=wide, device=low_ND.device)
            for loss, x, target in zip(*(y.split(rows) for y in (losses_N, low_ND, targets_N)), strict=True):
                log_p = torch.log_softmax(x @ low_VD.mT, dim=1, dtype=wide)
                loss.copy_(-log_p.gather(1, target[:, None])[:, 0])
        ctx.save_for_backward(low_ND, weight_VD, targets_N, losses_N)
        ctx.rows, ctx.hidden_dtype = rows, hidden_ND.dtype
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        low_ND, weight_VD, targets_N, losses_N = ctx.saved_tensors
        with torch.autocast(low_ND.device.type, enabled=False):
            low_VD = weight_VD.to(low_ND)
            dhidden_ND, dweight_VD = torch.empty_like(low_ND, dtype=ctx.hidden_dtype), torch.zeros_like(weight_VD)
            parts = (dhidden_ND, low_ND, targets_N, losses_N, gradient_N[:, None])
            for dx, x, target, loss, gradient in zip(*(y.split(ctx.rows) for y in parts), strict=True):
                dlogits = torch.softmax(x @ low_VD.mT, dim=1)
                # p - 1 of the target: a difference of rounded numbers would lose it where p is close to 1
                dlogits.scatter_(1, target[:, None], torch.expm1(-loss)[:, None].to(dlogits))
                dx.copy_((dlogits @ low_VD) * gradient)
                dweight_VD += dlogits.mT @ (x * gradient).to(x)
        return dhidden_ND, dweight_VD, None, None
