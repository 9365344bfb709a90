"""The Python API of the diagnostics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixers.transformer import Transformer
from runners.mad import Study, api, study
from runners.mad import __main__ as mad
from runners.mad.options import Options, read_options
from runners.options import flag_of
from tests.runners.mad.made_up import as_shown, interval_of

SMALL: dict[str, Any] = {
    "lr": [1e-3, 5e-3],
    "weight_decay": [0.0],
    "steps": 4,
    "evaluations": 2,
    "batch_size": 16,
    "width": 16,
    "mlp_width": 16,
    "mixer_options": {"heads": 2},
    "task_options": {"length": 16, "train_examples": 32, "eval_examples": 20},
    "device": "cpu",
    "quiet": True,
}
SAME = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--lr", "1e-3", "5e-3", "--weight-decay", "0"),
    *("--steps", "4", "--evaluations", "2", "--batch-size", "16", "--width", "16", "--mlp-width", "16"),
    *("--mixer.heads", "2", "--task.length", "16", "--task.train-examples", "32", "--task.eval-examples", "20"),
    *("--device", "cpu"),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two points with one seed, then three more seeds of the chosen one."""
    out = tmp_path_factory.mktemp("results")
    return study("transformer", "in-context-recall", seeds=4, seeds_of="chosen", out=out, **SMALL)


def test_figures_are_those_of_the_chosen_point(result: Study) -> None:
    points = result.points()
    assert [*points["lr"]] == [1e-3, 5e-3]
    (chosen,) = points[points["chosen"]].itertuples()
    assert chosen.seeds == [0, 1, 2, 3]
    records = result.table[result.table["lr"] == chosen.lr]
    text = as_shown([*records["test.token_accuracy"]], digits=4)
    assert result.test["token_accuracy"].text() == text
    assert result.test.keys() == {"sequence_accuracy", "token_accuracy", "loss"}
    assert f"token_accuracy {text}" in repr(result)
    assert result.ceiling.token == 1
    assert result.chance.token == pytest.approx(0.418, abs=1e-3)  # a guess among the values shown so far

    # A row for each evaluation.
    curves = result.curves()
    assert len(curves) == 2 * len(result.table) == 10
    assert {*curves["step"]} == {2, 4}
    assert curves.notna().all(axis=None)


def test_the_model_is_the_best_of_the_chosen_point(result: Study) -> None:
    batch = result.data["test"]
    with torch.no_grad():
        predictions_ST = result.model(torch.from_numpy(batch.inputs_ST)).argmax(-1).numpy()
    chosen = result.table.dropna(subset=["test.loss"])
    best = chosen.loc[chosen["validation.score"].idxmax()]
    accuracy = (predictions_ST == batch.targets_ST)[batch.scored_ST].mean()
    assert accuracy == pytest.approx(best["test.token_accuracy"])


def test_accuracies_on_longer_sequences_are_estimates_over_the_seeds(tmp_path: Path) -> None:
    settings = {**SMALL, "task_options": {"length": 24, "train_examples": 32, "eval_examples": 32}, "lr": [1e-3]}
    result = study(Transformer, "parity", seeds=2, out=tmp_path, **settings)
    assert result.extrapolation.keys() == {"length 48", "length 96"}
    for name, found in result.extrapolation.items():
        expected = interval_of([*result.table[f"{name}.token_accuracy"]])
        of = found["token_accuracy"]
        assert (of.mean, of.low, of.high) == pytest.approx(expected)


@pytest.mark.usefixtures("undiagnosed")
def test_the_command_finds_what_the_function_has_trained(result: Study) -> None:
    before = {path: path.stat().st_mtime_ns for path in result.folder.glob("*/record.json")}
    mad.main([*SAME, "--seeds", "4", "--seeds-of", "chosen", "--out", str(result.out)])
    assert {path: path.stat().st_mtime_ns for path in result.folder.glob("*/record.json")} == before


