"""Kernels run through Triton's interpreter where there is no GPU; that is decided before Triton is imported."""

import gc
import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import quicken_interpreter

        quicken_interpreter()
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what stays to the end: a million objects of libraries and of tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def device() -> torch.device:
    """The GPU in tests marked gpu, the CPU elsewhere."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
