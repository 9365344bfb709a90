"""The search: each point exactly once, whatever is killed or runs beside it."""

import io
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pandas as pd
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from mixers.base import Shape
from mixers.registry import find_mixer
from mixers.transformer import Transformer
from runners import progress
from runners.files import load_tensors
from runners.mad import charts, search
from runners.mad import experiment as experiment_module
from runners.mad.display import Display
from runners.mad.experiment import Experiment
from runners.mad.training import loop
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.loop import CurvePoint, Metrics, Result
from runners.mad.training.protocol import Protocol, Run
from runners.search import JOURNAL, open_storage
from runners.tracking import Tracking
from tasks.metrics import Counts, count, score
from tasks.recall import InContextRecall, NoisyInContextRecall
from tests.runners.mad.commands import OPTIONS, experiment, planned, trained
from tests.runners.processes import forks, run_program, start, wait_for

GRID = OPTIONS.runs
COMMAND = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--task.length", "16", "--task.train-examples", "64"),
    *("--task.eval-examples", "30", "--batch-size", "16", "--width", "16", "--mlp-width", "32", "--mixer.heads", "2"),
    *("--device", "cpu", "--steps", "20", "--evaluations", "10", "--reference", "none"),
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[Run]]:
    """The runs of each ensemble that is trained."""
    ensembles: list[list[Run]] = []
    shown = Display.started

    def spy(self: Display, of: Experiment, runs: Sequence[Run], waiting: int) -> None:
        ensembles.append([*runs])
        shown(self, of, runs, waiting)

    monkeypatch.setattr(Display, "started", spy)
    return ensembles


def trials(out: Path, storage: str = "") -> list[FrozenTrial]:
    return optuna.load_study(study_name=None, storage=open_storage(storage or str(out / JOURNAL))).trials


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run, Result], Result]) -> None:
    """Let the search see changed results of its runs."""
    real = search.train

    def train(*arguments: Any) -> list[Result]:
        return [change(run, result) for run, result in zip(arguments[3], real(*arguments), strict=True)]

    monkeypatch.setattr(search, "train", train)


@pytest.mark.parametrize("storage", [None, "sqlite:///{}/studies.db"])
def test_the_grid_runs_once_and_a_larger_one_only_what_is_missing(
    tmp_path: Path, started: list[list[Run]], storage: str | None
) -> None:
    url = storage and storage.format(tmp_path)
    first, again = (trained(tmp_path, storage=url) for _ in range(2))
    assert started == [[*GRID]]
    pd.testing.assert_frame_equal(first, again)
    assert len(trained(tmp_path, storage=url, lr=(1e-3, 2e-3), weight_decay=(0.1,), seeds=2)) == 4
    assert [(run.lr, run.seed) for run in started[1]] == [(1e-3, 1), (2e-3, 0), (2e-3, 1)]
    assert [trial.state for trial in trials(tmp_path, url or "")] == [TrialState.COMPLETE] * 9


def test_ensembles_of_any_size_give_the_same_figures(tmp_path: Path, started: list[list[Run]]) -> None:
    tables = [trained(tmp_path / str(together), together=together) for together in (6, 4, 1)]
    assert [len(runs) for runs in started] == [6, 4, 2, 1, 1, 1, 1, 1, 1]
    for table in tables[1:]:
        assert [*table["validation.loss"]] == pytest.approx([*tables[0]["validation.loss"]], rel=1e-5)


def test_a_record_has_what_is_needed_to_judge_and_repeat_a_run(tmp_path: Path) -> None:
    record = trained(tmp_path, lr=(1e-4,), weight_decay=(0.0,)).iloc[0]
    assert record["study"] == experiment().name
    assert (record["lr"], record["weight_decay"], record["seed"], record["steps"]) == (1e-4, 0.0, 0, 6)
    assert record["mixer_config"] == {"heads": 2, "qk_norm": True}
    assert record["parameters"] == 4 * 16**2 + 2 * 16 * 32 + 4 * 16
    assert record["state"] == {"128": 2 * 128 * 16, "1024": 2 * 1024 * 16}
    assert record["curve"]["step"] == [2, 4, 6]
    assert record["file"].parent.name == "lr0.0001-wd0.0-seed0"
    assert {path.name for path in record["file"].parent.iterdir()} == {"record.json", "model.safetensors", ".lock"}

    # The model has the figures.
    model = experiment().build()
    model.load_state_dict(load_tensors(record["file"].with_name("model.safetensors"))[0])
    for split in ("validation", "test"):
        batch = experiment().instance.batch(split)
        with torch.no_grad():
            logits_STV = model(torch.from_numpy(batch.inputs_ST))
        counts = count(logits_STV[None], torch.from_numpy(batch.targets_ST), torch.from_numpy(batch.scored_ST))
        for metric in ("sequence_accuracy", "token_accuracy", "loss"):
            assert record[f"{split}.{metric}"] == pytest.approx(getattr(counts, metric).item(), rel=1e-5), metric
        if split == "validation":
            assert record["validation.score"] == pytest.approx(score(counts).item(), rel=1e-5)

    # Optuna shows it.
    (trial,) = trials(tmp_path)
    assert trial.value == record["validation.token_accuracy"]
    assert trial.intermediate_values == dict(zip((2, 4, 6), record["curve"]["token_accuracy"], strict=True))
    assert [trial.user_attrs[name] for name in ("seed", "lr", "weight_decay")] == [0, 1e-4, 0.0]


