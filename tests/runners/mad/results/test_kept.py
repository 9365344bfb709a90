"""The models that ``--keep`` keeps, and the disk that a study is said to take."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from runners.mad import Study, study
from runners.mad import __main__ as mad
from runners.mad.search import search

SMALL: dict[str, Any] = {
    "lr": [1e-3, 5e-3],
    "weight_decay": [0.0],
    "steps": 4,
    "evaluations": 2,
    "batch_size": 16,
    "width": 16,
    "mlp_width": 16,
    "mixer_options": {"heads": 2},
    "task_options": {"length": 16, "train_examples": 32, "eval_examples": 20},
    "device": "cpu",
    "quiet": True,
}
SAME = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--lr", "1e-3", "5e-3", "--weight-decay", "0"),
    *("--steps", "4", "--evaluations", "2", "--batch-size", "16", "--width", "16", "--mlp-width", "16"),
    *("--mixer.heads", "2", "--task.length", "16", "--task.train-examples", "32", "--task.eval-examples", "20"),
    *("--device", "cpu", "--reference", "none"),
]


def trained(out: Path, keep: Literal["all", "best", "none"] = "all", **changes: Any) -> Study:
    return study("transformer", "in-context-recall", out=out, keep=keep, **SMALL | changes)


@pytest.mark.usefixtures("wide_terminal")
def test_models_go_once_there_is_a_result_and_nothing_is_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tmp_path)
    models = {path.parent.name for path in tmp_path.glob("runs/*/model.safetensors")}
    assert models == {path.name for path in (tmp_path / "runs").iterdir()}
    best = whole.summary.best_run
    assert best is not None

    monkeypatch.setattr(search, "train", None)
    assert trained(tmp_path, "best").test == whole.test
    kept = [path.parent.name for path in tmp_path.glob("runs/*/model.safetensors")]
    assert kept == [whole.experiment.run_id(best)]

    # The command says what the study takes, and looks into the chosen model before that goes, too.
    mad.main([*SAME, "--out", str(tmp_path), "--keep", "none"])
    text = capsys.readouterr().out
    assert "diagnosis of the chosen model" in text
    assert not list(tmp_path.glob("runs/*/model.safetensors"))
    ((folder, size),) = re.findall(r"stored in (\S+): (\S+) MiB with its 2 runs\n", text)
    files = [path for inner in (Path(folder), *(tmp_path / "runs").iterdir()) for path in inner.iterdir()]
    assert float(size) == round(sum(path.stat().st_size for path in files) / 2**20, 1) > 0

    again = trained(tmp_path)
    assert again.test == whole.test
    assert again.curves() == whole.curves()
    with pytest.raises(ValueError, match=r"model\.safetensors is gone, perhaps by --keep"):
        _ = again.model

    # A lost storage is rebuilt from the records.
    (tmp_path / "studies.journal").unlink()
    assert trained(tmp_path, rebuild=True).test == whole.test

    # Without test figures there is nothing left to read them from.
    next(tmp_path.glob("runs/*/test.json")).unlink()
    untested = trained(tmp_path)
    assert "no test accuracy" in repr(untested)
    assert "no test accuracy" not in repr(whole)
    with pytest.raises(ValueError, match=r"model\.safetensors is gone, perhaps by --keep"):
        _ = untested.test
