"""Operations as single operators of a trace, because a compiler must not trace into one that launches kernels.

While ``as_operators`` is in effect, each operation appears in a trace as the two operators ``mixers::forward`` and
``mixers::backward``, and the tracer learns only the shapes of their results.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.ops.ahead import without_launches
from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.replay import replayed_backward, replayed_forward


class _Place(NamedTuple):
    """Where to find a result of a method among the results of its operator.

    Attributes:
        result: index of the operator's result. A negative index counts the operator's arguments from their end; the
            method then returns that argument.
        layout: shape, strides and offset in the operator's result; None for the whole result.
    """

    result: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None


_methods: list[Method] = []
"""Methods of the operators of one trace, which name them by their index; set by ``operators_of``."""

_places: list[_Place] = []
"""Places of the results of the operator that ran last."""

_tracing = False
"""Whether ``as_operators`` is in effect."""


@contextmanager
def as_operators() -> Iterator[None]:
    """Make operations appear in a trace as single operators (see the module's docstring)."""
    global _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = False


@contextmanager
def operators_of(methods: list[Method]) -> Iterator[None]:
    """Let operators be those of a trace: inside, a trace appends its methods, and what it has recorded may run."""
    global _methods
    before, _methods = _methods, methods
    try:
        yield
    finally:
        _methods = before


def run_forward(method: Method, tensors: Optionals) -> tuple[Tensors, Tensors]:
    """Return ``method.forward(*tensors)``, or what stands for it in a trace."""
    if not _tracing:
        return method.forward(*tensors) if method.recipe is None else replayed_forward(method, tensors)
    number = _operator(method)
    results = _placed(torch.ops.mixers.forward(number, tensors), tensors)
    return results[: method.outputs], results[method.outputs :]


def run_backward(method: Method, gradients: Tensors, tensors: Optionals, outputs: Tensors, saved: Tensors) -> Optionals:
    """Return ``method.backward(gradients, tensors, outputs, saved)``, or what stands for it in a trace."""
    if not _tracing:
        run = method.backward if method.recipe is None else partial(replayed_backward, method)
        return run(gradients, tensors, outputs, saved)
    number = _operator(method)
    given = *gradients, *tensors, *outputs, *saved
    results = _placed(torch.ops.mixers.backward(number, gradients, tensors, outputs, saved), given)
    return [y if y.numel() else None for y in results]


def _operator(method: Method) -> int:
    """Return the number by which an operator names the method."""
    _methods.append(method)
    return len(_methods) - 1


def _placed(results: Sequence[Tensor], tensors: Sequence[Any]) -> Tensors:
    """Return the results of a method from the results and arguments of its operator."""
    return tuple(_placed_one(place, results, tensors) for place in _places)


def _placed_one(place: _Place, results: Sequence[Tensor], tensors: Sequence[Any]) -> Tensor:
    y: Tensor = (tensors if place.result < 0 else results)[place.result]
    return y if place.layout is None else y.as_strided(*place.layout)


@torch.library.custom_op("mixers::forward", mutates_args=())
def _forward(method: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the outputs of a method, then its saved tensors."""
    return _forward_results(method, tensors)


@torch.library.custom_op("mixers::backward", mutates_args=())
def _backward(
    method: int,
    gradients: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of the tensors; an empty tensor stands for None."""
    return _backward_results(method, gradients, tensors, outputs, saved)


@_forward.register_fake
def _(method: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    with _shapes_alone(tensors):
        return _forward_results(method, tensors)


@_backward.register_fake
def _(
    method: int, gradients: Sequence[Tensor], tensors: Sequence[Tensor | None], *kept: Sequence[Tensor]
) -> list[Tensor]:
    with _shapes_alone(tensors):
        return _backward_results(method, gradients, tensors, *kept)


def _forward_results(method: int, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    outputs, saved = _methods[method].forward(*tensors)
    return _apart((*outputs, *saved), tensors)


def _backward_results(
    method: int,
    gradients: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> list[Tensor]:
    results = _methods[method].backward(tuple(gradients), tuple(tensors), tuple(outputs), tuple(saved))
    present = [gradients[0].new_empty(0) if y is None else y for y in results]
    return _apart(present, (*gradients, *tensors, *outputs, *saved))


def _apart(results: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return results that share no memory with the arguments or with each other, as operators require.

    An argument that a method returns unchanged is left out. Another result that shares memory with an argument is
    copied. Results that share memory with each other become one result. ``_places`` records where each result is.
    """
    given = {_view(y): n - len(tensors) for n, y in enumerate(tensors) if y is not None}
    taken = {memory for memory, _ in given}
    results = [y.clone() if _memory(y) in taken and _view(y) not in given else y for y in results]
    sharing = Counter(map(_memory, results))

    apart: list[Tensor] = []
    at: dict[int, int] = {}
    _places.clear()
    for y in results:
        if (view := _view(y)) in given:
            _places.append(_Place(given[view], None))
            continue

        memory = _memory(y)
        alone = sharing[memory] == 1
        if memory not in at:
            at[memory] = len(apart)
            numbers = y.untyped_storage().nbytes() // y.element_size()
            apart.append(y if alone else y.as_strided((numbers,), (1,), 0))
        layout = None if alone else _layout(y)
        _places.append(_Place(at[memory], layout))
    return apart


def _memory(y: Tensor) -> int:
    """Return a number that identifies a tensor's storage."""
    return int(y.untyped_storage()._cdata)


def _layout(y: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the arguments of ``as_strided`` that make the tensor from its storage."""
    return tuple(y.shape), y.stride(), int(y.storage_offset())


def _view(y: Tensor) -> tuple[int, Any]:
    """Return a key that identifies a view: storage, layout and dtype."""
    return _memory(y), (_layout(y), y.dtype)


@contextmanager
def _shapes_alone(tensors: Sequence[Tensor | None]) -> Iterator[None]:
    """Skip the launches of Triton kernels, and let a method combine its own tensors with fake tensors."""
    tracer = next(y for y in tensors if isinstance(y, FakeTensor)).fake_mode
    with without_launches(), patch.object(tracer, "allow_non_fake_inputs", True):
        yield
