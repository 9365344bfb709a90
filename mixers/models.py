"""Models around a stack of layers: a language model, and the autoencoder of the compression task.

Both map tokens (B, T) to logits (B, T, V) that are aligned with the targets of ``tasks.base.Batch``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import groupby
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mixers.base import Layer, Shape, State, hooked, settled
from mixers.parts import Embedding, RMSNorm, linear, sinusoids


class Stack(nn.ModuleList):
    """Stacked layers.

    ``Layer.through`` of their class runs neighbours of one class; a layer with hooks runs by itself.

    Attributes:
        recompute: compute activations again in the backward pass (Chen et al. 2016, arXiv:1604.06174), with the
            parameters that the layers have then. Only the inputs of parts of the stack are kept. A part has about
            sqrt(L) of L neighbours if these run at the same time, else a single layer.
    """

    recompute = False

    def __iter__(self) -> Iterator[Layer]:
        """Return the layers in order."""
        return cast(Iterator[Layer], super().__iter__())

    def forward(self, x_BTD: Tensor) -> Tensor:
        for kind, layers in self._neighbours():
            if not (self.recompute and torch.is_grad_enabled()):
                x_BTD = kind.through(layers, x_BTD)
                continue

            # Recompute part by part.
            at_once = kind.at_once(layers, x_BTD)
            count = round(sqrt(len(layers))) if at_once else 1
            for first in range(0, len(layers), count):
                part = layers[first : first + count]
                x_BTD = checkpoint(kind.through, part, x_BTD, use_reentrant=False, preserve_rng_state=not at_once)
        return x_BTD

    def at_once(self, x_BTD: Tensor) -> bool:
        """Return whether all neighbours of one class run at the same time."""
        return all(kind.at_once(layers, x_BTD) for kind, layers in self._neighbours())

    def _neighbours(self) -> Iterator[tuple[type[Layer], list[Layer]]]:
        """Return the class whose ``through`` runs layers, and these, for each run of layers of one class."""

        def kind_of(layer: nn.Module) -> type[Layer]:
            return type(layer) if isinstance(layer, Layer) and not hooked(layer) else Layer

        return ((kind, [*layers]) for kind, layers in groupby(self, kind_of))


class Backbone(nn.Module, ABC):
    """Token embedding, the L layers of ``Layer.members``, and a final norm; a subclass computes the logits.

    Attributes:
        one_by_one: compute the runs that are trained together one after another, not by ``torch.func.vmap``.
    """

    one_by_one = False

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, shape.width)

        members = layer.members(config, shape.layers)
        self.layers = Stack(settled(kind(own, shape)) for kind, own in members)

        self.norm = RMSNorm(shape.width)

    @property
    def stack(self) -> list[Layer]:
        """The layers, in order from the embedding to the readout."""
        return [*self.layers]

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Return the vectors (B, T, D) from which the logits are computed: the normed outputs of the last layer.

        Linear probes read them, too.
        """
        return self.norm(self.layers(self.embedding(tokens_BT)))

    @abstractmethod
    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits (B, T, V)."""


class LanguageModel(Backbone):
    """Logits of each position from the output at that position; the readout is not tied to the embedding."""

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__(layer, config, shape, vocab_size)
        self.readout = linear(shape.width, vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.readout(self.hidden(tokens_BT))

    def init_state(self, batch: int) -> list[State]:
        """Return the layers' states before the first position."""
        return [layer.init_state(batch) for layer in self.stack]

    def step(self, tokens_B: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        """Decode one position; return ``(logits (B, V), next states of the layers)``."""
        x_BD, after = self.embedding(tokens_B), []
        for layer, state in zip(self.stack, states, strict=True):
            x_BD, state = layer.step(x_BD, state)
            after.append(state)

        return self.readout(self.norm(x_BD)), after


class AutoEncoder(Backbone):
    """A decoder that reads only the last position's output (MAD compression task, Poli et al. 2024, arXiv:2403.17844).

    The decoder adds a sinusoidal position code to that vector and applies a two-layer MLP that does not expand.
    """

    def __init__(self, layer: type[Layer], config: Any, shape: Shape, vocab_size: int) -> None:
        super().__init__(layer, config, shape, vocab_size)
        self.decoder_in = linear(shape.width, shape.width)
        self.decoder_out = linear(shape.width, shape.width)
        self.readout = linear(shape.width, vocab_size)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        last_B1D = self.layers(self.embedding(tokens_BT))[:, -1:]
        return self.norm(last_B1D).expand(-1, tokens_BT.shape[1], -1)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        summary_BTD = self.hidden(tokens_BT)
        coded_BTD = summary_BTD + sinusoids(tokens_BT.shape[1], summary_BTD.shape[2], summary_BTD.device)
        return self.readout(self.decoder_out(F.gelu(self.decoder_in(coded_BTD))))


BACKBONES: dict[str, type[Backbone]] = {"language-model": LanguageModel, "autoencoder": AutoEncoder}
