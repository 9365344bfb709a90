"""The language model of a pretraining run, its cross-entropy in chunks of tokens, and the authors' parametrisation.

The parametrisation of the authors' code differs from that of their paper.

Oncescu et al. 2026 (arXiv:2604.21215) define the Transformer and the Recurrent Transformer in section 2. Their code,
https://github.com/geniucos/recurrent-transformer (olmo/model.py, configs/kempner/base-c4-t5.yaml), differs:

- Layer norms with gains and without biases replace all RMS norms, including the norms of queries and keys.
- There is no factor 1/sqrt(L) on the residual branches.
- The output maps of attention and MLP start with standard deviation 1/sqrt(2 inputs (l + 1)) in layer l = 0, 1, ...
- Embeddings start with standard deviation 1/sqrt(D).
- The learning rate rises from a tenth of its peak, not from zero.

Two differences are not reproduced: their code truncates the normal distributions of initial weights at three standard
deviations, and uses an epsilon of 1e-5 in norms. Ours does not truncate, and uses 1e-6 as in all other layers.

A model with layer norms equals a model with RMS norms and other weights (Jiang et al. 2023, arXiv:2305.14858). Every
layer norm subtracts the mean over the channels, so the logits do not depend on the mean of the residual stream. If
embeddings and the outputs of all branches have zero mean, the logits are the same, and the layer norm of the stream is
its RMS norm. Queries and keys are read by their norms only, so the mean is removed from their maps, too. The removed
factor of the residual branches is folded into their output maps. Layers and kernels stay unchanged, and the gradients
equal those of the model with layer norms.

One case remains a choice: without ``persistent_norm``, persistent pairs read the residual stream without a norm. Here
the stream has zero mean, so that only the division by the standard deviation is left out.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from mixers.attention_layer import AttentionLayer
from mixers.base import Layer
from mixers.models import LanguageModel
from mixers.ops.numerics import product_dtype
from mixers.options import override
from mixers.registry import building, find_mixer
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.c4.config import Config
from runners.options import heads_of

LOGITS = 2**28
"""Number of logits in memory at a time: half a GiB in bfloat16, and a GiB of float32 log-probabilities."""
VOCAB_UNIT = 128
"""Rows of embedding and readout are a multiple of this number, which suits matrix products on a GPU."""
LAYERS = (Transformer, RecurrentTransformer)
"""Layers of the authors' code."""


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

    by_size = {name: config.head_count() for name in heads_of(layer.Config) if name not in options}
    return layer, override(layer.Config, by_size | options)


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
    hidden_BTD = model.hidden(tokens_BT[:, :-1])
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


class MeanFree(nn.Module):
    """Subtract the mean over ``axis`` from a matrix, and multiply the result by ``factor``."""

    def __init__(self, axis: int, factor: float = 1.0) -> None:
        super().__init__()
        self.axis = axis
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * (weight - weight.mean(self.axis, keepdim=True))


@torch.no_grad()
def to_authors(model: LanguageModel) -> None:
    """Change an untrained model with layers of ``LAYERS`` from the paper's parametrisation to the authors', in place.

    The trained parameter of each changed map becomes its ``parametrizations.weight.original``.
    """
    shape = model.stack[0].shape
    model.embedding.weight *= shape.width**-0.5
    parametrize.register_parametrization(model.embedding, "weight", MeanFree(axis=1))

    for index, layer in enumerate(model.stack):
        assert isinstance(layer, AttentionLayer)
        for ends_a_branch in (layer.out, layer.mlp.down):
            ends_a_branch.weight *= (2 * (index + 1)) ** -0.5
            change = MeanFree(axis=0, factor=1 / shape.residual_scale)
            parametrize.register_parametrization(ends_a_branch, "weight", change)

        for normed in (layer.q, layer.k) if layer.config.qk_norm else ():
            parametrize.register_parametrization(normed, "weight", MeanFree(axis=0))


def fold(model: LanguageModel) -> None:
    """Replace the parametrised weights of a model by plain parameters of equal value, in place.

    Training the model further would no longer follow the authors' parametrisation.
    """
    for module in [module for module in model.modules() if parametrize.is_parametrized(module, "weight")]:
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
