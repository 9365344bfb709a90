"""The command line: what it prints, what it refuses, what it leaves behind."""

import io
import json
import os
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console
from scipy import stats

from mixers import MIXERS
from mixers.base import Shape
from mixers.costs import Costs
from runners.c4.config import Config
from runners.mad import __main__ as mad
from runners.mad.options import Options
from runners.mad.results.charts import draw_bars, draw_heat_map, plot_comparison
from runners.mad.results.choice import choose_point
from runners.mad.results.held_out import Reading
from runners.mad.results.standings import Standing, print_comparison
from runners.mad.results.summary import METRICS, TEST_METRICS, Estimate, Point, summarise
from runners.mad.results.tables import print_summary
from runners.mad.search.study import DISTRIBUTIONS, run_of
from runners.mad.training.protocol import Protocol, Run
from runners.nested_options import parse
from tasks import TASKS
from tasks.base import Accuracy
from tests.runners.mad.commands import planned

ROOT = Path(__file__).parents[3]
TINY = [
    *("--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--evaluations", "3", "--steps", "6"),
]
HEADS = ["--mixer.heads", "2"]
pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixer", "nope", "--task", "compression"], "no mixer 'nope': choose from transformer, sliding-attention"),
        (["--mixer", "rt", "--task", "nope"], "no task 'nope': choose from in-context-recall"),
        (
            ["--mixer", "rt", "--task", "compression", "--mixer.window", "3"],
            "--mixer.window does not apply to mixer rt",
        ),
        (
            ["--mixer", "lstm", "transformer", "--task", "compression", "--mixer.block", "3"],
            "--mixer.block does not apply to mixer lstm, transformer: the options are --mixer.heads, --mixer.qk-norm",
        ),
        (
            ["--mixer", "rt", "--task", "parity", "selective-copying", "--task.length", "16"],
            "task selective-copying: length is 16: 16 tokens to copy",
        ),
        (
            ["--mixer", "rt", "--task", "compression", "copying", "--task.degree", "3"],
            "--task.degree does not apply to task compression, copying",
        ),
        (["--mixer", "rt", "--task", "compression", "--mixer.heads", "5"], "mixer 'rt': heads: 5 must divide"),
        (["--mixer", "rt", "--task", "compression", "--steps", "x"], "--steps"),
        (["--mixer", "rt", "--task", "compression", "--steps", "0"], "--steps 0 must be at least 1"),
        (["--mixer", "rt", "--task", "compression", "--lr", "-1"], "--lr -1 must lie between"),
        (["--mixer", "rt", "--task", "compression", "--sped", "1"], "unknown option --sped"),
        (["rt", "--task", "compression", "--mixer", "rt"], "no option takes rt: see --help"),
        (["--mixer", "rt", "--task", "compression", "--difficulty", "hard"], "has no difficulty 'hard'"),
        (["--mixer", "rt", "--task", "compression", "--batch-size", "20000"], "batch size 20000 is larger than"),
        (["--mixer", "no_such_module:Layer", "--task", "compression"], "cannot import mixer 'no_such_module:Layer'"),
        (["--mixer", "pathlib:Path", "--task", "compression"], "must be a class derived from torch.nn.Module"),
        (["--task", "compression"], "--mixer is missing"),
        (["--mixer", "rt", "--task", "compression", "--epochs", "3", "--steps", "5"], "exclude each other"),
        (["--mixer", "rt", "--mixer", "gla", "--task", "parity"], "--mixer is given more than once: give it once"),
        (["--mixer", "rt", "--task", "parity", "--task=copying"], "--task is given more than once: give it once"),
        (["--list", "--dry-run"], "--list and --dry-run exclude each other"),
        (["--mixer", "rt"], "--task is missing"),
        (["--mixer", "rt", "--task"], "--task is missing"),
        (["--mixer", "--task", "compression"], "--mixer is missing"),
        (["--mixer", "rt", "--task", "compression", "--preset"], "Missing value for argument '--preset'"),
        (["--mixer", "gla", "--task", "parity", "--mixer.gate-temperature", "nan"], "gate-temperature nan must be a"),
    ],
)
def test_bad_input_is_one_clear_line(refused: Callable[..., str], arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_results_in_place_of_a_folder_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("")
    for rest in ([], ["--dry-run"]):
        with pytest.raises(SystemExit, match="2"):
            mad.main(["--mixer", "rt", "--task", "compression", "--out", str(file), *rest])
        assert capsys.readouterr().err == f"error: --out {file} is a file: name a folder\n"


def test_a_storage_that_cannot_be_opened_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for storage in (str(results), "nonsense://x"):
        with pytest.raises(SystemExit) as stop:
            mad.main(["--mixer", "rt", "--task", "compression", "--out", str(tmp_path / "out"), "--storage", storage])
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
        assert list(tmp_path.iterdir()) == [results]


def sqlite_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table studies (name text)")
        database.commit()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (sqlite_file, "is an SQLite database: give --storage sqlite:///"),
        (lambda path: path.write_bytes(b"\x7fELF\x02\n and no newline at the end"), "is not an Optuna journal"),
        (lambda path: path.write_text('{"my": "notes"}\n{"half'), "is not an Optuna journal"),
        (lambda path: path.write_text("one line"), "is not an Optuna journal"),
        (os.mkfifo, "is no regular file"),
    ],
    ids=["sqlite", "binary", "json", "text", "pipe"],
)
@pytest.mark.parametrize("rest", [[], ["--dry-run"]], ids=["training", "dry-run"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(
    refused: Callable[..., str], tmp_path: Path, make: Callable[[Path], object], remedy: str, rest: list[str]
) -> None:
    file = tmp_path / "file"
    make(file)
    before = file.read_bytes() if file.is_file() else None

    message = refused("--mixer", "rt", "--task", "compression", "--storage", str(file), *rest)

    assert message.startswith(f"error: storage {file} ")
    assert remedy in message
    assert (file.read_bytes() if file.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_journal_whose_lock_has_too_long_a_name_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    storage = tmp_path / f"{'ü' * 104}.journal"
    message = refused("--mixer", "rt", "--task", "compression", "--storage", str(storage))
    assert message.endswith("has a name of 216 bytes: name a file with at most 207\n")
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    message = refused("--mixer", "rt", "--task", "compression", "--storage", str(tmp_path / "loop" / "journal"))
    assert "symbolic links" in message or "File exists" in message


def test_defaults_are_the_published_grid_at_the_baseline() -> None:
    options, experiments = planned(["--mixer", "rt", "--task", "compression"])
    (experiment,) = experiments
    assert [(run.lr, run.weight_decay) for run in options.runs] == list(product((1e-4, 5e-4, 1e-3), (0.0, 0.1)))
    assert {run.seed for run in options.runs} == {0}
    assert experiment.difficulty == "baseline"
    assert experiment.task_config == TASKS["compression"].Config()
    assert experiment.mixer_config == MIXERS["rt"].Config(heads=16)
    assert (experiment.shape.width, experiment.shape.mlp_width, experiment.shape.layers) == (128, 512, 1)
    assert experiment.protocol.total_steps(12_800) == 20_000
    optimizer = experiment.protocol.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.final_lr) == (0.9, 0.98, 1e-8, 1e-6)


def test_the_wide_grid_holds_both_readings_of_the_papers_fourth_learning_rate() -> None:
    options, _ = planned(["--mixer", "rt", "--task", "compression", "--grid", "wide", "--seeds", "3"])
    points = list(product((1e-4, 5e-4, 1e-3, 2e-3, 5e-3), (0.0, 0.1)))
    assert len(options.runs) == 3 * len(points)
    assert {(run.lr, run.weight_decay) for run in options.runs} == set(points)


def test_all_and_sweeps_expand_to_every_setting_of_the_published_table() -> None:
    _, experiments = planned(["--mixer", "all", "--task", "selective-copying", "--difficulty", "all"])
    names = [e.difficulty for e in experiments if e.mixer == "rt"]
    assert len(experiments) == len(MIXERS) * len(names)
    # SPEC of the suite: vocab 3, length 2, examples 4, tokens to copy 3, and the baseline
    assert len(names) == 13
    assert {"baseline", "vocab-size-32", "length-1024", "train-examples-800", "tokens-to-copy-96"} <= set(names)


def test_nested_options_reach_the_layer_and_the_task() -> None:
    (experiment,) = planned(
        ["--mixer", "rt", "--mixer.block", "4", "--task", "compression", "--task.vocab-size", "32"]
    )[1]
    assert experiment.mixer_config.block == 4
    assert experiment.task_config.vocab_size == 32
    assert experiment.difficulty == "custom"


def test_options_apply_to_the_layers_and_tasks_that_have_them_and_a_line_names_the_others() -> None:
    command = ["--mixer", "rt", "lstm", "--task", "compression", "copying"]
    given = ["--mixer.block", "4", "--mixer.heads", "8", "--task.vocab-size", "32"]
    lines: list[str] = []
    plain, changed = planned(command)[1], planned([*command, *given], lines.append)[1]
    assert lines == [
        "--mixer.heads does not apply to mixer lstm",
        "--mixer.block does not apply to mixer lstm",
        "--task.vocab-size does not apply to task copying",
    ]
    assert [(e.mixer_config.block, e.mixer_config.heads) for e in changed if e.mixer == "rt"] == [(4, 8)] * 2
    assert [e.task_config.vocab_size for e in changed if e.task == "compression"] == [32] * 2
    same = [(e.mixer, e.task) for e, before in zip(changed, plain, strict=True) if e.name == before.name]
    assert same == [("lstm", "copying")]


def test_a_preset_sets_its_own_task_and_leaves_the_settings_of_others_alone() -> None:
    command = ["--preset", "demo", "--task", "in-context-recall", "copying", "--task.train-examples", "900"]
    own, other = planned([*command, "--mixer", "rt"])[1]
    recall, copying = TASKS["in-context-recall"].Config, TASKS["copying"].Config
    assert own.task_config == recall(length=48, eval_examples=320, train_examples=900)
    assert other.task_config == copying(train_examples=900)
    assert (own.difficulty, other.difficulty) == ("custom", "custom")
    assert own.protocol == other.protocol == Protocol(batch_size=64, steps=250, evaluations=5)
    (as_it_is, _) = planned(["--preset", "demo"])[1]
    assert as_it_is.difficulty == "demo"


def test_the_preset_quick_has_small_settings_of_every_task_and_its_name_in_every_record() -> None:
    options, experiments = planned(["--preset", "quick", "--mixer", "rt"])
    assert [experiment.task for experiment in experiments] == list(TASKS)
    assert len(options.runs) == 2
    assert list(options.more_seeds) == [1, 2]
    for experiment in experiments:
        assert (experiment.difficulty, experiment.to_dict()["preset"]) == ("quick", "quick")
        assert experiment.protocol == Protocol(batch_size=16, steps=1000, evaluations=10)
        assert experiment.shape == Shape(width=64, mlp_width=128)
        small, whole = experiment.task_config, TASKS[experiment.task].Config()
        assert small.train_examples <= 3200
        assert small != whole
        assert len(experiment.instance.split("validation")) == 320


def test_the_name_of_a_preset_is_no_part_of_an_experiments_identity() -> None:
    settings = ["--task", "parity", "--task.length", "24", "--steps", "9", "--width", "16"]
    settings += ["--task.train-examples", "3200", "--task.eval-examples", "320"]
    (named,), (plain,) = (
        planned([*preset, "--mixer", "lstm", *settings, "--batch-size", "16", "--mlp-width", "16"])[1]
        for preset in (["--preset", "quick", "--evaluations", "40"], [])
    )
    assert named.fingerprint == plain.fingerprint
    assert "preset" not in plain.to_dict()


def test_epochs_take_the_place_of_a_presets_steps() -> None:
    (experiment, _) = planned(["--preset", "demo", "--epochs", "2"])[1]
    assert experiment.protocol == Protocol(batch_size=64, epochs=2, evaluations=5)


def test_other_settings_have_a_chart_of_their_own() -> None:
    command = ["--mixer", "rt", "transformer", "--task", "compression", "--task.train-examples", "640"]
    others: tuple[list[str], ...] = ([], ["--steps", "5"], ["--task.length", "16"], ["--width", "64"])
    assert len({mad._figure_name(*planned([*command, *more])) for more in others}) == len(others)


def test_a_command_trains_tabulates_and_stores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["--mixer", "rt", "transformer", "--task", "in-context-recall", *HEADS, *TINY]
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--seeds", "2", "--out", str(tmp_path)])
    first = capsys.readouterr().out
    for expected in ("val seq", "steps/s", "±", "ceiling 1.0000", "chosen on validation", "optuna-dashboard"):
        assert expected in first
    assert len(list((tmp_path / "figures").glob("*.png"))) == 1
    studies = sorted((tmp_path / "studies").iterdir())
    assert len(studies) == 2
    for study in studies:
        assert {path.name for path in study.iterdir()} == {"summary.json", "diagnosis.json", "diagnosis.png"}
        (point,) = json.loads((study / "summary.json").read_text())["points"]
        assert point["seeds"] == [0, 1]
        assert point["estimates"]["test_token_accuracy"]["half_width"] >= 0
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}
    assert len(models) == 4
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--seeds", "2", "--out", str(tmp_path)])
    second = capsys.readouterr().out
    assert models == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/model.safetensors")}

    def rows(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("│")]

    assert rows(first) == rows(second)


def test_brackets_in_a_path_are_no_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a[bold]b[" / "c]"
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY]
    mad.main([*command, "--lr", "1e-3", "--weight-decay", "0", "--out", str(out)])
    text = capsys.readouterr().out
    assert f"\nstored in {out}" in text

    # One layer on one task has a final table with its costs, a chart, and a next command.
    assert "test accuracy of the points chosen on validation" in text
    assert "FLOPs" in text
    assert len(list((out / "figures").glob("*.png"))) == 1
    assert "\nto compare: python -m runners.mad --mixer transformer rt --task in-context-recall" in text