@pytest.mark.parametrize("decays", [(0.1,), (0.0, 0.1)])
def test_parameters_of_trials_are_those_that_vary_in_the_study(
    tmp_path: Path, started: list[list[Run]], decays: tuple[float, ...]
) -> None:
    for lrs in ((1e-3,), (1e-3, 2e-3), (1e-3,)):
        trained(tmp_path, lr=lrs, weight_decay=decays)
    storage = open_storage(str(tmp_path / JOURNAL))
    studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    varying = ["weight_decay"] * (len(decays) > 1)
    assert {study.study_name: [[*trial.params] for trial in study.trials] for study in studies} == {
        f"{experiment().name} over {' '.join(varying) or 'seeds'}": [varying] * len(decays),
        experiment().name + " over lr" * (not varying): [["lr", *varying]] * 2 * len(decays),
    }
    assert len(started) == 2


def test_the_chosen_point_alone_is_repeated_and_tested(tmp_path: Path) -> None:
    table = trained(tmp_path, seeds=3, seeds_of="chosen")
    order = ["validation.token_accuracy", "lr", "weight_decay"]
    best = table[table["seed"] == 0].sort_values(order, ascending=[False, True, True]).iloc[0]
    of_best = (table["lr"] == best["lr"]) & (table["weight_decay"] == best["weight_decay"])
    assert [*table[of_best]["seed"]] == [0, 1, 2]
    assert len(table) == len(GRID) + 2
    assert [*table["test.loss"].notna()] == [*of_best]


def test_where_a_further_seed_diverges_the_next_best_point_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[Run]]
) -> None:
    def diverging(run: Run, result: Result) -> Result:
        if run.seed == 1 and run.lr == 1e-3:
            return replace(result, diverged_step=3, validation=None)
        return replace(result, validation=replace(result.validation, token_accuracy=1 - run.lr))

    altered(monkeypatch, diverging)
    grid: dict[str, Any] = {"lr": (1e-3, 2e-3, 5e-3), "weight_decay": (0.0,)}
    table = trained(tmp_path, seeds=2, seeds_of="chosen", **grid)
    assert [*zip(table["lr"], table["seed"], table["test.loss"].notna(), strict=True)] == [
        *((1e-3, 0, False), (2e-3, 0, True), (5e-3, 0, False)),
        *((1e-3, 1, False), (2e-3, 1, True)),
    ]
    assert [trial.state for trial in trials(tmp_path)].count(TrialState.FAIL) == 1
    assert len(started) == 3
    trained(tmp_path, seeds=2, seeds_of="chosen", **grid)
    assert len(started) == 3

    # A command for one seed chooses the first.
    assert trained(tmp_path, **grid)["test.loss"].notna()[0]


def test_on_a_rung_of_one_rate_the_seeds_that_converge_are_read_on_the_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverged: dict[str, Any] = {"diverged_step": 3, "validation": None}
    altered(monkeypatch, lambda run, result: replace(result, **diverged) if run.seed == 1 else result)
    table = trained(tmp_path, experiment(difficulty="rung-4"), lr=(1e-3,), weight_decay=(0.0,), seeds=3)
    assert [*table["test.loss"].notna()] == [True, False, True]


def test_a_run_whose_evaluation_alone_is_not_finite_is_recorded_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = loop.evaluate

    def broken(members: Ensemble, params: torch.Tensor, *rest: Any) -> Counts:
        return evaluate(members, torch.full_like(params, torch.nan), *rest)

    monkeypatch.setattr(loop, "evaluate", broken)
    assert [*trained(tmp_path)["diverged_step"]] == [2] * 6
    assert {trial.state for trial in trials(tmp_path)} == {TrialState.FAIL}


