"""The journal survives torn lines: what a writer leaves on a full disk costs no other process its study."""

import errno
import io
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from runners.ending import user_errors
from runners.files import DamagedFileError
from runners.journal import Journal
from tests.runners.processes import forks, start

RECORD = {"op_code": 2, "worker_id": "a", "study_id": 0, "user_attr": {"k": 'a "{" in a string'}}
TORN = b'{"op_code":4,"worker_id":"b'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "studies.journal"
    made.touch()
    return made


def read(path: Path) -> list[dict[str, Any]]:
    return list(Journal(path).read_logs(0))


def test_nothing_is_appended_to_a_torn_line_and_optuna_reads_the_journal(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(path)
    journal.append_logs([RECORD])
    live = Journal(path)
    assert list(live.read_logs(0)) == [RECORD]
    with path.open("ab") as file:
        file.write(TORN)
    assert list(live.read_logs(1)) == []
    journal.append_logs([{**RECORD, "op_code": 3}])

    assert "blanked half a record" in caplog.text
    assert [record["op_code"] for record in live.read_logs(1)] == [3]
    assert [record["op_code"] for record in read(path)] == [2, 3]
    theirs = list(JournalFileBackend(str(path)).read_logs(0))
    assert [record.pop("checksum")[:6] for record in theirs] == ["crc32:"] * 2
    assert theirs == read(path)


def test_a_lock_that_others_took_while_this_process_was_suspended_is_theirs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    monkeypatch.setattr(journal, "_blank_torn_end", lambda: Path(f"{path}.lock").unlink())
    journal.append_logs([RECORD])
    assert read(path) == [RECORD]


def test_records_behind_a_torn_one_are_read_and_lines_without_a_record_skipped(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(path).append_logs([RECORD] * 3)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + TORN + second + TORN + b"\n" + third)
    journal = Journal(path)
    assert list(journal.read_logs(0)) == [RECORD] * 3
    assert [line.partition(": ")[2][:19] for line in caplog.messages] == ["skipped half a reco", "skipped a line that"]
    assert list(journal.read_logs(3)) == []
    assert list(journal.read_logs(1)) == [RECORD] * 2


@pytest.mark.parametrize("bit", [0, 1, 4, 6, 7])
def test_no_flipped_bit_of_a_whole_record_is_read_in_silence(path: Path, bit: int) -> None:
    """A flipped end of line makes the last record a torn one, and joins others."""
    Journal(path).append_logs([{**RECORD, "user_attr": {"validation_score": 0.25}}, RECORD])
    whole, expected = path.read_bytes(), read(path)
    for at in range(len(whole) - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        with pytest.raises(DamagedFileError, match=f"^{path} is damaged .* --rebuild takes them over$"):
            assert read(path) == "damage", f"byte {at}"
    path.write_bytes(whole)
    assert read(path) == expected


def test_records_without_a_checksum_are_read(path: Path) -> None:
    """Optuna's own writers, as the dashboard's, write none."""
    JournalFileBackend(str(path)).append_logs([RECORD])
    Journal(path).append_logs([RECORD])
    assert read(path) == [RECORD] * 2


def fill(path: str, barrier: Any, limit: int | None) -> None:
    """Write trials to a study; a process with a limit to the size of its files stops there, as on a full disk."""
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name="s", storage=JournalStorage(Journal(Path(path))))
    barrier.wait()
    for i in range(30):
        study.add_trial(optuna.trial.create_trial(value=float(i)))


def test_a_writer_without_space_leaves_two_others_their_study(path: Path) -> None:
    optuna.create_study(study_name="s", storage=JournalStorage(Journal(path)))
    barrier = forks().Barrier(3)
    limits = (None, path.stat().st_size + 1000, None)  # ends within a record
    processes = [start(fill, str(path), barrier, limit) for limit in limits]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 1, 0]
    for backend in (Journal(path), JournalFileBackend(str(path))):
        trials = optuna.load_study(study_name="s", storage=JournalStorage(backend)).trials
        assert 60 <= len(trials) < 90


class FullDisk(io.FileIO):
    """A file that takes half of what is written, then has no space."""

    def write(self, content: Any) -> int:
        super().write(bytes(content)[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: FullDisk(self, "a") if mode == "ab" else opened(self, mode))
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_that_says_what_to_do(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, user_errors(OSError):
        Journal(path).append_logs([RECORD])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(f"No space left on device: '{path}': free some space, then the same command resumes\n")
    assert error.count("\n") == 1
    assert path.read_bytes().strip() == b""
    assert not path.with_name(path.name + ".lock").is_symlink()
