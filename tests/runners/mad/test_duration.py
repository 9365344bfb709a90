"""How long a command says that it will take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial

from mixers import MIXERS
from runners.mad import __main__ as mad
from runners.mad import duration
from runners.mad.duration import Clock, Duration, Work, seconds_on_gpu, sentence, work_left
from runners.mad.reference.cells import FOLDER, read_cell
from runners.mad.training.protocol import Run
from runners.progress import spell
from tests.runners.mad.commands import planned
from tests.runners.mad.results.test_summary import made_up_trial

CPU = torch.device("cpu")
EVALUATIONS = 40 * 1280 / 3
"""Sequences that the evaluations of a run read, as many as take their time in training."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Members of the ensembles whose steps were timed; each step takes a second."""
    members: list[int] = []

    def time_step(experiment: Any, count: int, device: torch.device, limit: float) -> float:
        members.append(count)
        return 1.0

    monkeypatch.setattr(duration, "time_step", time_step)
    return members


def test_a_time_has_the_unit_that_suits_it() -> None:
    seconds = (3, 99, 100, 5960, 6000, 33_000, 48 * 3600 - 1, 48 * 3600, 4e8)
    expected = ["3 s", "99 s", "2 min", "99 min", "1.7 h", "9.2 h", "48.0 h", "2 days", "4,630 days"]
    assert [spell(value) for value in seconds] == expected


def test_a_shape_is_timed_once_and_others_are_estimated_after_the_budget(timed: list[int]) -> None:
    short, long = planned(["--mixer", "rt", "--task", "parity", "--difficulty", "all", "--device", "cpu"])[1][:2]
    ratio = long.task_config.length / short.task_config.length
    assert ratio > 1
    some, fewer, none = (Work(runs=10, run_steps=steps) for steps in (200, 20, 0))

    clock = Clock([CPU], together=4)
    whole = 1 + EVALUATIONS / (128 * 20_000)
    found = clock.durations([short, short, short], [some, fewer, none])
    assert [duration.here for duration in found] == pytest.approx(
        [50.0 * whole, 5.0 * whole, 0.0]
    )  # four runs a second
    assert timed == [4]

    clock.left = 0.0
    found = clock.durations([long, long, short], [some, none, some])
    assert [duration.here for duration in found] == pytest.approx([50.0 * whole * ratio, 0.0, 50.0 * whole])
    assert [duration.estimated for duration in found] == [True, False, False]
    assert timed == [4]


def test_the_shortest_sequences_come_first_and_no_step_that_would_not_fit(timed: list[int]) -> None:
    """Each timed step takes a second, so that a step with longer sequences is expected to take more than is left."""
    tasks = ["--task", "in-context-recall", "s5-permutations", "parity"]
    experiments = planned(["--mixer", "lstm", "rt", *tasks, "--device", "cpu"])[1]
    lengths = [experiment.instance.split("train").inputs_ST.shape[1] for experiment in experiments]
    work = Work(runs=4, run_steps=40)
    found = Clock([CPU], together=4, budget=2.0).durations(experiments, [work] * len(experiments))

    shortest, whole = min(lengths), 1 + EVALUATIONS / (128 * 20_000)
    assert [not duration.estimated for duration in found] == [length == shortest for length in lengths]
    assert [duration.here for duration in found] == pytest.approx(
        [10 * whole * length / shortest for length in lengths]
    )


def test_evaluations_count_where_there_are_few_steps(timed: list[int]) -> None:
    (experiment,) = planned(["--mixer", "rt", "--task", "memorization", "--steps", "400", "--device", "cpu"])[1]
    (found,) = Clock([CPU], together=4).durations([experiment], [Work(runs=4, run_steps=4 * 400)])
    assert found.here == pytest.approx(400 * (1 + EVALUATIONS / (128 * 400)))


def test_many_layers_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(duration, "time_step", lambda experiment, count, device, limit: limits.append(limit) or 1e-3)
    experiments = planned(["--mixer", "all", "--task", "parity", "compression", "--device", "cpu"])[1]
    Clock([CPU], together=1).durations(experiments, [Work(runs=1, run_steps=1)] * len(experiments))
    Clock([CPU], together=1).durations(experiments[:2], [Work(runs=1, run_steps=1)] * 2)
    assert limits == [45 / len(MIXERS)] * (2 * len(MIXERS)) + [10.0] * 2


def test_an_experiment_whose_step_fails_takes_an_unknown_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_step(experiment: Any, count: int, device: torch.device, limit: float) -> float:
        if experiment.mixer == "gla":
            raise RuntimeError("no kernel")
        return 1.0

    monkeypatch.setattr(duration, "time_step", time_step)
    experiments = planned(["--mixer", "gla", "rt", "--task", "parity", "--device", "cpu"])[1]
    found = Clock([CPU], together=1).durations(experiments, [Work(runs=1, run_steps=7)] * 2)
    assert [duration.cells()[0] for duration in found] == ["?", "7 s"]


