"""Operations on all runs that are trained together: their rules for ``torch.func.vmap``, which adds the run axis R."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from mixers.ops.method import Method, Optionals, Tensors
from mixers.ops.numerics import no_autocast
from mixers.ops.operators import run_backward, run_forward

Called = TypeVar("Called", bound=Callable[..., Any])


def signed(function: Called) -> Called:
    """Store a function's signature with it, because PyTorch asks for that of ``forward`` at each call."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


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
    @signed
    def forward(method: Method, stacked: bool, *tensors: Tensor | None) -> Tensors:
        tensors = tensors if stacked else _lifted(tensors)
        with _no_autocast(*tensors):
            outputs, saved = run_forward(method, tensors)
        if stacked:  # autograd needs a view of an input that is returned, not the input itself
            outputs = tuple(y.view_as(y) if any(y is given for given in tensors) else y for y in outputs)
        else:  # in place, because a caller cannot write into a view; but an input that is returned stays as it is
            outputs = tuple(y.squeeze(0) if any(y is given for given in tensors) else y.squeeze_(0) for y in outputs)
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
    @signed
    def forward(method: Method, stacked: bool, inputs: int, *given: Any) -> Optionals:
        known, tensors, outputs, saved = _parts(method, inputs, given)
        if not stacked:
            known, tensors, outputs = map(_lifted, (known, tensors, outputs))
        with _no_autocast(*tensors):
            computed = run_backward(method, known, tensors, outputs, saved)
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
    @signed
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
