"""What all command lines share: how they end, and how their help reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "unbuffered"), [("mad --help", "1"), ("c4 --help", ""), ("theory --help", "1"), ("bench --help", "")]
)
def test_a_command_that_nobody_reads_ends_silently(command: str, unbuffered: str) -> None:
    """Unbuffered output fails where it is printed, buffered output as late as the process ends."""
    read, write = os.pipe()
    os.close(read)
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"runners.{module}", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
