"""The Optuna storage that processes share, and how they claim trials without getting in one another's way.

A process holds a lock file of its own while it lives. A running trial belongs to the process whose lock it names; when
that process has exited, another one may take the trial over. The next process that opens a storage in the same folder
deletes the lock files of processes that were killed.
"""

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from runners.cli import unwritable
from runners.files import DamagedFileError, write_atomically
from runners.journal import JOURNAL_HEAD, Journal

optuna.logging.set_verbosity(optuna.logging.WARNING)

IDENTITY = "folder.id"
"""File in a results folder with its identity. It moves with the folder, and tells folders of one path apart."""
SQLITE_HEAD = b"SQLite format 3\0"
"""How each SQLite database begins (https://www.sqlite.org/fileformat.html, section 1.3)."""
LONGEST_JOURNAL = 255 - len(".lock" + str(uuid.UUID(int=0)) + ".rename")
"""Bytes of a journal's name; Optuna appends these endings for its lock, and file systems take 255."""


class Store:
    """An open storage, a results folder, and this process's lock.

    Attributes:
        folder: results folder, absolute.
        url: Optuna storage URL, or absolute path of a journal file.
        is_database: whether ``url`` is a URL.
        storage: the open storage.

    Raises:
        ValueError: the storage cannot be opened; no folder is left behind.
    """

    def __init__(self, folder: Path, storage: str) -> None:
        self.folder = Path(os.path.realpath(folder))  # unlike ``resolve``, leaves a loop of links to what follows
        self.is_database = is_url(storage)
        self.url = storage if self.is_database else os.path.realpath(storage)
        self._locks = (self.folder if self.is_database else Path(self.url).parent) / "locks"
        self._digest = sha256(self.url.encode()).hexdigest()[:16]
        self._owner = f"{self._digest}-{uuid.uuid4().hex}"
        self._life = FileLock(self._locks / f"{self._owner}.alive")

        made = [place for place in (self._locks, *self._locks.parents) if not place.exists()]
        self._locks.mkdir(parents=True, exist_ok=True)
        try:
            with self.exclusive():
                # Inside the lock, or another process could delete the file before it is locked.
                self._life.acquire()
                self._delete_leftovers()
                self.storage = _open_storage(self.url)
        except ValueError:
            self.close()
            if made:
                Path(self.exclusive().lock_file).unlink(missing_ok=True)
                with suppress(OSError):  # other processes may have files there
                    for place in made:
                        place.rmdir()
            raise

    def exclusive(self) -> FileLock:
        """Lock that one process at a time holds for this storage."""
        return FileLock(self._locks / f"{self._digest}.lock")

    @cached_property
    def identity(self) -> str:
        """Identity of the results folder, made at its first use; machines that share the folder read the same."""
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "locks" / "folder.lock"):
            if (known := identity_of(self.folder)) is not None:
                return known
            made = uuid.uuid4().hex
            write_atomically(self.folder / IDENTITY, lambda temporary: temporary.write_text(f"{made}\n"))
            return made

    def _delete_leftovers(self) -> None:
        """Delete the lock files of processes that were killed; this process holds the storage's lock."""
        for path in self._locks.glob("*.alive"):
            digest = path.name.partition("-")[0]
            if digest == self._digest:
                _delete_if_exited(path)
                continue

            # A process of another storage may be making its file: it holds that storage's lock.
            with suppress(Timeout), FileLock(self._locks / f"{digest}.lock", timeout=0):
                _delete_if_exited(path)

    def close(self) -> None:
        """Give up ownership; from here on other processes may take over trials that still run."""
        self._life.release()
        Path(self._life.lock_file).unlink(missing_ok=True)

    def end_queued(self, known: Iterable[FrozenTrial]) -> None:
        """End the trials that a process queued, and was killed before it could run them.

        The caller holds ``exclusive``, and calls this once before it claims trials.
        """
        for trial in known:
            if trial.state == TrialState.WAITING:
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def claim(self, study: optuna.Study, params: Mapping[str, Any], known: Iterable[FrozenTrial]) -> Trial:
        """Take over the trial with these parameters that a killed process left, or begin a new one.

        The caller holds ``exclusive``, and has made sure that no living process runs such a trial.

        Args:
            study: the study of the trial.
            params: values of all parameters.
            known: the study's trials as read under the lock.
        """
        left = (t for t in known if t.state == TrialState.RUNNING and params_of(t) == params and self.is_orphan(t))
        if (orphan := next(left, None)) is not None:
            mine = Trial(study, orphan._trial_id)
        else:
            study.enqueue_trial(dict(params))
            mine = study.ask()
        mine.set_user_attr("owner", self._owner)
        return mine

    def is_orphan(self, trial: FrozenTrial) -> bool:
        """Return whether the process that runs a trial has exited; the caller holds ``exclusive``."""
        return _delete_if_exited(self._locks / f"{trial.user_attrs.get('owner')}.alive")


def is_url(storage: str) -> bool:
    """Return whether a storage is an Optuna storage URL, complete or not; else it is the path of a journal file."""
    return "://" in storage or storage.startswith("sqlite:")


