"""Operations on all runs that are trained together: their rules for ``torch.func.vmap``, which adds the run axis R."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]
Optionals = Sequence[Tensor | None]


class Method(NamedTuple):
    """An operation with a backward pass of its own, on tensors that all have a leading run axis.

    Attributes:
        forward: ``forward(*tensors) -> (outputs, saved)``; an optional tensor may be None.
        backward: ``backward(gradients of the outputs, tensors, outputs, saved) -> gradients of the tensors``, None for
            tensors that are None or integers.
        outputs: Number of outputs.
    """

    forward: Callable[..., tuple[Tensors, Tensors]]
    backward: Callable[[Tensors, Any, Tensors, Tensors], Optionals]
    outputs: int = 1


def over_runs(method: Method, *tensors: Tensor | None) -> Tensors:
    """Return the outputs of ``method`` for tensors of one run, or of all runs under ``vmap``; without autocast."""
    outputs: Tensors = _OverRuns.apply(method, *(y if y is None else y[None] for y in tensors))
    return tuple(y.squeeze(0) for y in outputs[: method.outputs])


class _OverRuns(torch.autograd.Function):
    """Return the outputs, then the tensors saved for the backward pass, which are not differentiable."""

    @staticmethod
    def forward(method: Method, *tensors: Tensor | None) -> Tensors:
        with _no_autocast(*tensors):
            outputs, saved = method.forward(*tensors)
        return (*outputs, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.method, *tensors = inputs
        ctx.inputs = len(tensors)

        ctx.mark_non_differentiable(*output[ctx.method.outputs :])
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # read once: recomputed activations are handed out a single time
        tensors, results = saved_tensors[: ctx.inputs], saved_tensors[ctx.inputs :]
        outputs, saved = results[: ctx.method.outputs], results[ctx.method.outputs :]

        # The gradient of an output that nothing reads is None.
        known = tuple(torch.zeros_like(y) if g is None else g for g, y in zip(gradients, outputs, strict=False))

        with _no_autocast(*tensors):
            return None, *ctx.method.backward(known, tensors, outputs, saved)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], method: Method, *tensors: Tensor | None
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        """Fold the mapped axis into the run axis."""
        folded = (_fold(info.batch_size, y, dim) for y, dim in zip(tensors, in_dims[1:], strict=True))
        results = _OverRuns.apply(method, *folded)

        outputs = (y.unflatten(0, (info.batch_size, -1)) for y in results[: method.outputs])
        saved = results[method.outputs :]
        return (*outputs, *saved), (*(0 for _ in range(method.outputs)), *(None for _ in saved))


def over_batch(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``function(*tensors)``, whose tensors and result all have the batch as their first axis.

    Under ``torch.func.vmap`` the runs become further batch entries, so that PyTorch's fused kernels are used. Its own
    batching rules take these kernels apart or, for attention with a bias on CUDA (seen with 2.11), misalign them. The
    backward pass computes the forward pass once more and saves nothing but the inputs.
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
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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


def _fold(runs: int, y: Any, dim: int | None) -> Any:
    """Return a tensor with its mapped axis folded into its first one; None stays None."""
    if y is None:
        return None
    return (y.expand(runs, *y.shape) if dim is None else y.movedim(dim, 0)).flatten(0, 1)


def _no_autocast(*tensors: Tensor | None) -> torch.autocast:
    device = next(y.device for y in tensors if y is not None)
    return torch.autocast(device.type, enabled=False)
