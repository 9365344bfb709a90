"""PyTorch's threads beside other processes."""

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, ("1000", None)),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, (None, "ACTIVE")),
        ({"GOMP_SPINCOUNT": "7"}, ("7", None)),
    ],
)
def test_threads_wait_without_spinning_for_long_unless_the_user_says_how(
    given: dict[str, str], then: tuple[str | None, str | None]
) -> None:
    environment = {name: y for name, y in os.environ.items() if name not in NAMES} | given
    program = f"import sys, runners, os; print('torch' in sys.modules, *map(os.environ.get, {NAMES}))"
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", *map(str, then)]