@contextmanager
def explaining_database(storage: str) -> Iterator[None]:
    """Name the storage, and what its database says, in place of Optuna's error, which only says that there is a cause.

    Args:
        storage: Optuna storage URL, or path of a journal file.

    Raises:
        ValueError: the database has failed.
    """
    try:
        yield
    except StorageInternalError as error:
        reason = getattr(error.__cause__, "orig", error.__cause__)  # what the driver says, without the query
        raise ValueError(
            " ".join(f"storage {storage}: {reason}: repair the database, or name another storage".split())
        ) from error


def identity_of(folder: Path) -> str | None:
    """Return the identity of a results folder; None if it has none yet. Nothing is written."""
    path = folder / IDENTITY
    return path.read_text().strip() if path.exists() else None


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """Parameters of a trial, also while Optuna is still writing them one by one."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def check_writable(storage: str, out: Path) -> None:
    """Check that a storage in a file can be written; a database of another kind says so when it is opened.

    Nothing is made.

    Args:
        storage: Optuna storage URL, or path of a journal file.
        out: results folder.

    Raises:
        ValueError: the file takes no data, or its folder takes no files: locks, or the files of SQLite, lie there. Or
            the results folder would have to lie in the file. Or the URL is not complete, or names no file.
    """
    if (file := _file_of(storage)) is None:
        return
    file = Path(os.path.realpath(file))
    if not file.exists() and Path(os.path.realpath(out)).is_relative_to(file):
        raise ValueError(f"storage {storage} stands where the results folder {out} is to be: name another file")
    reason = unwritable(file.parent)
    if reason is None and file.exists() and not os.access(file, os.W_OK):
        reason = "nothing can be written into it (Permission denied)"
    if reason is not None:
        raise ValueError(f"storage {storage}: {reason}: name another")


def _file_of(storage: str) -> Path | None:
    """Return the file of a journal or of an SQLite database; None if the storage is another database.

    Raises:
        ValueError: the storage is no complete URL, or a database in memory, which would end with the process.
    """
    if not is_url(storage):
        return Path(storage)

    from sqlalchemy.engine import make_url  # takes half a second to import
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(storage)
    except (ArgumentError, ValueError) as error:
        raise ValueError(
            f"cannot open storage {storage}: {error}: give a URL such as sqlite:///studies.db, or the path of a journal"
        ) from error
    if url.get_backend_name() != "sqlite" or url.host:
        return None
    if url.database in (None, "", ":memory:", "file::memory:") or url.query.get("mode") == "memory":
        raise ValueError(
            f"storage {storage} is in memory, where its studies would be lost: name a file, such as sqlite:///studies.db"
        )

    # SQLite takes a name that begins with "file:" for a URI (https://www.sqlite.org/uri.html, section 3).
    is_uri = url.database.startswith("file:") and "uri" in url.query
    return Path(unquote(urlsplit(url.database).path) if is_uri else url.database)


def existing_storage(storage: str) -> BaseStorage | None:
    """A storage to read from, None where there is none; nothing is written.

    Raises:
        ValueError: the storage cannot be opened.
    """
    if (file := _file_of(storage)) is not None and not file.exists():
        if is_url(storage) and not file.parent.is_dir():
            raise ValueError(f"cannot open storage {storage}: there is no folder {file.parent}")
        return None
    return _open_storage(storage) if is_url(storage) else _read_journal(_journal_path(storage))


def _delete_if_exited(path: Path) -> bool:
    """Return whether the owner of a lock file has exited; delete the file if so."""
    if not path.exists():
        return True
    try:
        with FileLock(path, timeout=0):
            path.unlink(missing_ok=True)
            return True
    except Timeout:
        return False


def _open_storage(storage: str) -> BaseStorage:
    if is_url(storage):
        try:
            return optuna.storages.get_storage(storage)
        except Exception as error:
            raise ValueError(f"cannot open storage {storage}: {error}") from error

    path = _journal_path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
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
    if (length := len(os.fsencode(path.name))) > LONGEST_JOURNAL:
        raise ValueError(f"storage {storage} has a name of {length} bytes: name a file with at most {LONGEST_JOURNAL}")
    if path.exists():
        _check_journal(path)
    return path


def _check_journal(path: Path) -> None:
    """Raise ValueError unless a file is an Optuna journal: empty, or one record per line.

    The first record may be torn, and blanks may stand in its place, so only its start is compared.
    """
    with path.open("rb") as file:
        head = file.read(max(len(JOURNAL_HEAD), len(SQLITE_HEAD))).lstrip(b" ")
    if head.startswith(SQLITE_HEAD):
        raise ValueError(f"storage {path} is an SQLite database: give --storage sqlite:///{path}")
    if head[: len(JOURNAL_HEAD)] != JOURNAL_HEAD[: len(head)]:
        raise ValueError(f"storage {path} is not an Optuna journal and was left as it is: name another file")


def _read_journal(path: Path) -> BaseStorage:
    try:
        return JournalStorage(Journal(path))
    except DamagedFileError:
        raise
    except (ValueError, KeyError, TypeError) as error:  # raised by Optuna for lines that it did not write
        raise ValueError(f"{path} is damaged ({error}): repair it, or move it away to start again") from error
