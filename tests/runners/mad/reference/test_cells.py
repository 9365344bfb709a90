"""Cells of the reference results: what they hold, and when they are stale."""

import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console
from runners.mad.duration import Duration, total
from runners.mad.plan import plan_experiments
from runners.mad.reference.cells import FOLDER, Cell, options_of, read_cell, train_cell, write_cell
from runners.mad.reference.entries import ENTRIES, FIRST, Entry
from runners.mad.reference.forecast import expected_seconds, table_of

from mixers import MIXERS
from mixers.base import Shape
from runners import deadline
from runners.deadline import Deadline
from runners.files import DamagedFileError, read_json
from runners.mad.reference import __main__ as command
from runners.progress import spell

ENTRY = Entry(name="rt-block-2", mixer="rt", options={"heads": 2, "block": 2})
TINY = {"steps": 2, "evaluations": 2, "width": 16, "mlp_width": 16, "device": "cpu"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cell]:
    """A cell trained for two steps on the small data of the preset ``quick``, and its file."""
    folder = tmp_path_factory.mktemp("reference")
    changes: dict[str, Any] = {**TINY, "out": folder / "out", "lr": (1e-3, 5e-3), "weight_decay": (0.0,), "seeds": 5}
    options = options_of(ENTRY, "memorization", "quick", **changes)
    content = train_cell(ENTRY, "memorization", options, Console(file=io.StringIO()))
    return write_cell(folder, ENTRY, "memorization", content), content


def test_a_cell_holds_one_value_a_seed_of_the_chosen_point(cell: tuple[Path, Cell]) -> None:
    path, content = cell
    assert read_cell(path) == content
    assert path.parts[-2:] == ("rt-block-2", "memorization.json")
    assert content.seeds == [0, 1, 2, 3, 4]
    assert content.grid == [1e-3, 5e-3]
    assert content.steps == 2
    for values in (content.test.sequence_accuracy, content.test.token_accuracy):
        assert len(values) == 5
    points = content.points
    assert [len(point.seeds) for point in points] == [5 if i == content.chosen else 1 for i in range(2)]
    assert [len(curve) for curve in content.curves] == [2] * 5
    assert [row[0] for row in content.curves[0]] == [1, 2]

    assert content.sharp_trajectory is not None
    assert content.rehearsed_positions == 20

    # The accuracies along the sequence have the mean of the tokens' accuracy: each sequence has an answer at each.
    positions = content.positions
    assert positions is not None
    assert positions.axis == "position"
    assert len(positions.index) == len(positions.accuracy) <= 128
    assert fmean(positions.accuracy) == pytest.approx(fmean(content.test.token_accuracy), abs=1e-3)


def test_variants_are_planned_under_both_protocols() -> None:
    for protocol, steps, width in (("full", None, 128), ("quick", 1000, 64)):
        for name, layers, block in (("rt-block-4", 1, 4), ("transformer-3-layers", 3, None)):
            entry = ENTRIES[name]
            options = options_of(entry, "parity", protocol)  # type: ignore[arg-type]
            (experiment,) = plan_experiments(options, dict(entry.options), {})
            assert (experiment.shape.width, experiment.shape.layers) == (width, layers)
            assert getattr(experiment.mixer_config, "block", None) == block
            assert experiment.protocol.steps == steps
            assert experiment.difficulty == ("quick" if protocol == "quick" else "baseline")
            assert experiment.label == name


def test_every_registered_layer_has_a_row_and_the_first_ones_come_first() -> None:
    names = list(ENTRIES)
    assert set(MIXERS) <= set(names)
    assert names[:2] == list(FIRST[:2])
    assert [name for name in names if name in FIRST] == list(FIRST)


