"""The journal file of Optuna's storage, with writers and readers that survive torn lines.

A writer whose disk is full, or that is killed, leaves the first part of a record at the end of the file. Optuna's
backend appends the next record to it, and then no reader gets past that line. Here:

1. A writer holds the lock and overwrites a torn end with blanks before it appends. JSON may start with blanks, so
   Optuna's own readers, as the dashboard's, read the line. The file never gets shorter, so no position moves that
   another process has read up to.
2. A reader takes from each whole line what starts with the last ``JOURNAL_HEAD``. So it reads a record that was
   appended to a torn one. It skips a line with the first part of a record alone, and says so.
3. A last line that does not end is left for the next reading.
4. Each record ends with a checksum of itself, which Optuna ignores. A reader refuses a file with a whole record whose
   checksum does not fit. Records without one, of earlier versions or of the dashboard, are read as they are.
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock

from runners.files import CHECKSUM, DamagedFileError, checksum, damaged

JOURNAL_HEAD = b'{"op_code":'
"""How each record begins; JSON has no such bytes inside a string."""
_SEAL = f',"{CHECKSUM}":"%s"}}\n'
"""How each record ends, with its checksum."""
_BROKEN_SEAL = re.compile(rb'"checksum"|crc32:')
"""What is left of a seal if a byte of it is flipped."""
_REMEDY = "move it away; finished runs stay in their folders, and python -m runners.mad --rebuild takes them over"

log = logging.getLogger(__name__)


class Journal(BaseJournalBackend):
    """A file with one record per line, in the format of ``optuna.storages.journal.JournalFileBackend``.

    Args:
        path: an existing file. The lock is a link to it, which would never be released if the file were missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = JournalFileSymlinkLock(str(path))
        self._read = (0, 0)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records.

        Raises:
            OSError: the file cannot be written, with number ``ENOSPC`` if the disk is full; no torn line is left.
        """
        lines = "".join(_sealed(json.dumps(record, separators=(",", ":"))) for record in logs)
        self._lock.acquire()
        try:
            self._blank_torn_end()
            try:
                with self.path.open("ab") as file:
                    file.write(lines.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                self._blank_torn_end()
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            # Others take the lock of a process that was suspended for long, and a folder may be deleted.
            with suppress(RuntimeError):
                self._lock.release()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the records from a number on; lines without a record have no number.

        Raises:
            DamagedFileError: a record is damaged.
        """
        # Optuna asks for what follows the last record that it got, or for everything.
        number, position = self._read if self._read[0] == log_number_from else (0, 0)

        with self.path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                record = self._record(line)
                if record is None:
                    continue

                number += 1
                self._read = (number, position)
                if number > log_number_from:
                    yield record

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """Return the record of a whole line; None where there is none.

        To skip a damaged record would number the trials after it otherwise.

        Raises:
            DamagedFileError: the line is neither a record, nor what a torn one leaves.
        """
        start = max(line.rfind(JOURNAL_HEAD), 0)
        torn, whole = line[:start], line[start:]
        if _is_damaged(whole) or _BROKEN_SEAL.search(torn):
            raise self._damaged(line)

        if torn.strip():
            log.warning("%s: skipped half a record that a killed process or a full disk has left", self.path)
        try:
            record: dict[str, Any] = json.loads(whole)
            record.pop(CHECKSUM, None)
            return record
        except ValueError as error:
            if not whole.strip():
                return None
            if not whole.startswith(JOURNAL_HEAD):
                raise self._damaged(line) from error
            log.warning("%s: skipped a line that is no record: %.60r", self.path, line)
            return None

    def _damaged(self, line: bytes) -> DamagedFileError:
        return damaged(self.path, f"a record is not what was written: {line[:60]!r}", _REMEDY)

    def _blank_torn_end(self) -> None:
        """Overwrite a last line that does not end with blanks; the caller holds the lock."""
        with self.path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read() in (b"", b"\n"):
                return

            # The torn line may be of any length.
            file.seek(0)
            start = file.read().rfind(b"\n") + 1
            file.seek(start)
            if file.read().strip():
                log.warning("%s: blanked half a record that a killed process or a full disk has left", self.path)
                file.seek(start)
                file.write(b" " * (size - start))


def _sealed(record: str) -> str:
    """Return the line of a record, a JSON object, with its checksum as the last entry."""
    return record[:-1] + _SEAL % checksum(record[:-1].encode())


def _is_damaged(line: bytes) -> bool:
    """Return whether a line has a checksum that does not fit."""
    end = len(_SEAL % checksum(b""))
    content, seal = line[:-end], line[-end:]
    return bool(_BROKEN_SEAL.search(seal)) and seal != (_SEAL % checksum(content)).encode()
