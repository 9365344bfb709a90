"""Processes that work for another one."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from runners.processes import mapped
from tests.runners.processes import forks, wait_for

HELD: list[FileLock] = []


def hold_lock(folder: Path) -> None:
    """Hold a lock, named after this process, as long as it lives."""
    lock = FileLock(folder / str(os.getpid()))
    lock.acquire()
    HELD.append(lock)


def work_without_end(folder: Path) -> None:
    with mapped(time.sleep, [0.05] * 10**5, processes=2, prepare=partial(hold_lock, folder)):
        time.sleep(600)


def lives(lock: Path) -> bool:
    """Whether the holder of a lock lives; a process that nobody has waited for yet does not."""
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def test_results_come_in_order_from_other_processes() -> None:
    with mapped(divmod, [7, 8, 9], [2, 3, 4], processes=2, chunk=2) as results:
        assert list(results) == [(3, 1), (2, 2), (2, 1)]


def test_processes_leave_an_interrupt_to_their_parent_and_end_with_it_also_if_it_is_killed(tmp_path: Path) -> None:
    parent = forks().Process(target=work_without_end, args=(tmp_path,))
    parent.start()
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    locks = list(tmp_path.iterdir())
    wait_for(lambda: all(map(lives, locks)))
    for lock in locks:
        os.kill(int(lock.name), signal.SIGINT)
    time.sleep(0.2)
    assert all(map(lives, locks))

    parent.kill()
    parent.join()
    wait_for(lambda: not any(map(lives, locks)))
