"""Reference rows beside one's own studies: which may stand there, and what is said where none may."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runners.mad import __main__ as mad
from runners.mad.reference import rows
from runners.mad.reference.cells import (
    FOLDER,
    Accuracies,
    CellPoint,
    cell_file,
    options_of,
    protocol_folder,
    read_cell,
    train_cell,
    write_cell,
)
from runners.mad.reference.entries import ENTRIES
from runners.mad.reference.rows import (
    Terms,
    print_rankings,
    rankings,
    reference_folder,
    shown_together,
    to_standings,
)
from runners.mad.results import compare
from runners.mad.results.ranking import ranked
from runners.mad.results.standings import Standing
from runners.mad.results.summary import Estimate, Point, Summary, summarise
from tests.runners.mad.commands import planned

pytestmark = pytest.mark.usefixtures("wide_terminal")
TINY = {"steps": 2, "evaluations": 1, "width": 16, "mlp_width": 16, "device": "cpu"}
COMMAND = ["--task", "memorization", "--lr", "1e-3", "5e-3", "--weight-decay", "0", "--device", "cpu"]
COMMAND += ["--seeds", "2", "--seeds-of", "chosen", "--width", "16", "--mlp-width", "16", "--evaluations", "1"]
TOY = ["--mixer", "tests.mixers.strangers:GatedToy"]


def summary_of(*arguments: str) -> Summary:
    """Of a study that is as good as finished: each of its grid points has its seeds."""
    defaults = {"--mixer": "lstm", "--task": "parity"}
    words = [word for name, value in defaults.items() if name not in arguments for word in (name, value)]
    options, (experiment,) = planned([*words, *arguments, "--device", "cpu"])
    seeds: dict[tuple[float, float], list[int]] = {}
    for run in options.runs:
        seeds.setdefault((run.lr, run.weight_decay), []).append(run.seed)
    points = [
        Point(lr=lr, weight_decay=decay, seeds=found, estimates=None, diverged={})
        for (lr, decay), found in seeds.items()
    ]
    points[0].seeds.extend(options.more_seeds)
    return replace(summarise(experiment, [], None, {}), points=points, chosen=0)


def diverged_of(summary: Summary) -> Summary:
    """The same study, all of whose runs diverged, so that no seed repeats a point."""
    return replace(summary, points=[replace(p, seeds=[0], diverged={0: 7}) for p in summary.points], chosen=None)


def rows_or_reason(*arguments: str, folder: Path = FOLDER) -> list[str] | str:
    """Names of the reference rows beside a study, or why there are none."""
    summary = summary_of(*arguments)
    (ranking,) = rankings([summary], [Standing.of(summary)], folder)
    return [row.mixer for row in ranking.rows] if ranking.reason is None else ranking.reason


FULL = ("--preset", "full")


def test_a_study_of_the_full_protocol_has_the_shipped_rows_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    found = rows_or_reason(*FULL)
    assert found[:2] == ["rt", "transformer"]
    assert not any(name.startswith(("rt-", "transformer-2")) for name in found)
    assert rows_or_reason("--grid", "wide", "--seeds", "5", "--seeds-of", "chosen", "--steps", "20000") == found


def test_a_reference_row_has_a_label_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    summaries = [
        summary_of("--mixer", mixer, "--task", task, *FULL) for mixer, task in (("rt", "mqar"), ("lstm", "parity"))
    ]
    found = rankings(summaries, [Standing.of(summary) for summary in summaries], FOLDER)
    for ranking, own in zip(found, ("rt", "lstm"), strict=True):
        assert [standing.mixer for standing in ranking.own] == [own]
        assert [row.mixer for row in ranking.rows][:2] == ["rt (reference)", "transformer"]

    # Also beside a stale row, which is another layer than the user's of that name.
    monkeypatch.setattr(rows, "find_stale", lambda cells: [cell.layer == "rt" for cell in cells])
    for ranking in rankings(summaries, [Standing.of(summary) for summary in summaries], FOLDER):
        assert [row.mixer for row in ranking.rows][:2] == ["rt (reference) (stale)", "transformer"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ([*FULL, "--steps", "500"], "--steps 20000"),
        ([*FULL, "--epochs", "100"], "--steps 20000"),
        ([], "--preset full"),
        (["--steps", "500"], "--steps 20000 --preset full"),
        (["--seeds", "5"], "--grid wide"),
        ([*FULL, "--grid", "paper"], "--grid wide"),
        ([*FULL, "--weight-decay", "0"], "--weight-decay 0 0.1"),
        (["--grid", "wide", "--weight-decay", "0"], "--weight-decay 0 0.1 --seeds 5 --seeds-of chosen"),
        (["--grid", "wide"], "--seeds 5 --seeds-of chosen"),
        (["--preset", "full", "--lr", "1e-3"], "--grid wide"),
        ([*FULL, "--width", "64"], "--width 128"),
        ([*FULL, "--layers", "2"], "--layers 1"),
        ([*FULL, "--batch-size", "64", "--steps", "20000"], "--batch-size 128"),
        (["--seeds", "5", "--seeds-of", "chosen", "--lr", "1e-3"], "--grid wide"),
        ([*FULL, "--task.length", "32"], "the task's own settings"),
        ([*FULL, "--difficulty", "length-80"], "the task's own settings"),
        ([*FULL, "--task.length", "32", "--width", "64"], "the task's own settings and --width 128"),
    ],
)
def test_other_settings_are_refused_in_a_line_that_says_what_would_do(arguments: list[str], needed: str) -> None:
    reason = rows_or_reason(*arguments)
    assert isinstance(reason, str)
    assert reason == f"reference rows need {needed}, or --preset quick"


def test_a_layer_whose_runs_diverged_is_last_among_the_rows_though_no_seed_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    summary = summary_of(*FULL)
    diverged = diverged_of(summary)
    (ranking,) = rankings([diverged], [Standing.of(diverged)], FOLDER)
    assert [row.mixer for row in ranking.rows][:2] == ["rt", "transformer"]
    order = [(rank, standing.mixer) for rank, standing in ranked([*ranking.own, *ranking.rows])]
    assert order[-1] == (len(order), "lstm")

    # Where the rows have other terms, the number of seeds is not among what they need.
    (ranking,) = rankings([replace(diverged, points=diverged.points[:2])], [Standing.of(diverged)], FOLDER)
    assert ranking.reason == "reference rows need --grid wide, or --preset quick"


@pytest.mark.parametrize("diverged_first", [True, False])
def test_a_layer_whose_runs_diverged_shares_the_ranking_of_one_whose_runs_did_not(
    diverged_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    trained, summary = summary_of("--mixer", "gla", *FULL), summary_of(*FULL)
    diverged = diverged_of(summary)
    summaries = [diverged, trained] if diverged_first else [trained, diverged]
    (ranking,) = rankings(summaries, [Standing.of(summary) for summary in summaries], FOLDER)
    assert [standing.mixer for standing in ranking.own] == [summary.config.mixer for summary in summaries]
    assert [row.mixer for row in ranking.rows][:2] == ["rt", "transformer"]


def with_values(point: Point, score: float, seeds: int) -> Point:
    """The point with figures: a validation score, and test accuracies of a tenth of it."""
    splits = {f"{split}_{metric}_accuracy": score / by for split, by in (("validation", 1), ("test", 10))
              for metric in ("sequence", "token")}  # fmt: skip
    values = {"validation_score": [score] * seeds, **{name: [value] * seeds for name, value in splits.items()}}
    found = {name: Estimate.of(of_seeds) for name, of_seeds in values.items()}
    return replace(point, seeds=[*range(seeds)], values=values, estimates=found)


def test_a_study_with_more_points_and_seeds_is_ranked_as_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller learning rate is better, but the rows did not have it."""
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    quick = summary_of("--preset", "quick")
    first, second = quick.points
    points = [with_values(first, 0.5, 4), with_values(second, 0.25, 1), with_values(replace(first, lr=1e-4), 1.0, 4)]
    wide = replace(quick, points=points, chosen=2)
    (ranking,) = rankings([wide], [Standing.of(wide)], FOLDER)
    (own,) = ranking.own
    assert ranking.reason is None
    assert ranking.rows
    assert ranking.narrowed == [own]
    assert (own.accuracy("token"), own.seeds) == (Estimate.of([0.05] * 3), 3)
    assert shown_together([Standing.of(wide)], [ranking]) == ([own], ranking.rows)

    console = Console(file=io.StringIO(), width=200)
    print_rankings([ranking], console)
    assert isinstance(console.file, io.StringIO)
    line = "lstm on parity (quick) is ranked with the grid and seeds of the reference rows\n"
    assert line in console.file.getvalue()

    # Neither does a further seed that diverged at the rate that the rows did not have.
    lost = replace(points[2], values=None, estimates=None, diverged={3: 5})
    diverged = replace(wide, points=[*points[:2], lost])
    assert Standing.of(diverged).failure == "1 of 4 diverged"
    (ranking,) = rankings([diverged], [Standing.of(diverged)], FOLDER)
    assert ranking.own[0].failure == ""
    assert ranking.own[0].accuracy("token") == Estimate.of([0.05] * 3)

    # Not where the figures of the smaller grid are not known, or something else differs.
    for other in (
        replace(wide, points=points[1:], chosen=1),
        replace(wide, points=[with_values(first, 0.5, 1), *points[1:]]),
        replace(wide, config=replace(wide.config, shape=replace(wide.config.shape, width=32))),
    ):
        (ranking,) = rankings([other], [Standing.of(other)], FOLDER)
        assert (ranking.rows, ranking.narrowed) == ([], [])
        assert ranking.reason is not None


