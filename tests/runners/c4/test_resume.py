"""Kills, signals, divergence and full disks: what they change, and what they do not."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers.transformer import Transformer  # noqa: E402
from runners.c4 import checkpoints, identity, rehearsal  # noqa: E402
from runners.c4 import train as training  # noqa: E402
from runners.c4.curve import read_curve  # noqa: E402
from runners.c4.errors import BusyError, DivergedError, RunError  # noqa: E402
from runners.c4.presets import PRESETS  # noqa: E402
from runners.c4.train import train  # noqa: E402
from runners.files import load_tensors  # noqa: E402
from runners.interrupt import StoppedError  # noqa: E402
from tests.runners.c4.runs import (  # noqa: E402
    ALONE,
    At,
    Interruption,
    configured,
    corpus_of,
    folder_of,
    interrupt,
    largest_file,
    last_tensors,
    losses,
    run,
)


def test_a_run_goes_on_with_other_code_that_trains_the_same_and_with_no_other(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])

    # The code trains otherwise, here or in what no rehearsal shows.
    refused = pytest.raises(
        RunError, match=r"^the code of transformer or of its training is not the .* begun with: del"
    )
    forward = Transformer.forward
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "forward", lambda self, x_BTD: forward(self, x_BTD) + 1e-3 * x_BTD)
        patch.setattr(identity, "run_code", lambda config: "trains otherwise")
        patch.setattr(rehearsal, "run_code", lambda config: "trains otherwise")
        with refused:
            run(config)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "run_code", lambda config: "another")
        patch.setattr(training, "unrehearsed_code", lambda: "another")
        with refused:
            run(config)

    # It trains the same, which is remembered.
    with monkeypatch.context() as patch:
        patch.setattr(identity, "run_code", lambda config: "another")
        run(config)
        patch.setattr(training, "trajectory", lambda *_: pytest.fail("rehearsed again"))
        run(config)
        assert len(read_curve(folder_of(config))) == 8

    # Nothing is known of the code of an earlier version.
    (folder_of(config) / training.REHEARSAL).unlink()
    run(config)
    monkeypatch.setattr(identity, "run_code", lambda config: "another")
    with refused:
        run(config)


def test_a_layer_without_a_rehearsal_needs_the_code_that_its_run_was_begun_with(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "trajectory", lambda *_: 1 / 0)
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    assert json.loads((folder_of(config) / training.REHEARSAL).read_text())["trajectory"] is None
    with monkeypatch.context() as patch:
        patch.setattr(identity, "run_code", lambda config: "another")
        with pytest.raises(RunError, match="begun with: delete this folder"):
            run(config)
    run(config)


@pytest.mark.parametrize("mixer", ["rt", "gla"])
def test_a_killed_run_goes_on_bitwise(texts: Path, tmp_path: Path, mixer: str) -> None:
    """Killed two steps after a checkpoint: losses, last checkpoint and result are those of an uninterrupted run."""
    whole = configured(texts, tmp_path / "whole", mixer=mixer)
    killed = replace(whole, out=tmp_path / "killed")
    expected = run(whole)
    with pytest.raises(Interruption):
        run(killed, [At(5, interrupt)])
    got = run(killed)
    assert losses(killed) == losses(whole)
    assert [row.step for row in read_curve(folder_of(killed))] == list(range(1, 9))
    before, after = last_tensors(whole), last_tensors(killed)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert got["validation_loss"] == expected["validation_loss"]


def test_a_copy_of_a_checkpoint_is_no_checkpoint(texts: Path, tmp_path: Path) -> None:
    """Its name sorts behind that of the original; only the newest checkpoints are kept, and copies are not deleted."""
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(5, interrupt)])
    newest = checkpoints.newest(folder_of(config))
    assert newest is not None
    copy = newest.with_stem(f"{newest.stem}_copy")
    shutil.copy(newest, copy)
    assert checkpoints.newest(folder_of(config)) == newest
    assert checkpoints.steps_done(folder_of(config)) == 3

    run(config)
    assert checkpoints.steps_done(folder_of(config)) == 8
    assert copy.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_first_signal_saves_and_stops(texts: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    config = configured(texts, tmp_path, checkpoint_every=100)
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=r"^stopped after step [45]: the same command resumes from there$") as stop:
        run(config, [At(4, lambda: os.kill(os.getpid(), number))])
    assert stop.value.status == status
    assert signal.getsignal(number) == before
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    saved = load_tensors(path)[1]["step"]
    assert saved in (4, 5)
    seen: list[int] = []
    watcher = At(saved + 1, lambda: seen.append(saved + 1))
    run(config, [watcher, At(saved, interrupt)])
    assert seen == [saved + 1]


def test_a_signal_in_the_last_step_stops_before_anything_else_begins(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(StoppedError, match=r"^stopped after step 8:"):
        run(config, [At(8, lambda: os.kill(os.getpid(), signal.SIGINT))])
    assert not (folder_of(config) / "result.json").exists()
    assert run(config)["validation_loss"] == read_curve(folder_of(config))[-1].validation_loss


def test_a_later_ctrl_c_stops_at_once(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.interrupt.SECONDS_OF_ONE_REQUEST", -1.0)

    def interrupt_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    config = configured(texts, tmp_path, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(config, [At(4, interrupt_twice)])
    assert checkpoints.newest(folder_of(config)) is None


def test_divergence_names_the_step_the_documents_and_the_last_checkpoint(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=0.9)
    with pytest.raises(DivergedError) as error:
        run(config)
    record = json.loads((folder_of(config) / "diverged.json").read_text())
    assert f"step {record['step']}" in str(error.value)
    assert record["documents"]
    assert record["documents"][0] in str(error.value)
    assert "last good checkpoint" in str(error.value)
    with pytest.raises(DivergedError, match="delete"):
        run(config, [At(1, interrupt)])


def test_a_gradient_that_is_not_finite_is_told_from_the_loss(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([(5.5, 1.0), (5.25, math.inf)])
    monkeypatch.setattr("runners.c4.step.Stepper.step", lambda *_: map(torch.tensor, next(steps)))
    monkeypatch.setattr(training, "trajectory", lambda *_: [1.0])  # which would take these steps
    with pytest.raises(
        DivergedError, match=r"^the gradient's norm inf, at loss 5\.2500, is not finite at step 2, with"
    ):
        run(configured(texts, tmp_path))


def test_a_validation_loss_that_is_not_finite_is_divergence(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=0.0, steps=1)
    with pytest.raises(DivergedError, match="validation loss nan is not finite at step 1"):
        run(config)
    assert checkpoints.newest(folder_of(config)) is None


def test_a_layer_whose_first_loss_is_not_finite_is_to_be_corrected(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No learning rate has had an effect yet."""
    lines = ("from torch import nn", "class NaN(nn.Linear):", "    def __init__(self, dim: int) -> None:")
    code = (*lines, "        super().__init__(dim, dim)", "        nn.init.constant_(self.weight, float('nan'))")
    (tmp_path / "not_finite_at_first.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(tmp_path)
    config = configured(texts, tmp_path, mixer="not_finite_at_first:NaN", heads=None)
    for _ in range(2):  # nothing stands in the way of the corrected layer
        with pytest.raises(RunError) as error:
            run(config)
        assert not isinstance(error.value, DivergedError)
        assert str(error.value) == "loss nan is not finite before any training: correct the layer"


def test_what_a_kill_left_half_written_is_removed(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    folder = folder_of(config)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    for _ in range(2):  # of a run that goes on, and of one that is finished
        for name in ("checkpoints/.tmpAbCdEf", ".result-AbCdEf.json"):
            (folder / name).write_bytes(b"half")
        run(config)
        assert [path.name for path in folder.rglob(".*")] == [".lock"]


def test_a_full_disk_leaves_the_last_checkpoint(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    path = checkpoints.newest(folder_of(config))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runners.files.save_file", full)
    with pytest.raises(RunError, match=r"no space for .*step-00000006.*step-00000003"):
        run(config)
    monkeypatch.undo()
    assert checkpoints.newest(folder_of(config)) == path
    assert not list(path.parent.glob(".*")) if path else False
    assert run(config)["step"] == 8


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_files(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library raises plain Exception with the words of the system, here those of a full disk, too."""
    config = configured(texts, tmp_path)
    corpus, folder = corpus_of(config), folder_of(config)
    with largest_file(100), pytest.raises(OSError, match=rf"File too large: '{folder}'"):
        train(config, {}, corpus, ALONE, [])

    class Full:
        def save(self, path: str) -> None:
            raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("runners.c4.loop.load_tokenizer", lambda _: Full())
        with pytest.raises(RunError, match=rf"^no space in {folder}: free some and run the same command again$"):
            run(config)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert run(config)["step"] == 8


def test_a_checkpoint_of_another_model_is_refused(texts: Path, tmp_path: Path) -> None:
    small, large = (configured(texts, tmp_path, width=width, mlp_width=32) for width in (16, 32))
    run(small)
    folder = folder_of(large) / "checkpoints"
    folder.mkdir(parents=True)
    source = checkpoints.newest(folder_of(small))
    assert source is not None
    (folder / source.name).write_bytes(source.read_bytes())
    shutil.copy(folder_of(small) / "curve.csv", folder_of(large))
    with pytest.raises(ValueError, match="checkpoint of another model"):
        run(large)


def test_a_second_command_leaves_a_running_one_alone(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)

    def second() -> None:
        with pytest.raises(BusyError, match="another process"):
            run(config)

    assert run(config, [At(2, second)])["step"] == 8


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mixer", ["rt", "lru"])
def test_every_preset_can_be_rehearsed(preset: str, mixer: str) -> None:
    """Also that whose widths are the paper's, of which a rehearsal takes a part."""
    config = replace(PRESETS[preset], mixer=mixer, device="cpu")
    narrow = training._narrow(config)
    assert narrow.shape().width == min(config.shape().width, 256)
    assert narrow.shape().mlp_width == 4 * narrow.shape().width
    found = training._trajectory(config, {})
    assert found is not None
    assert len(found) == 5


def test_very_long_sequences_of_a_users_layer_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that keeps all pairs of positions would take the machine's memory when a run begins."""
    monkeypatch.setattr(training, "is_path", lambda name: True)
    monkeypatch.setattr(training, "trajectory", lambda *_: [1.0])
    short = replace(PRESETS["tiny"], mixer="transformer")
    assert training._trajectory(short, {}) == [1.0]
    assert training._trajectory(replace(short, seq_len=4096), {}) is None
