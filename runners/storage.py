"""Where studies and the files of runs live, and the locks of the processes that share them.

A process holds a lock file of its own while it lives; a running trial whose owner is gone may be taken over. The file
that a killed process leaves goes when the next one opens the same storage.
"""

import os
import uuid
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial

optuna.logging.set_verbosity(optuna.logging.WARNING)

JOURNAL_HEAD = b'{"op_code":'

"""How each record of Optuna's journal begins (``optuna.storages.journal.JournalFileBackend``)."""

SQLITE_HEAD = b"SQLite format 3\0"

"""How each SQLite database begins (https://www.sqlite.org/fileformat.html, section 1.3)."""


class Store:
    """Where studies and the files of runs live.

    Args:
        folder: results folder; models and checkpoints go below it, and with a database the locks.
        storage: an Optuna storage URL, or a path of a journal file, beside which its locks lie.

    Raises:
        ValueError: the storage cannot be opened; no folder is left behind.
    """

    def __init__(self, folder: Path, storage: str) -> None:
        self.folder = folder.resolve()
        self.is_database = "://" in storage
        self.url = storage if self.is_database else str(Path(storage).resolve())
        home = self.folder if self.is_database else Path(self.url).parent
        self._locks = home / "locks"
        made = [place for place in (self._locks, *self._locks.parents) if not place.exists()]
        self._locks.mkdir(parents=True, exist_ok=True)
        self._digest = sha256(self.url.encode()).hexdigest()[:16]
        self._owner = f"{self._digest}-{uuid.uuid4().hex}"
        self._life = FileLock(self._locks / f"{self._owner}.alive")
        try:
            with self.exclusive():
                self._life.acquire()  # in here, or another process could find the file before it is locked
                for path in self._locks.glob(f"{self._digest}-*.alive"):
                    _clear(path)
                self.storage = _open_storage(self.url)
        except ValueError:
            self.close()
            if made:
                Path(self.exclusive().lock_file).unlink(missing_ok=True)
                with suppress(OSError):  # other processes have files there
                    for place in made:
                        place.rmdir()
            raise

    def exclusive(self) -> FileLock:
        """Lock that one process holds at a time for this storage."""
        return FileLock(self._locks / f"{self._digest}.lock")

    def close(self) -> None:
        """Give up ownership; trials still running may be taken over from here on."""
        self._life.release()
        Path(self._life.lock_file).unlink(missing_ok=True)

    def own(self, trial: Trial) -> None:
        """Mark a trial as this process's."""
        trial.set_user_attr("owner", self._owner)

    def is_orphan(self, trial: FrozenTrial) -> bool:
        """Whether the process that took a running trial is gone; the caller holds ``exclusive``."""
        return _clear(self._locks / f"{trial.user_attrs.get('owner')}.alive")


def _clear(path: Path) -> bool:
    """Whether the process that a lock file is of is gone; then the file goes, too."""
    if not path.exists():
        return True
    try:
        with FileLock(path, timeout=0):
            path.unlink(missing_ok=True)
            return True
    except Timeout:
        return False


def existing_storage(storage: str) -> BaseStorage | None:
    """A storage to read from, None where there is none; nothing is written beside it, and no file made.

    Raises:
        ValueError: the storage cannot be opened.
    """
    name, _, _ = storage.removeprefix("sqlite:///").partition("?")
    if "://" not in name and not (file := Path(name)).exists():
        if storage.startswith("sqlite:") and not file.parent.is_dir():
            raise ValueError(f"cannot open storage {storage}: there is no folder {file.parent}")
        return None
    return _open_storage(storage) if "://" in storage else _read_journal(_journal_path(storage))


def _open_storage(storage: str) -> BaseStorage:
    if "://" in storage:
        try:
            return optuna.storages.get_storage(storage)
        except Exception as error:
            raise ValueError(f"cannot open storage {storage}: {error}") from error
    path = _journal_path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(path)
    return _read_journal(path)


def _journal_path(storage: str) -> Path:
    """Path of a journal that exists or can be made.

    Raises:
        ValueError: something else is there, which must not be touched.
    """
    path = Path(storage)
    if path.is_dir():
        raise ValueError(f"storage {storage} is a folder: give a file name or a URL such as sqlite:///studies.db")
    if path.exists() and not path.is_file():
        raise ValueError(
            f"storage {storage} is no regular file: name a file, or give a URL such as sqlite:///studies.db"
        )
    if path.exists():
        _check_journal(path)
    return path


def _check_journal(path: Path) -> None:
    """Raise ValueError unless a file is an Optuna journal: empty, or records one a line.

    The first record may be torn, so its start alone is compared.
    """
    with path.open("rb") as file:
        head = file.read(max(len(JOURNAL_HEAD), len(SQLITE_HEAD)))
    if head.startswith(SQLITE_HEAD):
        raise ValueError(f"storage {path} is an SQLite database: give --storage sqlite:///{path}")
    if head[: len(JOURNAL_HEAD)] != JOURNAL_HEAD[: len(head)]:
        raise ValueError(f"storage {path} is not an Optuna journal and was left as it is: name another file")


def _read_journal(path: Path) -> BaseStorage:
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError) as error:  # what Optuna makes of lines that are none of its own
        raise ValueError(f"{path} is damaged ({error}): mend it, or move it away to begin anew") from error


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that a killed process left half-written; later lines would be unreadable behind it."""
    path.touch()  # the lock is a link to it; one of a killed process, which leads nowhere, would never be given up
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()
