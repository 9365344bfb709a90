"""A dry run of pretraining says how long the run takes."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4 import duration
from runners.c4.__main__ import main
from runners.c4.presets import configure

CPU = torch.device("cpu")


class Timed(nn.Module):
    """A layer that takes half a second per sequence, by a clock of its own."""

    now = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        Timed.now += 0.5 * len(x_BTD)
        return x_BTD * self.scale


class Exhausted(Timed):
    """A layer that finds too little memory for the whole batch."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        if len(x_BTD) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x_BTD * self.scale


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration.time, "monotonic", lambda: Timed.now)
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Timed=Timed, Exhausted=Exhausted))


def test_a_batch_takes_as_long_as_its_sequences_do_in_the_largest_timed_step() -> None:
    """100 steps of 8 sequences in 2 layers, and 4 evaluations of 64 sequences each, forward: a third of the time."""
    config = configure("tiny", {"mixer": "layers_of_others:Timed"})
    seconds = duration.seconds_of_run(config, {}, vocab_size=100, flops_per_token=1, device=CPU)
    assert seconds == pytest.approx(100 * 8 + 4 * 64 / 3)


def test_steps_grow_until_one_takes_long_enough() -> None:
    """Steps of 1, 2 and 4 sequences follow a first one, which compiles."""
    Timed.now = 0.0
    config = configure("tiny", {"mixer": "layers_of_others:Timed"})
    duration.seconds_of_run(config, {}, vocab_size=100, flops_per_token=1, device=CPU)
    assert Timed.now == 1 + 1 + 2 + 4


def test_a_step_takes_no_more_sequences_than_the_batch_has() -> None:
    Timed.now = 0.0
    config = configure("tiny", {"mixer": "layers_of_others:Timed", "batch_size": 3, "layers": 1})
    seconds = duration.seconds_of_run(config, {}, vocab_size=100, flops_per_token=1, device=CPU)
    assert Timed.now == 0.5 * (1 + 1 + 2 + 3)
    assert seconds == pytest.approx(100 * 1.5 + 4 * 64 * 0.5 / 3)


def test_a_cpu_is_not_timed_with_a_model_that_is_too_large_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--layers", "6", "--device", "cpu", "--dry-run"])
    assert capsys.readouterr().out.endswith("no time is given for this machine's CPU: the model is too large for it\n")


def test_the_dry_run_ends_with_the_time_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--preset", "tiny", "--device", "cpu", "--dry-run", "--mixer", "layers_of_others:Timed"])
    out = capsys.readouterr().out
    assert out.endswith("a run takes about 15 min on this machine's CPU (single steps were timed)\n")  # 885 s


def test_too_little_memory_is_said_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--preset", "tiny", "--device", "cpu", "--dry-run", "--mixer", "layers_of_others:Exhausted"])
    assert capsys.readouterr().out.endswith(
        "time on this machine's CPU unknown: out of memory: lower --micro-batch-size (now 8) or give --recompute\n"
    )
