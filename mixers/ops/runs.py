"""Operations on all runs that are trained together: their rules for ``torch.func.vmap``, which adds the run axis R.

A compiler must not trace into an operation that launches kernels. While ``as_operators`` is in effect, each operation
appears in a trace as the two operators ``mixers::forward`` and ``mixers::backward``, and the tracer learns only the
shapes of their results.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.ops.numerics import no_autocast

Tensors = tuple[Tensor, ...]
Optionals = Sequence[Tensor | None]


class Method(NamedTuple):
    """An operation with its own backward pass, on tensors that all have a leading run axis.

    A method must not hold a tensor that the model computes, because the method outlives the trace of that tensor.

    Attributes:
        forward: ``forward(*tensors) -> (outputs, saved)``; an optional tensor may be None.
        backward: ``backward(gradients of the outputs, tensors, outputs, saved) -> gradients of the tensors``, None for
            tensors that have none.
        outputs: Number of outputs.
        label: Name in reports; if empty, the name of the function that makes the method is used.
    """

    forward: Callable[..., tuple[Tensors, Tensors]]
    backward: Callable[[Tensors, Any, Tensors, Tensors], Optionals]
    outputs: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        """``label``, or else derived from the function: ``attention`` for a method made by ``attention_method``."""
        return self.label or self.forward.__qualname__.partition(".")[0].removesuffix("_method")


def over_runs(method: Method, *tensors: Tensor | None) -> Tensors:
    """Return the outputs of ``method`` for tensors of one run, or of all runs under ``vmap``; autocast is off."""
    if _names is not None:
        _names[method.name] = None
    outputs: Tensors = _OverRuns.apply(method, False, *tensors)
    return outputs[: method.outputs]


_names: dict[str, None] | None = None
"""Names of the methods called so far, in order, while ``methods_met`` is in effect; else None."""


@contextmanager
def methods_met() -> Iterator[dict[str, None]]:
    """Collect the names of the methods that ``over_runs`` calls, each once, in order."""
    global _names
    _names = {}
    try:
        yield _names
    finally:
        _names = None


class _OverRuns(torch.autograd.Function):
    """Return the outputs, then the tensors saved for the backward pass, which are not differentiable.

    ``stacked`` says whether the tensors already have the run axis, which ``vmap`` adds.
    """

    @staticmethod
    def forward(method: Method, stacked: bool, *tensors: Tensor | None) -> Tensors:
        tensors = tensors if stacked else _lifted(tensors)
        with _no_autocast(*tensors):
            outputs, saved = _traced_forward(method, tensors) if _tracing else method.forward(*tensors)
        if stacked:  # autograd needs a view of an input that is returned, not the input itself
            outputs = tuple(y.view_as(y) if any(y is given for given in tensors) else y for y in outputs)
        else:
            outputs = tuple(y.squeeze_(0) for y in outputs)  # in place, because a caller cannot write into a view
        return *outputs, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.method, ctx.stacked, *tensors = inputs
        ctx.inputs = len(tensors)

        ctx.mark_non_differentiable(*output[ctx.method.outputs :])
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # read only once, because checkpointing returns recomputed tensors only once
        outputs = saved_tensors[ctx.inputs :][: ctx.method.outputs]

        # The gradient of an output that nothing reads is None.
        known = (torch.zeros_like(y) if g is None else g for g, y in zip(gradients, outputs, strict=False))
        compute = _Gradients.apply if torch.is_grad_enabled() else _Gradients.forward  # the former takes longer
        return None, None, *compute(ctx.method, ctx.stacked, ctx.inputs, *known, *saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], method: Method, stacked: bool, *tensors: Tensor | None
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        """Make the mapped axis the run axis, or fold it into an existing run axis."""
        results = _OverRuns.apply(method, True, *_with_runs(info.batch_size, stacked, tensors, in_dims[2:]))

        outputs, saved = results[: method.outputs], results[method.outputs :]
        if stacked:
            outputs = tuple(y.unflatten(0, (info.batch_size, -1)) for y in outputs)
        return (*outputs, *saved), (*(0 for _ in outputs), *(None for _ in saved))


class _Gradients(torch.autograd.Function):
    """Return the gradients of an operation's tensors; these gradients have no gradients themselves.

    ``given`` holds the gradients of the outputs, the operation's ``inputs`` tensors, its outputs, and what it saved.
    """

    @staticmethod
    def forward(method: Method, stacked: bool, inputs: int, *given: Any) -> Optionals:
        known, tensors, outputs, saved = _parts(method, inputs, given)
        if not stacked:
            known, tensors, outputs = map(_lifted, (known, tensors, outputs))
        with _no_autocast(*tensors):
            run = partial(_traced_backward, method) if _tracing else method.backward
            computed = run(known, tensors, outputs, saved)
        return tuple(computed) if stacked else _lowered(computed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Optionals) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Raise NotImplementedError: to autograd, the gradients that a kernel computes would be constants."""
        raise NotImplementedError(
            f"{ctx.name} has no second derivative: gradients through it can be read, but not be differentiated in turn"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], method: Method, stacked: bool, inputs: int, *given: Any
    ) -> tuple[Optionals, Any]:
        """Make the mapped axis the run axis if the operation was mapped, too; else take its entries one by one."""
        dims, outputs = in_dims[3:], method.outputs
        if all(dim is None for dim in dims[outputs:]):
            each = [
                _Gradients.apply(method, stacked, inputs, *_entry(n, given[:outputs], dims), *given[outputs:])
                for n in range(info.batch_size)
            ]
            computed = [None if ys[0] is None else torch.stack(ys) for ys in zip(*each, strict=True)]
        else:
            mapped = 2 * outputs + inputs
            with_runs = _with_runs(info.batch_size, stacked, given[:mapped], dims[:mapped])
            computed = _Gradients.apply(method, True, inputs, *with_runs, *given[mapped:])
            if stacked:
                computed = [y if y is None else y.unflatten(0, (info.batch_size, -1)) for y in computed]
        return tuple(computed), tuple(None if y is None else 0 for y in computed)


