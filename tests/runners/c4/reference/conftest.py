"""Fixtures of the tests of the reference language models."""

from dataclasses import replace
from pathlib import Path

import pytest

from runners import verdicts
from runners.c4.presets import PRESETS
from runners.c4.reference import order
from tests.runners.c4.reference.tiny import TINY


@pytest.fixture(autouse=True)
def verdicts_of_the_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "CACHE", tmp_path / "cache" / "verdicts.json")


@pytest.fixture
def command(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains two layers in a tiny setting, at three learning rates and no others."""
    monkeypatch.setattr(order, "RATES", order.FIRST)
    monkeypatch.setitem(PRESETS, "ranking", replace(PRESETS["ranking"], **TINY))
    places = ["--folder", str(tmp_path / "cells"), "--out", str(tmp_path / "out")]
    return ["--data", str(texts), "--rows", "gla", "transformer", *places]
