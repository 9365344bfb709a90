"""An operation with its own backward pass, which computes all runs that are trained together."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Tensors = tuple[Tensor, ...]
Optionals = Sequence[Tensor | None]


class Recipe(NamedTuple):
    """How to make a method again, with other constants of the same shapes: ``make(*constants)``.

    Attributes:
        key: methods of equal keys differ in nothing but their constants.
        constants: tensors that the method reads beside those that it is called with.
        make: makes the method; None if it has no constants.
    """

    key: Hashable
    constants: Tensors = ()
    make: "Callable[..., Method] | None" = None


@dataclass(frozen=True)
class Method:
    """An operation with its own backward pass, on tensors that all have a leading run axis.

    It is no tuple, because ``torch.func`` takes tuples among its arguments apart, and joins them again, at each call.
    A method must not hold a tensor that the model computes, because the method outlives the trace of that tensor.

    Attributes:
        forward: ``forward(*tensors) -> (outputs, saved)``; an optional tensor may be None.
        backward: ``backward(gradients of the outputs, tensors, outputs, saved) -> gradients of the tensors``, None for
            tensors that have none.
        outputs: number of outputs.
        label: name in reports; if empty, the name of the function that makes the method is used.
        recipe: of a method of thousands of launches, which ``mixers.ops.replay`` replays on a GPU.
    """

    forward: Callable[..., tuple[Tensors, Tensors]]
    backward: Callable[[Tensors, Any, Tensors, Tensors], Optionals]
    outputs: int = 1
    label: str = ""
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        """``label``, or else derived from the function: ``attention`` for a method made by ``attention_method``."""
        return self.label or self.forward.__qualname__.partition(".")[0].removesuffix("_method")
