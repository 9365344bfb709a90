"""Processes that work for another one."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from runners.processes import mapped
from tests.runners.processes import forks, wait_for


def write_own_number(folder: Path, _: int) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(0.05)


def work_without_end(folder: Path) -> None:
    with mapped(partial(write_own_number, folder), range(10**6), processes=2):
        time.sleep(60)


def lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_order_from_other_processes() -> None:
    with mapped(divmod, [7, 8, 9], [2, 3, 4], processes=2, chunk=2) as results:
        assert list(results) == [(3, 1), (2, 2), (2, 1)]


def test_processes_leave_an_interrupt_to_their_parent_and_end_with_it_also_if_it_is_killed(tmp_path: Path) -> None:
    parent = forks().Process(target=work_without_end, args=(tmp_path,))
    parent.start()
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    children = [int(name) for name in os.listdir(tmp_path)]
    for child in children:
        os.kill(child, signal.SIGINT)
    time.sleep(0.2)
    assert all(map(lives, children))

    parent.kill()
    parent.join()
    wait_for(lambda: not any(map(lives, children)))
