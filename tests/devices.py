"""Kernels run through Triton's interpreter where there is no GPU; that is decided before Triton is imported."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    # PyTorch keeps each seed for devices to come, with a trace of its stack, which takes a millisecond.
    for library in (torch.cuda, torch.mtia, torch.xpu):
        library.manual_seed_all = lambda seed: None

    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import quicken_interpreter

        quicken_interpreter()


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
