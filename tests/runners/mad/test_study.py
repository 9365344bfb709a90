"""The Python API of the diagnostics, and the protocol as it runs: a grid, its choice, more seeds of the choice."""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mixers.transformer import Transformer
from runners.files import read_json
from runners.guidance import flag_of
from runners.mad import Study, api, studies, study
from runners.mad import __main__ as mad
from runners.mad.options import Options, read_options
from runners.mad.reference import rows
from runners.mad.reference.cells import FOLDER, cell_file, cell_point, read_cell, write_cell
from runners.mad.reference.entries import ENTRIES
from runners.mad.results.summary import Estimate, read_summary, under_grid
from runners.mad.search import search
from runners.mad.training.protocol import Run
from runners.mad.training.result import Result
from tasks.mqar import MultiQueryRecall

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


def test_more_seeds_are_those_of_the_chosen_point_alone(result: Study) -> None:
    summary = result.summary
    assert [point.seeds for point in summary.points] == [
        [0, 1, 2, 3] if index == summary.chosen else [0] for index in range(2)
    ]
    chosen = summary.chosen_point
    assert chosen is not None
    assert chosen.values is not None
    assert chosen.estimates is not None
    for name in ("validation_loss", "test_token_accuracy"):
        assert len(chosen.values[name]) == 4
        assert chosen.estimates[name].mean == pytest.approx(np.mean(chosen.values[name]))
    assert result.test["token_accuracy"] == chosen.estimates["test_token_accuracy"]


def test_a_point_that_another_command_finishes_while_the_test_split_is_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, others = studies._read_test, []

    def while_another_command_runs(*arguments: Any) -> Any:
        if not others:
            others.append("begun")
            study("transformer", "in-context-recall", out=tmp_path, **{**SMALL, "lr": [5e-3]})
        return read(*arguments)

    monkeypatch.setattr(studies, "_read_test", while_another_command_runs)
    study("transformer", "in-context-recall", out=tmp_path, **{**SMALL, "lr": [1e-3]})
    (file,) = tmp_path.glob("studies/*/summary.json")
    assert [(point.lr, "test_token_accuracy" in (point.estimates or {})) for point in read_summary(file).points] == [
        (1e-3, True),
        (5e-3, True),
    ]


def test_seeds_whose_test_another_command_has_not_read_yet_take_no_figures_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command repeats the same point, and is stopped before it reads the test split."""
    read, others = studies._read_test, []

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    def while_another_command_repeats(*arguments: Any) -> Any:
        if not others:
            others.append("begun")
            with monkeypatch.context() as patch:
                patch.setattr(studies, "_read_test", stopped)
                with pytest.raises(KeyboardInterrupt):
                    study("transformer", "in-context-recall", out=tmp_path, **{**SMALL, "lr": [1e-3]}, seeds=3)
        return read(*arguments)

    monkeypatch.setattr(studies, "_read_test", while_another_command_repeats)
    study("transformer", "in-context-recall", out=tmp_path, **{**SMALL, "lr": [1e-3]})
    (file,) = tmp_path.glob("studies/*/summary.json")
    (point,) = read_summary(file).points
    assert point.seeds == [0]
    assert "test_token_accuracy" in (point.estimates or {})

    # The next command reads it.
    study("transformer", "in-context-recall", out=tmp_path, **{**SMALL, "lr": [1e-3]}, seeds=3)
    (point,) = read_summary(file).points
    assert len((point.values or {})["test_token_accuracy"]) == 3


def test_the_test_split_is_read_for_the_chosen_point_alone(result: Study) -> None:
    for point in result.summary.points:
        assert point.values is not None
        assert ("test_loss" in point.values) == (point is result.summary.chosen_point)
    read = list((result.out / "runs").glob("*/test.json"))
    assert len(read) == 4


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run, Result], Result]) -> None:
    """Let the search see changed results of its runs."""
    real = search.train

    def train(*arguments: Any) -> list[Result]:
        return [change(run, result) for run, result in zip(arguments[3], real(*arguments), strict=True)]

    monkeypatch.setattr(search, "train", train)


def scored(result: Result, value: float) -> Result:
    """The result with another score on validation."""
    assert result.validation is not None
    return replace(result, validation=replace(result.validation, score=value))


def test_other_grids_choose_without_the_seeds_that_repeat_the_chosen_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The point with the best first seed lies in the smaller grids, too, whatever its other seeds reach."""
    altered(
        monkeypatch,
        lambda run, result: scored(result, {0: 0.9, 1: 0.1}[run.seed] if run.lr == 1e-4 else 0.5 + run.lr),
    )
    settings = {**SMALL, "lr": [1e-4, 5e-4, 1e-3, 2e-3]}
    result = study("transformer", "in-context-recall", seeds=2, seeds_of="chosen", out=tmp_path, **settings)
    assert result.summary.points[0].seeds == [0, 1]
    assert result.summary.chosen == 0
    assert result.summary.other_choices == {"paper": 0}


