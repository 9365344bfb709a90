"""Fixtures of the tests of tasks."""

import pytest


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw sequences by 100: tests of properties need few, and a block is drawn whole."""
    monkeypatch.setattr("tasks.base.BLOCK", 100)