def test_the_dry_run_lists_what_is_missing_or_stale_and_says_how_long_training_takes(
    cell: tuple[Path, Cell],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_stale", lambda cells: [cell.layer == "gla" for cell in cells])
    monkeypatch.setattr("runners.mad.duration.time_step", lambda experiment, members, device, limit: members * 0.01)
    on_gpu = replace(cell[1], task="parity", seconds=90.0, device="NVIDIA H200")
    for row in ("rt", "gla"):
        write_cell(tmp_path, ENTRIES[row], "parity", replace(on_gpu, layer=row))
    folders = ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    command.main(["--layers", "rt", "gla", "--tasks", "parity", "mqar", *folders, "--dry-run"])
    first, stale, plan, *table, time = capsys.readouterr().out.splitlines()
    assert first.startswith("2 of 4 cells are in ")
    assert first.endswith(", 1 of them stale: delete a stale cell's file to train it again")
    assert stale == "stale: gla on parity"
    assert "│ mqar │ all │ 94 min │ 3 min │" in [" ".join(line.split()) for line in table]
    assert plan.startswith("to train: 2 cells, each at 10 points of the grid, then at the chosen point with 4 more ")
    # Two cells of 14 runs: 20,000 steps of 0.01 s a run and evaluations, a 150th of it; and 90 s each.
    words = "(up to 3 steps of each shape were timed), about 3 min on one NVIDIA H200 (from the reference results)"
    assert time == f"time: about 94 min here {words}"
    assert not (tmp_path / "out").exists()

    command.main(["--layers", "rt", "--tasks", "parity", "--preset", "quick", *folders, "--dry-run"])
    first, _plan, *table, _time = capsys.readouterr().out.splitlines()
    assert first == f"0 of 1 cells are in {tmp_path / 'quick'}"
    assert "│ parity │ rt " in "\n".join(table)
    assert "on one" not in "\n".join(table)


def test_the_missing_cells_of_a_task_are_listed_or_if_shorter_left_out() -> None:
    names = [*ENTRIES]
    missing = [*((ENTRIES[name], "mqar") for name in names[1:]), (ENTRIES[names[0]], "parity")]
    durations = [Duration(here=None, recorded=60.0, device="NVIDIA H200")] * len(missing)
    columns = [[*column.cells] for column in table_of(missing, durations, names).columns]
    assert columns == [["mqar", "parity"], [f"all but {names[0]}", names[0]], [spell(60.0 * len(names[1:])), "60 s"]]

    # The time of a task is unknown if that of one of its cells is.
    durations[0] = Duration(here=2.0, recorded=None)
    assert total(durations[:2]).cells() == ["?", ""]
    assert total(durations[1:3]).cells() == ["?", spell(120.0)]


def test_a_cell_is_expected_to_take_the_time_of_its_layer_and_of_its_task() -> None:
    took = {("a", "x"): 10.0, ("a", "y"): 20.0, ("b", "x"): 30.0}
    seconds = expected_seconds(took, ("b", "y"))
    assert seconds is not None
    assert 30 < seconds < 60
    whole = {**took, ("b", "y"): 60.0}
    assert expected_seconds(whole, ("b", "y")) == pytest.approx(60)
    assert expected_seconds(whole, ("c", "z")) == pytest.approx((10 * 20 * 30 * 60) ** 0.25)
    assert expected_seconds({}, ("a", "x")) is None


def test_within_minutes_only_cells_begin_that_are_expected_to_end_in_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {("rt", "parity"): 100.0, ("rt", "mqar"): 30.0, ("lstm", "parity"): 60.0, ("lstm", "mqar"): 85.0}

    def forecast(missing: Any, *others: Any) -> list[Duration]:
        return [Duration(here=None, recorded=expected[entry.name, task]) for entry, task in missing]

    # Each cell needs 30 s beside training.
    begun = []
    monkeypatch.setattr(command, "train_if_free", lambda entry, task, *others: begun.append((entry.name, task)))
    monkeypatch.setattr(command, "forecast", forecast)
    monkeypatch.setattr(command, "write_overview", lambda *others: [])
    arguments = ["--layers", "rt", "lstm", "--tasks", "parity", "mqar", "--folder", str(tmp_path)]
    arguments += ["--out", str(tmp_path / "out"), "--minutes"]
    command.main([*arguments, "2"])
    assert begun == [("rt", "mqar"), ("lstm", "parity"), ("lstm", "mqar")]
    assert "not trained: 4 cells, where not expected to end within 2 minutes" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "0"])
    assert "--minutes 0 must be more than 0" in capsys.readouterr().err


