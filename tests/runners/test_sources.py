"""The code that counts is the code that runs, although its file was edited since."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from runners.provenance import code_version
from tests.runners.processes import run_program, start

ROOT = Path(__file__).parents[2]
NAME = "a_layer_that_is_edited"
SOURCE = """
from functools import cached_property

SCALE = 1.0
KINDS = ["gelu", "relu"]
SIZES = {"hidden": 4}

def scaled(y, times=3):
    return times * y

class Layer:
    depth = 1

    def forward(self, x):
        return SCALE * x * SIZES["hidden"]

    def kind(self, name):
        return name in KINDS or name in {"gelu", "silu", "relu", "tanh", "sigmoid"}

    @property
    def half(self):
        return 0.5

    @cached_property
    def third(self):
        return [1 / 3 for _ in range(3)]

    @staticmethod
    def fourth():
        return 0.25
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / f"{NAME}.py"
    path.write_text(SOURCE)
    yield path
    sys.modules.pop(NAME, None)


def imported() -> ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(NAME)


@pytest.mark.parametrize("change", [("SCALE = 1.0", "SCALE = 2.0"), ("SCALE * x", "SCALE + x")])
def test_an_edit_does_not_count_until_the_module_is_loaded_again(file: Path, change: tuple[str, str]) -> None:
    module = imported()
    first = code_version(module.Layer)
    file.write_text(SOURCE.replace(*change))
    assert code_version(module.Layer) == first
    importlib.reload(module)
    assert code_version(module.Layer) != first
    file.write_text(SOURCE)
    del sys.modules[NAME]
    assert code_version(imported().Layer) == first


@pytest.mark.parametrize(
    "change",
    [
        ("SCALE = 1.0", "SCALE = 2.0"),
        ("times=3", "times=4"),
        ("SCALE * x", "SCALE + x"),
        ("return 0.5", "return 0.4"),
        ("1 / 3 for", "1 / 2 for"),
        ("0.25", "0.2"),
        ("def fourth", "def fifth"),
        ('"hidden": 4', '"hidden": 5'),
        ("depth = 1", "depth = 2"),
    ],
)
def test_a_file_that_was_edited_between_import_and_first_reading_is_not_taken_for_what_runs(
    file: Path, change: tuple[str, str]
) -> None:
    module = imported()
    file.write_text(SOURCE.replace(*change))
    mixed = code_version(module.Layer)
    importlib.reload(module)
    after = code_version(module.Layer)
    file.write_text(SOURCE)
    del sys.modules[NAME]
    before = code_version(imported().Layer)
    assert len({before, mixed, after}) == 3


def test_what_a_reloaded_module_was_before_counts_where_it_is_still_used(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "a_user_of_it.py"
    user.write_text(f"from {NAME} import Layer, scaled\nclass Mine(Layer):\n    pass\n")
    mine = importlib.import_module("a_user_of_it").Mine
    before = code_version(mine)
    file.write_text(SOURCE.replace("return times * y", "return times + y"))
    importlib.reload(sys.modules[NAME])
    mixed = code_version(mine)
    after = code_version(importlib.reload(sys.modules["a_user_of_it"]).Mine)
    assert len({before, mixed, after}) == 3
    del sys.modules["a_user_of_it"]


def test_a_constant_that_the_environment_decides_counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = (
        "import os\ntry:\n    SCALE = float(os.environ['SCALE'])\nexcept KeyError:\n    SCALE = 1.0\nSTART = os.times()"
    )
    file.write_text(SOURCE.replace("SCALE = 1.0", read).replace("return 0.5", "return 0.5 + START[4]"))
    found = []
    for scale in ("1", "1", "0"):
        monkeypatch.setenv("SCALE", scale)
        found.append(code_version(imported().Layer))
        del sys.modules[NAME]
    assert found[0] == found[1] != found[2]  # the start of the program does not count


def test_an_entry_that_is_changed_after_the_import_counts(file: Path) -> None:
    module = imported()
    before = code_version(module.Layer)
    module.SIZES["hidden"] = 5
    changed = code_version(module.Layer)
    module.SIZES["hidden"] = 4
    assert code_version(module.Layer) == before != changed


def test_a_table_that_is_filled_while_the_module_is_used_does_not_count(file: Path) -> None:
    file.write_text(SOURCE.replace("SCALE = 1.0", "SCALE = 1.0\nKNOWN = {}").replace("return 0.5", "return KNOWN"))
    module = imported()
    before = code_version(module.Layer)
    module.KNOWN[4] = 0.5
    assert code_version(module.Layer) == before


def test_comments_and_lines_are_no_change(file: Path) -> None:
    module = imported()
    file.write_text(SOURCE.replace("class Layer:", "# A layer.\n\n\nclass Layer:"))
    edited = code_version(module.Layer)
    file.write_text(SOURCE)
    importlib.reload(module)
    assert edited == code_version(module.Layer)


def test_the_code_of_a_module_is_the_same_in_every_process(file: Path) -> None:
    """A set of strings has another order in each, and constants that a file of bytecode holds have one of their own."""
    code = f"import {NAME}, runners.provenance as p; print(p.code_version({NAME}.Layer))"
    found = set()
    for seed in ("0", "1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{file.parent}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(made.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_source_has_the_encoding_that_it_states(file: Path, encoding: str) -> None:
    text = SOURCE.replace("return 0.5", "return len('é')")
    file.write_bytes((f"# coding: {encoding}\n{text}" if encoding == "latin-1" else text).encode(encoding))
    digest = code_version(imported().Layer)
    file.write_text(text, encoding="utf-8")
    importlib.reload(sys.modules[NAME])
    assert code_version(sys.modules[NAME].Layer) == digest


def test_a_module_that_is_not_imported_is_read_each_time(file: Path) -> None:
    first = code_version(NAME)
    file.write_text(SOURCE.replace("0.25", "0.2"))
    assert code_version(NAME) != first


LAYER = """
from pathlib import Path
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        if self.training and EDITS and x.shape[0] == 16:
            path = Path(__file__)
            edited = path.read_text().replace("SCALE = 1.0", "SCALE = 0.3")
            path.write_text(edited.replace("EDITS = True", "EDITS = False"))
        return SCALE * self.out(torch.cumsum(x, 1))

SCALE = 1.0
EDITS = True
"""


def test_a_study_that_begins_after_an_edit_is_one_of_the_code_that_trained_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command trains both tasks with the layer as it was imported, and edits its file in the first step."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "edited.py").write_text(LAYER)
    line = [
        *("--mixer", "edited:Layer", "--task", "parity", "memorization", "--reference", "none"),
        *("--task.train-examples", "64", "--task.eval-examples", "32", "--batch-size", "16", "--width", "16"),
        *("--mlp-width", "16", "--device", "cpu", "--steps", "2", "--evaluations", "1", "--lr", "1e-2"),
        *("--weight-decay", "0", "--out", str(tmp_path / "out")),
    ]

    def said(name: str) -> str:
        process = start(run_program, "runners.mad.__main__", line, tmp_path / name)
        process.join()
        assert process.exitcode == 0
        return (tmp_path / name).read_text()

    assert "trains differently" not in said("first")
    assert "SCALE = 0.3" in (tmp_path / "edited.py").read_text()
    assert said("second").count("was trained by code that trains differently") == 2
