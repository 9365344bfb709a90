"""One process per GPU: a command runs itself once per GPU, and these processes divide its work among themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import torch

WORKER = "RUNNERS_WORKER"
"""Environment variable of the processes that a command starts: when it began, as ``time.monotonic`` tells it."""


def is_worker() -> bool:
    """Return whether a command has started this process for one GPU."""
    return WORKER in os.environ


def starts_workers() -> bool:
    """Return whether this process is to start workers: the user has started it, and PyTorch sees several GPUs."""
    return torch.cuda.device_count() > 1 and not is_worker()


def beginning() -> float:
    """Return when the user's command began: for a worker, when the command that started it did; else now."""
    return float(os.environ.get(WORKER, monotonic()))


def run_on_all_gpus(module: str, arguments: Sequence[str], began: float) -> bool:
    """Run a command once per GPU; each process sees only its own. Return whether all did the whole of their work.

    The processes share the CPU's cores, unless OMP_NUM_THREADS is set: with a thread per core each, they would wait for
    each other's threads. A process that the system ended, for lack of memory for example, is one line; the others do
    its work.

    Args:
        module: module of the command, which ends with status 1 if a part of its work failed and the rest is done.
        arguments: words after its name.
        began: when the command began.

    Raises:
        SystemExit: this process got SIGTERM, or another one was stopped or ended with another status; the exit has the
            status.
    """
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    threads = max(1, _cores() // count)
    command = [sys.executable, "-m", module, *arguments]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with _Sigterm() as sigterm:
        try:
            for gpu in visible:
                own = {"CUDA_VISIBLE_DEVICES": gpu, WORKER: str(began)}
                environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **own}
                processes[gpu] = subprocess.Popen(command, env=environment)
            with sigterm.raised():
                statuses = {gpu: process.wait() for gpu, process in processes.items()}
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait()  # each saves its state and prints that it did

    for gpu, status in statuses.items():
        if status < 0:
            name = signal.Signals(-status).name
            print(f"the process of GPU {gpu} was ended by {name}: give the same command again", file=sys.stderr)
    if ended := [status for status in statuses.values() if status > 1]:
        raise SystemExit(ended[0])
    return not any(statuses.values())


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Sigterm:
    """Turns SIGTERM into SystemExit while processes are waited for; before and after, it waits.

    An exception while a process starts would lose the process, and one while they end would leave them alone.
    """

    def __init__(self) -> None:
        self._asked = self._raises = False

    def __enter__(self) -> "_Sigterm":
        self._before = signal.getsignal(signal.SIGTERM)
        if self._before is not signal.SIG_IGN:  # an ignored signal stays ignored
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise SystemExit at the first SIGTERM, also at one from before."""
        self._raises = True
        try:
            if self._asked:
                self._stop()
            yield
        finally:
            self._raises = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._raises:
            self._stop()

    def _stop(self) -> None:
        self._raises = False
        raise SystemExit(128 + signal.SIGTERM)
