"""The test split: what it says, of whom it is read, and how often."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from runners.mad.results import held_out
from runners.mad.results.held_out import Reading, read_test
from runners.mad.search.progress import Display
from runners.mad.studies import kept_model, kept_record
from runners.mad.training.data import Resident
from torch import Tensor

from mixers.base import Shape
from mixers.transformer import Transformer
from runners.files import DamagedFileError, load_tensors, save_tensors
from runners.mad import __main__ as mad
from runners.mad.experiment import Experiment, run_folder
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.storage import Store
from tasks.metrics import Counts, count
from tasks.recall import InContextRecall
from tests.runners.mad.commands import search

CPU = torch.device("cpu")
RUNS = [Run(lr=1e-3, weight_decay=0.0, seed=seed) for seed in range(3)]
EXPERIMENT = Experiment(
    mixer="transformer",
    mixer_config=Transformer.Config(heads=2),
    task="in-context-recall",
    task_config=InContextRecall.Config(length=16, train_examples=40, eval_examples=30),
    difficulty="custom",
    shape=Shape(width=16, mlp_width=32),
    protocol=Protocol(batch_size=16, steps=6, evaluations=3),
    precision="float32",
)

COMMAND = [
    *("--mixer", "transformer", "--mixer.heads", "2", "--task", "in-context-recall", "--task.length", "16"),
    *("--task.train-examples", "64", "--task.eval-examples", "30", "--width", "16", "--mlp-width", "32"),
    *("--batch-size", "16", "--steps", "6", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with all runs; tests work on copies."""
    folder = tmp_path_factory.mktemp("trained")
    opened = Store(folder, str(folder / "studies.journal"))
    search(EXPERIMENT, RUNS, opened, CPU, 64, Display(Console(quiet=True)))
    opened.close()
    return folder


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    opened = Store(tmp_path, str(tmp_path / "studies.journal"))
    yield opened
    opened.close()


def model_path(store: Store, run: Run) -> Path:
    return run_folder(store.folder, EXPERIMENT, run) / "model.safetensors"


@pytest.mark.parametrize("together", [64, 2, 1])
def test_readings_are_those_of_each_runs_kept_parameters(store: Store, together: int) -> None:
    readings = read_test(EXPERIMENT, RUNS, store.folder, CPU, together)
    batch = EXPERIMENT.instance.split("test")
    for run in RUNS:
        model = EXPERIMENT.build()
        model.load_state_dict(load_tensors(model_path(store, run))[0])
        with torch.no_grad():
            logits_STV = model(torch.from_numpy(batch.inputs_ST))
        counts = count(logits_STV[None], torch.from_numpy(batch.targets_ST), torch.from_numpy(batch.scored_ST))
        for name in ("sequence_accuracy", "token_accuracy", "loss"):
            value = getattr(readings[run], name)
            assert value == pytest.approx(getattr(counts, name).item(), rel=1e-5), name
    assert len({reading.loss for reading in readings.values()}) == 3


def test_a_run_is_read_once_and_then_from_its_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_test(EXPERIMENT, RUNS[:1], store.folder, CPU, 64)
    model_path(store, RUNS[0]).unlink()
    evaluated, evaluate = [], held_out.evaluate

    def recorded(members: Ensemble, params_RP: Tensor, data: Resident, vocab_size: int) -> Counts:
        evaluated.append(members.runs)
        return evaluate(members, params_RP, data, vocab_size)

    monkeypatch.setattr(held_out, "evaluate", recorded)
    both = read_test(EXPERIMENT, RUNS[:2], store.folder, CPU, 64)
    assert both[RUNS[0]] == first[RUNS[0]]
    assert read_test(EXPERIMENT, RUNS[:2], store.folder, CPU, 64) == both
    assert evaluated == [(RUNS[1],)]


