"""Settings that no machine has the time or the memory for are refused before anything is drawn, built or written."""

from collections.abc import Callable

import pytest
import torch

from runners.mad.memory import runs_at_once
from tests.runners.mad.commands import planned

HUGE = "1000000000000"
PARITY = ("--mixer", "transformer", "--mixer.heads", "2", "--task", "parity", "--device", "cpu", "--width", "16")


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--steps", "1" + 30 * "0"), ["--steps 1000", "at most 1,000,000,000"]),
        (("--epochs", "1" + 30 * "0"), ["--epochs 1000", "at most 1,000,000,000"]),
        (("--seeds", HUGE), ["--seeds", "at most 100,000"]),
        (("--seeds", HUGE, "--seeds-of", "chosen"), ["--seeds", "at most 100,000"]),
        (("--evaluations", HUGE), ["--evaluations", "at most 100,000"]),
        (("--layers", "100000000"), ["--layers", "at most 1,000"]),
        (("--layers", "1000", "--width", "2048"), ["for 6 runs of transformer", "lower --width"]),
        (("--width", "1000000"), ["for 6 runs of transformer", "lower --width"]),
        (("--task.length", HUGE), ["the data of parity", "lower --task.train-examples"]),
        (("--task.train-examples", HUGE), ["the data of parity", "lower --task.train-examples"]),
        (("--task.eval-examples", HUGE), ["the data of parity", "lower --task.train-examples"]),
        (("--task.extrapolation-factors", HUGE), ["the data of parity", "the lengths of the task"]),
        (
            ("--task.train-examples", "10000000", "--batch-size", "10000000", "--layers", "100"),
            ["a step of 1 run of", "lower --batch-size, --layers"],
        ),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_what_cannot_fit_is_refused_in_one_line(
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    messages: list[str],
    more: list[str],
) -> None:
    monkeypatch.setattr("runners.memory.total_memory", lambda device: 16 * 2**30)
    error = refused(*PARITY, *options, *more)
    assert all(message in error for message in messages), error


def test_what_fits_is_not_refused_and_its_neighbour_is(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 bits in each of 12,800 + 2 x 1,280 sequences, 17 bytes a bit."""
    monkeypatch.setattr("runners.memory.total_memory", lambda device: 17 * 40 * 15_360 - 1)
    assert "the data of parity: at least 0.0 GiB" in refused(*PARITY)
    monkeypatch.setattr("runners.memory.total_memory", lambda device: 17 * 40 * 15_360)
    error = refused(*PARITY, "--width", "1024")
    assert "for 6 runs of transformer" in error
    assert "lower --width, --mlp-width, --layers, --together or" in error


@pytest.mark.parametrize(
    ("task", "device", "runs"),
    [("s5-permutations", "cpu", 16), ("parity", "cpu", 6), ("copying", "cpu", 1), ("copying", "cuda", 30)],
)
def test_a_cpu_trains_as_many_runs_at_once_as_32768_positions_hold(task: str, device: str, runs: int) -> None:
    """Of 128 sequences of 16, 40 and 220 positions."""
    (experiment,) = planned(["--mixer", "transformer", "--task", task, "--device", "cpu"])[1]
    assert runs_at_once(experiment, 30, torch.device(device)) == runs


def test_splits_that_share_examples_are_one_line_in_training_as_in_a_dry_run(refused: Callable[..., str]) -> None:
    few = ("--task.length", "8", "--task.train-examples", "64", "--batch-size", "32")
    for more in ((), ("--dry-run",)):
        assert "parity: train and validation share" in refused(*PARITY, *few, *more)
