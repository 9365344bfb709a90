"""The command that compares finished studies."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runners import compare, records
from tests.runners.mad.made_up import layer, study

pytestmark = pytest.mark.usefixtures("undrawn", "wide_terminal")


def stored(folder: Path) -> Path:
    """A results folder with two studies, and a language model's run, which is none."""
    for one in (*layer("rt", (0.5, 0.7)), *study({(1e-3, 0.0, 0): 0.25}, layer="mine")):
        records.write(folder / "studies" / one.layer / f"seed{one.seed}", one)
    records.write(folder / "studies" / "model", replace(one, task=records.LANGUAGE_MODEL))
    return folder


def rows_of(text: str) -> list[str]:
    """The names in the table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parity ")) + 1
    return [line.split()[0] for line in lines[start : next(i for i, y in enumerate(lines) if "test accuracy," in y)]]


def test_all_studies_of_a_folder_or_the_named_ones_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(stored(tmp_path))]
    compare.main([*out, "--reference", "none"])
    said = capsys.readouterr().out
    assert rows_of(said) == ["rt", "mine"]
    (chart,) = (tmp_path / "figures").glob("comparison-*.png")
    assert said.endswith(f"chart: {chart}; rows with costs: the .csv beside it, or --verbose\n")
    assert chart.with_suffix(".csv").exists()

    compare.main([*out, str(tmp_path / "studies" / "mine")])
    said = capsys.readouterr().out
    assert rows_of(said) == ["mine"]
    assert "no reference rows for mine on parity: " in said
    assert len([*(tmp_path / "figures").glob("*.png")]) == 2


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, ended: Callable[..., str]) -> None:
    (tmp_path / "studies" / "old").mkdir(parents=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / records.RECORD).write_text("{")
    messages = {
        str(tmp_path / "gone"): "gone is not there: name files or folders of records",
        str(tmp_path / "studies"): "no finished run is there: train with runners.mad",
        str(tmp_path / "torn"): "is damaged",
    }
    for place, message in messages.items():
        assert message in ended(compare.main, [place, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
