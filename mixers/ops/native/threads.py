"""Threads that share the calls of a library. Python threads suffice, because ctypes releases the GIL during a call."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Part = TypeVar("Part")


def workers_for(parts: int) -> int:
    """Return the number of threads for ``parts`` parts of work: as many as PyTorch uses, at most one per part."""
    return max(1, min(torch.get_num_threads(), parts))


def share_among_threads(parts: Sequence[Part], work: Callable[[int, Part], None]) -> None:
    """Call ``work(worker, part)`` for all parts, and return when all calls have returned.

    There are ``workers_for(len(parts))`` workers, one thread each. A worker takes the next part until none is left.
    """
    waiting = iter(parts)

    def run(worker: int) -> None:
        for part in waiting:
            work(worker, part)

    others = [threading.Thread(target=run, args=(worker,)) for worker in range(1, workers_for(len(parts)))]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
