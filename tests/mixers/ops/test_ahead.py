"""Kernels of a trace are compiled before they are launched. A driver that only names a GPU stands for one."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from mixers.ops.ahead import compiling_ahead, without_launches  # noqa: E402


class NamedGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def double_kernel(x_ptr: tl.tensor, count: tl.tensor, W: tl.constexpr) -> None:
    at = tl.arange(0, W)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < count) * 2, at < count)


class Compiler:
    """In place of Triton's: keeps what it is asked to compile, and fails on widths that are no powers of two."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self, source: Any, **settings: Any) -> object:
        self.threads.append(threading.current_thread().name)
        (width,) = (value for value in source.constants.values() if isinstance(value, int))
        if width & (width - 1):
            raise ArithmeticError(f"{width} is no power of two")
        return object()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_active", NamedGpu())
    monkeypatch.setattr(triton.compiler, "compile", Compiler())
    kernel = triton.JITFunction(double_kernel)
    kernel.__module__ = "mixers.ops.kernels"
    kernel.create_binder()  # takes the compiler
    return kernel


def test_kernels_of_a_trace_are_compiled_in_threads_and_not_launched(kernel: Any) -> None:
    with compiling_ahead(), without_launches():
        with FakeTensorMode():
            fake = torch.zeros(32)
        for _ in range(2):
            kernel[(1,)](fake, 7, W=32)
        kernel[(1,)](fake, count=7, W=64)
    threads = kernel.compile.threads
    assert len(threads) == 2
    assert threading.main_thread().name not in threads

    # A launch finds them: nothing more is compiled for a tensor in memory, unless it is of another dtype.
    kernel.run(torch.zeros(32), 9, grid=(1,), warmup=True, W=32)
    assert len(threads) == 2
    kernel.run(torch.zeros(32).double(), 9, grid=(1,), warmup=True, W=32)
    assert threads[2:] == [threading.main_thread().name]


def test_backward_passes_meet_their_kernels_in_the_thread_of_the_mode(kernel: Any) -> None:
    """On a GPU they run in a thread of their own otherwise, where Triton would compile at once."""
    with compiling_ahead():
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_a_tensor_that_begins_elsewhere_in_memory_is_a_case_of_its_own(kernel: Any) -> None:
    y = torch.zeros(64)
    with compiling_ahead(), without_launches():
        kernel[(1,)](y, 7, W=32)
        kernel[(1,)](x_ptr=y[1:], count=7, W=32)
        kernel[(1,)](x_ptr=y[5:], count=7, W=32)
    assert len(kernel.compile.threads) == 2
    for start in (0, 1):
        kernel.run(y[start:], 9, grid=(1,), warmup=True, W=32)
    assert len(kernel.compile.threads) == 2


def test_kernels_of_others_are_launched_unless_their_tensors_are_fake(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda *arguments, **settings: launched.append(settings["warmup"]))
    kernel.__module__ = "elsewhere"
    with compiling_ahead(), without_launches():
        kernel[(1,)](torch.zeros(32), 7, W=32)
        assert launched == [False]
        with FakeTensorMode():
            fake = torch.zeros(32)
        kernel[(1,)](x_ptr=fake, count=7, W=32)
    assert launched == [False, True]


def test_a_kernel_that_does_not_compile_stops_the_launch_but_not_the_trace(kernel: Any) -> None:
    with compiling_ahead(), without_launches():
        kernel[(1,)](torch.zeros(32), 7, W=33)
    with pytest.raises(ArithmeticError, match="33 is no power of two"):
        kernel[(1,)](torch.zeros(32), 7, W=33)


@pytest.mark.parametrize(("ahead", "has_gpu"), [(nullcontext, True), (compiling_ahead, False)])
def test_elsewhere_and_without_a_gpu_a_trace_compiles_nothing(
    ahead: Callable[[], AbstractContextManager[None]], has_gpu: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with ahead(), without_launches():
        kernel[(1,)](torch.zeros(32), 7, W=32)
    assert kernel.compile.threads == []


def test_an_interrupt_while_kernels_are_compiled_leaves_nothing_behind(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Compiler, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt), compiling_ahead(), without_launches():
        kernel[(1,)](torch.zeros(32), 7, W=32)
    with compiling_ahead():
        pass