def test_what_counts_makes_another_study_and_names_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    different = [
        experiment(),
        experiment(mixer_config=Transformer.Config(heads=4)),
        experiment(task_config=InContextRecall.Config(length=18, train_examples=40, eval_examples=30)),
        experiment(protocol=Protocol(batch_size=16, steps=7, evaluations=3)),
        experiment(shape=Shape(width=32, mlp_width=32)),
        experiment(precision="bfloat16"),
        experiment(mixer="rt", mixer_config=find_mixer("rt").Config(heads=2)),
        experiment(short_convolution=3),
    ]
    assert len({e.fingerprint for e in different}) == len({e.name for e in different}) == len(different)
    assert experiment().fingerprint == experiment(difficulty="another", preset="quick").fingerprint
    assert different[0].instance is different[1].instance is not different[2].instance

    before = experiment().fingerprint
    monkeypatch.setattr(InContextRecall, "fingerprint", lambda self: "other sequences")
    experiment_module.data_facts.cache_clear()
    assert experiment().fingerprint != before
    experiment_module.data_facts.cache_clear()


@pytest.mark.parametrize(
    ("mixer", "task", "start"), [("deltanet", "parity", "f4a535dbd9a0"), ("rt", "compression", "c67763e8d015")]
)
def test_reference_results_have_the_fingerprint_of_todays_settings_and_data(mixer: str, task: str, start: str) -> None:
    """Settings that were added since are switches, which are no part of it where they are off."""
    (planned_today,) = planned(["--mixer", mixer, "--task", task])[1]
    assert replace(planned_today, precision="bfloat16").fingerprint.startswith(start)


def test_another_text_of_a_users_module_makes_another_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from mixers.transformer import Transformer\n\n\nclass L(Transformer):\n    factor = 1\n"
    found = []
    for factor in ("1", "2", "1"):
        (tmp_path / "edited_layer.py").write_text(text.replace("1", factor))
        monkeypatch.delitem(sys.modules, "edited_layer", raising=False)
        found.append(experiment(mixer="edited_layer:L").fingerprint)
    assert found[0] == found[2] != found[1]

    # That of a notebook has no file; the texts of its functions count.
    cells = []
    for factor in ("1", "2"):
        source = f"class L(Transformer):\n    def forward(self, x):\n        return {factor} * super().forward(x)\n"
        name = f"<cell {factor}>"
        monkeypatch.setitem(sys.modules["linecache"].cache, name, (1, None, source.splitlines(True), name))
        scope: dict[str, Any] = {"__name__": "__main__", "Transformer": Transformer}
        exec(compile(source, name, "exec"), scope)
        monkeypatch.setattr(sys.modules["__main__"], "L", scope["L"], raising=False)
        monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
        cells.append(experiment(mixer="__main__:L").fingerprint)
    assert cells[0] != cells[1]


def test_optuna_is_told_again_of_what_its_storage_has_lost(tmp_path: Path, started: list[list[Run]]) -> None:
    trained(tmp_path)
    before = {trial.user_attrs["run"]: (trial.value, trial.intermediate_values) for trial in trials(tmp_path)}
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    for damaged in (b"", whole[:-20], whole[:-20] + b"}}}\n", whole[:500] + whole[600:]):
        journal.write_bytes(damaged)
        trained(tmp_path)
        assert {t.user_attrs["run"]: (t.value, t.intermediate_values) for t in trials(tmp_path)} == before
    assert len(started) == 1


# Several processes.


def train_undiagnosed(arguments: Sequence[str], output: Path) -> None:
    """Run the program; its models' diagnosis would take longer than their few steps."""
    search.diagnose_best = charts.plot_comparison = lambda *_: None
    run_program("runners.mad.__main__", arguments, output)


