"""The search: each point exactly once, whatever is killed or runs beside it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from filelock import FileLock, Timeout
from optuna.trial import TrialState

from mixers import MIXERS
from mixers.base import Shape
from mixers.registry import find_mixer
from mixers.transformer import Transformer
from runners import provenance
from runners import storage as store_module
from runners.files import load_tensors
from runners.mad import __main__ as mad
from runners.mad import experiment as experiment_module
from runners.mad.experiment import Experiment, run_folder
from runners.mad.results import charts
from runners.mad.search import study as study_module
from runners.mad.search.study import ForeignFolderError, describe_study, open_study
from runners.mad.training import loop as train_module
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol, Run
from runners.mad.training.result import CurvePoint, Result
from runners.provenance import code_version
from runners.storage import Store
from tasks.metrics import Counts, count, score
from tasks.recall import InContextRecall
from tests.runners.mad.commands import search
from tests.runners.processes import run_program, start

CPU = torch.device("cpu")
GRID = [Run(lr=lr, weight_decay=decay, seed=0) for lr in (1e-4, 5e-4, 1e-3) for decay in (0.0, 0.1)]


class Silent:
    """A watcher that remembers how many runs were started."""

    def __init__(self) -> None:
        self.started_runs: list[Run] = []
        self.more: list[int] = []

    def started(self, experiment: Experiment, runs: Sequence[Run], total_steps: int, more: int = 0) -> None:
        self.started_runs += runs
        self.more.append(more)

    def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None: ...

    def progressed(self, step: int) -> None: ...

    def resumed(self, step: int, curves: Sequence[Sequence[CurvePoint]]) -> None: ...

    def finished(self, results: Sequence[Result]) -> None: ...

    def waiting(self, trials: int) -> None: ...


def experiment(**changes: object) -> Experiment:
    values: dict[str, object] = {
        "mixer": "transformer",
        "mixer_config": Transformer.Config(heads=2),
        "task": "in-context-recall",
        "task_config": InContextRecall.Config(length=16, train_examples=40, eval_examples=30),
        "difficulty": "custom",
        "shape": Shape(width=16, mlp_width=32),
        "protocol": Protocol(batch_size=16, steps=6, evaluations=3),
        "precision": "float32",
    }
    return Experiment(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path, str(tmp_path / "studies.journal"))
    yield opened
    opened.close()


def test_the_grid_runs_once_and_is_then_read_from_storage(store: Store) -> None:
    first, second = Silent(), Silent()
    trials = search(experiment(), GRID, store, CPU, 64, first)
    again = search(experiment(), GRID, store, CPU, 64, second)
    assert first.started_runs == GRID
    assert second.started_runs == []
    assert [t.number for t in trials] == [t.number for t in again]
    assert len({(t.params["lr"], t.params["weight_decay"]) for t in trials}) == 6


def test_more_seeds_run_only_what_is_missing(store: Store) -> None:
    watcher = Silent()
    search(experiment(), GRID[:2], store, CPU, 64, watcher)
    search(experiment(), [*GRID[:2], Run(lr=1e-4, weight_decay=0.0, seed=1)], store, CPU, 64, watcher)
    assert watcher.started_runs[2:] == [Run(lr=1e-4, weight_decay=0.0, seed=1)]


def test_what_a_killed_process_left_half_written_goes(store: Store) -> None:
    folder = run_folder(store.folder, experiment(), GRID[0])
    folder.mkdir(parents=True)
    (folder / ".checkpoint-abc.safetensors").write_bytes(b"half")
    search(experiment(), GRID[:1], store, CPU, 64, Silent())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_study_of_an_earlier_version_is_continued_under_its_name_and_with_its_value(store: Store) -> None:
    """Its study is named after the experiment, its trials have a parameter seed, and their value is the score."""
    study = optuna.create_study(storage=store.storage, study_name=experiment().name, direction="maximize")
    study.set_user_attr("results_folder", str(store.folder))
    study.set_user_attr("config", experiment().to_dict())
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        study.set_metric_names(["validation score"])
    study.enqueue_trial(asdict(GRID[0]))
    trial = study.ask()
    trial.suggest_float("lr", 1e-8, 10.0, log=True)
    trial.suggest_float("weight_decay", 0.0, 10.0)
    trial.suggest_int("seed", 0, 2**31 - 1)
    study.tell(trial, 0.5)

    watcher = Silent()
    first, second = search(experiment(), GRID[:2], store, CPU, 64, watcher)
    assert watcher.started_runs == GRID[1:2]
    assert first.value == 0.5
    assert second.value == second.user_attrs["validation_score"]
    assert len(optuna.get_all_study_names(store.storage)) == 1


def test_a_queue_that_a_killed_command_left_is_nobody_elses(store: Store) -> None:
    study = open_study(experiment(), store)
    for run in GRID[1:4]:
        study.enqueue_trial(asdict(run))
    watcher = Silent()
    search(experiment(), GRID[4:], store, CPU, 64, watcher)  # two runs, which are claimed together
    assert watcher.started_runs == GRID[4:]
    search(experiment(), GRID, store, CPU, 64, watcher)
    assert sorted(map(str, watcher.started_runs)) == sorted(map(str, GRID))


def test_small_ensembles_give_the_same_figures_as_one(tmp_path: Path) -> None:
    values = []
    for together in (6, 4, 1):
        opened = Store(tmp_path / str(together), str(tmp_path / str(together) / "studies.journal"))
        trials = search(experiment(), GRID, opened, CPU, together, Silent())
        values.append([trial.user_attrs["validation_loss"] for trial in trials])
        opened.close()
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert values[2] == pytest.approx(values[0], rel=1e-5)


def test_a_cpu_trains_fewer_runs_at_once_if_their_steps_are_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 16 sequences of 16 positions."""
    monkeypatch.setattr("runners.mad.memory.POSITIONS_ON_A_CPU", 4 * 16 * 16 + 255)
    watcher = Silent()
    trials = search(experiment(), GRID, store, CPU, 64, watcher)
    assert [trial.user_attrs["trained_together"] for trial in trials] == [4, 4, 4, 4, 2, 2]
    assert watcher.more == [2, 0]


