"""Commands that run themselves once per GPU."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from runners.gpus import WORKER, run_on_all_gpus, starts_workers
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)))
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", WORKER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("on_a_gpu.py").write_text(COMMAND)
    return tmp_path


def test_each_process_sees_one_gpu_and_has_its_share_of_the_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts_workers()
    assert run_on_all_gpus("on_a_gpu", ["--rows", "rt"])
    assert [(folder / gpu).read_text() for gpu in "01"] == ["--rows rt 0 4", "--rows rt 1 4"]

    # GPUs that the user has chosen; CUDA reads no further than the first that there is not.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,-1,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_on_all_gpus("on_a_gpu", [])
    assert {path.name for path in folder.iterdir()} & {"5", "7", "-1", "3"} == {"5", "7"}
    assert (folder / "7").read_text() == "7 3"

    monkeypatch.setenv(WORKER, "0")
    assert not starts_workers()


@pytest.mark.usefixtures("folder")
def test_a_failed_part_is_no_stop_but_a_stopped_process_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS_OF_0", "1")
    assert not run_on_all_gpus("on_a_gpu", [])
    monkeypatch.setenv("STATUS_OF_1", "-9")
    assert not run_on_all_gpus("on_a_gpu", [])
    assert capsys.readouterr().err == "the process of GPU 1 was ended by signal 9: give the same command again\n"
    monkeypatch.setenv("STATUS_OF_1", "143")
    with pytest.raises(SystemExit, match="143"):
        run_on_all_gpus("on_a_gpu", [])


def test_sigterm_stops_all_processes(folder: Path) -> None:
    """A scheduler may send it to the command alone."""

    def send() -> None:
        wait_for(lambda: (folder / "0").exists() and (folder / "1").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    assert not run_on_all_gpus("on_a_gpu", ["--wait"])
    thread.join()
    assert not (folder / "not stopped").exists()
    assert signal.getsignal(signal.SIGTERM) is before