def die_in_training(arguments: Sequence[str], output: Path) -> None:
    """Run the program until it has shown a third evaluation, and kill it there."""
    shown, steps = Display.evaluated, []

    def dying(self: Display, step: int, points: Sequence[CurvePoint]) -> None:
        shown(self, step, points)
        steps.append(step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    Display.evaluated = dying  # type: ignore[method-assign]
    loop.SECONDS_BETWEEN_CHECKPOINTS = 0.0
    train_undiagnosed(arguments, output)


def test_four_processes_leave_exactly_six_finished_runs(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{i}.txt" for i in range(4)]
    command = [*COMMAND, "--out", str(tmp_path), "--together", "2"]
    processes = [start(train_undiagnosed, command, output) for output in outputs]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 4, [output.read_text() for output in outputs]
    assert len({*tmp_path.glob("studies/*/*/record.json")}) == 6
    assert {trial.user_attrs["run"] for trial in trials(tmp_path)} == {p.name for p in tmp_path.glob("studies/*/lr*")}
    assert {trial.state for trial in trials(tmp_path)} == {TrialState.COMPLETE}


def test_a_killed_search_resumes_from_its_checkpoints_and_repeats_nothing(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    command = [*COMMAND, "--out", str(tmp_path), "--together", "3"]
    killed = start(die_in_training, command, output)
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL, output.read_text()
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.RUNNING] * 3
    again = start(train_undiagnosed, command, output)
    again.join(300)
    assert again.exitcode == 0, output.read_text()
    assert "resumes after step 6" in output.read_text()
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.COMPLETE] * 6
    assert not [*tmp_path.rglob("checkpoint.safetensors")]


def run_on_two_devices(arguments: Sequence[str], output: Path) -> None:
    """Body of a process: the program, whose second device has a process of its own, here a fork of this one."""
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda kind: context  # type: ignore[assignment]
    search.find_places = lambda name, ladders: [torch.device("cpu")] * 2
    progress.SECONDS_TO_FIRST_LINE = 0.0
    train_undiagnosed(arguments, output)


def test_two_devices_share_a_grid(tmp_path: Path) -> None:
    command = [*COMMAND, "--out", str(tmp_path), "--steps", "40"]
    both = forks().Process(target=run_on_two_devices, args=(command, tmp_path / "output.txt"))
    both.start()
    both.join(300)
    assert both.exitcode == 0, (tmp_path / "output.txt").read_text()
    text = (tmp_path / "output.txt").read_text()
    assert "seed 0 · 3 runs, then 3 more" in text
    assert "resumes" not in text
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.COMPLETE] * 6


def test_a_program_is_not_run_again_by_processes_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(7)")
    program = SimpleNamespace(__file__=str(tmp_path / "program.py"), __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    with search.program_not_run_again():
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert program.__file__


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    endless = [*COMMAND, "--out", str(tmp_path), "--steps", "1000000", "--evaluations", "4000"]
    command = forks().Process(target=run_on_two_devices, args=(endless, tmp_path / "output.txt"))
    command.start()
    journal = tmp_path / JOURNAL
    wait_for(lambda: journal.exists() and journal.read_text().count('"run"') == 6)
    command.kill()
    command.join()
    wait_for(lambda: len(_claimable(tmp_path)) == 6)


def _claimable(out: Path) -> list[Path]:
    """The folders of runs that no process trains."""
    folders = [path.parent for path in out.glob("studies/*/*/.lock")]
    with search.claimed(folders, len(folders)) as mine:
        return mine


# What is shown.


def shown(console: Console, *actions: Callable[[Display], object]) -> None:
    with closing(Display(console, Tracking())) as display:
        for act in actions:
            act(display)


def test_a_log_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many evaluations and ensembles there are; the first comes after ten seconds."""
    now, text = [0.0], io.StringIO()
    monkeypatch.setattr("runners.progress.time.monotonic", lambda: now[0])
    runs = [replace(GRID[0], seed=seed) for seed in (2, 1)]

    def evaluated(seconds: float) -> Callable[[Display], object]:
        def act(display: Display) -> None:
            now[0] = seconds
            display.started(experiment(), runs, 4)
            display.evaluated(3, [CurvePoint(step=3, train_loss=None, validation=None)])

        return act

    console = Console(file=text, width=200, force_terminal=False)
    shown(console, *map(evaluated, (1.0, 11.0, 12.0, 70.0, 71.5, 72.0)))
    assert text.getvalue().count("seeds 1, 2 · 2 runs, then 4 more: step 3 of 6: all runs diverged") == 2


def test_a_bar_of_80_columns_keeps_its_figures() -> None:
    task: Any = {"task": NoisyInContextRecall.name, "task_config": NoisyInContextRecall.Config(train_examples=40)}
    long = experiment(**task, difficulty="vocab-size-32", protocol=Protocol(steps=20_000))
    metrics = Metrics(sequence_accuracy=0.123, token_accuracy=0.456, loss=1.0, score=0.1)
    text = io.StringIO()
    shown(
        Console(file=text, width=80, force_terminal=True),
        lambda display: display.started(long, GRID, 0),
        lambda display: display.evaluated(12_345, [CurvePoint(step=12_345, train_loss=2.5, validation=metrics)]),
    )
    figures = ("12345/20000", "loss train 2.500 val 1.000  seq 0.123 token 0.456")
    for part in (*figures, "noisy-in-context-recall", "vocab-size-32"):
        assert part in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
