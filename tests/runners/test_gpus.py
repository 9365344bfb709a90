"""Commands that run themselves once per GPU."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runners import gpus
from runners.gpus import WORKER, beginning, is_worker, run_on_all_gpus, starts_workers
from tests.runners.processes import wait_for

COMMAND = """
import os, pathlib, sys, time

gpu = os.environ["CUDA_VISIBLE_DEVICES"]
pathlib.Path(gpu).write_text(" ".join([*sys.argv[1:], os.environ["RUNNERS_WORKER"], os.environ["OMP_NUM_THREADS"]]))
if "--wait" in sys.argv:
    time.sleep(60)
    pathlib.Path("not stopped").touch()
status = int(os.environ.get("STATUS_OF_" + gpu, 0))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""A command that leaves a file with its words, under the name of its GPU."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on a machine with two GPUs that imports this command."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "_cores", lambda: 9)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("on_a_gpu.py").write_text(COMMAND)
    return tmp_path


def test_each_process_sees_one_gpu_and_has_its_share_of_the_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts_workers()
    assert run_on_all_gpus("on_a_gpu", ["--rows", "rt"], 12.5)
    assert [(folder / gpu).read_text() for gpu in "01"] == ["--rows rt 12.5 4"] * 2

    # Fewer cores than GPUs.
    monkeypatch.setattr(gpus, "_cores", lambda: 1)
    assert run_on_all_gpus("on_a_gpu", [], 12.5)
    assert (folder / "1").read_text() == "12.5 1"

    # GPUs that the user has chosen; CUDA reads no further than the first that there is not.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,-1,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_on_all_gpus("on_a_gpu", [], 0.0)
    assert {path.name for path in folder.iterdir()} & {"5", "7", "-1", "3"} == {"5", "7"}
    assert (folder / "7").read_text() == "0.0 3"


@pytest.mark.usefixtures("folder")
def test_a_process_for_one_gpu_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beginning() == pytest.approx(time.monotonic(), abs=10)
    monkeypatch.setenv(WORKER, "12.5")
    assert is_worker()
    assert not starts_workers()
    assert beginning() == 12.5


@pytest.mark.usefixtures("folder")
def test_a_failed_part_is_no_stop_but_a_stopped_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATUS_OF_0", "1")
    assert not run_on_all_gpus("on_a_gpu", [], 0.0)
    monkeypatch.setenv("STATUS_OF_1", "143")
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", [], 0.0)


@pytest.mark.usefixtures("folder")
def test_a_process_that_the_system_ended_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS_OF_1", "-9")
    assert not run_on_all_gpus("on_a_gpu", [], 0.0)
    assert capsys.readouterr().err == "the process of GPU 1 was ended by SIGKILL: give the same command again\n"


def test_sigterm_stops_all_processes(folder: Path) -> None:
    """A scheduler may send it to the command alone."""

    def send() -> None:
        wait_for(lambda: (folder / "0").exists() and (folder / "1").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", ["--wait"], 0.0)
    thread.join()
    assert not (folder / "not stopped").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_while_processes_start_loses_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised while a process starts, because it would be left running."""
    started = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGTERM)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", ["--wait"], 0.0)
    assert [process.poll() for process in started] == [-signal.SIGTERM] * 2


def test_further_signals_do_not_end_the_command_before_its_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Popen(subprocess.Popen[bytes]):
        def terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().terminate()

        def wait(self, timeout: float | None = None) -> int:
            if not ended:
                ended.append(0)
                raise KeyboardInterrupt
            ended.append(super().wait(timeout))
            return ended[-1]

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(KeyboardInterrupt):
        run_on_all_gpus("on_a_gpu", ["--wait"], 0.0)
    assert ended == [0, -signal.SIGTERM, -signal.SIGTERM]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with gpus._Sigterm() as sigterm, sigterm.raised():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
