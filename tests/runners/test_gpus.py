"""Commands that run themselves once per GPU."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from runners.gpus import WORKER, is_worker, run_on_all_gpus, starts_workers

COMMAND = """
import os, pathlib, sys, time

gpu = os.environ["CUDA_VISIBLE_DEVICES"]
pathlib.Path(gpu).write_text(" ".join([*sys.argv[1:], str("RUNNERS_WORKER" in os.environ)]))
if "--wait" in sys.argv:
    time.sleep(60)
    pathlib.Path("not stopped").touch()
sys.exit(int(os.environ.get("STATUS_OF_" + gpu, 0)))
"""
"""A command that leaves a file with its words, under the name of its GPU."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on a machine with two GPUs that imports this command."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("on_a_gpu.py").write_text(COMMAND)
    return tmp_path


def test_each_process_sees_one_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts_workers()
    assert run_on_all_gpus("on_a_gpu", ["--rows", "rt"])
    assert [(folder / gpu).read_text() for gpu in "01"] == ["--rows rt True"] * 2

    # GPUs that the user has chosen.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert run_on_all_gpus("on_a_gpu", [])
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "5", "7", "on_a_gpu.py"]


@pytest.mark.usefixtures("folder")
def test_a_process_for_one_gpu_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER, "1")
    assert is_worker()
    assert not starts_workers()


@pytest.mark.usefixtures("folder")
def test_a_failed_part_is_no_stop_but_a_stopped_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATUS_OF_0", "1")
    assert not run_on_all_gpus("on_a_gpu", [])
    monkeypatch.setenv("STATUS_OF_1", "143")
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", [])


def test_sigterm_stops_all_processes(folder: Path) -> None:
    """A scheduler may send it to the command alone."""

    def send() -> None:
        while not ((folder / "0").exists() and (folder / "1").exists()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", ["--wait"])
    thread.join()
    assert not (folder / "not stopped").exists()
    assert signal.getsignal(signal.SIGTERM) is before