def test_a_changed_preset_is_no_longer_called_by_its_name() -> None:
    for words, name in (
        ([], "quick"),
        (["--layers", "2", "--seeds", "2", "--lr", "1e-3"], "quick"),
        (["--steps", "60"], "custom"),
        (["--width", "32"], "custom"),
        (["--batch-size", "8"], "custom"),
    ):
        (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--preset", "quick", *words])[1]
        assert experiment.difficulty == name
        assert experiment.to_dict().get("preset") == ("quick" if name == "quick" else None)
    assert rows_or_reason("--preset", "quick", "--steps", "60") == "reference rows need --steps 1000"

    # The runs of full are those of grid, so the studies are the same.
    full, grid = (planned(["--mixer", "rt", "--task", "parity", "--preset", name])[1][0] for name in ("full", "grid"))
    assert (full.title, full.to_dict()) == (grid.title, grid.to_dict())


def test_settings_near_those_of_the_preset_quick_are_told_its_name() -> None:
    """Its tasks have settings of their own, which no other option gives."""
    near = ["--steps", "1000", "--batch-size", "16", "--evaluations", "10", "--width", "64", "--mlp-width", "128"]
    grid = ["--lr", "2e-3", "5e-3", "--weight-decay", "0", "--seeds", "3", "--seeds-of", "chosen"]
    assert rows_or_reason(*near, *grid) == "reference rows need --preset quick, with the settings of its tasks"


def test_settings_that_lack_the_same_share_a_line() -> None:
    summaries = [summary_of("--task", task) for task in ("parity", "mqar")]
    console = Console(file=io.StringIO(), width=200)
    print_rankings(rankings(summaries, [Standing.of(summary) for summary in summaries], FOLDER), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == (
        "no reference rows for parity, mqar: reference rows need --preset full, or --preset quick\n"
    )


def test_quick_and_full_never_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    cell = read_cell(cell_file(FOLDER, ENTRIES["rt"], "parity"))
    write_cell(tmp_path, ENTRIES["rt"], "parity", cell)
    command = "python -m runners.mad.reference --preset quick --tasks parity"
    assert rows_or_reason("--preset", "quick", folder=tmp_path) == f"{command} trains them"

    # A quick cell, with its settings.
    (experiment,) = planned(["--mixer", "rt", "--task", "parity", "--preset", "quick"])[1]
    config = experiment.to_dict()
    points = [replace(cell.points[0], lr=lr, seeds=[0, 1, 2]) for lr in (2e-3, 5e-3)]
    settings = {"shape": experiment.shape, "protocol": experiment.protocol, "preset": experiment.preset}
    quick = replace(cell, **settings, task_config=config["task_config"], points=points, layer="gla")
    write_cell(protocol_folder(tmp_path, "quick"), ENTRIES["gla"], "parity", quick)
    assert config["preset"] == "quick"
    assert rows_or_reason("--preset", "quick", folder=tmp_path) == ["gla"]
    assert rows_or_reason(*FULL, folder=tmp_path) == ["rt"]
    assert str(rows_or_reason(folder=tmp_path)).endswith("need --preset full, or --preset quick")
    assert str(rows_or_reason("--preset", "quick", "--steps", "9", folder=tmp_path)).endswith("need --steps 1000")


def test_a_stale_cell_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = read_cell(cell_file(FOLDER, ENTRIES["rt"], "parity"))
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False, True])
    assert [standing.mixer for standing in to_standings([cell, cell])] == ["rt", "rt (stale)"]


