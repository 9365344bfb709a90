"""Orderly stops: the first SIGINT or SIGTERM asks a training to stop, a later Ctrl-C interrupts it at once.

Programs import this file before anything else, so it imports nothing that is slow.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as in shells."""
SECONDS_OF_ONE_REQUEST = 2.0
"""A SIGINT within this time repeats the first: launchers pass theirs on to processes that the terminal reached, too."""


class StoppedError(RuntimeError):
    """Training was asked to stop and has saved its state.

    Attributes:
        status: exit status of the command.
    """

    def __init__(self, step: int, asked: Sequence[int]) -> None:
        super().__init__(f"stopped after step {step}: the same command resumes from there")
        self.status = INTERRUPTED if signal.SIGINT in asked else 128 + signal.SIGTERM


def end_at_once() -> None:
    """Let Ctrl-C end the process without a traceback, until ``heed_interrupts``.

    A program calls this before its other imports. These take seconds, and some libraries turn a KeyboardInterrupt
    into another error or drop it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_parent() -> None:
    """End this process when the one that has started it through ``multiprocessing`` ends, however that ends."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


def heed_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again; a signal that is ignored stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Yield a list to which each SIGINT (Ctrl-C) or SIGTERM is appended; a signal that is ignored stays ignored.

    SIGTERM never interrupts, because schedulers and launchers send it more than once. A second SIGINT that comes
    ``SECONDS_OF_ONE_REQUEST`` after the first signal raises KeyboardInterrupt. Outside the main thread, which alone
    gets signals, the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first: list[float] = []

    def handler(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first.append(now)
        if number == signal.SIGINT and number in asked and now - first[0] > SECONDS_OF_ONE_REQUEST:
            raise KeyboardInterrupt
        asked.append(number)

    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield asked
    finally:
        for number, former in before.items():
            signal.signal(number, former)
