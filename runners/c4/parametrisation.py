"""The parametrisation of the authors' code, which differs from their paper.

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
"""Learning rate at the start of the warm-up, as a fraction of its peak."""
LAYERS = (Transformer, RecurrentTransformer)
"""Layers of the authors' code."""


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
    _register(model.embedding, MeanFree(axis=1))

    for index, layer in enumerate(model.stack):
        assert isinstance(layer, AttentionLayer)
        for ends_a_branch in (layer.out, layer.mlp.down):
            ends_a_branch.weight *= (2 * (index + 1)) ** -0.5
            _register(ends_a_branch, MeanFree(axis=0, factor=1 / shape.residual_scale))

        for normed in (layer.q, layer.k) if layer.config.qk_norm else ():
            _register(normed, MeanFree(axis=0))


def fold(model: LanguageModel) -> None:
    """Replace the parametrised weights of a model by plain parameters of equal value, in place.

    Training the model further would no longer follow the authors' parametrisation.
    """
    for module in list(_parametrised(model)):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _register(module: nn.Module, change: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", change)


def _parametrised(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if parametrize.is_parametrized(module, "weight"))
