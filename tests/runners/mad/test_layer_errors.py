"""What a command says when a user's layer fails: the place in the user's file, in one line."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mixers.models import LanguageModel
from mixers.origin import OWN
from runners.ending import run_command
from runners.mad import __main__ as mad

PROJECT = Path(__file__).parents[3]
LAYERS = """
from torch import nn
class Product(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a = nn.Linear(dim, dim)
    def forward(self, x):
        y = self.a(x)
        return y @ y
class Unfinished(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.b = self.a
class Keyed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        raise ValueError("no such dim")
class NotFinite(Product):
    def forward(self, x):
        return self.a(x) * (float("nan") if len(x) > 2 else 1.0)  # the check before the first step has two sequences
"""
SMALL = (
    *("--task", "parity", "--task.train-examples", "32", "--task.eval-examples", "8", "--batch-size", "8"),
    *("--width", "16", "--mlp-width", "32", "--steps", "2", "--device", "cpu", "--lr", "1e-3", "--weight-decay", "0"),
)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file with layers that fail."""
    file = tmp_path / "layers_that_fail.py"
    file.write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "layers_that_fail", raising=False)
    return file


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Product", "{file}:9, in Product.forward(x (2, 40, 16)): RuntimeError: Expected size"),
        ("Unfinished", "{file}:13, in Unfinished.__init__: AttributeError: 'Unfinished' object has no attribute 'a'"),
    ],
)
def test_an_error_of_a_users_layer_is_one_line_with_its_place_and_a_file_with_its_traceback(
    layers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
    message: str,
    more: list[str],
) -> None:
    """It stands alone: no table with gaps and no warning come before it."""
    command = [*SMALL, "--mixer", "transformer", f"layers_that_fail:{name}", "--out", str(tmp_path / "out"), *more]
    with pytest.raises(SystemExit) as end:
        run_command(lambda: mad.main(command), "interrupted")
    assert end.value.code == 2
    assert caplog.messages == []
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith("error: " + message.format(file=layers))
    assert f"mixer 'layers_that_fail:{name}'" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

    (traceback,) = re.findall(r"traceback: (\S+)\n", error)
    text = Path(traceback).read_text()
    assert text.startswith("Traceback")
    assert f'"{layers}", line' in text
    Path(traceback).unlink()


def test_what_a_layer_refuses_is_one_line_with_its_place(layers: Path, refused: Callable[..., str]) -> None:
    error = refused(*SMALL, "--mixer", "layers_that_fail:Keyed")
    assert error.startswith("error: cannot build mixer 'layers_that_fail:Keyed'")
    assert f"{layers}:17, in Keyed.__init__: no such dim" in error


def test_a_module_that_ends_the_program_on_import_is_one_line(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_that_exits.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(*SMALL, "--mixer", "script_that_exits:L")
    assert f"cannot import mixer 'script_that_exits:L': {tmp_path}/script_that_exits.py:3, in <module>: " in error
    assert "SystemExit: 0" in error


@pytest.mark.usefixtures("undrawn")
def test_a_layer_without_finite_outputs_ends_with_one_line_and_status_1(
    layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "--mixer", "layers_that_fail:NotFinite", "--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time from the stored results
        with pytest.raises(SystemExit) as end:
            mad.main(command)
        assert end.value.code == 1
        text, error = capsys.readouterr()
        assert "\nlayers_that_fail:NotFinite on parity (custom): no rank: no point converged\n" in text
        assert error.splitlines()[-1] == "no point converged: try smaller learning rates (--lr), or correct the layer"


@pytest.mark.usefixtures("undiagnosed")
def test_a_layer_with_a_result_beside_one_without_is_no_failure(
    layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--mixer", "transformer", "layers_that_fail:NotFinite", "--mixer.heads", "2", "--reference", "none"]
    mad.main([*SMALL, *both, "--out", str(tmp_path / "out")])
    assert "layers_that_fail:NotFinite on parity (custom): no rank: no point converged" in capsys.readouterr().out


def test_an_error_of_the_project_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixers.origin.OWN", (*OWN, str(PROJECT)))  # a test is no user's file
    with pytest.raises(TypeError, match="missing 4 required positional arguments"):
        run_command(LanguageModel, "")  # type: ignore[arg-type]
