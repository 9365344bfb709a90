"""The language model of a pretraining run, and its cross-entropy, computed in chunks of tokens."""

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
from mixers.options import override
from mixers.registry import building, find_mixer
from runners.c4.config import Config
from runners.c4.parametrisation import LAYERS, to_authors

LOGITS = 2**28
"""Number of logits in memory at a time: half a GiB in bfloat16, and a GiB of float32 log-probabilities."""
VOCAB_UNIT = 128
"""Rows of embedding and readout are a multiple of this number, which suits matrix products on a GPU."""


def layer_of(config: Config, options: dict[str, Any]) -> tuple[type[Layer], Any]:
    """Return the class of the layer and its settings.

    Args:
        config: configuration of the run; gives the number of heads to a layer that has heads.
        options: options of the layer that were set; they override the others.

    Raises:
        ValueError: there is no such layer or no such model in the table, the parametrisation is not defined for the
            layer, or an option is not a finite number.
    """
    layer = find_mixer(config.mixer)
    if config.parametrisation == "authors" and layer not in LAYERS:
        raise ValueError(
            f"--parametrisation authors is defined for rt and transformer, not for {config.mixer}: leave it out"
        )

    has_heads = "heads" in {field.name for field in fields(layer.Config)}
    heads = {"heads": config.head_count()} if has_heads and "heads" not in options else {}
    return layer, override(layer.Config, heads | options)


def padded_vocab(size: int) -> int:
    """Return the number of rows of embedding and readout for ``size`` tokens: the next multiple of ``VOCAB_UNIT``."""
    return -(-size // VOCAB_UNIT) * VOCAB_UNIT


def build(config: Config, options: dict[str, Any], vocab_size: int) -> LanguageModel:
    """Build the untrained model with the seed ``config.seed``; the global random state is restored.

    Args:
        config: configuration of the run.
        options: options of the layer that were set.
        vocab_size: tokens of the tokenizer.

    Raises:
        ValueError: the layer cannot be built in this shape.
    """
    layer, layer_config = layer_of(config, options)
    with torch.random.fork_rng(devices=[]), building(config.mixer):
        torch.default_generator.manual_seed(config.seed)
        model = LanguageModel(layer, layer_config, config.shape(), padded_vocab(vocab_size))
    if config.parametrisation == "authors":
        to_authors(model)

    model.layers.recompute = config.recompute
    return model


def token_losses(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Return the cross-entropy of each token given the tokens before it.

    At most ``LOGITS`` logits exist at a time, forward and backward. Their products run in the dtype of autocast if it
    is on.

    Args:
        model: the model.
        tokens_BT: windows (B, T + 1).

    Returns:
        Cross-entropies (B, T) of ``tokens_BT[:, 1:]`` in nats; float32, or float64 for a model in float64.
    """
    inputs = _readout(model, tokens_BT)
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.view_as(tokens_BT[:, 1:])


def mean_loss(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """Return the mean of ``token_losses``, a scalar in their dtype; training minimises it.

    For bfloat16 products on a GPU, Liger-Kernel computes the mean if it is installed, in less time and memory. It
    divides the gradients of logits by the number of tokens before rounding them; float16 would lose them.
    """
    # Fused, if possible.
    inputs = hidden_ND, weight_VD, targets_N, dtype = _readout(model, tokens_BT)
    if hidden_ND.is_cuda and dtype == torch.bfloat16 and (fused := _liger()) is not None:
        return fused(weight_VD.to(dtype), hidden_ND.to(dtype), targets_N)

    # In chunks.
    losses_N: Tensor = _ReadoutLosses.apply(*inputs)  # type: ignore[no-untyped-call]
    return losses_N.mean()


def _readout(model: LanguageModel, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Return hidden vectors (N, D), readout weights (V, D), targets (N,), and the dtype of the readout's products."""
    hidden_BTD = model.encode(tokens_BT[:, :-1])
    return hidden_BTD.flatten(0, 1), model.readout.weight, tokens_BT[:, 1:].flatten(), product_dtype(hidden_BTD)


@cache
def _liger() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return Liger-Kernel's mean cross-entropy of weights (V, D), hidden vectors (N, D) and targets (N,).

    The gradient of the weights is accumulated in float32, because the error of a sum over 64 chunks of tokens would be
    three times as large in bfloat16.

    Returns:
        The function, or None if Liger-Kernel is not installed.
    """
    if find_spec("liger_kernel") is None:
        return None
    return import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)


class _ReadoutLosses(torch.autograd.Function):
    """Cross-entropies (N,) of the readout of hidden vectors, a chunk of tokens at a time.

    The backward pass recomputes the logits of each chunk. Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024,
    arXiv:2410.10989) saves this product by computing gradients in the forward pass, but it must know the weight of each
    token in the loss beforehand. ``torch.utils.checkpoint`` around each chunk would read the logits six times in
    float32; this backward pass reads them twice in their own dtype.
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
                # Compute p - 1 of the target directly, because rounding would cancel it for p close to 1.
                dlogits.scatter_(1, target[:, None], torch.expm1(-loss)[:, None].to(dlogits))
                dx.copy_((dlogits @ low_VD) * gradient)
                dweight_VD += dlogits.mT @ (x * gradient).to(x)

        return dhidden_ND, dweight_VD, None, None