def test_it_takes_the_options_of_the_command_and_its_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    def plan(options: Options, *_: Any) -> list[Any]:
        asked.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(api, "plan", plan)
    tracking = {"wandb": "offline", "wandb_project": "mine", "wandb_entity": "us", "wandb_tags": ["first"]}
    for changes in ({}, {"epochs": 3}, {"lr": [1e-4], "width": 32}, tracking):
        with pytest.raises(ValueError, match="enough"):
            study("rt", "mqar", preset="quick", out=tmp_path, **changes)
        words = [f"{flag_of(name)}={value[0] if isinstance(value, list) else value}" for name, value in changes.items()]
        expected, *_ = read_options(
            ["--preset", "quick", "--mixer", "rt", "--task", "mqar", "--out", str(tmp_path), *words]
        )
        assert asked.pop() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "nope"}, "no mixer 'nope': choose from"),
        ({"task": "nope"}, "no task 'nope': choose from"),
        ({"steps": 0}, "^--steps 0 must be at least 1"),
        ({"mixer_options": {"heads": 3}}, "heads: 3 must divide the model width 16"),
        ({"mixer_options": {"head": 3}}, "--mixer.head does not apply to mixer transformer"),
        ({"mixer": type("Local", (torch.nn.Module,), {})}, "give the class that has this name at the top level"),
        ({"mixer": Path}, r"'pathlib:Path' is no mixer: it must be a class derived from torch.nn.Module"),
        ({"preset": "small"}, "preset: Input should be 'grid', 'full', 'quick', 'demo' or 'profile', not 'small'"),
        ({"task": "all"}, "one layer on one task"),
        ({"task": ["parity", "mqar"]}, "one layer on one task"),
        ({"steps": 4.0}, "steps: Input should be a valid integer, not 4.0"),
        ({"lr": ["a"]}, "lr.*: Input should be a valid number"),
        ({"lr": [100.0]}, "^--lr 100 must lie between"),
        ({"reference": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_does_not_fit_is_one_clear_error_and_leaves_nothing_behind(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        study(**{"mixer": "transformer", "task": "in-context-recall", **SMALL, **arguments, "out": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undiagnosed")
def test_numbers_of_numpy_and_names_with_dashes_are_those_of_the_command(tmp_path: Path) -> None:
    """A whole number for a real one, too: it is part of the study's identity."""
    few = SMALL | {"steps": 1, "evaluations": 1, "lr": [np.float64(0.5), 1], "weight_decay": 0}
    study("transformer", "in-context-recall", out=str(tmp_path), **few | {"mixer_options": {"heads": 2}})
    rates = [{"1e-3": "0.5", "5e-3": "1"}.get(word, word) for word in SAME]
    mad.main([*rates, "--steps", "1", "--evaluations", "1", "--out", str(tmp_path)])
    assert len([*tmp_path.glob("studies/*/*/record.json")]) == 2


class Plain(torch.nn.Module):
    """A layer without a step form; divided by zero, it diverges in training at once."""

    def __init__(self, dim: int, divisor: int = 1) -> None:
        super().__init__()
        self.out, self.divisor = torch.nn.Linear(dim, dim), divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        divisor = self.divisor if len(x) > 2 else 1  # the check before the first step has two sequences
        return self.out(x) / torch.tensor(float(divisor))


def test_quiet_prints_nothing_and_a_study_that_diverged_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = SMALL | {"lr": [1e-3], "steps": 1, "evaluations": 1, "reference": "none", "out": tmp_path}
    found = study(Plain, "in-context-recall", **{**few, "mixer_options": {}})
    assert found.table["state"][0] is None
    assert capsys.readouterr() == ("", "")

    diverged = study(Plain, "in-context-recall", **{**few, "mixer_options": {"divisor": 0}})
    assert diverged.test == diverged.extrapolation == {}
    assert repr(diverged).endswith(": every point diverged>")
    with pytest.raises(ValueError, match="every point diverged, so there is no model"):
        diverged.model  # noqa: B018
