"""How long a command says that it will take."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runners.mad import __main__ as mad
from runners.mad import duration
from runners.mad.duration import Clock, Duration, Work, seconds_on_gpu, sentence, work_left
from runners.mad.reference.cells import FOLDER, read_cell
from runners.progress import spell
from tests.runners.mad.commands import planned

CPU = torch.device("cpu")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Members of the ensembles whose steps were timed; each step takes a second."""
    members: list[int] = []

    def time_step(experiment: Any, count: int, device: torch.device) -> float:
        members.append(count)
        return 1.0

    monkeypatch.setattr(duration, "time_step", time_step)
    return members


def test_a_time_has_the_unit_that_suits_it() -> None:
    seconds = (3, 99, 100, 5960, 6000, 33_000, 48 * 3600 - 1, 48 * 3600, 4e8)
    expected = ["3 s", "99 s", "2 min", "99 min", "1.7 h", "9.2 h", "48.0 h", "2 days", "4,630 days"]
    assert [spell(value) for value in seconds] == expected


def test_a_shape_is_timed_once_and_none_after_the_budget(timed: list[int]) -> None:
    (one, other) = planned(["--mixer", "rt", "--task", "parity", "--difficulty", "all", "--device", "cpu"])[1][:2]
    clock = Clock([CPU], together=4)
    assert clock.duration(one, Work(runs=10, run_steps=200)).here == 50.0  # four runs a second
    assert clock.duration(one, Work(runs=10, run_steps=20)).here == 5.0
    assert timed == [4]
    clock.left = 0.0
    assert clock.duration(other, Work(runs=10, run_steps=200)).here is None
    assert clock.duration(other, Work(runs=0, run_steps=0)).here == 0.0


def test_a_step_is_really_timed() -> None:
    tiny = ["--task.length", "24", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"]
    command = ["--mixer", "lstm", "--task", "parity", *tiny, "--width", "16", "--mlp-width", "16", "--device", "cpu"]
    (experiment,) = planned(command)[1]
    assert 0 < duration.time_step(experiment, 2, CPU) < 60


def test_the_gpu_time_is_that_of_the_reference_result_of_the_same_settings() -> None:
    cell = read_cell(FOLDER / "rt" / "parity.json")
    command = ["--mixer", "rt", "--task", "parity", "--device", "cpu"]
    run_steps = cell["steps"] * (len(cell["points"]) + len(cell["seeds"]) - 1)
    for same in ([], ["--steps", "500"]):
        (experiment,) = planned([*command, *same])[1]
        found = seconds_on_gpu(experiment)
        assert found is not None
        assert found == (pytest.approx(cell["seconds"] / run_steps), cell["device"])
    for other in (["--width", "64"], ["--batch-size", "64"], ["--mixer.heads", "8"], ["--task.data-seed", "9"]):
        (experiment,) = planned([*command, *other])[1]
        assert seconds_on_gpu(experiment) is None


def test_the_sentence_says_what_was_timed() -> None:
    known = Duration(here=33_000.0, recorded=200.0, device="NVIDIA H200")
    unknown = Duration(here=None, recorded=None)
    assert sentence([known]) == (
        "about 9.2 h here (3 steps of each shape were timed), "
        "about 3 min on one NVIDIA H200 (from the reference results)"
    )
    assert sentence([known, unknown]) == (
        "more than 9.2 h here (1 of 2 rows were timed), "
        "about 3 min on one NVIDIA H200 (from the reference results of 1 of 2 rows)"
    )
    assert sentence([unknown]) == ""


def test_repeats_of_the_chosen_point_are_part_of_the_work(tmp_path: Path) -> None:
    options, (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--preset", "quick"])
    work = work_left(experiment, options.runs, options.more_seeds, None, tmp_path)
    assert work == Work(runs=2, run_steps=(2 + 2) * 1000)


def test_training_is_announced_unless_it_is_short(timed: list[int], tmp_path: Path) -> None:
    said: list[str] = []
    command = ["--mixer", "rt", "--task", "parity", "--device", "cpu", "--out", str(tmp_path), "--width", "64"]
    for steps in ("99", "7200"):
        options, experiments = planned([*command, "--steps", steps])
        mad.announce(options, experiments, said.append)
    assert said == ["training takes about 2.0 h here (3 steps of each shape were timed)"]
    assert timed == [6]
