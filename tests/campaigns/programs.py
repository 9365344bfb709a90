"""Programs in processes of their own that can be killed, and what must hold of how they end.

A *fresh* process starts Python. A *forked* one begins after the imports, which lets a campaign try ten times as much.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from tests.runners.processes import PRELOADED

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
MAINS = {"mad": "runners.mad.__main__", "c4": "runners.c4.__main__"}
"""The module that holds the function ``main`` of each program."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended.

    Attributes:
        status: exit status; that of a killed process is the signal's number below zero.
        out: standard output.
        err: standard error.
    """

    status: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line that was printed."""
        return (self.err or self.out).strip().rpartition("\n")[2][:300]


@dataclass(kw_only=True)
class Started:
    """A process under way.

    Attributes:
        pid: its number.
        folder: its working directory, which also takes what it prints.
        name: of the files with what it prints.
    """

    pid: int
    folder: Path
    name: str
    _wait: Callable[[float | None], int | None] = field(repr=False)

    def end(self, patience: float = 600.0) -> End | None:
        """Wait for its end; return None if it still runs after ``patience`` seconds."""
        status = self._wait(patience)
        if status is None:
            return None
        out, err = ((self.folder / f"{self.name}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
        return End(status=status, out=out, err=err)

    def kill(self) -> None:
        """Kill it and all processes that it has started, and wait for its end."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait(None)

    def family(self) -> list[int]:
        """Return the numbers of the process and of those that it has started."""
        found = [self.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    def catches(self, number: int) -> bool:
        """Return whether it has a handler for a signal."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def fork(program: str, arguments: Sequence[str], folder: Path, name: str = "forked") -> Started:
    """Start a program in a fork of a process that has imported it."""
    process = _forks().Process(target=_run, args=(program, list(arguments), str(folder), name), daemon=True)
    for kind in ("out", "err"):
        (folder / f"{name}.{kind}").write_bytes(b"")
    process.start()
    assert process.pid is not None

    def wait(patience: float | None) -> int | None:
        process.join(patience)
        return process.exitcode

    return Started(pid=process.pid, folder=folder, name=name, _wait=wait)


def spawn(command: Sequence[str], folder: Path, name: str = "fresh") -> Started:
    """Start a command, in which ``python`` stands for this interpreter, in a fresh process."""
    words = [sys.executable if word == "python" else word for word in command]
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=err, env={**os.environ, **ENVIRONMENT})

    def wait(patience: float | None) -> int | None:
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    return Started(pid=process.pid, folder=folder, name=name, _wait=wait)


def fault(end: End, allowed: Sequence[int]) -> str | None:
    """Return what is wrong with an end: a traceback, or a status that is not allowed."""
    if "Traceback (most recent call last)" in end.err:
        return f"traceback: {end.last}"
    return None if end.status in allowed else f"status {end.status}: {end.last}"


def _forks() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forks of one that has imported all programs."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED, "runners.mad.diagnosis.diagnose"])
    return context


def _run(program: str, arguments: list[str], folder: str, name: str) -> None:
    """Body of a forked process."""
    from runners.ending import run_command
    from runners.interrupt import end_at_once

    os.chdir(folder)
    os.setsid()
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY), number)

    sys.argv = [program, *arguments]
    end_at_once()
    run_command(import_module(MAINS[program]).main, "interrupted")
