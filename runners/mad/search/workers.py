"""Several GPUs: a process for each but the first, all training what is missing of the same grids.

The processes share a study as separate commands do (see ``runners.search``); nothing else passes between them.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from runners.interrupt import StoppedError
from runners.mad.experiment import Experiment
from runners.mad.search.search import open_study, train_available
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.mad.training.result import CurvePoint, Result
from runners.storage import Store

SECONDS_TO_END = 5.0
"""After these a process that was told to end is killed."""


def work_off(
    experiments: Sequence[Experiment],
    grid: Sequence[Run],
    folder: Path,
    storage: str,
    together: int,
    watcher: Watcher,
    device: torch.device,
) -> None:
    """Train on ``device`` what other processes leave of each experiment's grid, and wait for none of them."""
    with closing(Store(folder, storage)) as store:
        for experiment in experiments:
            train_available(open_study(experiment, store), experiment, grid, store, device, together, watcher)


class CrewError(RuntimeError):
    """A process of the crew has failed or died."""


class Crew:
    """A ``runners.search.Watcher`` that runs ``work`` on each of ``devices``, in a silent process of its own.

    The processes start with the first ensemble that this process trains, and end with this process however it ends.

    Raises:
        CrewError: one of them has failed; raised at whatever is watched next.
        torch.OutOfMemoryError: its GPU had too little memory; raised likewise.
    """

    def __init__(self, devices: Sequence[torch.device], work: Callable[[torch.device], None]) -> None:
        self.devices, self.work = devices, work
        self._processes: list[BaseProcess] = []
        self._errors, self._error_sink = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all have done their work; end them where this process failed or was interrupted."""
        if kind is None:
            for process in self._processes:
                process.join()
            self._check()
            return
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int) -> None:
        """Start the processes, or look after them."""
        if self.devices and not self._processes:
            self._start()
        self._check()

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
        """Look after the processes."""
        self._check()

    def progressed(self, step: int) -> None:
        """Look after the processes."""
        self._check()

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None:
        """Look after the processes."""
        self._check()

    def finished(self, results: Sequence[Result]) -> None:
        """Look after the processes."""
        self._check()

    def waiting(self, trials: int) -> None:
        """Look after the processes."""
        self._check()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Ctrl-C goes to all processes of a terminal. Those started here ignore it, for this one ends them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for device in self.devices:
                arguments = (self.work, device, self._error_sink)
                process = context.Process(target=_run, args=arguments, name=str(device), daemon=True)
                process.start()
                self._processes.append(process)
        finally:
            signal.signal(signal.SIGINT, handler)

    def _check(self) -> None:
        dead = [process for process in self._processes if process.exitcode]  # first, for an error is sent before
        if self._errors.poll():
            kind, message = self._errors.recv()
            raise kind(message)
        if dead:
            raise CrewError(f"{dead[0].name}: its process ended with exit code {dead[0].exitcode}")


def _run(work: Callable[[torch.device], None], device: torch.device, errors: Connection) -> None:
    """One process of a crew."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work(device)
        except StoppedError as stopped:
            sys.exit(stopped.status)
        except Exception as error:
            kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else CrewError
            # cut to a length that a pipe takes in one piece: several may write, and nobody may be reading
            errors.send((kind, f"{device}: {type(error).__name__}: {error}"[:1000]))
            sys.exit(1)


def _end_with_parent() -> None:
    """End this process, in good order if it can, when its parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
