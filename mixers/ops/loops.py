"""Loops over positions or segments in PyTorch's operations, for widths without kernels; on a GPU they are replayed."""

from collections.abc import Callable, Hashable, Sequence
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mixers.base import hooked
from mixers.ops.method import Method, Optionals, Recipe, Tensors
from mixers.ops.replay import may_replay
from mixers.ops.runs import over_runs


class _OfThread(local):
    """Whether a loop is running in a thread, whose parts are no loops of their own."""

    looping = False


_of_thread = _OfThread()


def loop(name: Hashable, function: Callable[..., Any], *tensors: Tensor | None, outputs: int = 1) -> Tensors:
    """Return the results of ``function(*tensors)``, a tuple.

    On a GPU it is launched operation by operation at first, then replayed (``mixers.ops.replay``); the backward pass
    computes the forward pass again. In a trace, a graph of the caller's or ``vmap`` it is the function itself.

    Args:
        name: functions of equal names compute the same.
        function: returns a tensor or a tuple of tensors; it reads no tensor beside its arguments, and no value of one.
        tensors: its arguments; the first one is no None.
        outputs: number of its results.
    """
    if not _are_replayed(tensors):
        return _as_tuple(function(*tensors))
    differentiated = [y is not None and y.requires_grad for y in tensors]
    return over_runs(_loop_method(name, function, outputs, differentiated), *tensors)


def loop_of(module: nn.Module, settings: Hashable, function: Callable[[Tensor], Tensor], x_BTD: Tensor) -> Tensor:
    """Return ``function(x)``, the forward pass of a module.

    Args:
        module: the module. With hooks, which a replay would not call, or parts of other packages, whose attributes may
            change what they compute, it is launched.
        settings: modules of one class with equal settings differ in nothing but their parameters and buffers.
        function: the forward pass itself, without this call.
        x_BTD: inputs.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not is_known(module) or not _are_replayed((x_BTD, *tensors.values())):
        return function(x_BTD)

    def call(x_BTD: Tensor, *values: Tensor) -> Any:
        return functional_call(module, dict(zip(tensors, values, strict=True)), (x_BTD,))

    name = type(module), settings, module.training, *tensors, *map(type, module.modules())
    return loop(name, call, x_BTD, *tensors.values())[0]


def is_known(module: nn.Module) -> bool:
    """Return whether the parameters say what a module computes: no hooks, and no parts of other packages."""
    parts = [*module.modules()]
    return all(type(part).__module__.startswith(("mixers.", "torch.nn.")) and not hooked(part) for part in parts)


def _are_replayed(tensors: Sequence[Any]) -> bool:
    """Return whether a loop over tensors is replayed: on a GPU, in no loop, trace, ``vmap`` or graph of a caller."""
    if _of_thread.looping or not may_replay(tensors[0]):
        return False
    return not any(y is not None and torch._C._functorch.is_functorch_wrapped_tensor(y) for y in tensors)


def _as_tuple(results: Any) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


def _loop_method(name: Hashable, function: Callable[..., Any], outputs: int, differentiated: Sequence[bool]) -> Method:
    """Return a function of tensors of one run as an operation; some of the tensors have gradients."""
    autocast = {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")}

    def run(tensors: Sequence[Any]) -> Tensors:
        kind, _of_thread.looping = tensors[0].device.type, True
        try:
            with torch.autocast(kind, *autocast[kind]):
                return _as_tuple(function(*(y if y is None else y[0] for y in tensors)))
        finally:
            _of_thread.looping = False

    def forward(*tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        return tuple(y[None] for y in run(tensors)), ()

    def backward(gradients: Tensors, tensors: Any, outputs: Tensors, saved: Tensors) -> Optionals:
        with torch.enable_grad():
            given = [y.detach().requires_grad_() if d else y for y, d in zip(tensors, differentiated, strict=True)]
            results = run(given)
        leaves = [y for y, d in zip(given, differentiated, strict=True) if d]
        pairs = [(y, dy[0]) for y, dy in zip(results, gradients, strict=True) if y.requires_grad]
        found = iter(torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs], allow_unused=True))
        return [next(found) if d else None for d in differentiated]

    recipe = Recipe((name, *autocast["cuda"], *differentiated))
    return Method(forward, backward, outputs, "loop of operations, replayed", recipe)
