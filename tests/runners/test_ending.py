"""How all programs end: with one line, the right status, and silently where nobody reads."""

import errno
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.ending import others_continue, run_command
from runners.interrupt import StoppedError

ROOT = Path(__file__).parents[2]


def test_a_character_that_the_encoding_lacks_does_not_end_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    run_command(lambda: print("1 ± 2"), "interrupted")
    assert out.getvalue() == b"1 ? 2\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")]
)
def test_a_lack_of_memory_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is

    with pytest.raises(SystemExit) as stop:
        run_command(main, "interrupted")
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"stopped: too little memory ({type(error).__name__}: ")
    assert said.endswith("free some, or lower the sizes; what is stored is kept\n")
    assert said.count("\n") == 1


def test_an_error_in_one_piece_of_work_is_one_line_with_a_file_of_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    failed: list[str] = []
    with others_continue("first", failed, ValueError):
        raise RuntimeError("no such\nkernel")
    with others_continue("second", failed, ValueError):
        pass
    with others_continue("third", failed, ValueError):
        raise ValueError("the file is of another corpus: delete it")
    with others_continue("fourth", failed, ValueError):
        raise MemoryError
    with others_continue("fifth", failed, ValueError):
        raise AssertionError
    assert failed == ["first", "third", "fourth", "fifth"]

    unexpected, expected, memory, assertion = capsys.readouterr().err.splitlines()
    assert expected == "third stopped: the file is of another corpus: delete it"
    assert memory.startswith("fourth stopped: too little memory (MemoryError: )")
    said, _, traceback = unexpected.partition("; traceback: ")
    assert said == "first stopped: RuntimeError: no such kernel"
    assert 'raise RuntimeError("no such\\nkernel")' in Path(traceback).read_text()
    Path(traceback).unlink()

    said, _, traceback = assertion.partition("; traceback: ")
    assert said == "fifth stopped: AssertionError: raise AssertionError"
    Path(traceback).unlink()


def test_a_full_disk_is_one_line_although_the_traceback_needs_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("mixers.origin.origin", lambda error: None)  # not of a user's file, as this one is
    failed: list[str] = []
    with others_continue("first", failed):
        raise RuntimeError("no such kernel")
    assert capsys.readouterr().err == f"first stopped: RuntimeError: no such kernel; traceback: not written ({full})\n"
    assert failed == ["first"]


@pytest.mark.parametrize(
    "stop",
    [
        KeyboardInterrupt(),
        SystemExit(2),
        StoppedError(3, [signal.SIGTERM]),
        BrokenPipeError(),
        OSError(errno.ENOSPC, "No space left on device"),  # no other piece would be stored
    ],
)
def test_what_stops_the_program_stops_all_pieces_of_work(stop: BaseException) -> None:
    with pytest.raises(type(stop)), others_continue("first", [], RuntimeError):
        raise stop


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.fixture
def same_signals() -> Iterator[None]:
    """What a signal does to the tests stays as it is."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_a_process_that_nobody_reads_ends_silently(unread: int) -> None:
    """Python flushes buffered output as late as the process ends."""
    words = [sys.executable, "-m", "runners.theory", "--help"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, stdout=unread, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("module", ["mad", "c4", "theory", "bench"])
def test_a_command_that_nobody_reads_ends_silently(
    module: str, unbuffered: bool, unread: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unbuffered output fails where it is printed, buffered output after the program."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    raw = io.FileIO(unread, "w", closefd=False)
    out = io.TextIOWrapper(raw, write_through=True) if unbuffered else io.TextIOWrapper(io.BufferedWriter(raw))
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "runners" / module / "__main__.py"), run_name="__main__")
    out.close()  # flushes what is left, as Python does at its end
    assert (stop.value.code, capsys.readouterr().err) == (1, "")


@pytest.mark.parametrize(("closed", "arguments", "status"), [(">&-", "--help", 0), (">&- 2>&-", "--nonsense", 2)])
def test_a_program_whose_streams_are_closed_does_its_work(closed: str, arguments: str, status: int) -> None:
    words = ["sh", "-c", f'exec "$0" -m runners.theory {arguments} {closed}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
