"""Fixtures of the tests of layers and kernels."""

import pytest
import torch
from torch import Tensor

from mixers.base import log_once


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """What is said once a process is said in this test, whatever others have met."""
    log_once.cache_clear()


@pytest.fixture
def nan_filled_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel allocates and must write before it reads is full of NaN."""
    for module, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(module, name)

        def filled(*a: object, original: object = original, **k: object) -> Tensor:
            y: Tensor = original(*a, **k)  # type: ignore[operator]
            if y.is_floating_point():
                y.detach().fill_(torch.nan)
            return y

        monkeypatch.setattr(module, name, filled)


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of products are split into about as few groups as there are runs; ``ops/test_products.py`` has the many."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("mixers.ops.kernels.products.PROGRAMS", 64)