def test_a_step_is_really_timed() -> None:
    tiny = ["--task.length", "24", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"]
    command = ["--mixer", "lstm", "--task", "parity", *tiny, "--width", "16", "--mlp-width", "16", "--device", "cpu"]
    (experiment,) = planned(command)[1]
    assert 0 < duration.time_step(experiment, 2, CPU) < 60


def test_the_gpu_time_is_that_of_the_reference_result_of_the_same_settings() -> None:
    cell = read_cell(FOLDER / "rt" / "parity.json")
    command = ["--mixer", "rt", "--task", "parity", "--device", "cpu"]
    run_steps = cell.steps * (len(cell.points) + len(cell.seeds) - 1)
    for same in ([], ["--steps", "500"]):
        (experiment,) = planned([*command, *same])[1]
        found = seconds_on_gpu(experiment)
        assert found is not None
        assert found == (pytest.approx(cell.seconds / run_steps), cell.device)
    for other in (["--width", "64"], ["--batch-size", "64"], ["--mixer.heads", "8"], ["--task.data-seed", "9"]):
        (experiment,) = planned([*command, *other])[1]
        assert seconds_on_gpu(experiment) is None


def test_the_sentence_says_what_was_timed() -> None:
    known = Duration(here=33_000.0, recorded=200.0, device="NVIDIA H200")
    estimated = Duration(here=3_000.0, estimated=True, recorded=None)
    unknown = Duration(here=None, recorded=None)
    assert sentence([known]) == (
        "about 9.2 h here (up to 3 steps of each shape were timed), "
        "about 3 min on one NVIDIA H200 (from the reference results)"
    )
    assert sentence([known, estimated]) == (
        "about 10.0 h here (1 of 2 rows were timed, others follow from the lengths of their sequences), "
        "about 3 min on one NVIDIA H200 (from the reference results of 1 of 2 rows)"
    )
    assert sentence([known, unknown]) == (
        "more than 9.2 h here (1 of 2 rows were timed), "
        "about 3 min on one NVIDIA H200 (from the reference results of 1 of 2 rows)"
    )
    assert sentence([unknown]) == ""

    finished = Duration(here=0.0, recorded=0.0)
    assert sentence([finished, known, finished, estimated]) == (
        "about 10.0 h here (1 of 2 unfinished rows were timed, others follow from the lengths of their sequences), "
        "about 3 min on one NVIDIA H200 (from the reference results of 1 of 2 unfinished rows)"
    )
    assert [duration.cells() for duration in (known, estimated, unknown)] == [
        ["9.2 h", "3 min"],
        ["~50 min", ""],
        ["?", ""],
    ]


def test_repeats_of_the_chosen_point_are_part_of_the_work(tmp_path: Path) -> None:
    options, (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--preset", "quick"])
    work = work_left(experiment, options.runs, options.more_seeds, None, tmp_path)
    assert work == Work(runs=2, run_steps=(2 + 2) * 1000)


def test_where_a_repeat_diverged_the_repeats_of_the_next_best_point_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--preset", "quick"])
    (best, next_best), done = [run.lr for run in options.runs], {}
    for lr, seed, score in ((best, 0, 0.9), (next_best, 0, 0.5), (best, 1, None), (best, 2, 0.9), (next_best, 1, 0.5)):
        done[lr, seed] = made_up_trial(lr, 0.0, seed, score)

    def done_of(runs: Sequence[Run], *_: object) -> list[FrozenTrial]:
        return [done[run.lr, run.seed] for run in runs if (run.lr, run.seed) in done]

    monkeypatch.setattr(duration, "done_of", done_of)

    def left() -> int:
        return work_left(experiment, options.runs, options.more_seeds, InMemoryStorage(), tmp_path).runs

    assert left() == 1
    done[next_best, 2] = made_up_trial(next_best, 0.0, 2, None)
    assert left() == 0  # a seed of each point diverged
    del done[best, 2]
    assert left() == 1


def test_training_is_announced_unless_it_is_short(timed: list[int], tmp_path: Path) -> None:
    said: list[str] = []
    command = ["--mixer", "rt", "--task", "parity", "--device", "cpu", "--out", str(tmp_path), "--width", "64"]
    for steps in ("99", "7200"):
        options, experiments = planned([*command, "--steps", steps])
        mad.announce(options, experiments, said.append)
    assert said == ["training takes about 2.0 h here (up to 3 steps of each shape were timed)"]
    assert timed == [6]
