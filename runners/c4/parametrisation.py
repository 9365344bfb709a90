"""The parametrisation of the authors' code, which is not that of their paper.

Oncescu et al. 2026 (arXiv:2604.21215) define the Transformer and the Recurrent Transformer in section 2. Their code,
https://github.com/geniucos/recurrent-transformer (olmo/model.py, configs/kempner/base-c4-t5.yaml), differs:

- Layer norms with gains and without biases stand in place of all RMS norms, those of queries and keys included.
- There is no factor 1/sqrt(L) on the residual branches.
- The maps out of attention and MLP start with standard deviation 1/sqrt(2 inputs (l + 1)) in layer l = 0, 1, ...
- Embeddings start with standard deviation 1/sqrt(D).
- The learning rate rises from a tenth of its peak, not from zero.

Theirs also cuts normal distributions off at three standard deviations, and adds 1e-5 in norms; ours does not cut, and
adds 1e-6 as everywhere.

A model with layer norms is a model with RMS norms and other weights (Jiang et al. 2023, arXiv:2305.14858).
Whatever reads the residual stream subtracts the mean of each row first, so the logits do not depend on that mean.
Embeddings without means, and branches that add none, therefore give the same logits, and there the layer norm of a row
is its RMS norm. Queries and keys go to their norms alone, so their maps lose their means, too. The removed factor of
the residual branches is a factor of the maps that end the branches. Layers and kernels stay as they are, and gradients
are those of the model with layer norms.

One case remains a choice: without ``persistent_norm``, persistent pairs read rows of the stream without a norm. Here
these rows have no mean; only the division is left out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mixers.attention_layer import AttentionLayer
from mixers.models import LanguageModel
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.c4.config import Parametrisation

WARMUP_FROM: dict[Parametrisation, float] = {"paper": 0.0, "authors": 0.1}
"""Fraction of the peak from which the learning rate rises."""
LAYERS = (Transformer, RecurrentTransformer)
"""Layers that the authors' code has."""


class MeanFree(nn.Module):
    """Subtract the mean over ``axis`` from a matrix, and multiply the rest by ``factor``."""

    def __init__(self, axis: int, factor: float = 1.0) -> None:
        super().__init__()
        self.axis = axis
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * (weight - weight.mean(self.axis, keepdim=True))


@torch.no_grad()
def to_authors(model: LanguageModel) -> None:
    """Turn an untrained model of the paper, with layers of ``LAYERS``, into one of the authors' code, in place.

    The parameters that are trained become ``parametrizations.weight.original`` of the maps that change.
    """
    shape = model.stack[0].shape
    model.embedding.weight *= shape.width**-0.5
    _register(model.embedding, MeanFree(axis=1))

    for index, layer in enumerate(model.stack):
        assert isinstance(layer, AttentionLayer)
        for ends_a_branch in (layer.out, layer.mlp.down):
            ends_a_branch.weight *= (2 * (index + 1)) ** -0.5
            _register(ends_a_branch, MeanFree(axis=0, factor=1 / shape.residual_scale))

        for normed in (layer.q, layer.k) if layer.config.qk_norm else ():
            _register(normed, MeanFree(axis=0))


def fold(model: LanguageModel) -> None:
    """Make the weights that the layers use the parameters of a model, in place; they cannot be trained any further."""
    for module in list(_parametrised(model)):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _register(module: nn.Module, change: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", change)


def _parametrised(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if parametrize.is_parametrized(module, "weight"))
