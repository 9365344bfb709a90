"""Compilation of Triton kernels before their first launch, several at a time.

Triton compiles a kernel when it is launched for the first time, so that the kernels of a training step are compiled one
after another. A trace of the step on fake tensors meets the same kernels, with the same settings, before.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_begun: set[Any] | None = None
"""Kernels with their arguments whose compilation has begun, while ``compiling_ahead`` is in effect; else None."""


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels that a trace meets, in threads while the trace and what follows it go on.

    At the end the context waits for all of them. A kernel that does not compile raises its error when it is launched.
    Without a GPU nothing is compiled.
    """
    if not torch.cuda.is_available():
        yield
        return

    from triton import AsyncCompileMode  # does not exist on every platform

    global _begun
    # Triton's mode is that of one thread, in which backward passes must run, too.
    with (
        torch.autograd.set_multithreading_enabled(False),
        ThreadPoolExecutor() as threads,
        AsyncCompileMode(threads, ignore_errors=True),
    ):
        _begun = set()
        try:
            yield
        finally:
            _begun = None


@contextmanager
def without_launches() -> Iterator[None]:
    """Skip the launches of Triton kernels; in ``compiling_ahead``, begin to compile the kernels instead."""
    import triton  # does not exist on every platform
    from triton.runtime.jit import MockTensor

    run = triton.JITFunction.run

    def begin(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        if _begun is None:
            return
        case = (kernel, *map(_dtype, arguments), *((name, _dtype(value)) for name, value in settings.items()))
        if case not in _begun:
            _begun.add(case)
            mocks = [MockTensor.wrap_dtype(_dtype(value)) for value in arguments]
            named = {name: MockTensor.wrap_dtype(_dtype(value)) for name, value in settings.items()}
            run(kernel, *mocks, grid=grid, warmup=True, **named)

    with patch.object(triton.JITFunction, "run", begin):
        yield


def _dtype(argument: Any) -> Any:
    """Return the dtype of a tensor, which is what a kernel is compiled for; return other arguments unchanged."""
    return argument.dtype if isinstance(argument, Tensor) else argument
