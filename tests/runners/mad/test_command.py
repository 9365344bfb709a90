"""What a command prints and leaves behind, and how it ends."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runners.ending import run_command
from runners.mad import __main__ as mad
from runners.mad.training.step import Stepper
from tests.runners.mad.commands import HEADS, TINY

COMMAND = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
COMMAND += ["--lr", "1e-3", "--reference", "none"]
pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.usefixtures("undrawn")
def test_a_command_trains_tabulates_and_stores_and_trains_nothing_twice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "a[bold]b[" / "c]"  # brackets are no markup
    command = [*COMMAND, "--mixer", "rt", "lstm+transformer", "--seeds", "2", "--out", str(out)]
    command += ["--mixer.transformer.heads", "2"]
    mad.main(command[2:])
    first = capsys.readouterr().out
    for expected in ("–", f"\nruns and diagnosis: {out}/studies; dashboard: optuna-dashboard {out}/optuna.journal\n"):
        assert expected in first
    assert [path.name.startswith("curves-") for path in sorted((out / "figures").glob("*.png"))] == [True, False]
    studies = sorted((out / "studies").iterdir())
    assert [path.name.split("-")[0] for path in studies] == ["lstm+transformer", "rt"]
    runs = {f"lr0.001-wd0.0-seed{seed}" for seed in range(2)}
    for study in studies:
        assert {path.name for path in study.iterdir()} == {*runs, "diagnosis.json", "diagnosis.png"}

    before = {path: path.stat().st_mtime_ns for path in (out / "studies").rglob("*.*") if path.name != ".lock"}
    mad.main(command[2:])
    second = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert re.sub(r"^.*: step .*\n", "", first, flags=re.MULTILINE) == second


@pytest.mark.usefixtures("undrawn")
def test_the_diagnosis_is_of_the_best_of_all_runs_of_the_study(tmp_path: Path) -> None:
    """Also of those of commands with other grids; and it is made again where its picture is gone."""
    titles = []
    for rates in (["1e-4", "1e-3"], ["1e-4"], ["1e-3"]):
        mad.main([*COMMAND, "--lr", *rates, "--out", str(tmp_path)])
        (path,) = tmp_path.glob("studies/*/diagnosis.json")
        titles.append(json.loads(path.read_text())["title"])
    assert len(set(titles)) == 1
    assert re.search(r", lr 0.001?\d*, weight decay 0, seed 0$", titles[0])
    path.with_suffix(".png").unlink()
    mad.main([*COMMAND, "--out", str(tmp_path)])
    assert path.with_suffix(".png").exists()


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("keep", "left"), [("all", 3), ("best", 2), ("none", 0)])
def test_models_are_kept_as_asked(tmp_path: Path, keep: str, left: int) -> None:
    command = [*COMMAND, "--seeds", "2", "--seeds-of", "chosen", "--lr", "1e-4", "1e-3", "--out", str(tmp_path)]
    mad.main([*command, "--keep", keep])
    assert len([*tmp_path.rglob("model.safetensors")]) == left
    assert len([*tmp_path.rglob("record.json")]) == 3
    mad.main([*command, "--keep", keep])  # needs no model any more


@pytest.mark.usefixtures("undiagnosed")
def test_a_chosen_model_that_is_gone_leaves_no_test_accuracy_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mad.main([*COMMAND, "--lr", "1e-4", "1e-3", "--keep", "none", "--out", str(tmp_path)])
    tested = [path for path in tmp_path.rglob("record.json") if "test" in json.loads(path.read_text())["metrics"]]
    (other,) = {"0.0001", "0.001"} - {tested[0].parent.name.split("-")[0].removeprefix("lr")}
    with pytest.raises(SystemExit, match="1"):
        mad.main([*COMMAND, "--lr", other, "--out", str(tmp_path)])
    assert "no test accuracy: " in (text := capsys.readouterr().out)
    assert "is gone, perhaps by --keep: delete its folder to train the run again" in text


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("name", ["record.json", "checkpoint.safetensors"])
def test_a_damaged_file_is_one_line_that_says_what_to_do(ended: Callable[..., str], tmp_path: Path, name: str) -> None:
    mad.main([*COMMAND, "--out", str(tmp_path)])
    (record,) = tmp_path.rglob("record.json")
    path = record.with_name(name)
    path.write_bytes(record.read_bytes()[:100])
    if path != record:
        record.unlink()
    error = ended(mad.main, [*COMMAND, "--out", str(tmp_path)])
    assert error.startswith(f"error: {path} is damaged")
    assert error.endswith("delete it and run the same command again\n")
    path.unlink()
    mad.main([*COMMAND, "--out", str(tmp_path)])


@pytest.mark.usefixtures("undiagnosed")
def test_too_little_memory_is_one_line_that_names_together(
    ended: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {}
    exec("def run(*_):\n    raise MemoryError('CUDA out of memory. Tried to allocate 3.00 GiB')", scope)
    monkeypatch.setattr(Stepper, "_take_step", scope["run"])
    program = partial(mad.main, [*COMMAND, "--seeds", "3", "--out", str(tmp_path)])
    error = ended(run_command, program, "", status=1)
    assert error.startswith("stopped: too little memory (MemoryError: CUDA out of memory")
    assert "lower --together, which is 3 here" in error
