"""Kills, signals, divergence and full disks: what they change, and what they do not."""

import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.loop import RunError  # noqa: E402
from runners.c4.train import BusyError, loss_of  # noqa: E402
from runners.files import load_tensors  # noqa: E402
from runners.interrupt import StoppedError  # noqa: E402
from runners.records import RECORD  # noqa: E402
from runners.runs import is_finished  # noqa: E402
from tests.runners.c4.runs import (  # noqa: E402
    At,
    Interruption,
    configured,
    folder_of,
    interrupt,
    last_tensors,
    losses,
    newest_of,
    rows,
    run,
)


@pytest.mark.parametrize("mixer", ["rt", "gla", "tests.mixers.strangers:Dropping"])
def test_a_killed_run_goes_on_bitwise(texts: Path, tmp_path: Path, mixer: str) -> None:
    """Killed two steps after a checkpoint: losses, last checkpoint and record are those of an uninterrupted run."""
    whole = configured(texts, tmp_path / "whole", mixer=mixer)
    killed = replace(whole, out=tmp_path / "killed")
    expected = run(whole)
    with pytest.raises(Interruption):
        run(killed, At(5, interrupt))
    (folder_of(killed) / "checkpoints" / ".tmpAbCdEf").write_bytes(b"half")

    got = run(killed)
    assert [path.name for path in folder_of(killed).rglob(".*")] == [".lock"]
    assert losses(killed) == losses(whole)
    assert [row.step for row in rows(killed)] == list(range(1, 9))
    before, after = last_tensors(whole), last_tensors(killed)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert (got.metrics, got.curve) == (expected.metrics, expected.curve)


def test_a_copy_of_a_checkpoint_is_no_checkpoint(texts: Path, tmp_path: Path) -> None:
    """Its name sorts behind that of the original; only the newest checkpoints are kept, and copies are not deleted."""
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, At(5, interrupt))
    newest = newest_of(config)
    copy = newest.with_stem(f"{newest.stem}_copy")
    shutil.copy(newest, copy)
    assert newest_of(config) == newest
    run(config)
    assert copy.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_first_signal_saves_and_stops(texts: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    config = configured(texts, tmp_path, checkpoint_every=100)
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=r"^stopped after step [45]: the same command resumes from there$") as stop:
        run(config, At(4, lambda: os.kill(os.getpid(), number)))
    assert stop.value.status == status
    assert signal.getsignal(number) == before
    saved = load_tensors(newest_of(config))[1]["step"]
    seen: list[int] = []
    run(config, lambda row: seen.append(row.step))
    assert seen[0] == saved + 1


def test_a_signal_in_the_last_step_stops_before_anything_else_begins(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(StoppedError, match=r"^stopped after step 8:"):
        run(config, At(8, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert not is_finished(folder_of(config))
    assert loss_of(run(config)) == rows(config)[-1].validation_loss


@pytest.mark.parametrize(("warmup", "step"), [(0.9, 3), (0.0, 1)])
def test_divergence_is_recorded_once(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: float, step: int
) -> None:
    """In training, and in the evaluation after the first step."""
    monkeypatch.setattr("runners.c4.config._RANGES", {})
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=warmup)
    record = run(config)
    assert record.diverged_step <= step
    assert record.metrics == {}
    assert run(config, At(1, interrupt)) == record

    # Without the record, it is trained again.
    (folder_of(config) / RECORD).unlink()
    assert run(config).diverged_step == record.diverged_step


def test_the_step_of_a_divergence_is_said(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    steps = iter([(5.5, 1.0), (5.25, math.inf)])
    monkeypatch.setattr("runners.c4.step.ModelStepper.step", lambda *_: map(torch.tensor, next(steps)))
    monkeypatch.setattr("rich.console.Console.print", lambda self, text, **_: said.append(str(text)))
    assert run(configured(texts, tmp_path)).diverged_step == 2
    assert said[-1] == "diverged: the gradient's norm inf, at loss 5.2500, is not finite at step 2: lower --lr"


def test_a_layer_whose_first_loss_is_not_finite_is_to_be_corrected(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No learning rate has had an effect yet, and nothing stands in the way of the corrected layer."""
    monkeypatch.setattr("runners.c4.step.ModelStepper.step", lambda *_: (torch.tensor(math.nan),) * 2)
    config = configured(texts, tmp_path)
    with pytest.raises(RunError, match=r"^loss nan is not finite before any training: correct the layer$"):
        run(config)
    monkeypatch.undo()
    assert run(config).diverged_step is None


def test_a_full_disk_leaves_the_last_checkpoint(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, At(4, interrupt))
    path = newest_of(config)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runners.files.save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step-00000006"):
        run(config)
    monkeypatch.undo()
    assert newest_of(config) == path
    assert not list(path.parent.glob(".*"))
    assert run(config).curve["step"][-1] == 8


def test_a_checkpoint_of_another_model_is_refused(texts: Path, tmp_path: Path) -> None:
    small, large = (configured(texts, tmp_path, width=width, mlp_width=32) for width in (16, 32))
    run(small)
    shutil.copytree(folder_of(small), folder_of(large), ignore=shutil.ignore_patterns(RECORD))
    with pytest.raises(ValueError, match="checkpoint of another model"):
        run(large)


def test_a_second_command_leaves_a_running_one_alone(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)

    def second() -> None:
        with pytest.raises(BusyError, match="another process"):
            run(config)

    assert run(config, At(2, second)).curve["step"][-1] == 8
