"""Processes that work for this one: they leave Ctrl-C to it, and end when it ends, however that happens."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

SECONDS_TO_END = 5.0
"""A process that was told to end is killed after this time."""

Result = TypeVar("Result")


@contextmanager
def mapped(
    work: Callable[..., Result],
    *arguments: Iterable[Any],
    processes: int | None = None,
    chunk: int = 1,
    prepare: Callable[[], object] | None = None,
) -> Iterator[Iterator[Result]]:
    """Give an iterator over the results of ``work``, in order, which several processes compute meanwhile.

    Args:
        work: function that can be pickled.
        arguments: for each argument of ``work``, its values.
        processes: number of processes, one per core unless given.
        chunk: number of calls that a process takes at a time.
        prepare: function that each process calls first; it can be pickled.

    Raises:
        BrokenProcessPool: the system ended a process, for example for lack of memory.
    """
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (prepare,))
    try:
        with deaf_to_interrupts():
            results = pool.map(work, *arguments, chunksize=chunk)
        yield results
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(prepare: Callable[[], object] | None) -> None:
    """Begin a process of a pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Let processes that are started meanwhile ignore Ctrl-C, which a terminal sends to all: this process ends them."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread alone
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_with_parent() -> None:
    """End this process, in good order if it can, when its parent has exited."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
