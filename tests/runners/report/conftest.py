"""Folders of made-up results, and the page of one."""

from pathlib import Path

import pytest

from runners.report import __main__ as report
from runners.report import trained
from tests.runners.report.made_up import ACCURACIES, use, write_cell


@pytest.fixture(autouse=True)
def stale_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the made-up language models, those are stale whose code has the name "stale"."""
    monkeypatch.setattr(trained, "is_stale", lambda cell, config, options: cell.runs[0].code == "stale")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results, whose cells are those of ``ACCURACIES``."""
    for (row, task), values in ACCURACIES.items():
        write_cell(tmp_path / "results", row, task, values)
    use(tmp_path / "results", monkeypatch)
    return tmp_path / "results"


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of these results, made once: drawing it takes seconds."""
    folder = tmp_path_factory.mktemp("results")
    for (row, task), values in ACCURACIES.items():
        write_cell(folder, row, task, values)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(folder, monkeypatch)
        report.main(["--out", str(folder)])
    return folder / "report" / "index.html"
