"""Orderly stops: the first SIGINT or SIGTERM asks the program to stop, a later Ctrl-C interrupts it at once.

Programs import this file before anything else, so it imports nothing that is slow.
"""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as in shells."""
SECONDS_OF_ONE_REQUEST = 2.0
"""A SIGINT within this time repeats the first: launchers pass theirs on to processes that the terminal reached, too."""
SECONDS_TO_LEAVE = 1.0
"""A process that was interrupted, and still waits for the end of a call after this time, is ended."""
HELD_UP = "finishing the step under way, then saving: Ctrl-C again leaves at once"
"""Said if training has not stopped ``SECONDS_OF_ONE_REQUEST`` after Ctrl-C."""
PIECE = 64
"""Bytes that are read from a pipe at a time."""
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_STOPPED = b"\0"
"""Written to the pipe of signals in place of a signal's number."""


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
    for number in _STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)

    # Python drops its handlers while it shuts down. A signal would then kill a program that has done its work. The
    # function that is registered first is called last.
    atexit.register(_ignore)


def heed_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt after ``end_at_once``, once; SIGTERM still ends the process with one line.

    A repeat is dropped, so that it does not break off what cleans up. A later Ctrl-C ends the process.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _interrupt)


def keep_status(status: int) -> None:
    """Let SIGINT and SIGTERM end the process with ``status`` and no word; what the program had to say is said."""
    # CPython notes a KeyboardInterrupt that leaves the ``exec`` of a text, which makes each dataclass, and then ends
    # with SIGINT in place of its status, though the interrupt was handled. The next such ``exec`` clears the note.
    exec("")

    for number in _STOPPING:
        if signal.getsignal(number) in (_end, _interrupt):
            signal.signal(number, lambda *_: os._exit(status))


class _Request:
    """When this process was asked to stop.

    Attributes:
        first: clock time of the first signal; None before.
    """

    first: float | None = None

    def enter(self) -> bool:
        """Enter a signal; return whether it belongs to the first one."""
        now = time.monotonic()
        self.first = now if self.first is None else self.first
        return now - self.first <= SECONDS_OF_ONE_REQUEST


_request = _Request()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"ended by {signal.Signals(number).name}: run the same command again\n".encode())
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    is_first = _request.first is None
    repeats = _request.enter()
    if is_first:
        raise KeyboardInterrupt
    if not repeats:
        _end(number, frame)


def _ignore() -> None:
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def asked_to_stop(speaks: bool = True) -> Iterator[list[int]]:
    """Yield a list to which each SIGINT (Ctrl-C) or SIGTERM is appended; a signal that is ignored stays ignored.

    SIGTERM never interrupts, because schedulers and launchers send it more than once. A SIGINT that comes
    ``SECONDS_OF_ONE_REQUEST`` after the first signal, and is not the first SIGINT, restores the former handlers and is
    raised again. Before that, ``HELD_UP`` tells the user of this way out.

    Python runs handlers between calls, and one call may take minutes. So a thread says the line, and ends the process
    if the second Ctrl-C does not get through. Outside the main thread, which alone gets signals, the list stays empty.

    Args:
        speaks: whether this process says the line.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    heeded = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    _request.first = None

    with _attended(speaks), ExitStack() as before:

        def handler(number: int, frame: FrameType | None) -> None:
            # A repeated Ctrl-C has the effect that it had before.
            repeats = _request.enter()
            if number == signal.SIGINT and number in asked and not repeats:
                before.close()
                _request.first = None
                signal.raise_signal(number)
            asked.append(number)

        for heed in heeded:
            before.callback(signal.signal, heed, signal.signal(heed, handler))
        yield asked


@contextmanager
def _attended(speaks: bool) -> Iterator[None]:
    """Attend to SIGINT in a thread, which reads it from a pipe that Python writes signals to at once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_attend, args=(reader, speaks), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.write(writer, _STOPPED)
        thread.join()
        os.close(writer)
        os.close(reader)


def _attend(reader: int, speaks: bool) -> None:
    """Say ``HELD_UP`` some time after a first SIGINT; end the process some time after a second one."""
    if not _awaits_interrupt(reader) or _stops_within(SECONDS_OF_ONE_REQUEST, reader):
        return
    if speaks:
        print(HELD_UP, file=sys.stderr, flush=True)
    if _awaits_interrupt(reader) and not _stops_within(SECONDS_TO_LEAVE, reader):
        _end(signal.SIGINT, None)


def _awaits_interrupt(reader: int) -> bool:
    """Return True at the next SIGINT, False if training has stopped."""
    while _STOPPED not in (numbers := os.read(reader, PIECE)):
        if signal.SIGINT in numbers:
            return True
    return False


def _stops_within(seconds: float, reader: int) -> bool:
    """Return True when training has stopped, False if it has not after some seconds."""
    deadline = time.monotonic() + seconds
    while select.select([reader], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        if _STOPPED in os.read(reader, PIECE):
            return True
    return False
