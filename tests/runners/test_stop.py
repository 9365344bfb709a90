"""Signals that end a training in good order."""

import os
import signal

import pytest

from runners.options import run_command
from runners.stop import StoppedError, asked_to_stop


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


@pytest.mark.parametrize(("asked", "status"), [([signal.SIGINT], 130), ([signal.SIGTERM], 1), ([], 1)])
def test_a_command_that_was_stopped_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], asked: list[int], status: int
) -> None:
    def main() -> None:
        raise StoppedError(7, asked)

    with pytest.raises(SystemExit) as end:
        run_command(main, "interrupted")
    assert end.value.code == status
    assert capsys.readouterr().err == "stopped after step 7: the same command goes on from there\n"