def test_finished_cells_show_the_pace_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])
    durations = [
        Duration(here=None, recorded=70.0),  # 100 s with what stands beside training
        Duration(here=170.0, recorded=9.0),  # on a CPU, the time of its steps counts
        Duration(here=None, recorded=None),
    ]
    left = Deadline(5.0, began=100.0)
    assert all(left.allows(duration.seconds) for duration in durations)

    # Half as fast as expected: 200 s for 100, so 400 for 200.
    now[0] = 200.0
    left.learn(durations[0].seconds, 200.0)
    assert [left.allows(duration.seconds) for duration in durations] == [True, False, True]
    now[0] = 341.0
    assert [left.allows(duration.seconds) for duration in durations] == [False, False, False]


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs a file system that takes no files")
def test_a_folder_that_takes_no_cells_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--layers", "rt", "--tasks", "parity", "--folder", "/proc/cells", "--out", str(tmp_path / "out")]
    for words in ([], ["--overview"]):
        with pytest.raises(SystemExit, match="2"):
            command.main([*arguments, *words])
        printed = capsys.readouterr()
        assert printed.err.startswith("error: --folder /proc/cells: nothing can be written into /proc (")
        assert printed.out == ""

    command.main([*arguments, "--dry-run"])
    assert "0 of 1 cells are in /proc/cells" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_preset_s_folder_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quick").touch()
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "quick", "--folder", str(tmp_path), "--overview"])
    assert capsys.readouterr().err == f"error: --folder {tmp_path / 'quick'} is a file: name a folder\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "nope"], "no row 'nope': choose from rt, transformer, "),
        (
            ["--layers", "rt", "transfomer"],
            "no row 'transfomer': did you mean transformer? The rows are rt, transformer, ",
        ),
        (["--layers", "rt,lstm"], "no row 'rt,lstm': separate names by spaces"),
        (["--tasks", "nope"], "no task 'nope'"),
        (
            ["--overview", "--dry-run"],
            "--overview writes the overview, and --dry-run writes nothing: leave one of them",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cell: [cell], "it holds no named entries"),
        (lambda cell: {"my": "notes"}, "task: field required"),
        (lambda cell: cell | {"sharp_trajectory": "x"}, "sharp_trajectory: input should be a valid array, not 'x'"),
        (lambda cell: cell | {"steps": "3"}, "steps: input should be a valid integer, not '3'"),
        (lambda cell: cell | {"curves": [[[1, 2.0]]]}, "curves: 0: 0: 2: field required"),
        (lambda cell: cell | {"chosen": 10}, "chosen: there is no point 10"),
        (lambda cell: cell | {"chosen": None}, "test: 5 and 5 accuracies do not fit the chosen point"),
        (
            lambda cell: cell | {"test": {"token_accuracy": [0.5]}},
            "test: 0 and 1 accuracies do not fit the chosen point",
        ),
    ],
)
def test_a_file_that_is_no_cell_is_an_error(change: Any, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    file.write_text(json.dumps(change(read_json(FOLDER / "rt" / "parity.json"))))
    with pytest.raises(DamagedFileError) as raised:
        read_cell(file)
    assert f"parity.json is damaged ({reason}): move it elsewhere, or delete it" in str(raised.value)


def test_a_cell_of_an_earlier_version_has_the_shape_of_its_layers(tmp_path: Path) -> None:
    content = read_json(FOLDER / "transformer-2-layers" / "parity.json")
    file = tmp_path / "parity.json"
    file.write_text(json.dumps({name: value for name, value in content.items() if name != "shape"}))
    assert read_cell(file).shape == Shape(layers=2)