def test_a_row_has_the_figures_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    cell = read_cell(cell_file(FOLDER, ENTRIES["transformer"], "parity"))
    standing, diverged = to_standings([cell, replace(cell, chosen=None, seeds=[], test=Accuracies())])
    estimate = standing.accuracy("token")
    assert estimate is not None
    assert estimate.mean == pytest.approx(sum(cell.test.token_accuracy) / 5)
    assert (standing.seeds, standing.setting, standing.family) == (5, "parity", "attention")
    assert standing.costs.state_floats == {128: 32768, 1024: 262144}  # keys and values of 128 channels, in the file
    assert diverged.accuracies() == ["diverged", ""]


@pytest.fixture(scope="module")
def tiny_cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three cells of the settings of ``COMMAND``: one is trained, two have made-up figures."""
    folder = tmp_path_factory.mktemp("reference")
    entry = ENTRIES["linear-attention"]
    changes: dict[str, Any] = {**TINY, "lr": (1e-3, 5e-3), "weight_decay": (0.0,), "seeds": 2}
    options = options_of(entry, "memorization", out=folder / "out", **changes)
    cell = train_cell(entry, "memorization", options, Console(file=io.StringIO()))
    for name, accuracy in (("gla", 0.0), ("rt", 1.0)):
        test = Accuracies(sequence_accuracy=[accuracy] * 2, token_accuracy=[accuracy] * 2)
        made_up = replace(cell, layer=name, fingerprint=name, test=test)
        write_cell(folder, ENTRIES[name], "memorization", made_up)
    write_cell(folder, entry, "memorization", cell)
    return folder


@pytest.mark.usefixtures("undrawn")
def test_a_toy_layer_is_ranked_among_stored_cells(
    tiny_cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [False] * len(cells))
    monkeypatch.setattr("runners.mad.__main__.look_into", lambda *_: None)
    command = [*TOY, *COMMAND, "--steps", "2", "--out", str(tmp_path)]
    mad.main([*command, "--reference", str(tiny_cells)])
    trained = capsys.readouterr().out
    assert "tests.mixers.strangers:GatedToy is " in trained
    assert " of 4 on memorization: " in trained
    assert "behind rt outside the intervals" in trained
    assert "to compare" not in trained
    assert len(list((tmp_path / "figures").glob("*.png"))) == 1

    # The same from the files, and without the rows.
    compare.main(["--out", str(tmp_path), "--reference", str(tiny_cells)])
    (said,) = (line for line in trained.splitlines() if " of 4 on memorization: " in line)
    assert said in capsys.readouterr().out.splitlines()
    (table,) = (tmp_path / "figures").glob("comparison-*.csv")
    assert len(table.read_text().splitlines()) == 1 + 4
    compare.main(["--out", str(tmp_path), "--reference", "none"])
    assert "reference" not in capsys.readouterr().out
    compare.main(["--out", str(tmp_path)])
    assert "no reference rows for memorization: reference rows need --width 128" in capsys.readouterr().out


@pytest.mark.usefixtures("undiagnosed")
def test_training_a_row_again_takes_its_place(
    tiny_cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "find_stale", lambda cells: [cell.layer == "gla" for cell in cells])
    command = ["--mixer", "linear-attention", *COMMAND, "--steps", "2", "--out", str(tmp_path)]
    mad.main([*command, "--reference", str(tiny_cells)])
    text = capsys.readouterr().out
    assert " of 3 on memorization: " in text
    assert "gla (stale)" in text
    assert "rt (stale)" not in text
    assert rows.STALE in text


def test_a_folder_of_reference_results_is_shipped_named_or_none(tmp_path: Path) -> None:
    assert reference_folder("shipped") == FOLDER == Path(__file__).parents[4] / "results" / "reference"
    assert reference_folder("none") is None
    assert reference_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="is no folder: give shipped, none"):
        reference_folder(str(tmp_path / "nothing"))


def test_terms_do_not_depend_on_how_the_length_is_given() -> None:
    one, other = (summary_of(*arguments) for arguments in (["--epochs", "2"], ["--steps", "200"]))
    points = [CellPoint(lr=1e-3, weight_decay=0.0, seeds=[0])]
    assert Terms.of(one.config, points) == Terms.of(other.config, points)