def test_what_a_smaller_grid_chose_keeps_its_test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the study can still stand beside others of the smaller grid."""
    altered(monkeypatch, lambda run, result: scored(result, run.lr))
    for lrs in ([1e-3, 2e-3], [1e-3, 2e-3, 5e-3]):
        again = {**SMALL, "lr": lrs}
        result = study("transformer", "in-context-recall", seeds=2, seeds_of="chosen", out=tmp_path, **again)
    stored = read_summary(result.folder)
    assert [(p.lr, p.seeds, "test_loss" in (p.values or {})) for p in stored.points] == [
        (1e-3, [0], False),
        (2e-3, [0, 1], True),
        (5e-3, [0, 1], True),
    ]
    small = under_grid(stored, [(1e-3, 0.0), (2e-3, 0.0)], 2)
    assert small is not None
    assert small.chosen_point == stored.points[1]
    assert small.best_seed == 0
    assert under_grid(stored, [(1e-3, 0.0), (2e-3, 0.0)], 3) is None

    # Had a third seed of that choice diverged, its figures would be lost, and another point must not take its place,
    # although it has the seeds and the test figures that a choice needs.
    _, second, third = stored.points
    lost = replace(second, seeds=[0, 1, 2], values=None, estimates=None, diverged={2: 4})
    other = replace(third, lr=1e-3)
    of_both = [(1e-3, 0.0), (2e-3, 0.0)]
    diverged = replace(stored, points=[other, lost], chosen=0)
    assert under_grid(replace(stored, points=[other], chosen=0), of_both[:1], 2) is not None
    assert under_grid(diverged, of_both, 2) is None
    assert under_grid(stored, [(1e-3, 0.0), (3e-3, 0.0)], 2) is None


def test_where_a_further_seed_diverges_the_next_best_point_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(run: Run, result: Result) -> Result:
        if run.seed == 1 and run.lr == 1e-3:
            return replace(result, diverged_step=3, validation=None)
        return scored(result, 1 - run.lr)

    altered(monkeypatch, diverging)
    settings = {**SMALL, "lr": [1e-3, 2e-3, 5e-3]}
    result = study("transformer", "in-context-recall", seeds=2, seeds_of="chosen", out=tmp_path, **settings)
    assert [point.seeds for point in result.summary.points] == [[0, 1], [0, 1], [0]]
    assert [point.diverged for point in result.summary.points] == [{1: 3}, {}, {}]
    assert result.summary.chosen == 1
    assert result.test["token_accuracy"].half_width is not None
    assert read_json(result.folder / "summary.json")["chosen"] == 1

    # A command for fewer seeds chooses among those.
    fewer = study("transformer", "in-context-recall", seeds=1, out=tmp_path, **settings)
    assert fewer.summary.chosen == 0


def test_reference_rows_of_equal_terms_are_ranked_beside_the_layer(
    result: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    (own,) = result.ranking()
    assert (own["rank"], own["layer"], own["own"], own["seeds"]) == (1, "transformer", True, 4)
    assert own["token_accuracy"] == result.test["token_accuracy"].mean
    assert own["token_accuracy_half_width"] == result.test["token_accuracy"].half_width

    # A cell with the study's settings.
    config, points = result.summary.config, [cell_point(point) for point in result.summary.points]
    cell = read_cell(cell_file(FOLDER, ENTRIES["rt"], "in-context-recall"))
    settings = {"shape": config.shape, "protocol": config.protocol}
    like = replace(cell, **settings, task_config=config.task_config, points=points, chosen=0)
    write_cell(tmp_path, ENTRIES["rt"], "in-context-recall", like)
    reference, own = replace(result, reference=tmp_path).ranking()
    assert [(row["rank"], row["layer"], row["own"]) for row in (reference, own)] == [
        (1, "rt", False),
        (2, "transformer", True),
    ]
    assert reference["token_accuracy"] == pytest.approx(np.mean(cell.test.token_accuracy))


def test_it_takes_each_option_of_the_command_that_is_not_about_printing() -> None:
    command_alone = {"list", "dry_run"}
    own = {"mixer_options", "task_options", "quiet"}
    assert {*inspect.signature(study).parameters} - own == {field.name for field in fields(Options)} - command_alone


def test_accuracies_on_longer_sequences_are_estimates_over_the_seeds(tmp_path: Path) -> None:
    settings = {**SMALL, "task_options": {"length": 24, "train_examples": 32, "eval_examples": 32}, "lr": [1e-3]}
    result = study(Transformer, "parity", seeds=2, out=tmp_path, **settings)
    chosen = result.summary.chosen_point
    assert chosen is not None
    assert result.extrapolation.keys() == chosen.extrapolation.keys() != set()
    for name, found in result.extrapolation.items():
        tokens = [accuracy.token for accuracy in chosen.extrapolation[name]]
        assert found["token_accuracy"] == Estimate.of(tokens)
        assert len(tokens) == 2


def test_a_reference_folder_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder: give shipped, none"):
        study("transformer", "in-context-recall", out=tmp_path / "out", reference=tmp_path / "none", **SMALL)
    assert not (tmp_path / "out").exists()


def test_tables_have_a_row_a_point_and_a_row_an_evaluation(result: Study) -> None:
    points, curves = result.points(), result.curves()
    assert [point["lr"] for point in points] == [1e-3, 5e-3]
    assert sum(point["chosen"] for point in points) == 1
    assert len(curves) == 2 * len(result.runs) == 10
    assert {row["step"] for row in curves} == {2, 4}
    assert len({tuple(row) for row in curves}) == 1  # all rows have the same columns


def test_the_model_is_the_one_that_the_figures_are_of(result: Study) -> None:
    batch, best = result.data["test"], result.summary.best_run
    with torch.no_grad():
        predictions_ST = result.model(torch.from_numpy(batch.inputs_ST)).argmax(-1).numpy()
    accuracy = (predictions_ST == batch.targets_ST)[batch.scored_ST].mean()
    chosen = result.summary.chosen_point
    assert best is not None
    assert chosen is not None
    assert chosen.values is not None
    assert accuracy == pytest.approx(chosen.values["test_token_accuracy"][chosen.seeds.index(best.seed)])


@pytest.mark.usefixtures("undrawn")
def test_the_command_finds_what_the_function_has_trained(result: Study, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((result.out / "runs").iterdir())
    mad.main([*SAME, "--seeds", "4", "--seeds-of", "chosen", "--out", str(result.out)])
    assert sorted((result.out / "runs").iterdir()) == before
    stored = read_json(result.folder / "summary.json")
    assert stored == json.loads(json.dumps(result.summary.to_dict()))
    assert "chosen on validation: lr" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_a_choice_at_the_edge_is_said_in_table_summary_and_dashboard(
    result: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both learning rates are ends of this grid."""
    from runners.mad.search.study import study_names
    from runners.storage import existing_storage

    mad.main([*SAME, "--out", str(result.out)])
    said = capsys.readouterr().out
    edge = read_summary(result.folder).edge
    assert edge in ("smallest", "largest")
    assert f"is the {edge} of the grid, so a better one may lie beyond it: try --lr 0.00" in said
    storage = existing_storage(str(result.out / "studies.journal"))
    assert storage is not None
    (attributes,) = study_names(storage).values()
    assert f"is the {edge} of the grid" in attributes["chosen"]


