"""Models around a stack of layers: a language model, and the autoencoder of the compression task.

Both map tokens (B, T) to logits (B, T, V) that are aligned with the targets of ``tasks.base.Batch``.
"""

from abc import ABC, abstractmethod
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mixers.base import Layer, Shape, State
from mixers.deep import DeepLayer
from mixers.parts import Embedding, RMSNorm, linear, sinusoids


class Stack(nn.ModuleList):
    """Layers on top of each other; those of one kind work in the order it says, unless one has hooks of its own.

    Attributes:
        recompute: compute activations again in the backward (Chen et al. 2016, arXiv:1604.06174), with the parameters
            that the layers have then. Layers that work at the same time do so in parts of about the square root of
            their number, the others one by one; only the inputs of parts are kept.
    """

    recompute = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        kind, layers = self._kind, self._layers
        if not (self.recompute and torch.is_grad_enabled()):
            return kind.through(layers, x_BTD)
        at_once = self.at_once(x_BTD)
        count = round(sqrt(len(layers))) if at_once else 1
        for first in range(0, len(layers), count):
            part = layers[first : first + count]
            x_BTD = checkpoint(kind.through, part, x_BTD, use_reentrant=False, preserve_rng_state=not at_once)
        return x_BTD

    def at_once(self, x_BTD: Tensor) -> bool:
        """Whether the layers work at the same time."""
        return self._kind.at_once(self._layers, x_BTD)

    @property
    def _layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self]

    @property
    def _kind(self) -> type[Layer]:
        (kind, *others) = {type(layer) for layer in self._layers}
        one_kind = not others and issubclass(kind, Layer) and not any(map(_hooked, self._layers))
        return kind if one_kind else Layer


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class Backbone(nn.Module, ABC):
    """Token embedding, L layers of one kind, and a final norm; subclasses read the logits out.

    The L layers are one module where the kind is a ``DeepLayer``.
    """

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, shape.width)
        count = 1 if issubclass(layer, DeepLayer) else shape.layers
        self.layers = Stack(layer(config, shape) for _ in range(count))
        self.norm = RMSNorm(shape.width)

    @property
    def stack(self) -> list[Layer]:
        """The layers, from the embedding to the readout."""
        return [cast(Layer, layer) for layer in self.layers]

    def encode(self, tokens_BT: Tensor) -> Tensor:
        """Normalised outputs (B, T, D) of the last layer."""
        return self.norm(self.layers(self.embedding(tokens_BT)))

    @abstractmethod
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the layers alone know about each position's answer (B, T, D); linear probes read it."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V)."""


class LanguageModel(Backbone):
    """Logits of every position from the layers' output at that position; the readout is not tied to the embedding."""

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__(layer, config, shape, vocab_size)
        self.readout = linear(shape.width, vocab_size)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.encode(tokens_BT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.readout(self.encode(tokens_BT))

    def init_state(self, batch: int) -> list[State]:
        return [layer.init_state(batch) for layer in self.stack]

    def step(self, tokens_B: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """Decode one position: logits (B, V) and the layers' next states."""
        x_BD, after = self.embedding(tokens_B), []
        for layer, state in zip(self.stack, states, strict=True):
            x_BD, state = layer.step(x_BD, state)
            after.append(state)
        return self.readout(self.norm(x_BD)), after


class AutoEncoder(Backbone):
    """The last position's output is all that the decoder sees (MAD compression task, Poli et al. 2024).

    The decoder adds a sinusoidal position code to that single vector and applies a two-layer MLP that does not expand.
    """

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__(layer, config, shape, vocab_size)
        self.decoder_in = linear(shape.width, shape.width)
        self.decoder_out = linear(shape.width, shape.width)
        self.readout = linear(shape.width, vocab_size)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.encode(tokens_BT)[:, -1:].expand(-1, tokens_BT.shape[1], -1)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        summary_BTD = self.hidden(tokens_BT)
        coded_BTD = summary_BTD + sinusoids(tokens_BT.shape[1], summary_BTD.shape[2], summary_BTD.device)
        return self.readout(self.decoder_out(F.gelu(self.decoder_in(coded_BTD))))


BACKBONES: dict[str, type[Backbone]] = {"language-model": LanguageModel, "autoencoder": AutoEncoder}
