"""Switches of layers in the diagnostics: they name and identify a study, and leave studies without them as they are."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mixers.base import switched_off
from mixers.linear_attention import LinearAttention
from mixers.short_convolution import ConvolvedLayer
from runners.mad import __main__ as mad
from runners.mad import study
from runners.mad.experiment import Experiment
from runners.mad.results import compare
from runners.mad.results.standings import in_order, told_apart
from runners.mad.results.summary import Summary, read_summary
from tests.runners.mad.commands import planned

SMALL = ["--task", "in-context-recall", "--width", "16", "--mlp-width", "16", "--device", "cpu", "--batch-size", "16"]
DATA = ["--task.length", "16", "--task.train-examples", "32", "--task.eval-examples", "20"]
SHORT = ["--lr", "1e-3", "--weight-decay", "0", "--steps", "2", "--evaluations", "1"]
CONVOLUTION = ["--short-convolution", "3"]
STRANGER = "tests.mixers.strangers:GatedToy"
pytestmark = pytest.mark.usefixtures("wide_terminal")


def plan(*arguments: str) -> Experiment:
    (experiment,) = planned([*arguments, *SMALL, *DATA])[1]
    return experiment


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Summary]]:
    """The same small study without and with a convolution, and with another one."""
    out = tmp_path_factory.mktemp("results")
    values: dict[str, Any] = {
        "lr": [1e-3],
        "weight_decay": [0.0],
        "steps": 2,
        "evaluations": 1,
        "batch_size": 16,
        "width": 16,
        "mlp_width": 16,
        "mixer_options": {"heads": 2},
        "device": "cpu",
        "quiet": True,
        "out": out,
        "task_options": {"length": 16, "train_examples": 32, "eval_examples": 20},
    }
    sizes = ({}, {"short_convolution": 3}, {"short_convolution": 4})
    return out, [study("linear-attention", "in-context-recall", **values, **size).summary for size in sizes]


def test_a_switch_that_is_off_is_no_part_of_a_study_s_settings() -> None:
    """So that studies from before there was the switch are found."""
    off, on = plan("--mixer", "deltanet"), plan("--mixer", "deltanet", "--mixer.negative-eigenvalues", "True")
    assert switched_off(off) == ["short_convolution", "preset"]
    assert "short_convolution" not in off.to_dict()
    assert off.to_dict()["mixer_config"] == {"heads": 4, "convolution": 4}
    assert on.to_dict()["mixer_config"] == {"heads": 4, "convolution": 4, "negative_eigenvalues": True}
    assert on.fingerprint != off.fingerprint
    assert asdict(off.mixer_config)["negative_eigenvalues"] is False


def test_a_convolution_names_and_identifies_a_study() -> None:
    plain, convolved = plan("--mixer", "linear-attention"), plan("--mixer", "linear-attention", *CONVOLUTION)
    assert plain.name.startswith("linear-attention in-context-recall")
    assert convolved.name.startswith("linear-attention+conv3 in-context-recall")
    assert convolved.to_dict() == plain.to_dict() | {"short_convolution": 3}
    assert len({e.fingerprint for e in (plain, convolved, replace(convolved, short_convolution=4))}) == 3
    assert plain.layer is LinearAttention
    assert issubclass(convolved.layer, ConvolvedLayer)
    assert convolved.code != plain.code


def test_results_of_the_convolution_stand_in_record_costs_and_label(trained: tuple[Path, list[Summary]]) -> None:
    out, summaries = trained
    plain, convolved, _ = summaries
    assert convolved.costs.parameters == plain.costs.parameters + 3 * 16
    assert convolved.costs.flops_per_token == plain.costs.flops_per_token
    assert plain.costs.state_floats is not None
    assert convolved.costs.state_floats == {n: y + 2 * 16 for n, y in plain.costs.state_floats.items()}
    (path,) = out.glob("studies/linear-attention+conv3-*")
    assert read_summary(path).config.short_convolution == 3
    records = [json.loads(path.read_text()) for path in out.glob("runs/*/config.json")]
    assert len(records) == 3
    labels = [standing.mixer for standing in told_apart(in_order([*reversed(summaries)]))]
    assert labels == ["linear-attention", "linear-attention+conv3", "linear-attention+conv4"]


def test_a_comparison_of_finished_studies_names_the_convolution(
    trained: tuple[Path, list[Summary]], capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main(["--out", str(trained[0])])
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert {"linear-attention", "linear-attention+conv3", "linear-attention+conv4"} <= set(rows)


def test_the_command_finds_what_the_function_has_trained(
    trained: tuple[Path, list[Summary]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--mixer", "linear-attention", "--mixer.heads", "2", *SMALL, *DATA, *SHORT, *CONVOLUTION]
    mad.main([*command, "--out", str(trained[0]), "--dry-run"])
    text = capsys.readouterr().out
    assert "linear-attention+conv3" in text
    assert "all runs are finished" in text


@pytest.mark.usefixtures("undiagnosed")
def test_a_layer_from_outside_can_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mad.main(["--mixer", STRANGER, *SMALL, *DATA, *SHORT, *CONVOLUTION, "--out", str(tmp_path)])
    assert f"{STRANGER}+conv3 in-context-recall" in capsys.readouterr().out
    experiment = plan("--mixer", STRANGER, *CONVOLUTION)
    names = [name for name, _ in experiment.build().stack[0].named_parameters()]
    assert {"convolution.weight_DW", "layer.mixer.v.weight"} <= set(names)


def test_a_list_shows_the_convolution_and_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--width", "16", "--mlp-width", "32"]
    mad.main(["--list", "--mixer", "transformer", "--mixer.heads", "2", *size, *CONVOLUTION])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "transformer+conv3" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[2] == f"{4 * 16**2 + 2 * 16 * 32 + 4 * 16 + 3 * 16:,}"
    assert cells[3] == f"{2 * 128 * 16 + 2 * 16:,}"


def test_match_meets_the_transformer_with_the_same_convolution() -> None:
    lines: list[str] = []
    command = ["--mixer", "lstm", "--task", "compression", "--width", "64", "--mlp-width", "256", "--match", "params"]
    (experiment,) = planned([*command, *CONVOLUTION], lines.append)[1]
    target = 4 * 64**2 + 2 * 64 * 256 + 4 * 64 + 3 * 64
    assert f"{target:,} parameters" in lines[0]
    width, hidden = experiment.shape.width, experiment.shape.mlp_width
    assert abs((9 * width**2 + 2 * width * hidden + (6 + 3) * width) / target - 1) <= 0.02


@pytest.mark.parametrize("size", ["1", "-1", "x", "2.5", "158408"])
def test_a_size_that_makes_no_sense_is_one_clear_line(refused: Callable[..., str], size: str) -> None:
    assert "--short-convolution" in refused("--mixer", "rt", *SMALL, "--short-convolution", size)
