"""Signals that end a training in good order."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runners import interrupt
from runners.ending import run_command
from runners.interrupt import StoppedError, asked_to_stop

ROOT = Path(__file__).parents[2]


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As in a shell's background, where Ctrl-C is for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with asked_to_stop() as asked:
            os.kill(os.getpid(), signal.SIGINT)
        interrupt.end_at_once()
        interrupt.heed_interrupts()
        assert asked == []
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_heeded_again_and_again_and_only_a_later_ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    with asked_to_stop() as asked:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        clock[0] += 60.0
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("asked", "status"), [([signal.SIGINT], 130), ([signal.SIGTERM], 143)])
def test_a_command_that_was_stopped_says_so_in_one_line(
    ended: Callable[..., str], asked: list[int], status: int
) -> None:
    def main() -> None:
        raise StoppedError(7, asked)

    error = ended(run_command, main, "interrupted", status=status)
    assert error == "stopped after step 7: the same command resumes from there\n"


def test_ctrl_c_ends_the_imports_silently_and_is_the_programs_own_after_them(
    ended: Callable[..., str],
) -> None:
    code = "import signal; from runners import interrupt; interrupt.end_at_once(); signal.raise_signal(2)"
    during = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (during.returncode, during.stdout, during.stderr) == (-signal.SIGINT, b"", b"")

    interrupt.end_at_once()
    assert ended(run_command, lambda: signal.raise_signal(2), "its own line", status=130) == "its own line\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_comes_before_every_slow_import() -> None:
    """Python imports the packages around a program before the program."""
    packages = ("runners.interrupt", "runners.mad", "runners.c4", "runners.bench", "runners.theory", "runners.report")
    code = f"import sys, {', '.join(packages)}; print(sorted({{'numpy', 'torch', 'rich', 'tyro'}} & {{*sys.modules}}))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_training_outside_the_main_thread_is_not_asked() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with asked_to_stop() as asked:
            found.append(asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
