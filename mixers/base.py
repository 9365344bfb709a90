"""What a layer is.

Dimensions, used as suffixes of names everywhere: R runs trained together, B batch, T positions (N in the paper),
D model width, H heads, K head dim (H * K = D), F hidden width of the MLP, V vocabulary, S sequences of a data set,
L layers, P parameters of one run.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from torch import Tensor, nn

log = logging.getLogger(__name__)

State = dict[str, Tensor]

"""What a layer carries from one position to the next while decoding; every tensor is batch-first.

Which tensors there are next, and their shapes, follow from those that there are now, not from values in them.
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the backbone fixes for each of its layers.

    Attributes:
        width: model width D.
        mlp_width: hidden width F of the MLP.
        layers: number L of stacked layers; residual branches are scaled by 1/sqrt(L).
    """

    width: int = 128
    mlp_width: int = 512
    layers: int = 1

    @property
    def residual_scale(self) -> float:
        return float(self.layers**-0.5)


@cache
def log_once(message: str) -> None:
    """Warn of what a process may meet many times."""
    log.warning(message)


class ContractError(ValueError):
    """A layer does not do what ``Layer`` asks of it."""


class Layer(nn.Module, ABC):
    """One whole layer ``z = layer(x)``, residual branches and MLP included, causal over positions.

    A subclass holds a nested frozen ``Config`` dataclass, the only source of its defaults, and is built as
    ``Layer(config, shape)``. It is written for one run; the trainer adds the run axis.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the layer; a subclass replaces it with its own."""

    family: ClassVar[str] = "other"
    """Kind of layer, under which tables and charts show it."""
    paper: ClassVar[str] = ""
    """Source that defines the layer, shown beside its results."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map a whole sequence ``x_BTD`` to ``z_BTD``; position t depends on positions up to t alone."""

    @classmethod
    def through(cls, layers: Sequence[Self], x_BTD: Tensor) -> Tensor:
        """Outputs of the last of layers on top of each other; a kind may override in which order they work."""
        for layer in layers:
            x_BTD = layer(x_BTD)
        return x_BTD

    @classmethod
    def at_once(cls, layers: Sequence[Self], x_BTD: Tensor) -> bool:
        """Whether ``through`` lets these layers work at the same time; they must not draw random numbers then."""
        return False

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """State before the first position."""

    @abstractmethod
    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position: ``(z_BD, next state)``, equal to that position of ``forward``."""
