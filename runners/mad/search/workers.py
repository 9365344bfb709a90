"""Several GPUs: a process for each but the first; all train what is missing of the same grids.

The processes share a study as separate commands do (``runners.mad.search.search``); nothing else passes between them.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from runners.interrupt import StoppedError
from runners.mad.experiment import Experiment
from runners.mad.search.search import Searcher
from runners.mad.search.watch import Watcher
from runners.mad.training.protocol import Run
from runners.memory import ran_out_of_memory
from runners.processes import SECONDS_TO_END, deaf_to_interrupts, end_with_parent
from runners.storage import Store

LONGEST_MESSAGE = 1000
"""Bytes that a pipe takes in one piece; several processes may write, and nobody may be reading."""


def train_elsewhere(
    experiments: Sequence[tuple[Experiment, str]],
    grid: Sequence[Run],
    folder: Path,
    storage: str,
    together: int,
    watcher: Watcher,
    device: torch.device,
) -> None:
    """Train on ``device`` what other processes leave of each experiment's grid, and wait for none of them.

    Each experiment comes with the hash of its code in the process that began, which imported it earlier.

    Raises:
        WorkerError: the code was edited in between, or a value in it is another in this process.
    """
    with closing(Store(folder, storage)) as store:
        searcher = Searcher(store=store, device=device, together=together, watcher=watcher)
        for experiment, code in experiments:
            if experiment.code != code:
                raise WorkerError(
                    f"the code of {experiment.mixer} or {experiment.task} is another in the process of {device}: it "
                    "was edited while the command began, or a value in it was changed after its import: start again"
                )
            searcher.train_available(experiment, grid)
            watcher.close()


class WorkerError(RuntimeError):
    """A worker process has failed or died."""


class Workers:
    """Silent processes that run ``work`` on each of ``devices``; they end with this process however it ends."""

    def __init__(self, devices: Sequence[torch.device], work: Callable[[torch.device], None]) -> None:
        self.devices, self.work = devices, work
        self._processes: list[BaseProcess] = []
        self._errors, self._error_sink = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all have done their work; end them if this process failed or was interrupted."""
        if kind is None:
            for process in self._processes:
                process.join()
            self.check()
            return

        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()

    def start(self) -> None:
        """Start the processes, once."""
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        with deaf_to_interrupts():
            for device in self.devices:
                arguments = (self.work, device, self._error_sink)
                process = context.Process(target=_run, args=arguments, name=str(device), daemon=True)
                process.start()
                self._processes.append(process)

    def check(self) -> None:
        """Look after the processes.

        Raises:
            WorkerError: one of them has failed.
            torch.OutOfMemoryError: its GPU had too little memory.
        """
        dead = [process for process in self._processes if process.exitcode]  # first: an error is sent before an exit
        if self._errors.poll():
            kind, message = self._errors.recv()
            raise kind(message)
        if dead:
            raise WorkerError(f"{dead[0].name}: its process ended with exit code {dead[0].exitcode}")


def _run(work: Callable[[torch.device], None], device: torch.device, errors: Connection) -> None:
    """Body of a worker process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=end_with_parent, daemon=True).start()

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work(device)
        except StoppedError as stopped:
            sys.exit(stopped.status)
        except Exception as error:
            kind = torch.OutOfMemoryError if ran_out_of_memory(error) else WorkerError
            errors.send((kind, f"{device}: {type(error).__name__}: {error}"[:LONGEST_MESSAGE]))
            sys.exit(1)
