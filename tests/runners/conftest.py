"""Fixtures of the tests of command lines."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image


@pytest.fixture(scope="session", autouse=True)
def quick_files() -> Iterator[None]:
    """Read a file of the shipped results once a process; wait for no disk, whose power no test cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        if records := sys.modules.get("runners.records"):  # needs libraries that tests on a GPU do without
            from mixers import origin

            patch.setattr(origin, "OWN", (*origin.OWN, __file__))  # errors do not come from here
            read, shipped = records.read_all, records.REFERENCE
            kept = cache(read)

            def read_all(*places: str | Path) -> list[Any]:
                if all(Path(place).suffix == ".jsonl" and shipped in Path(place).parents for place in places):
                    return [found for place in places for found in kept(place)]
                return read(*places)

            patch.setattr(records, "read_all", read_all)
        yield


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for whole tables and messages."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login at Weights & Biases."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``runners.mad`` without diagnosis and chart, which take longer than few steps, in tests that look at neither."""
    monkeypatch.setattr("runners.mad.search.diagnose_best", lambda *_: None)
    monkeypatch.setattr("runners.mad.charts.plot_comparison", lambda *_: None)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are composed, and their files have one pixel: to draw one takes a second."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, path, **_: Image.new("L", (1, 1)).save(path, "PNG")
    )


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a program says where it ends with a status, 2 unless another one is given."""

    def end(program: Callable[..., object], *arguments: object, status: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            program(*arguments)
        assert stop.value.code == status
        error = capsys.readouterr().err
        assert len(error.splitlines()) == error.count("\n") == 1
        return error

    return end


@pytest.fixture
def refused(ended: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """What ``runners.mad`` says to arguments that it refuses: one line, before anything is written."""
    from runners.mad import __main__ as mad  # needs libraries that tests on a GPU do without

    def refuse(*arguments: str) -> str:
        error = ended(mad.main, [*arguments, "--out", str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
        return error

    return refuse
