"""Stopping in good order: a first SIGINT or SIGTERM is a wish, a second one does what it does elsewhere."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


class StoppedError(RuntimeError):
    """Training was asked to stop and has saved its state.

    Attributes:
        status: what the command is to end with.
    """

    def __init__(self, step: int, asked: Sequence[int]) -> None:
        super().__init__(f"stopped after step {step}: the same command goes on from there")
        self.status = INTERRUPTED if signal.SIGINT in asked else 1


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that holds the signal once SIGINT (Ctrl-C) or SIGTERM has come; one that is ignored stays so."""
    asked: list[int] = []
    heeded = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]

    with ExitStack() as before:

        def handler(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            before.close()

        for heed in heeded:
            before.callback(signal.signal, heed, signal.signal(heed, handler))
        yield asked
