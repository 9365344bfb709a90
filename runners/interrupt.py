"""Stopping in good order: a first SIGINT or SIGTERM is a wish, a later Ctrl-C does what it does elsewhere."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells have it."""
SECONDS_OF_ONE_WISH = 3.0
"""Within so many a SIGINT repeats the first: launchers hand theirs on to processes that had it from the terminal."""


class StoppedError(RuntimeError):
    """Training was asked to stop and has saved its state.

    Attributes:
        status: what the command is to end with.
    """

    def __init__(self, step: int, asked: Sequence[int]) -> None:
        super().__init__(f"stopped after step {step}: the same command goes on from there")
        self.status = INTERRUPTED if signal.SIGINT in asked else 128 + signal.SIGTERM


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that holds the signals once SIGINT (Ctrl-C) or SIGTERM has come; one that is ignored stays so.

    SIGTERM is heeded to the end, for schedulers and launchers send it more than once. A second Ctrl-C is not held up.
    """
    asked: list[int] = []
    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    first = 0.0

    with ExitStack() as before:

        def handler(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if number == signal.SIGINT and number in asked and time.monotonic() - first > SECONDS_OF_ONE_WISH:
                before.close()
                signal.raise_signal(number)
            first = first or time.monotonic()
            asked.append(number)

        for heed in heeded:
            before.callback(signal.signal, heed, signal.signal(heed, handler))
        yield asked
