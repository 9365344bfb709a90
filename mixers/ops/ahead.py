"""Compilation of Triton kernels before their first launch, several at a time.

Triton compiles a kernel when it is launched for the first time, so that the kernels of a training step are compiled one
after another. A trace of the step on fake tensors meets the same kernels, with the same settings, before. So does a
step whose launches are skipped; its numbers mean nothing.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from mixers.ops.cuda import Kernel
from mixers.ops.numerics import has_triton

ALIGNMENT = 16
"""Bytes; Triton compiles a kernel for tensors that begin at multiples of it, or for any."""

T = TypeVar("T")

_begun: set[Any] | None = None
"""Kernels with their arguments whose compilation has begun, while ``compiling_ahead`` is in effect; else None."""
_skipping = False
"""Whether ``without_launches`` is in effect."""


def skips_launches() -> bool:
    """Return whether ``without_launches`` is in effect."""
    return _skipping


def repeated(steps: Sequence[T]) -> Sequence[T]:
    """Return the steps of a loop, which launch the same kernels; while launches are skipped, a few of them."""
    return [*steps[:2], steps[-1]] if _skipping and len(steps) > 2 else steps


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels whose launches are skipped, in threads while the trace and what follows it go on.

    At the end the context waits for all of them. A kernel that does not compile raises its error when it is launched.
    Without a GPU nothing is compiled.
    """
    if not (torch.cuda.is_available() and has_triton()):
        yield
        return

    from triton import AsyncCompileMode
    from triton.runtime._async_compile import active_mode

    global _begun
    # Triton's mode is that of one thread, in which backward passes must run, too.
    with torch.autograd.set_multithreading_enabled(False), ThreadPoolExecutor() as threads, ExitStack() as stack:
        stack.callback(active_mode.set, None)  # an interrupt while it waits, as in a notebook, would leave it active
        stack.enter_context(AsyncCompileMode(threads, ignore_errors=True))
        _begun = set()
        try:
            yield
        finally:
            _begun = None


@contextmanager
def without_launches() -> Iterator[None]:
    """Skip the launches of kernels; in ``compiling_ahead``, begin to compile those of Triton instead.

    On tensors in memory only the project's own kernels are skipped: others may time themselves to find their settings,
    or write indices that later operations trust.
    """
    if not has_triton():
        yield
        return

    import triton

    global _skipping
    run = triton.JITFunction.run

    def begin(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        foreign = kernel.__module__.partition(".")[0] != "mixers"
        if foreign and not any(isinstance(y, FakeTensor) for y in (*arguments, *settings.values())):
            return run(kernel, *arguments, grid=grid, warmup=warmup, **settings)
        if _begun is None:
            return None
        case = (kernel, *map(_case, arguments), *((name, _case(value)) for name, value in settings.items()))
        if case not in _begun:
            _begun.add(case)
            named = {name: _stand_in(value) for name, value in settings.items()}
            run(kernel, *map(_stand_in, arguments), grid=grid, warmup=True, **named)
        return None

    with patch.object(triton.JITFunction, "run", begin), patch.object(Kernel, "launch", lambda *_: None):
        before, _skipping = _skipping, True
        try:
            yield
        finally:
            _skipping = before


def _case(argument: Any) -> Any:
    """Return what decides about the code for a tensor: its dtype and its place in memory; else the argument itself."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.dtype, 0 if isinstance(argument, FakeTensor) else argument.data_ptr() % ALIGNMENT


def _stand_in(argument: Any) -> Any:
    """Return a tensor that Triton accepts in place of a fake one; other arguments unchanged."""
    from triton.runtime.jit import MockTensor

    return MockTensor(argument.dtype) if isinstance(argument, FakeTensor) else argument