def test_a_trial_carries_what_is_needed_to_judge_and_repeat_it(store: Store) -> None:
    (trial,) = search(experiment(), GRID[:1], store, CPU, 64, Silent())
    attrs = trial.user_attrs
    assert list(trial.intermediate_values) == [2, 4, 6]
    percent = round(100 * attrs["validation_sequence_accuracy"], 2)
    assert trial.value == pytest.approx(percent + int(1e4 * attrs["validation_token_accuracy"]) * 1e-6, abs=1e-9)
    assert "seed" not in trial.params
    assert attrs["seed"] == 0
    files = Path(attrs["folder"])
    assert sorted(path.name for path in files.iterdir()) == ["config.json", "model.safetensors"]
    record = json.loads((files / "config.json").read_text())
    assert record["study"] == experiment().name
    assert record["config"]["mixer_config"] == {"heads": 2, "qk_norm": True}
    assert record["config"]["run"] == {"lr": 1e-4, "weight_decay": 0.0, "seed": 0}
    assert record["fingerprint"] == experiment().fingerprint
    assert record["code"] == experiment().code
    assert set(record["versions"]) == {"python", "torch", "triton", "numpy", "optuna"}
    assert [point["step"] for point in record["curve"]] == [2, 4, 6]
    model = experiment().build()
    model.load_state_dict(load_tensors(files / "model.safetensors")[0])
    batch = experiment().instance.batch("validation")
    with torch.no_grad():
        logits_STV = model(torch.from_numpy(batch.inputs_ST))
    counts = count(logits_STV[None], torch.from_numpy(batch.targets_ST), torch.from_numpy(batch.scored_ST))
    for metric in ("sequence_accuracy", "token_accuracy", "loss"):
        assert attrs[f"validation_{metric}"] == pytest.approx(getattr(counts, metric).item(), rel=1e-5), metric
    assert attrs["validation_score"] == pytest.approx(score(counts).item(), rel=1e-5)
    assert not any("test" in name for name in attrs)


def test_a_diverged_trial_is_recorded_with_its_step_and_not_run_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Experiment.build
    monkeypatch.setattr(Experiment, "build", lambda self: _poison_third(build(self)))
    grid = [Run(lr=1e-3, weight_decay=0.0, seed=seed) for seed in range(3)]
    watcher = Silent()
    trials = search(experiment(), grid, store, CPU, 64, watcher)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL]
    assert trials[2].user_attrs["diverged_step"] == 1
    assert search(experiment(), grid, store, CPU, 64, watcher) == trials
    assert watcher.started_runs == grid


