"""Today's code trains as the code of the stored results: its rehearsals repeat, and its kernels have the same PTX."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mixers import MIXERS
from tasks import TASKS
from tests.golden.rehearsal import FOLDER, REHEARSALS, agree, stored

ROOT = Path(__file__).parents[2]
CASES = [(file, name) for file in REHEARSALS for name in stored(file)]


@pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file}-{name}" for file, name in CASES])
def test_a_model_trains_as_before(file: str, name: str) -> None:
    entry = stored(file)[name]
    assert agree(entry["trajectory"], REHEARSALS[file](entry))


def test_every_layer_and_task_is_rehearsed() -> None:
    diagnostics, models = stored("diagnostics").values(), stored("language_models").values()
    assert {entry["mixer"] for entry in diagnostics if "task" not in entry} == set(MIXERS)
    assert {entry["task"] for entry in diagnostics if "task" in entry} == set(TASKS)
    assert {entry["settings"]["mixer"] for entry in models} == set(MIXERS)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("option", ["--check", "--fits"])
def test_kernels_compile_to_the_stored_ptx_and_fit_other_gpus(option: str) -> None:
    command, compiled = [sys.executable, "-m", "tests.golden.ptx", option], {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | compiled, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ptx_of_every_kernel_is_stored() -> None:
    files = [file for package in ("mixers", "runners") for file in (ROOT / package).rglob("*.py")]
    found = [(file, re.findall(r"jit.*\ndef (\w+_kernel)\(", file.read_text())) for file in files]
    kernels = {f"{file.stem}.{name}" for file, names in found for name in names}
    assert kernels == set(json.loads((FOLDER / "ptx.json").read_text())["kernels"])
