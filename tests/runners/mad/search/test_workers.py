"""Processes on several devices, here the CPU several times: what they share, and how they end."""

import io
import multiprocessing
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from mixers.base import Shape
from mixers.transformer import Transformer
from runners.mad import __main__ as mad
from runners.mad import studies
from runners.mad.experiment import Experiment
from runners.mad.search import progress
from runners.mad.search.progress import Display
from runners.mad.search.study import run_of
from runners.mad.search.watch import Watcher
from runners.mad.search.workers import WorkerError, Workers, train_elsewhere
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.result import CurvePoint, Metrics
from runners.storage import Store
from tasks.recall import InContextRecall
from tests.runners.mad.commands import search
from tests.runners.processes import forks, run_program, wait_for

CPU = torch.device("cpu")
GRID = [Run(lr=lr, weight_decay=decay, seed=0) for lr in (1e-4, 5e-4, 1e-3) for decay in (0.0, 0.1)]
EXPERIMENT = Experiment(
    mixer="transformer",
    mixer_config=Transformer.Config(heads=2),
    task="in-context-recall",
    task_config=InContextRecall.Config(length=16, train_examples=64, eval_examples=30),
    difficulty="custom",
    shape=Shape(width=32, mlp_width=32),
    protocol=Protocol(batch_size=16, steps=6, evaluations=3),
    precision="float32",
)
COMMAND = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--mixer.heads", "2", "--device", "cpu"),
    *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"),
    *("--width", "32", "--mlp-width", "32"),
]
"""The same experiment, and the same grid by default."""


