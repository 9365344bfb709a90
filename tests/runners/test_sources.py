"""The code that counts is the code that runs, although its file was edited since."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from runners.provenance import code_version, keep_sources
from tests.runners.processes import run_program, start

NAME = "a_layer_that_is_edited"
SOURCE = """
from functools import cached_property

SCALE = 1.0

class Layer:
    def forward(self, x):
        return SCALE * x

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
        ("SCALE * x", "SCALE + x"),
        ("return 0.5", "return 0.4"),
        ("1 / 3 for", "1 / 2 for"),
        ("0.25", "0.2"),
        ("def fourth", "def fifth"),
    ],
)
def test_an_edit_between_import_and_first_reading_is_refused(file: Path, change: tuple[str, str]) -> None:
    module = imported()
    file.write_text(SOURCE.replace(*change))
    with pytest.raises(ValueError, match=f"{NAME}.py has changed since it was imported: start the command again, or"):
        keep_sources(module.Layer)
    importlib.reload(module)
    keep_sources(module.Layer)


def test_comments_and_lines_are_no_change(file: Path) -> None:
    module = imported()
    file.write_text(SOURCE.replace("class Layer:", "# A layer.\n\n\nclass Layer:"))
    keep_sources(module.Layer)


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
