"""Signals that end a training in good order."""

import os
import signal

import pytest

from runners import interrupt as stop
from runners.cli import run_command
from runners.interrupt import StoppedError, asked_to_stop


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
