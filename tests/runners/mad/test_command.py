"""What a command prints and leaves behind."""

import json
import re
from pathlib import Path

import pytest

from runners.mad import __main__ as mad
from tests.runners.mad.commands import HEADS, TINY

pytestmark = pytest.mark.usefixtures("wide_terminal")


def test_a_command_trains_tabulates_and_stores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["--mixer", "rt", "transformer", "--task", "in-context-recall", *HEADS, *TINY]
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--seeds", "2", "--out", str(tmp_path)])
    first = capsys.readouterr().out
    for expected in ("val seq", "steps/s", "±", "ceiling 1.0000", "chosen on validation", "optuna-dashboard"):
        assert expected in first
    assert len(list((tmp_path / "figures").glob("*.png"))) == 1
    studies = sorted((tmp_path / "studies").iterdir())
    assert len(studies) == 2
    for study in studies:
        assert {path.name for path in study.iterdir()} == {"summary.json", "diagnosis.json", "diagnosis.png"}
        (point,) = json.loads((study / "summary.json").read_text())["points"]
        assert point["seeds"] == [0, 1]
        assert point["estimates"]["test_token_accuracy"]["half_width"] >= 0
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}
    assert len(models) == 4
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--seeds", "2", "--out", str(tmp_path)])
    second = capsys.readouterr().out
    assert models == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}

    def rows(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("│")]

    assert rows(first) == rows(second)


@pytest.mark.usefixtures("undrawn")
def test_brackets_in_a_path_are_no_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a[bold]b[" / "c]"
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY]
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--out", str(out)])
    text = capsys.readouterr().out
    assert f"\nstored in {out}" in text

    # One layer on one task has a final table with its costs, a chart, and a next command.
    assert "test accuracy of the points chosen on validation" in text
    assert "FLOPs" in text
    assert len(list((out / "figures").glob("*.png"))) == 1
    assert "\nto compare: python -m runners.mad --mixer transformer rt --task in-context-recall" in text


@pytest.mark.usefixtures("undrawn")
def test_a_study_keeps_the_best_of_what_commands_with_different_grids_have_chosen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
    choices, found = set[str](), list[str]()
    for rates in (["1e-4", "1e-3"], ["1e-4"], ["1e-3"]):
        mad.main([*command, "--lr", *rates, "--out", str(tmp_path)])
        (folder,) = (tmp_path / "studies").iterdir()
        text = capsys.readouterr().out
        (chosen,) = re.findall(r"chosen on validation: (lr \S+, weight decay \S+)", text)
        found.append(chosen)

        # Diagnosis and summary are of the first command's choice, which was made among all points.
        assert f", {found[0]}, seed 0" in json.loads((folder / "diagnosis.json").read_text())["title"]
        summary = json.loads((folder / "summary.json").read_text())
        assert len(summary["points"]) == 2
        point = summary["points"][summary["chosen"]]
        assert f"lr {point['lr']:g}, weight decay {point['weight_decay']:g}" == found[0]
        better = f"{found[0].replace(',', ' with')}, which another command has chosen, is better"
        assert (better in text) == (chosen != found[0])

        # Only points that a command has chosen have test figures.
        tested = [p for p in summary["points"] if any(name.startswith("test") for name in p["estimates"])]
        choices.add(chosen)
        assert {f"lr {p['lr']:g}, weight decay {p['weight_decay']:g}" for p in tested} == choices


@pytest.mark.usefixtures("undrawn")
def test_the_diagnosis_says_of_how_many_seeds_its_own_was_the_best(tmp_path: Path) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
    for seeds, said in (("1", "seed 0"), ("2", r"seed [01], the best of 2 seeds on validation")):
        mad.main([*command, "--lr", "1e-3", "--seeds", seeds, "--out", str(tmp_path)])
        (path,) = tmp_path.glob("studies/*/diagnosis.json")
        assert re.search(f"weight decay 0, {said}$", json.loads(path.read_text())["title"])


def test_a_picture_of_a_diagnosis_that_is_gone_is_drawn_again(tmp_path: Path) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
    mad.main([*command, "--lr", "1e-3", "--out", str(tmp_path)])
    (picture,) = tmp_path.glob("studies/*/diagnosis.png")
    picture.unlink()
    mad.main([*command, "--lr", "1e-3", "--out", str(tmp_path)])
    assert picture.stat().st_size > 0


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_diagnosis_is_one_clear_line_and_one_without_a_title_is_made_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    command += ["--weight-decay", "0", "--out", str(tmp_path)]
    mad.main(command)
    (path,) = tmp_path.glob("studies/*/diagnosis.json")
    whole = path.read_bytes()
    for damaged in (whole[:100], b"\xff"):
        path.write_bytes(damaged)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            mad.main(command)
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is damaged")
        assert error.count("\n") == 1
    path.write_text("{}")
    mad.main(command)
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("undiagnosed")
def test_odd_widths_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--width", "15", "--mixer.heads", "3", "--task.train-examples", "64", "--task.eval-examples", "30"]
    command = ["--mixer", "rt", "--task", "compression", *sizes, "--batch-size", "16", "--steps", "2", "--lr", "1e-3"]
    mad.main([*command, "--device", "cpu", "--out", str(tmp_path)])
    assert "chosen on validation" in capsys.readouterr().out