def trials(folder: Path) -> list[FrozenTrial]:
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "studies.journal"))
    return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(journal)).trials


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as forks of a process that has imported the program: as fresh ones, but seconds earlier."""
    context = forks()
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)


def test_a_worker_does_not_train_code_that_was_edited_since(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError,
        match="the code of transformer or in-context-recall is another in the process of cpu: it was edited",
    ):
        train_elsewhere([(EXPERIMENT, "another hash")], GRID, tmp_path, str(tmp_path / "journal"), 1, Watcher(), CPU)


@pytest.mark.usefixtures("forked", "undiagnosed")
def test_two_processes_share_a_grid_track_their_runs_and_find_what_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tracked() -> list[Path]:
        return list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

    shown = Display.evaluated

    def wait_for_company(self: Display, step: int, points: list[CurvePoint]) -> None:
        wait_for(lambda: len(tracked()) == 6)
        shown(self, step, points)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(studies, "find_devices", lambda name: [CPU, CPU])
    monkeypatch.setattr(Display, "evaluated", wait_for_company)
    mad.main([*COMMAND, "--steps", "6", "--evaluations", "3", "--wandb", "offline", "--out", str(tmp_path)])
    assert multiprocessing.active_children() == []
    printed = capsys.readouterr()
    assert "2 GPUs share each grid, up to 3 runs at a time on each" in printed.out
    assert "chosen on validation" in printed.out
    assert printed.err == ""

    found = trials(tmp_path)
    owners = [trial.user_attrs["owner"] for trial in found]
    assert sorted(owners.count(owner) for owner in set(owners)) == [3, 3]
    assert all(b"kept/token_accuracy" in path.read_bytes() for path in tracked())

    store = Store(tmp_path / "one", str(tmp_path / "one" / "studies.journal"))
    expected = search(EXPERIMENT, GRID, store, CPU, 64, Display(Console(quiet=True)))
    store.close()
    by_run = {run_of(trial): trial for trial in found}
    assert len(by_run) == len(found) == len(expected)
    for trial in expected:
        other = by_run[run_of(trial)]
        assert other.state == TrialState.COMPLETE
        assert other.user_attrs["best_step"] == trial.user_attrs["best_step"]
        for name in ("validation_loss", "validation_token_accuracy"):
            assert other.user_attrs[name] == pytest.approx(trial.user_attrs[name], rel=1e-5), name


def fail_or_go_on(device: torch.device) -> None:
    print("nobody is to see this")
    if device.index == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    time.sleep(600)


@pytest.mark.usefixtures("forked")
def test_a_process_that_fails_or_dies_is_named_and_the_others_end(capfd: pytest.CaptureFixture[str]) -> None:
    def next_error(workers: Workers) -> tuple[type[Exception], str]:
        with pytest.raises((WorkerError, torch.OutOfMemoryError)) as caught:
            wait_for(lambda: workers.check())
        return caught.type, str(caught.value)

    errors = []
    devices = [torch.device("meta", i) for i in range(2)]
    with pytest.raises(KeyboardInterrupt), Workers(devices, fail_or_go_on) as workers:  # noqa: PT012
        workers.start()
        errors = [next_error(workers) for _ in range(2)]
        assert [process.name for process in multiprocessing.active_children()] == ["meta:0"]
        raise KeyboardInterrupt
    assert errors == [
        (torch.OutOfMemoryError, "meta:1: OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB"),
        (WorkerError, "meta:1: its process ended with exit code 1"),
    ]
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def run_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


@pytest.mark.usefixtures("forked")
def test_too_little_memory_of_another_gpu_ends_a_command_as_that_of_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(studies, "find_devices", lambda name: [CPU] * 2)
    monkeypatch.setattr(studies, "train_elsewhere", run_out_of_memory)
    with pytest.raises(SystemExit) as stop:
        mad.main([*COMMAND, "--steps", "1000000", "--evaluations", "4000", "--out", str(tmp_path)])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "stopped: out of memory: lower --together (now 3)\n"


def run_on_two_devices(arguments: Sequence[str], output: Path) -> None:
    """Body of a process: the program, whose second device has a process of its own."""
    context = forks()
    multiprocessing.get_context = lambda kind: context  # type: ignore[assignment]
    studies.find_devices = lambda name: [CPU, CPU]
    run_program("runners.mad.__main__", arguments, output)


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    endless = [*COMMAND, "--steps", "1000000", "--evaluations", "4000", "--out", str(tmp_path)]
    command = forks().Process(target=run_on_two_devices, args=(endless, tmp_path / "output.txt"))
    command.start()
    journal = tmp_path / "studies.journal"
    wait_for(lambda: journal.exists() and journal.read_text().count('"owner"') == 6)
    store = Store(tmp_path, str(journal))

    def orphans() -> int:
        with store.exclusive():
            return sum(store.is_orphan(trial) for trial in trials(tmp_path))

    assert orphans() == 0
    command.kill()
    command.join()
    wait_for(lambda: orphans() == 6, patience=10.0)
    store.close()


def test_the_display_has_one_bar_at_a_time() -> None:
    display, bars = Display(Console(quiet=True)), []
    for show in (lambda: display.waiting(2), lambda: display.started(EXPERIMENT, GRID, 6), lambda: display.waiting(0)):
        show()
        bars.append(len(display._progress.tasks))
    assert bars == [1, 1, 0]


def test_a_bar_of_80_columns_keeps_its_figures() -> None:
    text, long = io.StringIO(), replace(EXPERIMENT, task="noisy-in-context-recall", difficulty="vocab-size-32")
    metrics = Metrics(sequence_accuracy=0.123, token_accuracy=0.456, loss=1.0, score=0.1)
    with Display(Console(file=text, width=80, force_terminal=True)) as display:
        display.started(long, GRID, 20_000)
        display.evaluated(12_345, [CurvePoint(step=12_345, train_loss=2.5, validation=metrics)])
    figures = ("12345/20000", "loss train 2.500 val 1.000  seq 0.123 token 0.456")
    for shown in (*figures, "noisy-in-context-recall", "vocab-size-32"):
        assert shown in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())


def test_without_a_terminal_each_evaluation_is_a_line() -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=200, force_terminal=False)) as display:
        display.started(EXPERIMENT, GRID, 6)
        display.evaluated(3, [CurvePoint(step=3, train_loss=None, validation=None)])
    assert f"seed 0 · {len(GRID)} runs: step 3 of 6: all runs diverged" in text.getvalue()


def test_the_display_tells_the_seeds_of_an_ensemble_and_how_many_runs_follow() -> None:
    """The chosen point's further seeds look like the grid trained a second time otherwise."""
    text = io.StringIO()
    with Display(Console(file=text, width=200, force_terminal=False)) as display:
        display.started(EXPERIMENT, [replace(GRID[0], seed=seed) for seed in (2, 1)], 6, more=4)
        display.evaluated(3, [CurvePoint(step=3, train_loss=None, validation=None)])
    assert "seeds 1, 2 · 2 runs, then 4 more: step 3 of 6" in text.getvalue()


@pytest.mark.parametrize(
    ("seconds", "steps", "said"), [(3.1, 20_000, ["3.1 s per step: 17.2 h for these runs"]), (0.1, 30_000, [])]
)
def test_a_long_training_is_announced_once_for_each_ensemble(
    monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int, said: list[str]
) -> None:
    """Before the first evaluation, on a terminal too; the time before the first report does not count."""
    text, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    display = Display(Console(file=text, width=200, force_terminal=True, color_system=None))
    for _ in range(2):
        display.started(EXPERIMENT, GRID, steps)
        now[0] += 500.0
        for step in range(1, 5):
            now[0] += seconds
            display.progressed(step)
    assert re.findall(r"\d\S* s per step: .* these runs", text.getvalue()) == 2 * said


def test_without_a_terminal_a_line_now_and_then_tells_the_speed_between_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of steps that take two seconds."""
    text, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Display(Console(file=text, width=200, force_terminal=False)) as display:
        monkeypatch.setattr(display._progress, "get_time", lambda: now[0])
        display.started(EXPERIMENT, GRID, 20_000)
        for step in range(1, 50):
            now[0] += 2.0
            display.progressed(step)
        lines = [line.partition(": ")[2] for line in text.getvalue().splitlines()]
    assert lines == [
        "2 s per step: 11.1 h for these runs",
        "step 5 of 20000: 0.50 steps/s  11.1 h left",
        "step 35 of 20000: 0.50 steps/s  11.1 h left",
    ]
