"""One process per GPU: a command runs itself once per GPU, and these processes divide its work among themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

WORKER = "RUNNERS_WORKER"
"""Set in the environment of the processes that a command starts, one per GPU."""


def is_worker() -> bool:
    """Return whether a command has started this process for one GPU."""
    return WORKER in os.environ


def starts_workers() -> bool:
    """Return whether this process is to start workers: the user has started it, and PyTorch sees several GPUs."""
    return torch.cuda.device_count() > 1 and not is_worker()


def run_on_all_gpus(module: str, arguments: Sequence[str]) -> bool:
    """Run a command once per GPU; each process sees only its own. Return whether all did the whole of their work.

    Args:
        module: module of the command, which ends with status 1 if a part of its work failed and the rest is done.
        arguments: words after its name.

    Raises:
        SystemExit: this process got SIGTERM, or another one was stopped or ended with another status; the exit has the
            status.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    command = [sys.executable, "-m", module, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    with _stopped_by_sigterm():
        try:
            for gpu in visible:
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, WORKER: "1"}
                processes.append(subprocess.Popen(command, env=environment))
            statuses = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()  # each saves its state and prints that it did

    if ended := [status for status in statuses if status not in (0, 1)]:
        raise SystemExit(ended[0])
    return not any(statuses)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let the first SIGTERM raise SystemExit, so that the processes that were started are stopped as well."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, lambda *_: None)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