def _poison_third(model: torch.nn.Module) -> torch.nn.Module:
    if torch.initial_seed() == 2:
        next(model.parameters()).data[:] = torch.nan
    return model


def test_what_differs_in_anything_that_counts_has_a_study_of_its_own() -> None:
    different = [
        experiment(),
        experiment(mixer_config=Transformer.Config(heads=4)),
        experiment(task_config=InContextRecall.Config(length=18, train_examples=40, eval_examples=30)),
        experiment(protocol=Protocol(batch_size=16, steps=7, evaluations=3)),
        experiment(shape=Shape(width=32, mlp_width=32)),
        experiment(precision="bfloat16"),
        experiment(mixer="rt", mixer_config=find_mixer("rt").Config(heads=2)),
    ]
    assert len({e.fingerprint for e in different}) == len(different)
    assert experiment().fingerprint == experiment(difficulty="another label").fingerprint


def test_a_torn_last_line_of_the_journal_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "studies.journal"
    first = Store(tmp_path, str(path))
    search(experiment(), GRID[:1], first, CPU, 64, Silent())
    first.close()
    with path.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    second, watcher = Store(tmp_path, str(path)), Silent()
    search(experiment(), GRID[:2], second, CPU, 64, watcher)
    second.close()
    assert watcher.started_runs == GRID[1:2]
    assert len(search(experiment(), GRID[:2], Store(tmp_path, str(path)), CPU, 64, watcher)) == 2


def test_a_relational_database_serves_as_well(tmp_path: Path) -> None:
    opened, watcher = Store(tmp_path, f"sqlite:///{tmp_path}/studies.db"), Silent()
    assert len(search(experiment(), GRID, opened, CPU, 64, watcher)) == 6
    assert len(search(experiment(), GRID, opened, CPU, 64, watcher)) == 6
    assert watcher.started_runs == GRID


COMMAND = [
    *("--mixer", "transformer", "--task", "in-context-recall", "--task.length", "16", "--task.train-examples", "64"),
    *("--task.eval-examples", "30", "--batch-size", "16", "--width", "16", "--mlp-width", "32", "--mixer.heads", "2"),
    *("--device", "cpu", "--steps", "20", "--evaluations", "10"),
]


def states(folder: Path) -> list[TrialState]:
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(folder / "studies.journal"))
    )
    return [trial.state for trial in optuna.load_study(study_name=None, storage=storage).trials]


def train_undiagnosed(arguments: Sequence[str], output: Path) -> None:
    """Run the program; its models' diagnosis would take longer than their few steps."""
    mad.look_into = charts.plot_comparison = lambda *_: None
    run_program("runners.mad.__main__", arguments, output)


def launch(folder: Path, output: Path, *more: str) -> ForkServerProcess:
    return start(train_undiagnosed, [*COMMAND, "--out", str(folder), *more], output)


