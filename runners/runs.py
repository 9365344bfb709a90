"""The folder of a run: who trains it, and whether it is finished.

The folders are the truth about what is trained. A run is finished once its folder holds a record
(``runners.records``). A process claims a run by a lock on a file in its folder. The system releases the lock when the
process ends, however it ends, so that another command takes the run over from its checkpoint.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from runners.files import clear_leftovers
from runners.records import RECORD

LOCK = ".lock"
"""Name of the file that a process locks while it trains the run of a folder."""


def is_finished(folder: Path) -> bool:
    """Return whether a run is finished."""
    return (folder / RECORD).exists()


@contextmanager
def claimed(folders: Sequence[Path], most: int = 1) -> Iterator[list[Path]]:
    """Claim unfinished runs that no other process trains, until the end of the context.

    Temporary files that a killed process has left in them are deleted.

    Args:
        folders: folders of runs, which need not exist.
        most: largest number of runs to claim.

    Yields:
        The folders of the claimed runs, in the given order.
    """
    mine: list[Path] = []
    with ExitStack() as locks:
        for folder in folders:
            if len(mine) == most:
                break
            if is_finished(folder):
                continue

            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                continue

            # Another process may have finished the run since.
            if is_finished(folder):
                lock.release()
                continue
            locks.callback(lock.release)
            clear_leftovers(folder)
            mine.append(folder)
        yield mine
