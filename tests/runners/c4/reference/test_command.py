"""The command that trains reference language models: what its files hold, and what ends leave."""

import contextlib
import errno
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")


from runners.c4.checkpoints import load_model
from runners.c4.config import Config
from runners.c4.errors import RunError
from runners.c4.presets import PRESETS
from runners.c4.reference import __main__ as reference
from runners.c4.reference import cells as cells_of_layers
from runners.c4.reference import order, training
from runners.c4.reference.__main__ import RUNS
from runners.device import device_name, find_devices
from runners.files import read_json
from runners.gpus import WORKER
from runners.interrupt import StoppedError
from tests.runners.c4.reference.tiny import TINY, begun_runs, cell_of, store
from tests.runners.c4.runs import At, Interruption, interrupt

FIRST = [(rate, 0) for rate in order.FIRST]


def names_of_cells(tmp_path: Path) -> list[str]:
    return [file.name for file in cells_of_layers.cell_files(tmp_path / "cells")]


def test_the_files_hold_every_run_and_the_same_command_trains_nothing_more(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.main([*command, "--dry-run"])
    assert not (tmp_path / "cells").exists()
    assert not (tmp_path / "out").exists()
    assert "to train: at least 8 runs of 192 tokens" in capsys.readouterr().out

    reference.main(command)
    for layer, family in (("gla", "linear attention"), ("transformer", "attention")):
        cell = cell_of(tmp_path, layer)
        assert (cell["complete"], cell["family"], cell["options"]["heads"]) == (True, family, 2)
        assert [(done["lr"], done["seed"]) for done in cell["runs"]][:3] == [(rate, 0) for rate in order.FIRST]
        assert cell["runs"][-1]["seed"] == 1
        losses = {done["lr"]: done["validation_loss"] for done in cell["runs"] if done["seed"] == 0}
        assert cell["runs"][-1]["lr"] == cell["chosen"] == min(losses, key=losses.__getitem__)
        for done in cell["runs"]:
            assert done["curve"][-1][0] == 4
            assert done["curve"][-1][2] == pytest.approx(done["validation_loss"], rel=1e-4)
            share = cell["corpus"]["recall_share"]
            both = share * done["recall_loss"] + (1 - share) * done["rest_loss"]
            assert both == pytest.approx(done["validation_loss"], abs=1e-5)

            # The seeds of the best rate alone are measured for their gradients.
            assert len(done["gradient"] or []) == len(done["gradient_half_width"] or []) == done["seed"] * 12
            assert min(done["gradient"] or [1]) > 0

    # A run of the user's own in the same results folder is another.
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "corpora"] == [RUNS]

    # Nothing remains of the runs, so that the models can be trained again once their files are deleted.
    assert list((tmp_path / "out" / RUNS / "c4").iterdir()) == []

    # The files alone say that nothing is missing.
    monkeypatch.setattr(reference, "train_models", lambda *_: pytest.fail("trains again"))
    capsys.readouterr()
    reference.main(command)
    assert capsys.readouterr().out.startswith("2 of 2 models are finished")


