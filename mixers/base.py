"""What a layer is.

Dimensions, used as suffixes of names everywhere: R runs trained together, B batch, T positions (N in the paper),
D model width, H heads, K head dim (H * K = D), F hidden width of the MLP, V vocabulary, S sequences of a data set,
L layers, P parameters of one run.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from torch import Tensor, nn

log = logging.getLogger(__name__)

State = dict[str, Tensor]

"""What a layer carries from one position to the next while decoding; every tensor is batch-first.

The names and shapes of the next state follow from those of the current one, not from values in it.
"""


NO_RECURRENCE = "no recurrence at this length"
NO_WINDOW = "window spans the sequence"
"""Remarks on layers that are plain attention on sequences as short as those of a task (``Layer.remark``)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the model fixes for each of its layers.

    Attributes:
        width: Model width D.
        mlp_width: Hidden width F of the MLP.
        layers: Number L of stacked layers; residual branches are scaled by 1/sqrt(L).
    """

    width: int = 128
    mlp_width: int = 512
    layers: int = 1

    @property
    def residual_scale(self) -> float:
        """Factor 1/sqrt(L) of the residual branches."""
        return float(self.layers**-0.5)


@cache
def log_once(message: str) -> None:
    """Log a warning the first time that this process meets it."""
    log.warning(message)


def switch(off: Any) -> Any:
    """Return a dataclass field with the default ``off``, at which it is no part of the identity of a result.

    A dataclass of settings can gain such a field, and results from before keep their names.
    """
    return field(default=off, metadata={"switch": True})


def switched_off(settings: Any) -> list[str]:
    """Return the names of the fields made by ``switch`` that have their defaults."""
    return [f.name for f in fields(settings) if "switch" in f.metadata and getattr(settings, f.name) == f.default]


class ContractError(ValueError):
    """A layer does not do what ``Layer`` asks of it."""


class Layer(nn.Module, ABC):
    """One whole layer ``z = layer(x)``, residual branches and MLP included, causal over positions.

    A subclass holds a nested frozen ``Config`` dataclass, the only source of its defaults, and is built as
    ``Layer(config, shape)``. It is written for one run; the trainer adds the run axis.

    Only ``forward`` must be written. A layer without ``init_state`` and ``step`` can be trained; its state is not
    counted and it cannot generate text.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the layer; a subclass replaces it with its own."""

    family: ClassVar[str] = "other"
    """Kind of layer, under which tables and charts show it."""
    paper: ClassVar[str] = ""
    """Source that defines the layer, shown beside its results."""
    compiled: ClassVar[bool] = True
    """Whether diagnostics compile the training step on a GPU; False where kernels of the project do all the work."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Starts of the names of parameters that weight decay leaves out, beside those of one axis (``decayed``)."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map a whole sequence ``x_BTD`` to ``z_BTD``; position t depends on no position after t."""

    def init_state(self, batch: int) -> State:
        """Return the state before the first position.

        Raises:
            NotImplementedError: The layer has no step form.
        """
        raise self._no_step_form()

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position: ``(z_BD, next state)``, equal to that position of ``forward``.

        Raises:
            NotImplementedError: The layer has no step form.
        """
        raise self._no_step_form()

    @classmethod
    def through(cls, layers: Sequence[Self], x_BTD: Tensor) -> Tensor:
        """Return the outputs of the last of several stacked layers; a subclass may choose the order of the work."""
        for layer in layers:
            x_BTD = layer(x_BTD)
        return x_BTD

    @classmethod
    def at_once(cls, layers: Sequence[Self], x_BTD: Tensor) -> bool:
        """Return whether ``through`` computes these layers at the same time; such layers draw no random numbers."""
        return False

    @classmethod
    def growth_period(cls, config: Any) -> int | None:
        """Return the number of positions after which the state has grown by a fixed amount, if it always grows.

        After each further period the state has gained as many floats as in the first. None means that the state does
        not grow for ever, or that nothing is known about it. The answer holds for the class that defines the method
        alone: a subclass may remember other things, and defines it again.
        """
        return None

    @classmethod
    def loop_period(cls, config: Any) -> int | None:
        """Return the number of positions in one round, if the plain forward pass loops over positions; else None.

        The operations of the pass, and the bytes it keeps for the backward pass, must be quadratic polynomials in the
        number of rounds.
        """
        return None

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        """Return what tables must say beside results on sequences of N positions; None if there is nothing to say.

        A layer whose recurrence or window does nothing on so short a sequence says so, because it is another layer
        there. A subclass that does other things defines the method again.
        """
        return None

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        """Return settings of the same layer in plain PyTorch: kernels hide their products from ``FlopCounterMode``."""
        return config

    def _no_step_form(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no step form: it defines no init_state and step")


def decayed(model: nn.Module) -> list[bool]:
    """Return for each of a model's parameters, in order, whether weight decay applies to it.

    It applies to matrices and embeddings, not to gains, nor to what the model's layers name in ``undecayed``.
    """
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    left_out = {p for layer in layers for name, p in layer.named_parameters() if name.startswith(layer.undecayed)}
    return [p.ndim > 1 and p not in left_out for p in model.parameters()]