def test_what_the_function_prints_names_its_arguments(result: Study, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "quiet": False}
    study("transformer", "in-context-recall", seeds=4, seeds_of="chosen", out=result.out, **settings)
    assert "reference rows need preset quick" in " ".join(capsys.readouterr().out.split())


def test_a_preset_gives_what_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the command with that preset."""
    asked: list[Options] = []

    def plan(options: Options, *_: Any) -> list[Any]:
        asked.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(api, "plan_experiments", plan)
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
        ({"steps": 0}, "^steps 0 must be at least 1"),
        ({"mixer_options": {"heads": 3}}, "heads: 3 must divide the model width 16"),
        (
            {"mixer_options": {"head": 3}},
            r"^mixer_options\['head'\] does not apply to mixer transformer: .*\['heads'\]",
        ),
        (
            {"task_options": {"len": 3}},
            r"^task_options\['len'\] does not apply to task in-context-recall: .*\['length'\]",
        ),
        (
            {"mixer": type("Local", (torch.nn.Module,), {})},
            "has no Local, or another one by now: give the class that has",
        ),
        ({"mixer": Path}, r"'pathlib:Path' is no mixer: it must be a class derived from torch.nn.Module"),
        ({"mixer": torch.nn.Identity()}, 'by name: write "torch.nn.modules.linear:Identity" in place of the Identity'),
        ({"mixer": ["rt", "lstm"]}, 'by name: write "rt" in place of the list'),
        ({"preset": "small"}, "preset: Input should be 'grid', 'full', 'quick' or 'demo', not 'small'"),
        ({"task": "all"}, "one layer on one task"),
        ({"task": ["parity", "mqar"]}, "one layer on one task: call it once for each in place of a list"),
        ({"difficulty": "all"}, "one layer on one task"),
        ({"steps": 4.0}, "steps: Input should be a valid integer, not 4.0"),
        ({"seeds": [0, 1]}, r"seeds: Input should be a valid integer, not \[0, 1\]"),
        ({"lr": "1e-3"}, r"lr is a list: write lr=\[1e-3\]"),
        ({"lr": []}, "^lr is empty: give at least one value, or leave it out"),
        ({"weight_decay": ()}, "^weight_decay is empty: give at least one value"),
        ({"wandb_tags": "mine"}, r"wandb_tags is a list: write wandb_tags=\['mine'\]"),
        ({"wandb_project": "mine"}, "^wandb_project has no effect without wandb online or wandb offline: give one"),
        ({"lr": ["a"]}, "lr: Input should be a valid number, not 'a'"),
        ({"mixer_options": {"heads": "2"}}, "heads: Input should be a valid integer, not '2'"),
        ({"task_options": {"length": 16.0}}, "length: Input should be a valid integer, not 16.0"),
        ({"lr": [100.0]}, "^lr 100 must lie between"),
        ({"lr": [1e-3], "grid": "paper"}, "^grid paper has no effect beside the learning rates of lr: give one"),
        ({"short_convolution": 1}, "^short_convolution 1 must be at least 2"),
        ({"mixer_options": {"qk": 2}}, r"the options are mixer_options\['heads'\], mixer_options\['qk_norm'\]$"),
        ({"lr": 1e-3}, r"lr is a list: write lr=\[0.001\]"),
    ],
)
def test_what_does_not_fit_is_one_clear_error_and_leaves_nothing_behind(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        study(**{"mixer": "transformer", "task": "in-context-recall", **SMALL, **arguments, "out": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


def test_the_folder_of_results_is_a_path() -> None:
    with pytest.raises(ValueError, match=r"^out is a folder, such as 'results', not 3"):
        study("transformer", "in-context-recall", out=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("undrawn")
def test_numbers_of_numpy_and_names_with_dashes_are_those_of_the_command(tmp_path: Path) -> None:
    """A whole number for a real one, too: it is part of the study's identity."""
    given = {"heads": 2, "qk-norm": False}
    few = SMALL | {"steps": 1, "evaluations": 1, "lr": np.array([0.5, 1]), "weight_decay": [0], "mixer_options": given}
    study("transformer", "in-context-recall", out=tmp_path, **few)
    rates = [{"1e-3": "0.5", "5e-3": "1"}.get(word, word) for word in SAME]
    options = [*rates, "--steps", "1", "--evaluations", "1", "--mixer.qk-norm", "False"]
    mad.main([*options, "--out", str(tmp_path)])
    assert len([*(tmp_path / "runs").iterdir()]) == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"heads": 4}, r"no argument 'heads': it is an option of transformer: write mixer_options=\{'heads': 4\}"),
        ({"length": 8}, r"no argument 'length': it is an option of mqar: write task_options=\{'length': 8\}"),
        ({"learning_rate": 1e-3}, "no argument 'learning_rate': did you mean 'lr'"),
        ({"dry_run": True}, r"no argument 'dry_run': help\(study\) lists the arguments"),
    ],
)
def test_an_unknown_argument_is_an_error_that_says_how_to_write_it(argument: dict[str, Any], message: str) -> None:
    for mixer, task in (("transformer", "mqar"), (Transformer, MultiQueryRecall)):
        with pytest.raises(TypeError, match=message):
            study(mixer, task, **argument)