def test_a_killed_command_continues_from_the_files_and_the_checkpoint(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the third run of a layer: the first two are not trained again, the third goes on from step 2."""
    whole = [*command[:4], *command[5:-3], str(tmp_path / "whole"), "--out", str(tmp_path / "out of whole")]
    reference.main(whole)
    seen: list[tuple[str, int]] = []
    kill = True

    class Watching(At):
        def __init__(self, *_: object) -> None:
            self.name = ""

        def started(self, name: str, description: dict[str, Any], row: Any) -> None:
            self.name = name

        def stepped(self, row: Any) -> None:
            seen.append((self.name.partition("-lr")[2].partition("-")[0], row.step))
            if kill and len(seen) == 11:
                interrupt()

        def close(self) -> None: ...

    monkeypatch.setattr(reference, "Bar", Watching)
    with pytest.raises(Interruption):
        reference.main([*command[:4], *command[5:]])
    assert [done["lr"] for done in cell_of(tmp_path, "gla")["runs"]] == [3e-3, 1e-2]

    kill = False
    del seen[:]
    reference.main([*command[:4], *command[5:]])
    assert seen[0] == ("0.03", 3)
    again, expected = cell_of(tmp_path, "gla"), read_json(tmp_path / "whole" / "gla.json")
    for done, other in zip(again["runs"], expected["runs"], strict=True):
        times = dict.fromkeys(("seconds", "evaluation_seconds", "tokens_per_second"), 0)
        assert {**done, **times} == {**other, **times}


@pytest.mark.parametrize(("module", "name"), [(cells_of_layers, "make_durable"), (reference, "discard_run")])
def test_a_run_keeps_its_checkpoints_until_its_figures_are_on_the_disk(
    module: Any, name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*command[:3], "transformer", *command[5:]]
    whole = getattr(module, name)

    def kill(*arguments: Any) -> None:
        if arguments[0]:  # a file, or a run whose checkpoints to delete
            interrupt()
        whole(*arguments)

    def kept() -> list[str]:
        return [path.parent.name for path in (tmp_path / "out" / RUNS / "c4").glob("*/checkpoints")]

    with monkeypatch.context() as patch:
        patch.setattr(module, name, kill)
        with pytest.raises(Interruption):
            reference.main(command)
    (folder,) = kept()
    assert f"-lr{order.FIRST[0]:g}-" in folder

    # The same command deletes them, and trains the other runs alone.
    begun = begun_runs(monkeypatch)
    reference.main(command)
    assert begun == [(done["lr"], done["seed"]) for done in cell_of(tmp_path, "transformer")["runs"]][1:]
    assert kept() == []


def test_runs_are_stored_after_an_edit_of_the_code_on_the_disk(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running command trains as the code was when it began."""
    command = [*command[:3], "transformer", *command[5:]]
    train = reference.train_place

    def train_and_edit(*arguments: Any) -> dict[str, Any]:
        done = train(*arguments)
        monkeypatch.setattr("runners.c4.reference.staleness.is_stale", lambda *_: True)
        return done

    monkeypatch.setattr(reference, "train_place", train_and_edit)
    reference.main(command)
    assert cell_of(tmp_path, "transformer")["complete"]


def test_a_run_whose_figures_cannot_be_written_is_not_trained_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*command[:3], "transformer", *command[5:]]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "transformer.json")

    with monkeypatch.context() as patch:
        patch.setattr(reference, "write_cell", full)
        with pytest.raises(SystemExit, match="2"):
            reference.main(command)
    assert not list((tmp_path / "cells").glob("*.json"))

    begun = begun_runs(monkeypatch)
    reference.main(command)
    assert begun == [(done["lr"], done["seed"]) for done in cell_of(tmp_path, "transformer")["runs"]][1:]


