"""What a command refuses: one line says why, and nothing is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runners.mad import __main__ as mad
from tests.runners.mad.commands import HEADS, TINY, planned

pytestmark = pytest.mark.usefixtures("wide_terminal")
HUGE = "1000000000000"
RT = ("--mixer", "rt", "--task", "parity")
PARITY = ("--mixer", "transformer", "--mixer.heads", "2", "--task", "parity", "--device", "cpu", "--width", "16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixer", "nope", "--task", "compression"], "no mixer 'nope': choose from transformer, sliding-attention"),
        (["--mixer", "rt", "--task", "memorisation"], "no task 'memorisation': did you mean memorization?"),
        (["--mixer", "rt,lstm", "--task", "parity"], "no mixer 'rt,lstm': separate names by spaces\n"),
        (["--mixer", "./my/layer.py", "--task", "parity"], "give module and class, not the file: my.layer:Class\n"),
        (["--mixer", "no_such_module:Layer", "--task", "compression"], "cannot import mixer 'no_such_module:Layer'"),
        (["--mixer", "pathlib:Path", "--task", "compression"], "must be a class derived from torch.nn.Module"),
        (["--task", "compression"], "--mixer is missing"),
        (["--mixer", "rt"], "--task is missing: give at least one value, or use --preset quick"),
        ([*RT, "--mixer.heads", "5"], "mixer 'rt': heads: 5 must divide"),
        (
            ["--mixer", "rt", "--task", "parity", "selective-copying", "--task.length", "16"],
            "task selective-copying: length is 16: 16 tokens to copy",
        ),
        (["--mixer", "gla", "--task", "parity", "--mixer.gate-temperature", "nan"], "gate-temperature nan must be a"),
        ([*RT, "--steps", "0"], "--steps 0 must be at least 1"),
        ([*RT, "--seeds", HUGE], f"--seeds {HUGE} must be at least 1 and at most 10,000"),
        ([*RT, "--lr", "-1"], "--lr -1 must lie between"),
        ([*RT, "--short-convolution", "1"], "--short-convolution 1 must be 0 for none, or 2 to 1,000"),
        ([*RT, "--difficulty", "hard"], "has no difficulty 'hard': choose from all, baseline"),
        ([*RT, "--batch-size", "20000"], "batch size 20000 is larger than"),
        ([*RT, "--epochs", "3", "--steps", "5"], "exclude each other"),
        (["--list", "--dry-run"], "--list and --dry-run exclude each other"),
        ([*RT, "--wandb-project", "mine"], "--wandb-project has no effect without --wandb online or --wandb offline"),
        ([*RT, "--reference", "/nowhere"], "--reference /nowhere is no folder: give shipped, none, or a folder"),
        ([*RT, "--storage", "nonsense://x"], "cannot open storage nonsense://x"),
        # What no machine has the memory for.
        ([*PARITY, "--layers", "1000", "--width", "2048"], "for 6 runs of transformer"),
        ([*PARITY, "--task.length", HUGE], "the data of parity"),
        (
            [*PARITY, "--task.train-examples", "10000000", "--batch-size", "10000000", "--layers", "100"],
            "a step of 1 run of",
        ),
        (
            [*PARITY, "--task.length", "8", "--task.train-examples", "64", "--batch-size", "32"],
            "parity: train and validation share",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("runners.device.total_memory", lambda device: 16 * 2**30)
    assert message in refused(*arguments)


def test_what_fits_is_not_refused_and_its_neighbour_is(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 bits in each of 12,800 + 2 x 1,280 sequences, 17 bytes a bit."""
    monkeypatch.setattr("runners.device.total_memory", lambda device: 17 * 40 * 15_360 - 1)
    assert "the data of parity: at least 0.0 GiB" in refused(*PARITY)
    monkeypatch.setattr("runners.device.total_memory", lambda device: 17 * 40 * 15_360)
    assert "lower --width, --mlp-width, --layers, --together or" in refused(*PARITY, "--width", "1024")


@pytest.mark.parametrize(
    ("task", "device", "runs"),
    [("s5-permutations", "cpu", 16), ("parity", "cpu", 6), ("copying", "cpu", 1), ("copying", "cuda", 30)],
)
def test_a_cpu_trains_as_many_runs_at_once_as_32768_positions_hold(task: str, device: str, runs: int) -> None:
    """Of 128 sequences of 16, 40 and 220 positions."""
    (experiment,) = planned(["--mixer", "transformer", "--task", task, "--device", "cpu"])[1]
    assert experiment.runs_at_once(30, torch.device(device)) == runs


def test_a_file_in_place_of_the_results_folder_is_refused(ended: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("")
    assert ended(mad.main, [*RT, "--out", str(file)]) == f"error: --out {file} is a file: name a folder\n"


@pytest.mark.usefixtures("undiagnosed")
def test_a_database_that_takes_no_more_data_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], ended: Callable[..., str], tmp_path: Path
) -> None:
    words = ["--mixer", "transformer", "--task", "parity", *HEADS, *TINY, "--weight-decay", "0"]
    words += ["--out", str(tmp_path / "out"), "--storage"]
    mad.main([*words, f"sqlite:///file:{tmp_path}/studies.db?uri=true&password=secret", "--lr", "1e-3"])
    assert f"optuna-dashboard sqlite:///file:{tmp_path}/studies.db?uri=true&password=***" in capsys.readouterr().out
    error = ended(mad.main, [*words, f"sqlite:///file:{tmp_path}/studies.db?mode=ro&uri=true", "--lr", "2e-3"])
    assert "attempt to write a readonly database" in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("class Config: pass", "Config must be a dataclass"),
        ("@dataclass\n    class Config:\n        size: int", "whose fields all have defaults"),
        ("Config = undefined", "cannot import mixer"),
    ],
)
def test_a_layer_with_an_unusable_config_is_one_clear_line(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, message: str
) -> None:
    name = f"layer_{abs(hash(config))}"
    imports = "from dataclasses import dataclass\nfrom mixers.base import Layer\n"
    (tmp_path / f"{name}.py").write_text(f"{imports}class L(Layer):\n    {config}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused("--mixer", f"{name}:L", "--task", "compression")