@pytest.mark.usefixtures("undiagnosed")
def test_too_little_memory_for_all_seeds_is_mended_as_the_line_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = held_out.evaluate

    def small(members: Ensemble, params_RP: Tensor, data: Resident, vocab_size: int) -> Counts:
        if len(members.runs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return evaluate(members, params_RP, data, vocab_size)

    monkeypatch.setattr(held_out, "evaluate", small)
    command = [*COMMAND, "--seeds", "3", "--lr", "1e-3", "--weight-decay", "0", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        mad.main(command)
    assert stop.value.code == 1
    assert capsys.readouterr().err == "stopped: out of memory: lower --together (now 3)\n"
    mad.main([*command, "--together", "2"])
    assert len(list(tmp_path.glob("runs/*/test.json"))) == 3


def test_a_loss_that_is_not_finite_is_none_and_a_nan_is_never_right(store: Store) -> None:
    tensors, info = load_tensors(model_path(store, RUNS[0]))
    save_tensors(model_path(store, RUNS[0]), tensors | {"readout.weight": tensors["readout.weight"] * torch.nan}, info)
    readings = read_test(EXPERIMENT, RUNS, store.folder, CPU, 64)
    assert readings[RUNS[0]] == Reading(sequence_accuracy=0.0, token_accuracy=0.0, loss=None)
    assert readings[RUNS[1]].loss is not None


def test_lost_parameters_are_an_error_that_says_what_to_do(store: Store) -> None:
    model_path(store, RUNS[1]).unlink()
    model_path(store, RUNS[2]).write_bytes(b"torn")
    for run, lost in ((RUNS[1], "gone, perhaps by --keep"), (RUNS[2], "damaged")):
        with pytest.raises(DamagedFileError, match=f"safetensors is {lost}: another --out trains the run again$"):
            read_test(EXPERIMENT, [RUNS[0], run], store.folder, CPU, 64)


def test_parameters_of_other_names_or_shapes_are_no_model(store: Store) -> None:
    """A change of names trains in the same way, so the study stays the same, but its models cannot be read."""
    path = model_path(store, RUNS[0])
    parameters, info = load_tensors(path)
    first, *_ = sorted(parameters)
    renamed = {f"{name}_before" if name == first else name: y for name, y in parameters.items()}
    reshaped = {name: y.flatten()[:1] if name == first else y for name, y in parameters.items()}
    for other in (renamed, reshaped):
        save_tensors(path, other, info)
        for read in (
            lambda: kept_model(EXPERIMENT, RUNS[0], store.folder),
            lambda: read_test(EXPERIMENT, RUNS[:1], store.folder, CPU, 64),
        ):
            with pytest.raises(DamagedFileError, match=f"do not share the parameters {first}.*: give them the names"):
                read()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"accuracy": 1.0}'])
def test_a_damaged_reading_is_an_error_that_says_what_to_do(store: Store, content: str) -> None:
    (run_folder(store.folder, EXPERIMENT, RUNS[0]) / "test.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"is damaged .*: delete it and run the same command again"):
        read_test(EXPERIMENT, RUNS, store.folder, CPU, 64)


@pytest.mark.parametrize("at", [0, 8, 30, 200, 3000, -3])
def test_a_flipped_byte_is_an_error_that_says_what_to_do(store: Store, at: int) -> None:
    """Of the figures, of the record with the curve, and of the parameters."""
    read_test(EXPERIMENT, RUNS[:1], store.folder, CPU, 64)
    calls: dict[str, Callable[[], object]] = {
        "test.json": lambda: read_test(EXPERIMENT, RUNS[:1], store.folder, CPU, 64),
        "config.json": lambda: kept_record(EXPERIMENT, RUNS[0], store.folder),
        "model.safetensors": lambda: kept_model(EXPERIMENT, RUNS[0], store.folder),
    }
    for name, read in calls.items():
        path = run_folder(store.folder, EXPERIMENT, RUNS[0]) / name
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 0x04
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=f"^{path} is .*damaged.*: (delete it and run|another --out trains)"):
            read()


def test_a_lost_record_is_an_error_that_says_what_to_do(store: Store) -> None:
    path = run_folder(store.folder, EXPERIMENT, RUNS[0]) / "config.json"
    path.unlink()
    with pytest.raises(DamagedFileError, match=f"^{path} is gone or damaged: another --out trains the run again$"):
        kept_record(EXPERIMENT, RUNS[0], store.folder)


@pytest.mark.usefixtures("undrawn")
def test_a_command_reads_it_for_the_chosen_point_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, "--seeds", "2", "--out", str(tmp_path)]
    mad.main(command)
    (summary,) = [json.loads(path.read_text()) for path in tmp_path.glob("studies/*/summary.json")]
    chosen = summary["points"][summary["chosen"]]
    read = [json.loads((path.parent / "config.json").read_text()) for path in tmp_path.glob("runs/*/test.json")]
    assert {(at["config"]["run"]["lr"], at["config"]["run"]["weight_decay"]) for at in read} == {
        (chosen["lr"], chosen["weight_decay"])
    }
    assert len(read) == 2
    assert not any("test" in name for at in read for name in at)
    for path in tmp_path.glob("*/*/*.*"):
        if path.name in ("test.json", "model.safetensors", "diagnosis.json"):
            path.unlink()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mad.main(command)
    assert stop.value.code == 1
    text, error = capsys.readouterr()
    assert re.fullmatch(r"transformer .*: no test accuracy, as said above\n", error)
    for lost in ("no test accuracy: ", "no diagnosis: "):
        assert len(re.findall(rf"{lost}.*/model.safetensors is (?:gone, perhaps by --keep|damaged)", text)) == 1
