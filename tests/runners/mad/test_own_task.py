"""Tasks from outside the project, from the command line and from Python."""

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runners.mad import Study, study
from runners.mad import __main__ as mad
from tests.runners.mad.test_foreign_layers import DOCUMENTED
from tests.tasks.test_outside import Own

SMALL = ["--steps", "2", "--evaluations", "1", "--width", "16", "--mlp-width", "16", "--lr", "1e-3"]
SMALL += ["--weight-decay", "0", "--batch-size", "16", "--device", "cpu"]
COUNT_MOD = ["--task", "count_mod:CountMod", "--task.train-examples", "32", "--task.eval-examples", "32"]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The task that docs/your-layer.md names, as a module."""
    (tmp_path / "count_mod.py").write_text((DOCUMENTED / "count_mod.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "count_mod", raising=False)
    return tmp_path


@pytest.mark.usefixtures("undiagnosed", "wide_terminal")
def test_the_task_that_the_documentation_shows_compares_layers(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = example / "out"
    mad.main(["--mixer", "rt", "lstm", *COUNT_MOD, "--task.modulus", "4", *SMALL, "--out", str(out)])
    text = capsys.readouterr().out
    assert "rt on count_mod:CountMod (custom): token accuracy " in text
    assert "chance" in text
    assert len([*out.glob("studies/*/*/record.json")]) == 2


def test_the_solver_that_the_documentation_shows_agrees(example: Path) -> None:
    module = example / "count_mod.py"
    runpy.run_path(str(module), run_name="__main__")
    module.write_text(module.read_text().replace("% 4", "% 5"))
    with pytest.raises(AssertionError):
        runpy.run_path(str(module), run_name="__main__")


def test_a_task_whose_code_fails_is_one_line_with_its_place(example: Path, ended: Callable[..., str]) -> None:
    module = example / "count_mod.py"
    module.write_text(module.read_text().replace("inputs_ST = rng", "1 / 0\n        inputs_ST = rng"))
    error = ended(mad.main, ["--mixer", "rt", *COUNT_MOD, *SMALL, "--out", str(example / "out")])
    place = rf"{module}:\d+, in CountMod\.sample"
    assert re.fullmatch(rf"error: task 'count_mod:CountMod': {place}: ZeroDivisionError: division by zero\n", error)
    assert not (example / "out").exists()


class WithList(Own):
    @dataclass(frozen=True, kw_only=True)
    class Config(Own.Config):
        sizes: list[int] = field(default_factory=lambda: [1, 2])


def train_on(task: type[Own], out: Path, **more: Any) -> Study:
    settings = {**more, "steps": 2, "evaluations": 1, "width": 16, "mlp_width": 16, "batch_size": 16, "device": "cpu"}
    return study("lstm", task, lr=[1e-3], weight_decay=[0.0], out=out, quiet=True, reference="none", **settings)


def test_settings_of_a_task_may_be_lists(tmp_path: Path) -> None:
    assert train_on(WithList, tmp_path).experiment.task_config.sizes == [1, 2]


def test_study_takes_a_tasks_class(tmp_path: Path) -> None:
    result = train_on(Own, tmp_path)
    assert result.experiment.task == "tests.tasks.test_outside:Own"
    assert result.data["train"].inputs_ST.shape == (20, 12)
    assert result.ranking().empty
