"""Signals that end a training in good order."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runners import interrupt as stop
from runners.ending import run_command
from runners.interrupt import HELD_UP, StoppedError, asked_to_stop

ROOT = Path(__file__).parents[2]


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As in a shell's background, where Ctrl-C is for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with asked_to_stop() as asked:
            os.kill(os.getpid(), signal.SIGINT)
        assert asked == []
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_heeded_again_and_again_and_only_a_later_ctrl_c_is_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: clock[0])
    with asked_to_stop() as asked:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        clock[0] += 60.0
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("asked", "status"), [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([], 143)])
def test_a_command_that_was_stopped_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], asked: list[int], status: int
) -> None:
    def main() -> None:
        raise StoppedError(7, asked)

    with pytest.raises(SystemExit) as end:
        run_command(main, "interrupted")
    assert end.value.code == status
    assert capsys.readouterr().err == "stopped after step 7: the same command resumes from there\n"


def catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal; of these two, Python itself installs that of SIGINT alone."""
    status = Path(f"/proc/{process}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("module", "number", "delay"),
    [
        ("mad", signal.SIGINT, 0.05),
        ("mad", signal.SIGTERM, 0.05),
        ("mad", signal.SIGINT, 0.5),
        ("mad", signal.SIGTERM, 0.5),
        ("mad.reference", signal.SIGINT, 0.1),
        ("c4", signal.SIGTERM, 0.1),
        ("bench", signal.SIGINT, 0.3),
        ("theory", signal.SIGTERM, 0.3),
        ("compare", signal.SIGINT, 0.2),
    ],
)
def test_a_signal_during_the_imports_ends_a_program_with_one_line(
    module: str, number: signal.Signals, delay: float
) -> None:
    """The delay counts from the first line of the program."""
    command = [sys.executable, "-m", f"runners.{module}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not catches(process.pid, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.005)

    time.sleep(delay)
    process.send_signal(number)
    out, error = process.communicate()
    assert (process.returncode, out) == (128 + number, "")
    assert error == f"ended by {number.name}: run the same command again\n"


def test_the_handlers_come_before_every_slow_import() -> None:
    """Python imports the packages around a program before the program."""
    packages = ("runners.interrupt", "runners.mad.reference", "runners.c4", "runners.bench", "runners.theory")
    code = f"import sys, {', '.join(packages)}; print(sorted({{'numpy', 'torch', 'rich', 'tyro'}} & {{*sys.modules}}))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_an_ignored_signal_stays_ignored_during_the_imports() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "from runners import interrupt; interrupt.end_at_once(); interrupt.heed_interrupts(); "
        "signal.raise_signal(signal.SIGINT); print('alive')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "alive\n"


def test_after_the_imports_ctrl_c_is_the_programs_own() -> None:
    code = (
        "import signal; from runners import interrupt; interrupt.end_at_once(); "
        "from runners.ending import run_command; "
        "run_command(lambda: signal.raise_signal(signal.SIGINT), 'its own line')"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "its own line\n")


COMMAND = """
import atexit, hashlib, os, signal, sys, threading
from runners import interrupt
interrupt.end_at_once()

def press(kill=os.kill, process=os.getpid(), number=int(signal.SIGINT)):
    kill(process, number)
"""
"""How a program begins."""


def command(code: str) -> tuple[int, str]:
    """Run a program; return its status and what it says on standard error."""
    code = f"{COMMAND}\nfrom runners.ending import run_command\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("late", "main", "status"),
    [
        # In the order of Python's end: its threads, the functions of atexit, the modules' objects.
        ("threading.Thread(target=lambda: (threading.main_thread().join(), press())).start()", "None", 0),
        ("atexit.register(press)", "sys.exit(2)", 2),
        ("class Last: __del__ = lambda self, press=press: press()\nlast = Last()", "None", 0),
    ],
)
def test_a_signal_after_the_last_word_changes_nothing(late: str, main: str, status: int) -> None:
    assert command(f"{late}\nrun_command(lambda: {main}, 'interrupted')") == (status, "")


def test_repeats_break_off_neither_what_cleans_up_nor_the_closing_line() -> None:
    code = """
class Listener:
    def write(self, text):
        os.write(2, text.encode())
        press()
    def flush(self): pass

def main():
    try:
        with interrupt.asked_to_stop() as asked:
            press()
            raise interrupt.StoppedError(7, asked)
    finally:
        press()
        sys.stderr = Listener()
        print("clean", file=sys.stderr)

run_command(main, "interrupted")
"""
    assert command(code) == (130, "clean\nstopped after step 7: the same command resumes from there\n")


def test_ctrl_c_in_a_call_that_takes_minutes_is_answered_and_a_second_one_leaves() -> None:
    code = """
interrupt.SECONDS_OF_ONE_REQUEST = interrupt.SECONDS_TO_LEAVE = 0.1
with interrupt.asked_to_stop():
    print("in the call", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    words, pipe = [sys.executable, "-c", COMMAND + code], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "in the call\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == HELD_UP + "\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "ended by SIGINT: run the same command again\n"
    assert process.returncode == 130


def test_ctrl_c_while_a_text_is_executed_keeps_the_status(tmp_path: Path) -> None:
    """As ``dataclass`` does to make methods. CPython handles SystemExit in another place with ``-m``."""
    code = "from runners.ending import run_command\nrun_command(lambda: exec('press()'), 'interrupted')"
    (tmp_path / "program.py").write_text(f"{COMMAND}\n{code}")
    words, environment = [sys.executable, "-m", "program"], {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_training_outside_the_main_thread_is_not_asked() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with asked_to_stop() as asked:
            found.append(asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