def test_a_full_disk_ends_the_command(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other models could not be stored either."""

    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    begun = begun_runs(monkeypatch)
    monkeypatch.setattr("runners.c4.checkpoints.save_tensors", full)
    with pytest.raises(SystemExit) as stopped:
        reference.main(command)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no space for ")
    assert line.endswith("free some and run the same command again; the last checkpoint is none yet")
    assert len(begun) == 1


def test_a_folder_that_is_a_file_is_refused_before_training(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cells").write_text("")
    with pytest.raises(SystemExit) as stopped:
        reference.main(command)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: --folder {tmp_path / 'cells'} is a file: name a folder\n"
    assert not (tmp_path / "out").exists()


def test_a_layer_that_fails_leaves_the_others_to_train(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_of_all = training.train

    def train_but_gla(config: Config, *others: Any) -> dict[str, Any]:
        if config.mixer == "gla":
            raise RuntimeError("CUDA error: no such\nkernel")
        return train_of_all(config, *others)

    monkeypatch.setattr(training, "train", train_but_gla)
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    with pytest.raises(SystemExit, match="1"):
        reference.main(command)
    assert names_of_cells(tmp_path) == ["transformer.json"]
    assert cell_of(tmp_path, "transformer")["complete"]
    line, end = capsys.readouterr().err.splitlines()
    said, _, traceback = line.partition("; traceback: ")
    assert said == "gla stopped: RuntimeError: CUDA error: no such kernel"
    assert end == "not finished: gla (failed, or trained by other processes)"
    assert "in train_but_gla" in Path(traceback).read_text()
    Path(traceback).unlink()


def test_a_layer_that_is_not_finite_before_any_training_has_no_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No learning rate helps it, so it is not a layer that diverged at every one."""
    monkeypatch.setattr("runners.c4.step.Stepper.step", lambda self, tokens: (torch.tensor(torch.nan),) * 2)
    with pytest.raises(SystemExit, match="1"):
        reference.main(command)
    assert names_of_cells(tmp_path) == []
    error = capsys.readouterr().err
    assert error.count("is not finite before any training: correct the layer") == 2
    assert "not finished: gla, transformer (failed" in error


def test_an_orderly_stop_in_one_layer_stops_all(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*others: object) -> None:
        raise StoppedError(3, [])

    monkeypatch.setattr(training, "train", stop)
    with pytest.raises(StoppedError):
        reference.main(command)
    assert names_of_cells(tmp_path) == []


def test_on_several_gpus_one_process_per_gpu_takes_layers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(reference, "run_on_all_gpus", lambda *call: started.append(call))
    with pytest.raises(SystemExit, match="1"):  # as one of them has failed
        reference.main(command)
    ((module, arguments, began),) = started
    assert (module, arguments) == ("runners.c4.reference", command)
    assert began == pytest.approx(time.monotonic(), abs=60)
    assert capsys.readouterr().out.startswith("0 of 2 models are finished")
    assert not (tmp_path / "out").exists()

    # Such a process trains on its GPU, and does not repeat what is said already.
    trained = []
    monkeypatch.setenv(WORKER, "1")
    monkeypatch.setattr(reference, "train_models", lambda models, *_: trained.extend(models) or True)
    reference.main(command)
    assert [model.name for model in trained] == ["gla", "transformer"]
    assert capsys.readouterr().out == ""


def timed(cell: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A model's file whose runs were trained on this device, with two evaluations of 10 s and one of recall tokens."""
    device = device_name(find_devices("auto")[0])
    own = {"device": device, "seconds": seconds, "evaluation_seconds": 10.0}
    return cell | {"runs": [{**done, **own} for done in cell["runs"]]}


@pytest.mark.parametrize(("gpus", "words"), [(1, "about 22 min as"), (2, "about 12 min on 2 GPUs as")])
def test_the_time_left_has_evaluations_and_is_divided_among_gpus(
    gpus: int,
    words: str,
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs of 120 s. 3 are left of the Transformer, 4 of each other model: of two GPUs one takes 6 of 11."""
    store(tmp_path, timed(unfinished(trained), 90.0))
    monkeypatch.setattr(reference, "find_devices", lambda _: find_devices("auto")[:1] * gpus)
    reference.main([*command[:3], "gla", "transformer", "lru", *command[5:], "--dry-run"])
    assert all(len(done["curve"]) == 2 for done in trained["runs"])
    assert "to train: at least 11 runs" in (out := capsys.readouterr().out)
    assert f"time: {words} the finished runs took on this device, with the mean of the others for gla, lru" in out


@pytest.mark.parametrize(("minutes", "begun"), [("3", []), ("5", ["transformer"]), ("8", ["gla", "transformer"])])
def test_within_minutes_only_runs_begin_that_are_expected_to_end_in_time(
    minutes: str,
    begun: list[str],
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run of the Transformer takes 4 minutes, one of GLA 6, and each needs 30 s beside training."""
    gla = {"layer": "gla", "config": trained["config"], "options": {"heads": 2}}
    for seconds, own in ((210.0, {}), (330.0, gla)):
        store(tmp_path, timed(unfinished(trained) | own, seconds))
    names: list[str] = []

    def train(place: Any, config: Config, *others: Any) -> dict[str, Any]:
        names.append(config.mixer)
        raise RunError("stopped by the test")

    monkeypatch.setattr(reference, "train_place", train)
    monkeypatch.setattr(reference, "check_cell", lambda *_: None)
    with contextlib.suppress(SystemExit):  # as a run is stopped
        reference.main([*command, "--minutes", minutes])
    assert names == begun
    reasons = f"failed, trained by other processes, or not expected to end within {minutes} minutes"
    assert f"not finished: gla, transformer ({reasons})" in capsys.readouterr().err


def test_a_run_that_is_too_long_keeps_no_shorter_one_from_beginning(
    trained: dict[str, Any], command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes 4 minutes; a quarter of the one at 3e-2 is left."""
    command = [*command[:3], "transformer", *command[5:]]
    store(tmp_path, timed(unfinished(trained), 210.0))
    begun: list[tuple[float, int]] = []

    def train(place: tuple[float, int], *_: object) -> dict[str, Any]:
        begun.append(place)
        raise RunError("stopped by the test")

    monkeypatch.setattr(reference, "train_place", train)
    monkeypatch.setattr(reference, "share_left", lambda place, *_: 0.25 if place == FIRST[2] else 1.0)
    with contextlib.suppress(SystemExit):  # as the run is stopped
        reference.main([*command, "--minutes", "3"])
    assert begun == [FIRST[2]]


def test_a_stopped_run_counts_for_its_remaining_steps(
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three runs of 240 s are left, the first of which is stopped after 2 of its 4 steps: 600 s in all."""
    command = [*command[:3], "transformer", *command[5:]]
    store(tmp_path, timed(unfinished(trained), 210.0))
    at_step_3 = At(3, interrupt)
    monkeypatch.setattr(at_step_3, "close", lambda: None, raising=False)
    monkeypatch.setattr(reference, "Bar", lambda _: at_step_3)
    with pytest.raises(Interruption):
        reference.main(command)
    (checkpoint,) = (tmp_path / "out" / RUNS / "c4").glob("*/checkpoints/*")
    assert checkpoint.stem == "step-00000002"

    capsys.readouterr()
    reference.main([*command, "--dry-run"])
    assert "time: about 10 min as the finished runs took" in capsys.readouterr().out

    # The other half of the run takes 2 minutes, with 30 s beside training; a whole one would take 4.5 minutes.
    begun: list[str] = []

    def train(*_: object) -> dict[str, Any]:
        begun.append(minutes)
        raise RunError("stopped by the test")

    monkeypatch.setattr(reference, "train_place", train)
    for minutes in ("2", "3"):
        with contextlib.suppress(SystemExit):  # as the run is stopped
            reference.main([*command, "--minutes", minutes])
    assert begun == ["3"]

    # Training does not continue from a damaged checkpoint, so all steps are left.
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    capsys.readouterr()
    reference.main([*command, "--dry-run"])
    assert "time: about 12 min as the finished runs took" in capsys.readouterr().out
    with contextlib.suppress(SystemExit):
        reference.main([*command, "--minutes", "3"])
    assert begun == ["3"]


def test_minutes_must_be_positive(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        reference.main([*command, "--minutes", "0"])
    assert capsys.readouterr().err == "error: --minutes 0 must be more than 0\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize("option", ["--out", "--folder"])
def test_a_dry_run_needs_no_folder_that_can_be_written(
    command: list[str], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    unwritable = [*command, option, "/proc/results"]
    with pytest.raises(SystemExit, match="2"):
        reference.main(unwritable)
    assert f"error: {option} /proc/results: nothing can be written into /proc (" in capsys.readouterr().err

    reference.main([*unwritable, "--dry-run"])
    assert "to train: at least 8 runs of 192 tokens" in capsys.readouterr().out


def test_an_option_of_a_layer_is_told_how_to_become_a_row(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        reference.main([*command, "--mixer.beta=True"])
    line = "error: --mixer.beta is no option here: a row has the default options of its layer; for other ones, name"
    assert capsys.readouterr().err.startswith(line)


def test_torchrun_is_refused_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes would share each collective call, and each would train another layer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        reference.main(command)
    line = "error: run this command without torchrun: it starts one process per GPU by itself\n"
    assert capsys.readouterr().err == line
    assert not (tmp_path / "out").exists()


def test_a_bad_rank_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "abc")
    with pytest.raises(SystemExit, match="2"):
        reference.main(command)
    assert capsys.readouterr().err.startswith("error: the environment variable RANK is 'abc', not a whole number")
    assert not (tmp_path / "cells").exists()


def of_another_corpus(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"corpus": cell["corpus"] | {"name": "0123456789abcdef"}}


def of_other_settings(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"config": cell["config"] | {"steps": 5}}


def stale(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"runs": [{**done, "code": "other", "trajectory": [1.0]} for done in cell["runs"]]}


def unfinished(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"runs": cell["runs"][:1]}


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file of a finished Transformer."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "RATES", order.FIRST)
        patch.setitem(PRESETS, "ranking", replace(PRESETS["ranking"], **TINY))
        places = ["--folder", str(folder / "cells"), "--out", str(folder / "out")]
        reference.main(["--data", str(texts), "--rows", "transformer", *places])
    return cell_of(folder, "transformer")


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["training", "dry run"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((unfinished, of_other_settings), "is of other settings: give another --folder, or delete it to train the"),
        ((unfinished, stale), "is unfinished, and its runs were trained by code that trains differently: delete it"),
    ],
    ids=["other settings", "stale"],
)
def test_a_file_that_runs_cannot_be_added_to_is_refused_before_any_training(
    changes: Sequence[Any],
    message: str,
    dry_run: list[str],
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Although another layer comes before it."""
    file = store(tmp_path, reduce(lambda cell, change: change(cell), changes, trained))
    with pytest.raises(SystemExit, match="2"):
        reference.main([*command, *dry_run])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file} {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["training", "dry run"])
def test_a_folder_with_models_of_another_text_is_refused_for_all_layers(
    dry_run: list[str], trained: dict[str, Any], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = store(tmp_path, of_another_corpus(trained))
    with pytest.raises(SystemExit, match="2"):
        reference.main([*command[:3], "gla", *command[5:], *dry_run])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file.parent} holds models of another text (transformer): give yours a folder of")
    assert not (tmp_path / "out").exists()


def test_a_finished_layer_of_other_code_is_named_and_not_trained_again(
    trained: dict[str, Any], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, stale(trained))
    reference.main([*command[:3], "transformer", *command[5:]])
    assert "stale: transformer was trained by code that trains differently" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_stale_file_that_another_process_has_just_written_gets_no_runs(
    trained: dict[str, Any],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = unfinished(stale(trained))
    prepare = reference.corpus_of

    def write_meanwhile(*arguments: Any) -> Any:
        store(tmp_path, cell)
        return prepare(*arguments)

    monkeypatch.setattr(reference, "corpus_of", write_meanwhile)
    with pytest.raises(SystemExit, match="1"):
        reference.main([*command[:3], "transformer", *command[5:]])
    assert "transformer.json is unfinished, and its runs were trained by code" in capsys.readouterr().err
    assert cell_of(tmp_path, "transformer") == cell


def test_a_variant_of_rt_is_trained_with_its_options(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(order, "RATES", order.FIRST)
    monkeypatch.setitem(PRESETS, "30m", replace(PRESETS["30m"], **TINY))
    name, places = "rt-6-no-persistent-norm-authors", ["--folder", str(tmp_path / "cells"), "--out", str(tmp_path)]
    command = ["--data", str(texts), "--experiment", "variants-authors", "--rows", name, *places]
    models = []
    monkeypatch.setattr(training, "load_model", lambda path: models.append(load_model(path)) or models[-1])
    reference.main(command)
    file = tmp_path / "cells" / "rt-against-transformer" / f"{name}.json"
    cell = read_json(file)
    assert (cell["layer"], cell["complete"], cell["config"]["parametrisation"]) == ("rt", True, "authors")
    assert cell["options"]["persistent_norm"] is False
    assert len(models) == len(cell["runs"])
    for model, _ in models:
        assert [layer.config.persistent_norm for layer in model.stack] == [False, False]

    # The dry run names what is missing of the whole experiment.
    capsys.readouterr()
    reference.main([*command[:4], *places, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1 of 8 models are finished in {file.parent}"
    assert f"finished: {name}" in lines
    assert "missing: rt-3-authors, 4 runs at least" in lines

    # A file of other options is not added to.
    other = {**cell["options"], "persistent_norm": True}
    file.write_text(json.dumps({**cell, "options": other, "runs": cell["runs"][:1]}))
    with pytest.raises(SystemExit) as stopped:
        reference.main(command)
    assert stopped.value.code == 2
    assert f"{name}.json is of other settings: give another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "tokenizer", "message"),
    [
        ("transformr", True, "error: no row 'transformr': did you mean transformer? The rows are transformer, sliding"),
        ("gla", False, "tokenizer.json: give --data a folder that python -m runners.c4 convert made"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    layer: str, tokenizer: bool, message: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts"
    shutil.copytree(command[1], data, ignore=None if tokenizer else shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SystemExit) as stopped:
        reference.main(["--data", str(data), "--rows", layer, *command[5:]])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.glob("[co]*")) == []


OWN = """
from torch import nn
class Shifted(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Linear(dim, dim)
    def forward(self, x):
        return self.weight(nn.functional.pad(x, (0, 0, 1, -1)))
class Peeking(Shifted):
    def forward(self, x):
        return self.weight(nn.functional.pad(x, (0, 0, -1, 1)))
"""


def test_a_layer_of_the_users_own_is_trained_as_the_others(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layer_of_ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "layer_of_ones_own", raising=False)
    own = [*command[:3], "layer_of_ones_own:Shifted", *command[5:]]
    reference.main(own)
    cell = cell_of(tmp_path, "layer_of_ones_own.Shifted")
    assert (cell["layer"], cell["family"], cell["complete"]) == ("layer_of_ones_own:Shifted", "other", True)
    assert list((tmp_path / "out" / RUNS / "c4").iterdir()) == []

    # The time of its runs is known to the next command.
    (tmp_path / "cells" / "layer_of_ones_own.Shifted.json").write_text(json.dumps(unfinished(cell)))
    capsys.readouterr()
    reference.main([*own, "--dry-run"])
    said = capsys.readouterr().out
    assert "missing: layer_of_ones_own:Shifted, 3 runs at least" in said
    assert "time: about " in said
    assert "with the mean of the others" not in said

    with pytest.raises(SystemExit, match="2"):
        reference.main([*command[:3], "layer_of_ones_own:Peeking", *command[5:]])
    assert "'layer_of_ones_own:Peeking' is not causal" in capsys.readouterr().err
    assert not (tmp_path / "cells" / "layer_of_ones_own.Peeking.json").exists()
