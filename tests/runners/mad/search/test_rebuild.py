"""A journal that was cut or emptied is rebuilt from the run folders, and a line says when it lacks finished runs."""

import shutil
from pathlib import Path

import pytest

from runners.mad import __main__ as mad
from runners.mad.experiment import Experiment
from runners.mad.search import search as search_module

COMMAND = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--mixer.heads", "2", "--lr", "1e-3", "5e-3"),
    *("--weight-decay", "0", "--task.length", "16", "--task.train-examples", "32", "--task.eval-examples", "20"),
    *("--batch-size", "16", "--width", "16", "--mlp-width", "16", "--steps", "4", "--evaluations", "2"),
    *("--device", "cpu", "--reference", "none"),
]

pytestmark = pytest.mark.usefixtures("wide_terminal", "undiagnosed")


def run(out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    mad.main([*COMMAND, "--out", str(out), *more])
    return capsys.readouterr().out


@pytest.mark.parametrize("kept", ["nothing", "the study alone", "a trial under way"])
def test_a_rebuilt_study_trains_nothing_again_and_has_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    first = run(tmp_path, capsys)
    assert "the storage lacks" not in first
    journal, summary = tmp_path / "studies.journal", next((tmp_path / "studies").glob("*/summary.json"))
    before, lines = summary.read_text(), journal.read_text().splitlines(keepends=True)

    owned = next(i for i, line in enumerate(lines) if '"owner"' in line)
    created = next(i for i, line in enumerate(lines) if line.startswith('{"op_code":4'))
    lines = lines[: {"nothing": 0, "the study alone": created, "a trial under way": owned + 1}[kept]]
    journal.write_text("".join(lines))

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "train", None)
        again = run(tmp_path, capsys, "--rebuild")
        assert "rebuilt: 2 finished runs\n" in again
        assert "the storage lacks" not in again
        assert "rebuilt: 0 finished runs\n" in run(tmp_path, capsys, "--rebuild")
    assert summary.read_text() == before

    journal.write_text("".join(lines))
    (line,) = [line for line in run(tmp_path, capsys).splitlines() if "the storage lacks" in line]
    assert line.endswith("the storage lacks 2 finished runs, to be trained again: --rebuild takes them over")


def test_runs_that_only_the_summary_still_holds_are_said_to_be_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, capsys)
    (tmp_path / "studies.journal").unlink()
    shutil.rmtree(tmp_path / "runs")
    (line,) = [line for line in run(tmp_path, capsys, "--rebuild").splitlines() if "the storage lacks" in line]
    assert line.endswith(
        "the storage lacks 2 finished runs of summary.json, and their folders are gone: they are trained again"
    )
    assert "the storage lacks" not in run(tmp_path, capsys)


def test_runs_of_other_code_are_rebuilt_into_their_study_but_do_not_count_as_todays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, capsys)
    (tmp_path / "studies.journal").write_text("")
    monkeypatch.setattr(Experiment, "code", property(lambda self: "another hash"))
    text = run(tmp_path, capsys, "--rebuild")
    assert "rebuilt: 2 finished runs\n" in text
    assert "has changed, and stored nothing to compare today's code with; this is study" in text