def _parts(method: Method, inputs: int, given: Tensors) -> tuple[Any, ...]:
    """Return gradients of the outputs, tensors, outputs and saved tensors."""
    known, results = given[: method.outputs], given[method.outputs + inputs :]
    return known, given[method.outputs :][:inputs], results[: method.outputs], results[method.outputs :]


def _entry(n: int, tensors: Optionals, dims: Sequence[int | None]) -> list[Any]:
    """Return entry n of the tensors' mapped axes; the other tensors as they are."""
    return [y if y is None or dim is None else y.select(dim, n) for y, dim in zip(tensors, dims, strict=False)]


def _lifted(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Return tensors with a run axis of size 1."""
    return tuple(y if y is None else y[None] for y in tensors)


def _lowered(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Return tensors of one run without the run axis."""
    return tuple(y if y is None else y.squeeze(0) for y in tensors)


class _Place(NamedTuple):
    """Where to find a result of a method among the results of its operator.

    Attributes:
        result: Index of the operator's result. A negative index counts the operator's arguments from their end; the
            method then returns that argument.
        layout: Shape, strides and offset in the operator's result; None for the whole result.
    """

    result: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None


_METHODS: list[Method] = []
"""Methods of the operators in traces; the operators name them by their index."""

_PLACES: dict[int, list[_Place]] = {}
"""Places of the methods' results, by the same index."""

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


def _traced_forward(method: Method, tensors: Optionals) -> tuple[Tensors, Tensors]:
    number = _operator(method)
    results = _placed(number, torch.ops.mixers.forward(number, tensors), tensors)
    return results[: method.outputs], results[method.outputs :]


def _traced_backward(
    method: Method, gradients: Tensors, tensors: Optionals, outputs: Tensors, saved: Tensors
) -> Optionals:
    number = _operator(method)
    given = *gradients, *tensors, *outputs, *saved
    results = _placed(number, torch.ops.mixers.backward(number, gradients, tensors, outputs, saved), given)
    return [y if y.numel() else None for y in results]


def _operator(method: Method) -> int:
    """Return the number by which an operator names the method."""
    _METHODS.append(method)
    return len(_METHODS) - 1


def _placed(number: int, results: Sequence[Tensor], tensors: Sequence[Any]) -> Tensors:
    """Return the results of a method from the results and arguments of its operator."""
    return tuple(_placed_one(place, results, tensors) for place in _PLACES[number])


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
    outputs, saved = _METHODS[method].forward(*tensors)
    return _apart(method, (*outputs, *saved), tensors)


def _backward_results(
    method: int,
    gradients: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> list[Tensor]:
    results = _METHODS[method].backward(tuple(gradients), tuple(tensors), tuple(outputs), tuple(saved))
    present = [gradients[0].new_empty(0) if y is None else y for y in results]
    return _apart(method, present, (*gradients, *tensors, *outputs, *saved))


def _apart(method: int, results: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return results that share no memory with the arguments or with each other, as operators require.

    An argument that a method returns unchanged is left out. Another result that shares memory with an argument is
    copied. Results that share memory with each other become one result. ``_PLACES`` records where each result is.
    """
    given = {_view(y): n - len(tensors) for n, y in enumerate(tensors) if y is not None}
    taken = {memory for memory, _ in given}
    results = [y.clone() if _memory(y) in taken and _view(y) not in given else y for y in results]
    sharing = Counter(map(_memory, results))

    apart: list[Tensor] = []
    at: dict[int, int] = {}
    _PLACES[method] = []
    for y in results:
        if (view := _view(y)) in given:
            _PLACES[method].append(_Place(given[view], None))
            continue

        memory = _memory(y)
        alone = sharing[memory] == 1
        if memory not in at:
            at[memory] = len(apart)
            numbers = y.untyped_storage().nbytes() // y.element_size()
            apart.append(y if alone else y.as_strided((numbers,), (1,), 0))
        layout = None if alone else _layout(y)
        _PLACES[method].append(_Place(at[memory], layout))
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
    import triton  # does not exist on every platform

    tracer = next(y for y in tensors if isinstance(y, FakeTensor)).fake_mode
    with (
        patch.object(triton.JITFunction, "run", lambda *arguments, **settings: None),
        patch.object(tracer, "allow_non_fake_inputs", True),
    ):
        yield


def over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``function(*tensors)``, where all tensors and the result have the batch as their first axis.

    Under ``torch.func.vmap`` the runs become further batch entries, so that PyTorch's fused kernels are used. PyTorch's
    own batching rules would run separate operations instead or, for attention with a bias on CUDA, pass misaligned
    tensors to these kernels (seen with 2.11). The backward pass computes the forward pass again and saves only the
    inputs.
    """
    result: Tensor = _OverBatch.apply(function, *tensors)
    return result


class _OverBatch(torch.autograd.Function):
    """``function`` with a rule for ``vmap`` that folds the runs into the batch."""

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients may be differentiated in turn
            pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
            return None, *pull(gradient)

        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = ctx.function(*leaves)
        return None, *torch.autograd.grad(output, leaves, gradient)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        folded = (_fold(info.batch_size, y, dim) for y, dim in zip(tensors, in_dims[1:], strict=True))
        return over_batch(function, *folded).unflatten(0, (info.batch_size, -1)), 0


def _with_runs(runs: int, stacked: bool, tensors: Optionals, dims: Sequence[int | None]) -> tuple[Any, ...]:
    """Return tensors with their mapped axes as the run axis, or folded into the run axis that they have."""
    place = _fold if stacked else _in_front
    return tuple(place(runs, y, dim) for y, dim in zip(tensors, dims, strict=True))


def _fold(runs: int, y: Any, dim: int | None) -> Any:
    """Return a tensor with its mapped axis folded into its first one; None stays None."""
    return y if y is None else _in_front(runs, y, dim).flatten(0, 1)


def _in_front(runs: int, y: Any, dim: int | None) -> Any:
    """Return a tensor with its mapped axis as a new first axis; None stays None."""
    if y is None or dim == 0:
        return y
    return y.expand(runs, *y.shape) if dim is None else y.movedim(dim, 0)


def _no_autocast(*tensors: Tensor | None) -> AbstractContextManager[Any]:
    device = next(y.device for y in tensors if y is not None)
    return no_autocast(device)