class Plain(torch.nn.Module):
    """A layer without a step form; divided by zero, it diverges in training at once."""

    def __init__(self, dim: int, divisor: int = 1) -> None:
        super().__init__()
        self.out, self.divisor = torch.nn.Linear(dim, dim), divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        divisor = self.divisor if len(x) > 2 else 1  # the check before the first step has two sequences
        z: torch.Tensor = self.out(x) / torch.tensor(float(divisor))
        return z


def test_quiet_says_nothing_and_else_a_divergence_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Plain=Plain))
    few = SMALL | {"lr": [1e-3], "steps": 1, "evaluations": 1, "reference": "none", "out": tmp_path}
    found = study("layers_of_others:Plain", "in-context-recall", **{**few, "mixer_options": {}})
    assert found.summary.costs.state_floats is None
    assert (capsys.readouterr(), caplog.messages) == (("", ""), [])

    study("layers_of_others:Plain", "in-context-recall", **{**few, "mixer_options": {"divisor": 0}, "quiet": False})
    assert "every run diverged, its loss or gradient is not finite before any training" in capsys.readouterr().out
    assert [message for message in caplog.messages if "state of Plain not counted" in message]


def test_a_database_that_takes_no_data_is_one_line_that_says_why(tmp_path: Path) -> None:
    few = SMALL | {"lr": [1e-3], "steps": 1, "evaluations": 1, "out": tmp_path}
    study("transformer", "in-context-recall", storage=f"sqlite:///{tmp_path}/studies.db", **few)
    with pytest.raises(ValueError, match=r"^storage sqlite:///file:.*attempt to write a readonly database.*$"):
        study(
            "transformer",
            "in-context-recall",
            storage=f"sqlite:///file:{tmp_path}/studies.db?mode=ro&uri=true",
            **few | {"lr": [2e-3], "width": 32},
        )