@pytest.mark.usefixtures("undiagnosed")
def test_wandb_offline_writes_runs_without_a_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    logging = ["--wandb", "offline", "--wandb-project", "mine", "--wandb-entity", "us", "--wandb-tags", "first", "try"]
    mad.main([*command, *logging, "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith(f"upload them: wandb sync {tmp_path}/wandb/offline-run-*\n")

    runs = [Logged.read(path) for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(runs) == 2
    for run in runs:
        assert (run.project, run.entity, run.job_type, run.tags) == ("mine", "us", "diagnostics", ["first", "try"])
        assert run.group.startswith("transformer in-context-recall (")
        assert run.config.keys() >= {"mixer", "lr", "seed", "parameters", "state_128", "flops_per_token_128"}
        assert run.config["family"] == "attention"

    # The chosen point alone has test figures.
    assert sorted("test/token_accuracy" in run.summary for run in runs) == [False, True]


@dataclass
class Logged:
    """What an offline run of Weights & Biases holds."""

    project: str
    entity: str
    job_type: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]

    @staticmethod
    def read(path: Path) -> "Logged":
        from wandb.proto.wandb_internal_pb2 import Record

        run, summary = None, {}
        for data in log_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                run = record.run
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        assert run is not None
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        return Logged(run.project, run.entity, run.job_type, run.run_group, list(run.tags), config, summary)


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind W&B's header of 7 bytes."""
    at, block, head, record = 7, 2**15, 7, b""
    while at + head <= len(data):
        if (left := block - at % block) < head:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + head])
        record += data[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_refused(refused: Callable[..., str]) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    assert "run wandb login, or give --wandb offline" in refused(*command, "--wandb", "online")


VALIDATION_SCORES = {
    (1e-4, 0.0): (0.50, 0.50, 0.53),  # the best lower end of an interval
    (1e-4, 0.1): (0.20, 0.30, 0.70),
    (1e-3, 0.0): (0.30, 0.90, 0.60),  # the best mean
    (1e-3, 0.1): (0.95, None, 0.97),  # better still, but one seed diverged
}


def made_up_trial(lr: float, weight_decay: float, seed: int, validation: float | None) -> FrozenTrial:
    """Every metric has values of its own."""
    attrs: dict[str, float] = {"steps_per_second": 10.0 + seed}
    if validation is None:
        attrs["diverged_step"] = 7
    else:
        for k, metric in enumerate(("score", "sequence_accuracy", "token_accuracy", "loss")):
            attrs[f"validation_{metric}"] = validation / (k + 1)
    return create_trial(
        state=TrialState.FAIL if validation is None else TrialState.COMPLETE,
        params={"lr": lr, "weight_decay": weight_decay},
        distributions=DISTRIBUTIONS,
        value=validation,
        user_attrs=attrs,
        system_attrs={"fixed_params": {"lr": lr, "weight_decay": weight_decay, "seed": seed}},
    )


def test_the_point_is_chosen_on_validation_whatever_the_test_split_says() -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization"])[1]
    trials = [
        made_up_trial(*point, seed, scores[seed]) for seed in range(3) for point, scores in VALIDATION_SCORES.items()
    ]
    readings = {}
    for run in map(run_of, trials):  # the order is opposed to that on validation
        value = 1 - (VALIDATION_SCORES[run.lr, run.weight_decay][run.seed] or 0)
        readings[run] = Reading(sequence_accuracy=value, token_accuracy=value / 2, loss=value / 3)

    chosen = choose_point(trials)
    assert chosen == (1e-3, 0.0)
    summary = summarise(experiment, trials, chosen, readings)
    assert [(point.lr, point.weight_decay) for point in summary.points] == list(VALIDATION_SCORES)
    assert [point.seeds for point in summary.points] == [[0, 1, 2]] * 4
    assert [point.diverged for point in summary.points] == [{}, {}, {}, {1: 7}]
    assert summary.points[3].estimates is None
    for i, point in enumerate(summary.points[:3]):
        assert point.estimates is not None
        for metric in METRICS:
            values, estimate = [trial.user_attrs[metric] for trial in trials[i::4]], point.estimates[metric]
            assert estimate.mean == pytest.approx(np.mean(values))
            _, upper = stats.t.interval(0.95, df=2, loc=np.mean(values), scale=stats.sem(values))
            assert estimate.half_width == pytest.approx(upper - np.mean(values))
    assert summary.chosen == 2
    assert summary.best_run == Run(lr=1e-3, weight_decay=0.0, seed=1)  # validation score 0.9
    sequence_accuracy = Standing.of(summary).accuracy("sequence")
    assert sequence_accuracy is not None
    assert sequence_accuracy.mean == pytest.approx(0.4)
    assert [point.estimates is not None and "test_loss" in point.estimates for point in summary.points] == [
        False, False, True, False,
    ]  # fmt: skip
    assert summarise(experiment, trials, choose_point(trials[1::4]), readings).chosen == 1


def test_a_point_whose_test_loss_is_not_finite_has_the_accuracies_alone() -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization"])[1]
    trials = [made_up_trial(1e-4, 0.0, seed, 0.5) for seed in range(2)]
    for losses, names in (((None, 1.0), TEST_METRICS[:2]), ((1.0, 2.0), TEST_METRICS), ((), ())):
        readings = [Reading(sequence_accuracy=0.0, token_accuracy=0.5, loss=loss) for loss in losses]
        by_run = dict(zip(map(run_of, trials), readings, strict=False))
        summary = summarise(experiment, trials, choose_point(trials), by_run)
        (point,) = summary.points
        assert point.estimates is not None
        assert {name for name in point.estimates if name not in METRICS} == set(names)


@pytest.mark.parametrize(("task", "limit"), [("memorization", "ceiling"), ("noisy-in-context-recall", "chance")])
def test_ceiling_and_chance_are_those_of_the_test_split(task: str, limit: str) -> None:
    """Of 8 sequences each, splits differ: in the keys that training does not show, and in the scored positions."""
    few = ["--task.train-examples", "8", "--task.eval-examples", "8", "--batch-size", "8"]
    (experiment,) = planned(["--mixer", "transformer", "--task", task, *few])[1]
    values = [getattr(experiment.instance, limit)(split) for split in ("train", "validation", "test")]
    assert len(set(values)) == 3
    assert getattr(summarise(experiment, [], None, {}), limit) == values[2]


def test_options_document_every_field() -> None:
    documented = Options.__doc__ or ""
    for name in (field.name for field in fields(Options)):
        assert re.search(rf"^        {name}: ", documented, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("preset", "sections"),
    [
        (Options(mixer=(), task=()), {("--mixer", "--task"): MIXERS, ("--task", "--difficulty"): TASKS}),
        (Config(), {("--mixer", "--width"): MIXERS}),
    ],
)
def test_the_help_names_the_layers_and_tasks_at_their_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    preset: Any,
    sections: dict[tuple[str, str], dict[str, Any]],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # a wide terminal gets groups side by side
    with pytest.raises(SystemExit) as stop:
        parse(type(preset), preset, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for (option, following), registry in sections.items():
        section = text[text.index(f" {option} ") : text.index(f" {following} ")]
        words = section.replace("│", " ").replace(",", " ").replace(".", " ").split()
        assert " ".join(registry) in " ".join(words)


def test_the_diagnosis_is_of_the_run_that_the_table_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
    for rates in (["1e-4", "1e-3"], ["1e-4"], ["1e-3"]):
        mad.main([*command, "--lr", *rates, "--out", str(tmp_path)])
        (folder,) = (tmp_path / "studies").iterdir()
        text = capsys.readouterr().out
        (chosen,) = re.findall(r"chosen on validation: (lr \S+, weight decay \S+)", text)
        assert f", {chosen}, seed 0" in json.loads((folder / "diagnosis.json").read_text())["title"]
        summary = json.loads((folder / "summary.json").read_text())
        assert len(summary["points"]) == 2
        point = summary["points"][summary["chosen"]]
        assert f"lr {point['lr']:g}, weight decay {point['weight_decay']:g}" == chosen
        assert [any(name.startswith("test") for name in p["estimates"]) for p in summary["points"]] == [
            p is point for p in summary["points"]
        ]


def test_the_diagnosis_says_of_how_many_seeds_its_own_was_the_best(tmp_path: Path) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
    for seeds, said in (("1", "seed 0"), ("2", r"seed [01], the best of 2 seeds on validation")):
        mad.main([*command, "--lr", "1e-3", "--seeds", seeds, "--out", str(tmp_path)])
        (path,) = tmp_path.glob("studies/*/diagnosis.json")
        assert re.search(f"weight decay 0, {said}$", json.loads(path.read_text())["title"])


def test_a_damaged_diagnosis_is_one_clear_line_and_one_without_a_title_is_made_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["--mixer", "transformer", "--task", "in-context-recall", *HEADS, *TINY, "--lr", "1e-3"]
    command += ["--weight-decay", "0", "--out", str(tmp_path)]
    mad.main(command)
    (path,) = tmp_path.glob("studies/*/diagnosis.json")
    whole = path.read_bytes()
    for damaged in (whole[:100], b"\xff"):
        path.write_bytes(damaged)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            mad.main(command)
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is damaged")
        assert error.count("\n") == 1
    path.write_text("{}")
    mad.main(command)
    assert path.read_bytes() == whole


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


def test_a_fault_in_the_code_of_a_layer_keeps_its_traceback_and_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from mixers.transformer import Transformer\nclass L(Transformer):\n    def __init__(self, *_): {}['size']\n"
    (tmp_path / "faulty_layer.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for rest in (["--task", "compression"], ["--list"]):
        with pytest.raises(KeyError, match="size") as caught:
            mad.main(["--mixer", "faulty_layer:L", *rest])
        assert caught.value.__notes__ == ["while mixer 'faulty_layer:L' was built"]
        assert caught.traceback[-1].path == tmp_path / "faulty_layer.py"


def test_too_little_gpu_memory_is_one_line_that_names_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")

    monkeypatch.setattr("runners.mad.search.search.train", full)
    with pytest.raises(SystemExit) as stop:
        mad.main(["--mixer", "rt", "--task", "in-context-recall", *HEADS, *TINY, "--out", str(tmp_path)])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "stopped: out of GPU memory: lower --together (now 6)\n"


@pytest.mark.usefixtures("undiagnosed")
def test_odd_widths_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--width", "15", "--mixer.heads", "3", "--task.train-examples", "64", "--task.eval-examples", "30"]
    command = ["--mixer", "rt", "--task", "compression", *sizes, "--batch-size", "16", "--steps", "2", "--lr", "1e-3"]
    mad.main([*command, "--device", "cpu", "--out", str(tmp_path)])
    assert "chosen on validation" in capsys.readouterr().out


MANY = ("lstm", "rt", "s5", "lru", "staircase")
SORTED = [("recurrent net", "lstm"), ("recurrent net", "lru"), ("recurrent attention", "rt")]
SORTED += [("recurrent attention", "staircase"), ("state space", "s5")]


def standings_of(
    mixers: Sequence[str], diverged: Sequence[tuple[str, str]] = (), half_width: float | None = None
) -> list[Standing]:
    """The n-th has a test sequence accuracy of n percent, the token accuracy is half a unit higher.

    A mean with a ``half_width`` is over 3 seeds.
    """
    standings = []
    for n, (task, mixer) in enumerate(product(("parity", "mqar"), mixers)):
        estimates = {m: Estimate(mean=n / 100 + 0.5 * ("token" in m), half_width=half_width) for m in TEST_METRICS}
        standings.append(
            Standing(
                mixer=mixer,
                family=MIXERS[mixer].family,
                remark=None,
                task=task,
                difficulty="baseline",
                test=None if (mixer, task) in diverged else estimates,
                seeds=1 if half_width is None else 3,
                ceiling=Accuracy(sequence=0.98, token=0.9912),  # two digits would put a perfect run above it
                chance=Accuracy(sequence=0.2, token=0.3 if task == "mqar" else 0.5),
                costs=Costs(parameters=1, state_floats=None, flops_per_token=None),
            )
        )
    return standings


def compared(standings: Sequence[Standing], width: int) -> list[list[list[str]]]:
    """Cells of each row of each table of a comparison, below the headings."""
    console = Console(width=width, file=io.StringIO())
    print_comparison(standings, console)
    assert isinstance(console.file, io.StringIO)
    tables = [table.splitlines() for table in console.file.getvalue().split("┏")[1:]]
    return [[[c.strip() for c in row.strip("│").split("│")] for row in rows if row.startswith("│")] for rows in tables]


@pytest.mark.parametrize("mixers", [MANY, MANY[:4]])
def test_the_comparison_is_sorted_by_task_and_family(mixers: tuple[str, ...]) -> None:
    (table,) = compared(standings_of(mixers), 200)
    named = [pair for pair in SORTED if pair[1] in mixers]
    families = dict.fromkeys(family for family, _ in named)
    rows = [name for family in families for name in (family, *(mixer for f, mixer in named if f == family))]
    rows = [name for name in rows if mixers == MANY or name in mixers]
    assert [name for name, *_ in table] == [
        name for task in ("parity", "mqar") for name in (task, *rows, "ceiling", "chance")
    ]
    half = len(table) // 2
    parity, mqar = ({name: cells for name, *cells in part} for part in (table[:half], table[half:]))
    assert parity["s5"][:3] == ["0.0200", "0.5200", "1"]
    assert mqar["rt"][0] == f"0.{len(mixers) + 1:02d}00"
    assert [parity["ceiling"][:2], parity["chance"][:2]] == [["0.98", "0.9912"], ["0.2", "0.5"]]
    assert mqar["chance"][:2] == ["0.2", "0.3"]


def test_a_study_s_intervals_are_whole_at_80_columns() -> None:
    note = "±: half the 95% t-interval of the mean over 2 seeds, not clipped to [0, 1]"
    (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--width", "16"])[1]
    estimates = {name: Estimate(mean=0.1 + i, half_width=0.25) for i, name in enumerate((*METRICS, *TEST_METRICS))}
    points = [
        Point(lr=5e-4, weight_decay=0.0, seeds=[0, 1], estimates=None, diverged={0: 7, 1: 8}),
        Point(lr=1e-3, weight_decay=0.1, seeds=[0, 1], estimates=estimates, diverged={}),
        Point(
            lr=1e-4, weight_decay=0.1, seeds=[0, 1], estimates={name: estimates[name] for name in METRICS}, diverged={}
        ),
    ]
    rows = {}
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO())
        limit = Accuracy(sequence=1.0, token=1.0)
        empty = summarise(experiment, [], None, {})
        summary = replace(empty, points=points, chosen=1, ceiling=limit, chance=limit)
        print_summary(summary, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert note in lines
        rows[width] = [[c.strip() for c in line.strip("│").split("│")] for line in lines if line.startswith("│ ")]
    validation = ["0.1000 ± 0.2500", "1.1000 ± 0.2500", "2.1000 ± 0.2500"]
    test = ["5.1000 ± 0.2500", "6.1000 ± 0.2500", "4.1"]
    chosen, other = ["→", "0.001", "0.1"], ["", "0.0001", "0.1"]
    assert rows[120][-2:] == [[*chosen, *validation, *test], [*other, *validation, "", "", "4.1"]]
    at = rows[80].index([*chosen, *validation])
    assert rows[80][at + 1 :] == [[*other, *validation], [*chosen, *test], [*other, "", "", "4.1"]]


def test_the_comparison_is_whole_at_80_columns() -> None:
    standings = standings_of(["feedback-transformer", *MANY], half_width=0.01)
    (whole,) = compared(standings, 200)
    accuracies, costs = compared(standings, 80)
    assert accuracies == [row[:3] for row in whole]
    assert costs == [[name, *cells[2:]] for name, *cells in whole[: len(whole) // 2] if cells[2]]


def test_a_comparison_says_over_how_many_seeds_its_intervals_are(capsys: pytest.CaptureFixture[str]) -> None:
    for half_width, said in ((None, False), (1.3, True)):
        print_comparison(standings_of(["rt", "s5"], half_width=half_width), Console())
        assert ("±: half the 95% t-interval of the mean over 3 seeds" in capsys.readouterr().out) == said


def test_whiskers_end_at_0_and_1_and_numbers_stand_above_them() -> None:
    for half_width in (1.3, 0.1, None):
        standings = standings_of(["rt", "s5"], half_width=half_width)
        figure = draw_bars(standings)
        figure.draw_without_rendering()
        axes = figure.axes[1]
        ends = [
            (0.0 if half_width is None else max(0.0, mean - half_width), min(1.0, mean + (half_width or 0.0)))
            for mean in (0.5, 0.51, 0.52, 0.53)
        ]
        if half_width is not None:
            drawn = [np.asarray(bars.lines[2][0].get_segments()[0])[:, 1] for bars in axes.containers[1::2]]
            np.testing.assert_allclose(drawn, ends)
        for number, mean, (_, high) in zip(axes.texts, (0.5, 0.51, 0.52, 0.53), ends, strict=True):
            assert number.get_text() == f"{mean:.2f}"
            assert axes.transData.inverted().transform(number.get_window_extent())[0, 1] > high
            assert figure.bbox.ymax > number.get_window_extent().ymax
        first, _, meaning = figure.get_suptitle().partition("\n")
        assert first == f"test accuracy, baseline settings, {'1 seed' if half_width is None else '3 seeds'}"
        assert ("means; whiskers: 95%" in meaning) == (half_width is not None)


def test_a_chart_says_once_after_how_many_steps_and_of_which_settings() -> None:
    standings = [replace(s, steps=250, difficulty="demo") for s in standings_of(["rt", "s5"])]
    figure = draw_bars(standings)
    assert figure.get_suptitle() == "test accuracy after 250 steps, demo settings, 1 seed"
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["parity", "mqar"]
    figure = draw_bars([replace(standings[0], steps=400, difficulty="quick"), *standings[1:]])
    assert figure.get_suptitle() == "test accuracy after 250 to 400 steps, 1 seed"
    assert "parity\nquick" in [label.get_text() for label in figure.axes[1].get_xticklabels()]


@pytest.mark.parametrize("length", [5, 30, 90])
def test_the_legend_fits_whatever_the_mixers_are_called(length: int) -> None:
    names = {mixer: f"{mixer}{'_' * length}.module:Layer{'x' * length}" for mixer in MANY[:4]}
    standings = [replace(s, mixer=names[s.mixer]) for s in standings_of(MANY[:4])]
    figure = draw_bars(standings)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert figure.bbox.xmin <= extent.xmin < extent.xmax <= figure.bbox.xmax
    texts = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert texts == [*names.values(), "ceiling", "chance"]


def test_a_heat_map_has_intervals_a_title_and_one_color_for_equal_numbers() -> None:
    standings = standings_of(MANY, half_width=0.25)
    assert draw_heat_map(standings).get_suptitle().endswith("3 seeds\nmeans ± half the 95% t-interval")
    assert draw_heat_map(standings_of(MANY)).get_suptitle().endswith("1 seed")
    for shift in (-0.001, 0.001):
        estimates = {m: Estimate(mean=0.5 + shift, half_width=0.25) for m in TEST_METRICS}
        standings = [replace(s, test=estimates) for s in standings]
        texts = {text.get_position(): text for axes in draw_heat_map(standings).axes for text in axes.texts}
        assert (texts[0, 1].get_text(), texts[0, 1].get_color()) == ("0.50\n±0.25", "#ffffff")
        assert (texts[0, 0].get_text(), texts[0, 0].get_color()) == ("0.99", "#111111")


def test_no_two_labels_of_a_chart_overlap_however_many_settings_they_name() -> None:
    words = ", ".join(f"some-setting-{n} {n}" for n in range(6))
    for mixers, draw in ((MANY[:4], draw_bars), (MANY, draw_heat_map)):
        named = [replace(s, mixer=f"{s.mixer} ({words})", difficulty=f"custom, {words}") for s in standings_of(mixers)]
        figure = draw(named)
        figure.draw_without_rendering()
        axes = figure.axes[-1] if draw is draw_bars else figure.axes[0]
        labels = [axes.get_xticklabels() if draw is draw_bars else [], axes.get_yticklabels()]
        for extents in ([label.get_window_extent() for label in side] for side in labels):
            assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
            assert all(figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 for extent in extents)


def test_means_are_over_the_seeds_of_what_has_not_diverged() -> None:
    for mixers, draw in ((MANY[:2], draw_bars), (MANY, draw_heat_map)):
        diverged, *others = standings_of(mixers, half_width=0.1)
        figure = draw([replace(diverged, test=None, seeds=0), *others])
        assert " 0 to" not in figure.get_supxlabel() + figure.get_suptitle()


def test_a_heat_map_calls_diverged_only_what_diverged() -> None:
    standings = [replace(s, test={}) if s.mixer == "rt" else s for s in standings_of(MANY, diverged=[("s5", "parity")])]
    axes = draw_heat_map(standings).axes[0]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert [texts[0, 3], texts[1, 3], texts[0, 5]] == ["–", "–", "div."]


def test_the_chart_of_many_mixers_is_a_heat_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    standings = [s for s in standings_of(MANY, diverged=[("s5", "mqar")]) if (s.mixer, s.setting) != ("rt", "mqar")]
    plot_comparison(standings, tmp_path / "many.png")
    plot_comparison([s for s in standings if s.mixer != "s5"], tmp_path / "few.png")
    assert {path.name for path in tmp_path.iterdir()} == {"many.png", "few.png"}
    heat_map, bars = drawn
    assert not any(axes.images for axes in bars.axes)
    nan = np.nan
    sequence = [[0.98, 0.98], [0.00, 0.05], [0.03, 0.08], [0.01, nan], [0.04, 0.09], [0.02, nan], [0.2, 0.2]]
    token = np.array(sequence) + 0.5
    token[[0, -1]] = [0.9912, 0.9912], [0.5, 0.3]
    *panels, color_bar = heat_map.axes
    assert color_bar.get_xlabel() == "accuracy"
    for axes, expected in zip(panels, (sequence, token), strict=True):
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array().filled(nan), expected)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["parity", "mqar"]
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        written = {(column, row): f"{value:.2f}" for (row, column), value in np.ndenumerate(expected)}
        assert texts == {**written, (1, 3): "–", (1, 5): "div."}
    names = [label.get_text() for label in heat_map.axes[0].get_yticklabels()]
    assert names == ["ceiling", *(mixer for _, mixer in SORTED), "chance"]
    (side,) = heat_map.axes[1].child_axes
    families = {label.get_text(): y for label, y in zip(side.get_yticklabels(), side.get_yticks(), strict=True)}
    assert families == {"recurrent net": 1.5, "recurrent attention": 3.5, "state space": 5}
    assert heat_map.get_supxlabel().startswith("grey")
