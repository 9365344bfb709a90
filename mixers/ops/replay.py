"""Replays of operations that consist of thousands of small launches, as CUDA graphs.

Launching takes Python longer than it takes the GPU to compute. So the third pass over tensors of the same shapes is
captured, and later ones are replayed. A graph has copies of its tensors: a replay copies the caller's tensors in and
the results out. So the results are the caller's own, shapes may alternate, and a layer may be called several times
before its backward pass, with other inputs and weights.

The memory of a graph is that of its copies and results; what lies between is shared by all graphs of a GPU. Where it
does not suffice, passes are launched. So they are for a caller who captures a graph himself.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.base import log_once
from mixers.ops.ahead import skips_launches
from mixers.ops.method import Method, Optionals, Tensors

PASSES = 2
"""Passes over tensors of the same shapes that are launched before one is captured: warm-ups of graphs have as many."""
SHAPES = 16
"""Passes that are remembered for each GPU by their shapes, those that ran last; forward and backward count as two."""
Function = Callable[[Sequence[Any]], Optionals]


def replayed_forward(method: Method, tensors: Optionals) -> tuple[Tensors, Tensors]:
    """Return ``method.forward(*tensors)``."""

    def forward(made: Method, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
        outputs, saved = made.forward(*tensors)
        return *outputs, *saved

    results: Any = _run("forward", method, forward, tensors)
    return tuple(results[: method.outputs]), tuple(results[method.outputs :])


def replayed_backward(
    method: Method, gradients: Tensors, tensors: Optionals, outputs: Tensors, saved: Tensors
) -> Optionals:
    """Return ``method.backward(gradients, tensors, outputs, saved)``."""
    parts = gradients, tensors, outputs, saved
    sizes = [*map(len, parts)]

    def backward(made: Method, given: Sequence[Any]) -> Optionals:
        each = iter(given)
        return made.backward(*(tuple(islice(each, size)) for size in sizes))

    return _run(("backward", *sizes), method, backward, [*chain(*parts)])


def _run(
    name: Hashable, method: Method, run: Callable[[Method, Sequence[Any]], Optionals], tensors: Optionals
) -> Optionals:
    """Return ``run(method, tensors)``, launched or replayed."""
    assert method.recipe is not None
    key, constants, make = method.recipe
    if not may_replay(tensors[0]):
        return run(method, tensors)

    def function(given: Sequence[Any]) -> Optionals:
        made = method if make is None else make(*given[: len(constants)])
        return run(made, given[len(constants) :])

    device = tensors[0].device  # type: ignore[union-attr]
    with torch.cuda.device(device):
        return _replays(device).run((name, key), function, (*constants, *tensors))


def may_replay(y: Any) -> bool:
    """Return whether operations on a tensor run on a GPU, and nobody records, traces or captures them one by one."""
    if not y.is_cuda or isinstance(y, FakeTensor) or skips_launches() or torch.compiler.is_compiling():
        return False
    watched = torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack()
    return not watched and not torch.cuda.is_current_stream_capturing()


class Replays:
    """Graphs of one GPU, by what they compute and the shapes of its tensors; threads take turns.

    Args:
        capture: captures a function of tensors, and returns one of other tensors of the same shapes.
    """

    def __init__(self, capture: Callable[[Function, Optionals], Function]) -> None:
        self.capture = capture
        self._known: dict[Hashable, int | Function] = {}
        self._lock = RLock()

    def run(self, name: Hashable, function: Function, given: Optionals) -> Optionals:
        """Return ``function(given)``.

        Args:
            name: functions of equal names compute the same of tensors of the same shapes.
            function: what to compute; it launches kernels alone, and reads no value of a tensor.
            given: its tensors.
        """
        key = name, tuple(None if y is None else (y.shape, y.dtype) for y in given)
        with self._lock:
            known = self._known.pop(key, 0)
            if known == PASSES:
                try:
                    known = self.capture(function, given)
                except RuntimeError as error:
                    log_once(f"passes are launched one operation after another, not replayed: {error}")
            if isinstance(known, int):
                known += 1
            self._known[key] = known  # the one used last
            if len(self._known) > SHAPES:
                del self._known[next(iter(self._known))]
            return function(given) if isinstance(known, int) else known(given)


class Graph:
    """A captured function, which computes the same of other tensors of the same shapes.

    Args:
        function: what is captured.
        given: its tensors.
    """

    def __init__(self, function: Function, given: Optionals) -> None:
        device, before = torch.cuda.current_device(), torch.cuda.current_stream()
        pool, side, self.done = _shared(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), torch.no_grad():
            self.given = [y if y is None else y.detach().clone() for y in given]

            # Libraries make their handles and load their kernels outside of the capture.
            side.wait_stream(before)
            with torch.cuda.stream(side):
                function(self.given)
            before.wait_stream(side)

            try:
                with torch.cuda.graph(self.graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    self.results = [*function(self.given)]
            except BaseException:  # PyTorch may leave the stream of the capture current, and the pool open
                torch.cuda.set_stream(before)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(device, pool)
                raise

    def __call__(self, given: Optionals) -> Optionals:
        """Return the results, which share no memory with the graph."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        pairs = [(own, y) for own, y in zip(self.given, given, strict=True) if own is not None and y is not None]
        torch._foreach_copy_([own for own, _ in pairs], [y.detach() for _, y in pairs])
        self.graph.replay()
        returned = {id(own): y for own, y in pairs}
        results = [returned[id(y)] if id(y) in returned else y if y is None else y.clone() for y in self.results]
        self.done.record(stream)
        return results


@cache
def _replays(device: torch.device) -> Replays:
    return Replays(Graph)


@cache
def _shared(device: int) -> tuple[Any, torch.cuda.Stream, torch.cuda.Event]:
    """Return what all graphs of a GPU share: memory, the stream of captures, and the event behind their last replay."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), torch.cuda.Event()
