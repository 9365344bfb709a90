"""Orderly stops: the first SIGINT or SIGTERM asks the program to stop, a later Ctrl-C interrupts it at once.

Programs import this file before anything else, so it imports nothing that is slow.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as in shells."""
SECONDS_OF_ONE_REQUEST = 3.0
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
    """Let SIGINT and SIGTERM end the process with one line, until ``heed_interrupts``; ignored signals stay ignored.

    A program calls this before its other imports. These take seconds, and some libraries turn a KeyboardInterrupt
    into another error or drop it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def heed_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt again after ``end_at_once``; SIGTERM still ends the process with one line."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"ended by {signal.Signals(number).name}: run the same command again\n".encode())
    os._exit(128 + number)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Yield a list to which each SIGINT (Ctrl-C) or SIGTERM is appended; a signal that is ignored stays ignored.

    SIGTERM never interrupts, because schedulers and launchers send it more than once. A SIGINT that comes
    ``SECONDS_OF_ONE_REQUEST`` after the first signal, and is not the first SIGINT, restores the former handlers and is
    raised again.
    """
    asked: list[int] = []
    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    first = 0.0

    with ExitStack() as before:

        def handler(number: int, frame: FrameType | None) -> None:
            # A repeated Ctrl-C has the effect that it had before.
            nonlocal first
            repeated = number == signal.SIGINT and number in asked
            if repeated and time.monotonic() - first > SECONDS_OF_ONE_REQUEST:
                before.close()
                signal.raise_signal(number)

            first = first or time.monotonic()
            asked.append(number)

        for heed in heeded:
            before.callback(signal.signal, heed, signal.signal(heed, handler))
        yield asked
