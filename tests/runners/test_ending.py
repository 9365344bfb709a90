"""How all programs end: with one line, the right status, and silently where nobody reads."""

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runners.ending import others_continue, run_command
from runners.interrupt import StoppedError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def not_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that tests raise are not those of a user's file."""
    for module in ("mixers.origin", "runners.ending"):
        monkeypatch.setattr(f"{module}.origin", lambda error: None)


def test_a_character_that_the_encoding_lacks_does_not_end_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    run_command(lambda: print("1 ± 2"), "interrupted")
    assert out.getvalue() == b"1 ? 2\n"


@pytest.mark.usefixtures("not_a_users")
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")]
)
def test_a_lack_of_memory_is_one_line(error: Exception, ended: Callable[..., str]) -> None:
    def main() -> None:
        raise error

    said = ended(run_command, main, "interrupted", status=1)
    assert said.startswith(f"stopped: too little memory ({type(error).__name__}: ")


@pytest.mark.usefixtures("not_a_users")
def test_an_error_in_one_piece_of_work_is_one_line_with_a_file_of_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed: list[str] = []
    with others_continue("first", failed, ValueError):
        raise RuntimeError("no such\nkernel")
    with others_continue("second", failed, ValueError):
        pass
    with others_continue("third", failed, ValueError):
        raise ValueError("the file is of another corpus: delete it")
    assert failed == ["first", "third"]

    unexpected, expected = capsys.readouterr().err.splitlines()
    assert expected == "third stopped: the file is of another corpus: delete it"
    said, _, traceback = unexpected.partition("; traceback: ")
    assert said == "first stopped: RuntimeError: no such kernel"
    assert 'raise RuntimeError("no such\\nkernel")' in Path(traceback).read_text()
    Path(traceback).unlink()


@pytest.mark.parametrize(
    "stop",
    [
        KeyboardInterrupt(),
        SystemExit(2),
        StoppedError(3, [signal.SIGTERM]),
        OSError(errno.ENOSPC, "No space left on device"),  # no other piece would be stored
    ],
)
def test_what_stops_the_program_stops_all_pieces_of_work(stop: BaseException) -> None:
    with pytest.raises(type(stop)), others_continue("first", [], RuntimeError):
        raise stop


def test_a_process_that_nobody_reads_ends_silently() -> None:
    """Python flushes buffered output as late as the process ends."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from runners.ending import run_command; run_command(lambda: sys.exit(print('help')), '')"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