def test_four_processes_leave_exactly_six_finished_trials(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{i}.txt" for i in range(4)]
    processes = [launch(tmp_path, output, "--together", "2") for output in outputs]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 4, [output.read_text() for output in outputs]
    assert states(tmp_path) == [TrialState.COMPLETE] * 6


def die_in_training(arguments: Sequence[str], output: Path) -> None:
    """Run the program until it has reported validation a third time, and kill it there."""
    report, steps = optuna.trial.Trial.report, []

    def dying(self: optuna.trial.Trial, value: float, step: int) -> None:
        report(self, value, step)
        steps.append(step)
        if len(set(steps)) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    optuna.trial.Trial.report = dying  # type: ignore[method-assign]
    train_undiagnosed(arguments, output)


def test_a_killed_search_goes_on_and_repeats_nothing_finished(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    arguments = [*COMMAND, "--out", str(tmp_path), "--together", "3"]
    killed = start(die_in_training, arguments, output)
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL, output.read_text()
    assert TrialState.RUNNING in states(tmp_path)
    again = launch(tmp_path, output, "--together", "6")
    again.join(300)
    assert again.exitcode == 0, output.read_text()
    assert states(tmp_path) == [TrialState.COMPLETE] * 6


def test_a_process_killed_while_it_takes_trials_leaves_a_study_that_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna writes the parameters of a trial one by one, after it runs: die after each of them."""

    class Died(BaseException):
        pass

    suggest, calls = optuna.trial.Trial.suggest_float, []

    def dying(self: optuna.trial.Trial, name: str, *args: object, **options: object) -> float:
        calls.append(name)
        if len(calls) == 2:
            raise Died
        return suggest(self, name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(optuna.trial.Trial, "suggest_float", dying)
    dead = Store(tmp_path, str(tmp_path / "studies.journal"))
    with pytest.raises(Died):
        search(experiment(), GRID, dead, CPU, 64, Silent())
    dead.close()
    monkeypatch.undo()
    watcher = Silent()
    assert len(search(experiment(), GRID, store, CPU, 64, watcher)) == 6
    assert sorted(watcher.started_runs, key=GRID.index) == GRID
    assert len(open_study(experiment(), store).trials) == 6


def test_a_narrower_command_does_not_work_off_the_queue_of_a_killed_one(store: Store, tmp_path: Path) -> None:
    class Dying(Silent):
        def evaluated(self, step: int, points: Sequence[CurvePoint]) -> None:
            raise KeyboardInterrupt

    dead = Store(tmp_path, str(tmp_path / "studies.journal"))
    with pytest.raises(KeyboardInterrupt):
        search(experiment(), GRID, dead, CPU, 2, Dying())
    dead.close()
    watcher = Silent()
    search(experiment(), GRID[5:], store, CPU, 64, watcher)
    assert watcher.started_runs == GRID[5:]


def test_two_spellings_of_a_journal_share_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = Store(tmp_path, "x.journal"), Store(tmp_path / "elsewhere", str(tmp_path / "sub" / ".." / "x.journal"))
    assert a.exclusive().lock_file == b.exclusive().lock_file
    a.close()
    b.close()


def open_a_store_and_die(folder: Path, storage: str) -> None:
    _opened = Store(folder, storage)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_files_of_killed_processes_go_when_the_next_one_starts_and_those_of_others_stay(
    store: Store, tmp_path: Path
) -> None:
    def owners() -> set[Path]:
        return set(tmp_path.glob("locks/*.alive"))

    journal = str(tmp_path / "studies.journal")
    elsewhere = Store(tmp_path, str(tmp_path / "other.journal"))
    living = owners()
    for name in ("studies.journal", "other.journal"):
        killed = start(open_a_store_and_die, tmp_path, str(tmp_path / name))
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
    assert len(owners()) == len(living) + 1  # that of the last one, who has deleted the other's
    following = Store(tmp_path, journal)
    assert living < owners()
    assert len(owners() - living) == 1  # its own; the one of the other journal has gone
    for opened in (following, elsewhere):
        opened.close()
    assert len(owners()) == 1


def test_no_process_is_taken_for_dead_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its locking a file is as a killed process leaves it: nobody may look for one then."""
    locked = []

    class Observed(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            if self.lock_file.endswith(".alive"):
                (lock,) = (tmp_path / "locks").glob("*.lock")
                with pytest.raises(Timeout):
                    FileLock(lock, timeout=0).acquire()
                locked.append(self.lock_file)
            return super().acquire(*args, **options)

    monkeypatch.setattr(store_module, "FileLock", Observed)
    Store(tmp_path, str(tmp_path / "studies.journal")).close()
    assert locked


def test_a_study_in_a_database_stays_with_its_results_folder(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    first, second = Store(tmp_path / "one", url), Store(tmp_path / "two", url)
    search(experiment(), GRID[:1], first, CPU, 64, Silent())
    with pytest.raises(ForeignFolderError, match="belongs to the results folder"):
        search(experiment(), GRID[:1], second, CPU, 64, Silent())
    first.close()
    second.close()


@pytest.mark.parametrize("kind", ["database", "journal"])
def test_a_study_notices_a_results_folder_of_its_path_on_another_machine(tmp_path: Path, kind: str) -> None:
    """The storage is shared, the folder is not; once it is mounted, also at another path, the study continues."""
    url = f"sqlite:///{tmp_path}/studies.db" if kind == "database" else str(tmp_path / "studies.journal")
    out, kept = tmp_path / "out", tmp_path / "kept"

    first = Store(out, url)
    open_study(experiment(), first)
    first.close()
    identity = (out / "folder.id").read_text().strip()
    out.rename(kept)

    other = Store(out, url)
    with pytest.raises(ForeignFolderError, match=rf"folder.id is {identity}, and {out} has no folder.id: share"):
        open_study(experiment(), other)
    out.mkdir(exist_ok=True)
    (out / "folder.id").write_text("another\n")
    with pytest.raises(ForeignFolderError, match=r"keeps its runs in another folder than the .*: share"):
        open_study(experiment(), other)
    (out / "folder.id").write_text(f"{identity}\n")  # as the first message says
    open_study(experiment(), other)
    other.close()

    shutil.rmtree(out, ignore_errors=True)  # the journal's locks are not in it
    kept.rename(out)
    again = Store(out, url)
    open_study(experiment(), again)
    again.close()


def test_a_study_of_an_earlier_version_takes_the_identity_of_its_folder(tmp_path: Path) -> None:
    opened = Store(tmp_path / "out", f"sqlite:///{tmp_path}/studies.db")
    study = optuna.create_study(storage=opened.storage, study_name=experiment().name, direction="maximize")
    study.set_user_attr("results_folder", str(tmp_path / "out"))
    assert open_study(experiment(), opened).user_attrs["results_folder_identity"] == opened.identity
    opened.close()


def test_a_run_that_only_its_evaluation_finds_broken_is_recorded_as_diverged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All training losses are finite; the parameters that the last step left give no finite loss."""
    evaluate = train_module.evaluate

    def broken(members: Ensemble, params: torch.Tensor, *rest: object) -> Counts:
        return evaluate(members, torch.full_like(params, torch.nan), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(train_module, "evaluate", broken)
    (trial,) = search(experiment(), GRID[:1], store, CPU, 64, Silent())
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["diverged_step"] == 2


def add_a_line(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let the code of a module be another."""
    source = provenance._source

    def with_more(name: str) -> str | None:
        found = source(name)
        return found if found is None or name != module else found + "\nX = 1\n"

    monkeypatch.setattr(provenance, "_source", with_more)


def test_a_study_is_another_when_its_data_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = experiment().fingerprint
    monkeypatch.setattr(InContextRecall, "fingerprint", lambda self: "other sequences")
    experiment_module._data_fingerprint.cache_clear()
    after = experiment().fingerprint
    experiment_module._data_fingerprint.cache_clear()
    assert before != after


@pytest.mark.parametrize("module", ["runners.mad.training.loop", "runners.mad.training.ensemble", "tasks.recall"])
def test_the_code_of_a_study_is_that_of_its_trainer_and_its_task(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    before = experiment().code
    add_a_line(monkeypatch, module)
    assert experiment().code != before


def test_layers_on_one_task_share_its_data() -> None:
    other = replace(experiment().task_config, data_seed=1)
    one, same, different = (
        experiment(**changes) for changes in ({}, {"precision": "bfloat16"}, {"task_config": other})
    )
    assert one.instance is same.instance
    assert len({e.fingerprint for e in (one, same, different)}) == 3
    assert different.instance.config == other


def test_a_study_in_a_database_belongs_to_the_folder_that_opened_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while that one is still counting what the layer costs."""
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    first, second = Store(tmp_path / "a", url), Store(tmp_path / "b", url)
    note = study_module.note

    def slow(described: Experiment) -> str:
        with pytest.raises(ForeignFolderError):
            open_study(described, second)
        return note(described)

    monkeypatch.setattr(study_module, "note", slow)
    study = open_study(experiment(), first)
    describe_study(study, experiment(), first)
    assert study.user_attrs["results_folder"] == str(tmp_path / "a")
    assert study.user_attrs["config"]["mixer"] == "transformer"


def test_a_damaged_journal_is_an_error_that_names_it(tmp_path: Path) -> None:
    path, line = tmp_path / "studies.journal", '{"op_code":4}'
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(ValueError, match=r"studies\.journal is damaged .*: repair it, or move it away to start again$"):
        Store(tmp_path, str(path))
    assert not list((tmp_path / "locks").glob("*.alive"))


def test_a_layer_is_the_same_when_another_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [code_version("runners.mad.training.loop", layer) for layer in MIXERS.values()]
    add_a_line(monkeypatch, "mixers.lstm")
    after = [code_version("runners.mad.training.loop", layer) for layer in MIXERS.values()]
    assert [name for name, a, b in zip(MIXERS, before, after, strict=True) if a != b] == ["lstm"]
