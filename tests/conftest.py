"""Kernels run through Triton's interpreter where there is no GPU; that is decided before Triton is imported."""

import importlib.util
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


def quicken_interpreter() -> None:
    """Leave out what takes most of the time of Triton's interpreter and changes no result.

    It replaces the functions of ``triton.language`` at each launch and at each call of a function within a kernel,
    after a search of the whole language; here once a module of kernels. It checks sums and products of integers for
    overflow by nine operations of the language; here by as many of NumPy.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_new(kernel: Callable[..., object]) -> interpreter._LangPatchScope:
        if kernel.__module__ not in patched:
            patch(kernel)
            patched.add(kernel.__module__)
        return interpreter._LangPatchScope()

    def check_overflow(self: TritonSemantic, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
        kind, name = lhs.type.scalar, operation.__name__
        if kind.int_bitwidth < 64:
            wide = getattr(operator, name)(*(y.handle.data.astype(np.int64) for y in (lhs, rhs)))
            in_range = kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
            assert in_range, f"int{kind.int_bitwidth} overflow detected for operation {name}"

    interpreter._patch_lang = patch_new
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        quicken_interpreter()
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """The GPU in tests marked gpu, the CPU elsewhere."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
