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
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)

State = dict[str, Tensor]

"""The tensors that a layer carries from one position to the next while decoding; their first axis is the batch.

The names and shapes of the next state follow from those of the current one, not from values in it.
"""


NO_RECURRENCE = "no recurrence at this length"
NO_WINDOW = "window spans the sequence"
"""Remarks on layers that equal plain attention on sequences as short as a task's (``Layer.remark``)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that a model sets for all of its layers.

    Attributes:
        width: model width D.
        mlp_width: hidden width F of the MLP; 0 for layers without MLP.
        layers: number L of stacked layers; residual branches are scaled by 1/sqrt(L).

    Raises:
        ValueError: A size is not a whole number of at least 1, or that of the MLP is below 0.
    """

    width: int = 128
    mlp_width: int = 512
    layers: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            least = 0 if name == "mlp_width" else 1
            if not isinstance(size, int) or size < least:
                raise ValueError(f"{name}: {size!r} must be a whole number of at least {least}")

    @property
    def residual_scale(self) -> float:
        """Factor 1/sqrt(L) of the residual branches."""
        return float(self.layers**-0.5)


@cache
def log_once(message: str) -> None:
    """Log a warning, once per process."""
    log.warning(message)


class ContractError(ValueError):
    """A layer does not fulfil the requirements of ``Layer``."""


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
    compile_step: ClassVar[bool] = True
    """Whether diagnostics compile the training step on a GPU; False if the project's own kernels do all the work."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters without weight decay, in addition to vectors (``decayed``)."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """Return ``forward`` of a whole sequence; hooks run as in any module.

        Raises:
            ValueError: the input is not of the shape (B, T, D), or has no position.
        """
        if x_BTD.ndim != 3 or x_BTD.shape[-1] != self.shape.width or x_BTD.shape[1] == 0:
            raise ValueError(
                f"{type(self).__name__} maps inputs of the shape (batch, time, width {self.shape.width}), "
                f"with at least one position, not {tuple(x_BTD.shape)}"
            )
        z_BTD: Tensor = super().__call__(x_BTD)
        return z_BTD

    @classmethod
    def members(cls, config: Any, layers: int) -> list[tuple[type["Layer"], Any]]:
        """Return class and settings of each layer of a model with a number of layers.

        Raises:
            ValueError: there is no such model of this number of layers.
        """
        return [(cls, config)] * layers

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map a whole sequence ``x_BTD`` to ``z_BTD``; outputs at position t do not depend on inputs after t."""

    def init_state(self, batch: int) -> State:
        """Return the state before the first position.

        Raises:
            NotImplementedError: the layer has no step form.
        """
        raise self._no_step_form()

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one position; return ``(z_BD, next state)``, where z equals the output of ``forward`` there.

        Raises:
            NotImplementedError: the layer has no step form.
        """
        raise self._no_step_form()

    @classmethod
    def through(cls, layers: Sequence[Self], x_BTD: Tensor) -> Tensor:
        """Return the outputs of a stack of layers; a subclass may compute the layers in another order."""
        for layer in layers:
            x_BTD = layer(x_BTD)
        return x_BTD

    @classmethod
    def at_once(cls, layers: Sequence[Self], x_BTD: Tensor) -> bool:
        """Return whether ``through`` computes these layers at the same time; such layers draw no random numbers."""
        return False

    @classmethod
    def growth_period(cls, config: Any) -> int | None:
        """Return the number of positions in which the state grows by a fixed amount, if it always grows.

        In each further period the state gains as many floats as in the first. None means that the state stops growing,
        or that its growth is unknown. The answer holds only for the class that defines the method; a subclass with
        another state must define it again.
        """
        return None

    @classmethod
    def loop_period(cls, config: Any) -> int | None:
        """Return the number of positions per iteration, if the plain forward pass loops over positions; else None.

        The operations of the pass, and the bytes that it keeps for the backward pass, must be quadratic polynomials in
        the number of iterations.
        """
        return None

    @classmethod
    def remark(cls, config: Any, length: int) -> str | None:
        """Return the remark of tables on results with sequences of ``length`` positions; None if there is none.

        If the recurrence or the window of a layer has no effect on sequences this short, the remark says so. A subclass
        that behaves differently must define the method again.
        """
        return None

    @classmethod
    def plain_config(cls, config: Any) -> Any:
        """Return settings that compute the same layer with PyTorch's products, which ``FlopCounterMode`` sees."""
        return config

    def _no_step_form(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no step form: it defines no init_state and step")


def decayed(model: nn.Module) -> list[bool]:
    """Return for each parameter of a model, in order, whether weight decay applies to it.

    It applies to matrices and embeddings, except parameters named in the layers' ``undecayed`` or marked
    ``parameter._no_weight_decay = True``, as public code of Mamba marks them; not to vectors.
    """
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    left_out = {p for layer in layers for name, p in layer.named_parameters() if name.startswith(layer.undecayed)}
    left_out |= {p for p in model.parameters() if getattr(p, "_no_weight_decay", False)}
    return [p.ndim > 1 and p not in left_out for p in model.parameters()]


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run only if the module itself is called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def settled(module: Module) -> Module:
    """Let the parameters of a module be what is trained, and return it.

    Frozen parameters, as public packages keep rotary tables, become buffers. A parameter whose numbers share memory,
    with each other (``expand``) or with another parameter, gets memory of its own.
    """
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            if not parameter.requires_grad:
                delattr(part, name)
                part.register_buffer(name, parameter.detach())

    seen: set[int] = set()
    for parameter in module.parameters():
        storage = parameter.untyped_storage()
        if storage.nbytes() < parameter.nbytes or storage.data_ptr() in seen:
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
    return module
