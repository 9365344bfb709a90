"""Finished studies beside one another: which, and what their rows are called."""

import copy
import csv
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from mixers.costs import Costs
from runners.mad import __main__ as mad
from runners.mad.results import compare
from runners.mad.results.charts import draw_bars, draw_heat_map
from runners.mad.results.standings import Standing, in_order, print_comparison, told_apart
from runners.mad.results.summary import Estimate, Point, Summary, read_summary, summarise
from runners.mad.results.tables import is_above_ceiling, print_summary, span
from tasks.base import Accuracy
from tests.runners.mad.commands import planned

pytestmark = pytest.mark.usefixtures("wide_terminal")


def summary_of(*arguments: str, seeds: int = 1) -> Summary:
    """Of a study, with made-up results."""
    (experiment,) = planned([*arguments])[1]
    estimates = {f"test_{split}_accuracy": Estimate(mean=0.25, half_width=None) for split in ("sequence", "token")}
    return replace(
        summarise(experiment, [], None, {}),
        points=[Point(lr=1e-3, weight_decay=0.0, seeds=[*range(seeds)], estimates=estimates, diverged={})],
        chosen=0,
        best_seed=0,
        ceiling=Accuracy(sequence=1.0, token=1.0),
        chance=Accuracy(sequence=0.0, token=0.5),
    )


def in_file(summary: Summary) -> dict[str, Any]:
    """A summary as it stands in its file."""
    read: dict[str, Any] = json.loads(json.dumps(summary.to_dict()))
    return read


RT = ("--mixer", "rt", "--task", "parity")
SMALL = ("--width", "16", "--mlp-width", "16")
LAYERS = ("retnet", "s5", "lstm", "lru")


def test_rows_name_the_settings_in_which_they_differ_and_no_others() -> None:
    standings = told_apart(
        [
            summary_of(*RT),
            summary_of(*RT, "--mixer.block", "4"),
            summary_of(*RT, "--mixer.block", "4", "--mixer.heads", "8"),
            summary_of("--mixer", "transformer", "--task", "parity"),
            summary_of(*RT, "--task.length", "32"),
            summary_of(*RT, "--task.length", "48"),
        ]
    )
    assert [(s.mixer, s.setting) for s in standings] == [
        ("rt", "parity"),
        ("rt-block-4 (heads 16)", "parity"),
        ("rt-block-4 (heads 8)", "parity"),
        ("transformer", "parity"),
        ("rt", "parity (custom, length 32)"),
        ("rt", "parity (custom, length 48)"),
    ]


def test_rows_of_several_layers_name_the_widths_in_which_they_differ() -> None:
    """Else layers of different sizes would seem to be compared at equal width."""
    wide, narrow = ("--mixer", "transformer", "--task", "parity"), (*RT, "--width", "64")
    standings = told_apart([summary_of(*wide), summary_of(*narrow), summary_of(*narrow, "--mixer.block", "4")])
    assert [s.mixer for s in standings] == ["transformer (width 128)", "rt (width 64)", "rt-block-4 (width 64)"]


def test_rows_of_several_layers_name_the_training_in_which_they_differ() -> None:
    standings = told_apart(
        [
            summary_of(*RT),
            summary_of(*RT, "--steps", "500"),
            summary_of("--mixer", "transformer", "--task", "parity", "--steps", "500"),
        ]
    )
    assert [s.mixer for s in standings] == ["rt (epochs 200)", "rt (steps 500)", "transformer (steps 500)"]


def test_rows_name_the_grids_in_which_they_differ() -> None:
    """A layer that was tried at more learning rates has an advantage."""
    one, two = summary_of(*RT), summary_of("--mixer", "transformer", "--task", "parity")
    more = replace(two, points=[*two.points, replace(two.points[0], lr=5e-3)])
    assert [s.mixer for s in told_apart([one, two])] == ["rt", "transformer"]
    assert [s.mixer for s in told_apart([one, more])] == ["rt (lr 0.001)", "transformer (lr 0.001 or 0.005)"]

    # Rows of different tasks are not compared.
    elsewhere = replace(summary_of("--mixer", "transformer", "--task", "mqar"), points=more.points)
    assert [s.mixer for s in told_apart([one, elsewhere])] == ["rt", "transformer"]


def test_a_layer_s_setting_may_be_called_as_one_of_the_training() -> None:
    summaries = [
        summary_of("--mixer", "staircase", "--task", "parity", "--mixer.steps", steps, "--steps", "500")
        for steps in ("2", "8")
    ]
    assert [s.mixer for s in told_apart(summaries)] == ["staircase-steps-2", "staircase-steps-8"]


def test_a_layer_has_its_variant_s_name_also_in_summaries_of_earlier_versions() -> None:
    names = {
        "rt-block-4": (*RT, "--mixer.block", "4"),
        "rt-no-persistent-norm": (*RT, "--mixer.persistent-norm", "False"),
        "transformer-2-layers": ("--mixer", "transformer", "--task", "parity", "--layers", "2"),
        "rt-block-4+conv3": (*RT, "--mixer.block", "4", "--short-convolution", "3"),
    }
    for name, words in names.items():
        summary = summary_of(*words)
        assert (summary.label, Standing.of(summary).mixer) == (name, name)
        assert Standing.of(replace(summary, label=None)).mixer == name
        assert summary.heading == f"{name} parity baseline {summary.fingerprint[:8]}"


def test_studies_are_in_the_order_of_the_registries_and_then_of_their_settings() -> None:
    memorization = ("--task", "memorization", "--width", "16", "--mlp-width", "16", "--mixer.heads", "2")
    foreign = summary_of("--mixer", "transformer", "--task", "parity")
    foreign = replace(foreign, config=replace(foreign.config, mixer="my_layer:Mine"))
    summaries = [
        summary_of("--mixer", "transformer", *memorization),
        summary_of("--mixer", "rt", *memorization),
        summary_of("--mixer", "transformer", "--task", "parity"),
        summary_of(*RT),
        summary_of(*RT, "--steps", "500"),
        summary_of(*RT, "--steps", "2000"),
        summary_of(*RT, "--mixer.block", "4"),
        summary_of(*RT, "--mixer.block", "16"),
        summary_of(*RT, "--short-convolution", "3"),
        summary_of(*RT, "--short-convolution", "16"),
        summary_of("--mixer", "lstm", "--task", "parity"),
        foreign,
        summary_of(*RT, "--task.length", "32"),
        summary_of("--mixer", "lstm", "--task", "parity", "--task.length", "32"),
        summary_of(*RT, "--task.length", "108"),
    ]
    shuffled = random.Random(0).sample(summaries, len(summaries))
    assert in_order(shuffled) == in_order(summaries) == summaries


def test_tables_and_charts_are_in_that_order_also_where_layers_are_on_different_tasks() -> None:
    """The first task has the last layer alone."""
    standings = told_apart(
        in_order(
            summary_of("--mixer", mixer, "--task", task, *SMALL)
            for task, mixer in [("parity", mixer) for mixer in LAYERS] + [("compression", "lstm")]
        )
    )
    console = Console(width=200, file=io.StringIO())
    print_comparison(standings, console)
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [row for row in rows if row not in ("ceiling", "chance")] == ["compression", "lstm", "parity", *LAYERS]
    (legend,) = draw_bars(standings).legends
    assert [text.get_text() for text in legend.get_texts()][: len(LAYERS)] == list(LAYERS)
    labels = [label.get_text() for label in draw_heat_map(standings).axes[0].get_yticklabels()]
    assert labels == ["ceiling", *LAYERS, "chance"]


def test_a_layer_that_is_plain_attention_on_so_short_sequences_has_a_remark_in_file_and_tables(tmp_path: Path) -> None:
    """s5-permutations has 16 tokens, parity 40."""
    layers = [("rmt", "segment"), ("sliding-attention", "window")]
    summaries = [
        summary_of("--mixer", mixer, "--task", task, *SMALL, f"--mixer.{option}", "16")
        for mixer, option in layers
        for task in ("s5-permutations", "parity")
    ]
    remarks = ["no recurrence at this length", None, "window spans the sequence", None]
    assert [summary.remark for summary in summaries] == remarks
    write(tmp_path / "study" / "summary.json", json.dumps(summaries[0].to_dict()))
    assert read_summary(tmp_path / "study").remark == remarks[0]

    # The comparison, and each study's table.
    console = Console(width=200, file=io.StringIO())
    print_comparison(told_apart(in_order(summaries)), console)
    assert isinstance(console.file, io.StringIO)
    rows = [line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    shown = [row for row in rows if row not in ("ceiling", "chance")]
    sliding, rmt = "sliding-attention-window-16", "rmt-segment-16"
    at_parity, at_s5 = [sliding, rmt], [sliding, remarks[2], rmt, remarks[0]]
    assert shown == ["parity", *at_parity, "s5-permutations", *at_s5]
    for summary, remark in zip(summaries, remarks, strict=True):
        console = Console(width=200, file=io.StringIO())
        print_summary(summary, console)
        assert isinstance(console.file, io.StringIO)
        assert (f"{summary.config.mixer}: {remark}" in console.file.getvalue()) == (remark is not None)


def test_a_mean_is_over_the_seeds_of_the_chosen_point() -> None:
    summary = summary_of(*RT)
    summary.points.append(replace(summary.points[0], lr=1e-4, seeds=[0, 1, 2]))
    assert Standing.of(summary).seeds == 1


def test_one_study_with_other_results_in_two_folders_is_refused(tmp_path: Path) -> None:
    summary = summary_of(*RT)
    files = [tmp_path / name / "summary.json" for name in ("one", "same", "other")]
    for file, content in zip(files, (summary, summary, replace(summary, chosen=None)), strict=True):
        write(file, json.dumps(content.to_dict()))
    assert compare.read_summaries(files[:2]) == [read_summary(files[0])]
    with pytest.raises(ValueError, match="differ: name one of them"):
        compare.read_summaries(files)


def test_studies_of_the_same_settings_are_told_apart_by_their_fingerprints() -> None:
    one = summary_of(*RT)
    other = replace(one, fingerprint="0123456789", study="rt parity baseline 01234567 r2")
    assert [s.mixer for s in told_apart([one, other])] == [f"rt {one.fingerprint[:8]}", "rt 01234567 r2"]


def test_a_standing_is_the_same_from_a_file_and_from_memory(tmp_path: Path) -> None:
    (experiment,) = planned(["--mixer", "lstm", "--task", "parity", "--width", "16"])[1]
    limit = Accuracy(sequence=1.0, token=1.0)
    for chosen, estimates in ((None, None), (0, {"test_token_accuracy": Estimate(mean=0.5, half_width=0.1)})):
        point = Point(lr=1e-3, weight_decay=0.0, seeds=[0, 1], estimates=estimates, diverged={})
        empty = summarise(experiment, [], None, {})
        summary = replace(empty, points=[point], chosen=chosen, ceiling=limit, chance=limit)
        file = tmp_path / str(chosen) / "summary.json"
        write(file, json.dumps(summary.to_dict()))
        standing = Standing.of(summary)
        assert standing == Standing.of(read_summary(file))
        assert (standing.family, standing.seeds) == ("recurrent net", 0 if chosen is None else 2)
        assert standing.costs == summary.costs
        assert standing.accuracy("sequence") is None
        assert standing.accuracy("token") == (estimates or {}).get("test_token_accuracy")
        assert standing.accuracies() == (["diverged", ""] if chosen is None else ["", "0.5000 ± 0.1000"])


def test_a_chosen_point_of_which_a_further_seed_diverged_says_so() -> None:
    point = Point(lr=1e-3, weight_decay=0.0, seeds=[0, 1, 2], estimates=None, diverged={1: 40})
    standing = Standing.of(replace(summary_of(*RT), points=[point]))
    assert standing.accuracies() == ["1 of 3 diverged", ""]


def test_a_row_of_the_table_s_file_has_each_figure_under_its_name() -> None:
    summary = replace(
        summary_of("--preset", "quick", "--mixer", "lstm", "--task", "parity", "--steps", "500", seeds=3),
        ceiling=Accuracy(sequence=0.9, token=0.95),
        chance=Accuracy(sequence=0.1, token=0.5),
        costs=Costs(parameters=7, state_floats={128: 5, 1024: 6}, flops_per_token={128: 77, 1024: 78}),
    )
    standing = Standing.of(summary)
    limits = {"ceiling_sequence": 0.9, "ceiling_token": 0.95, "chance_sequence": 0.1, "chance_token": 0.5}
    costs = {"parameters": 7, "state_128": 5, "state_1024": 6, "flops_per_token_128": 77}
    rest = {"steps": 500, "preset": None, "seeds": 3, "failure": ""}
    trained = {"mixer": "lstm", "options": "{}", "width": 64, "mlp_width": 128, "layers": 1, "lr": 1e-3}
    assert standing.rows()[0].items() >= (limits | costs | rest | trained).items()

    # Without accuracies every seed diverged, and costs may be unknown.
    unknown = Costs(parameters=7, state_floats=None, flops_per_token=None)
    row = replace(standing, test=None, costs=unknown, preset="quick").rows()[0]
    assert [row[name] for name in ("token_accuracy", "sequence_accuracy_half_width", "failure")] == [
        None,
        None,
        "diverged",
    ]
    assert [row[name] for name in costs] == [7, None, None, None]
    assert row["preset"] == "quick"


def beyond(summary: Summary, **accuracies: list[float]) -> Summary:
    """Return a summary whose chosen point has these sequence accuracies on extrapolation sets, half again by tokens."""
    found = {name: [Accuracy(sequence=y, token=0.5 + y / 2) for y in values] for name, values in accuracies.items()}
    assert summary.chosen is not None
    points = [
        replace(point, extrapolation=found) if n == summary.chosen else point for n, point in enumerate(summary.points)
    ]
    return replace(summary, points=points)


def test_accuracies_beyond_training_are_compared_and_filed(capsys: pytest.CaptureFixture[str]) -> None:
    lstm = beyond(summary_of("--mixer", "lstm", "--task", "parity"), long=[0.25, 0.75], longer=[0.0, 0.5])
    rt = beyond(summary_of(*RT), long=[1.0, 1.0])
    standings = [Standing.of(lstm), Standing.of(rt)]
    print_comparison(standings, Console(width=200, markup=False))
    out = capsys.readouterr().out
    assert re.search(r"beyond training: sequence / token accuracy\s", out)
    assert re.search(r"│   long +│ +0\.5000 / 0\.7500 │ +1\.0000 / 1\.0000 │", out)
    assert re.search(r"│   longer +│ +0\.2500 / 0\.6250 │ +│", out)
    print_comparison(standings[:1], Console(width=200, markup=False))
    assert "beyond training" not in capsys.readouterr().out  # the study's own lines have said it

    test, first, second = standings[0].rows()
    assert [row["split"] for row in (test, first, second)] == ["test", "long", "longer"]
    assert list(test) == list(first) == list(second)
    assert (first["sequence_accuracy"], first["token_accuracy"]) == (0.5, 0.75)
    assert first["sequence_accuracy_half_width"] == pytest.approx(0.25 * stats.t.ppf(0.975, 1))
    assert (test["ceiling_token"], first["ceiling_token"], first["seeds"]) == (1.0, None, test["seeds"])


def test_an_accuracy_above_the_ceiling_is_said() -> None:
    summary = summary_of(*RT, seeds=3)
    point = summary.chosen_point
    assert point is not None
    assert point.estimates is not None
    limits = point.estimates["test_sequence_accuracy"].mean, point.estimates["test_token_accuracy"].mean
    for sequence, token, expected in ((0.0, 0.0, False), (-0.2, 0.0, True), (0.0, -0.2, True), (-0.01, -0.01, False)):
        ceiling = Accuracy(sequence=limits[0] + sequence, token=limits[1] + token)
        assert is_above_ceiling(replace(summary, ceiling=ceiling)) == expected


def test_seeds_in_words() -> None:
    assert [span([3]), span([3, 3]), span([5, 2, 3])] == ["3", "3", "2 to 5"]


@pytest.mark.usefixtures("undrawn")
def test_a_command_compares_what_two_others_have_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--task", "parity", "--task.length", "24", "--task.train-examples", "32", "--task.eval-examples", "16"]
    small += ["--width", "16", "--mlp-width", "16", "--steps", "2", "--evaluations", "1", "--batch-size", "16"]
    rt = ["--mixer", "rt", "--mixer.heads", "2", "--lr", "1e-3", "--out", str(tmp_path)]
    mad.main([*rt, *small])
    mad.main([*rt, *small, "--mixer.block", "2", "--seeds", "2"])
    capsys.readouterr()
    compare.main(["--out", str(tmp_path)])
    text = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    beyond_training = ["parity (custom)", "length 48", "length 96"]
    assert sorted(rows) == sorted(["parity (custom)", "rt", "rt-block-2", "ceiling", "chance", *beyond_training])
    assert "mean over 2 seeds" in text
    (chart,) = (tmp_path / "figures").glob("comparison-*.png")
    assert text.endswith(f"chart: {chart}\ntable: {chart.with_suffix('.csv')}\n")

    # The table as a file: figures that are not rounded, and an interval for several seeds alone.
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("studies/*/summary.json")]
    known = {s["label"]: s["points"][s["chosen"]]["estimates"]["test_token_accuracy"] for s in summaries}
    with chart.with_suffix(".csv").open() as file:
        found = {row["layer"]: row for row in csv.DictReader(file) if row["split"] == "test"}
    assert {layer: float(row["token_accuracy"]) for layer, row in found.items()} == {
        layer: estimate["mean"] for layer, estimate in known.items()
    }
    assert found["rt"]["token_accuracy_half_width"] == ""
    assert float(found["rt-block-2"]["token_accuracy_half_width"]) == known["rt-block-2"]["half_width"]
    assert (found["rt"]["seeds"], found["rt-block-2"]["seeds"]) == ("1", "2")
    compare.main(["--out", str(tmp_path), "--reference", "none"])
    assert len(list((tmp_path / "figures").glob("comparison-*.png"))) == 2
    capsys.readouterr()
    (folder,) = {path.parent for path in tmp_path.glob("studies/*/summary.json") if '"block": 2' in path.read_text()}
    compare.main([str(folder), str(folder / "summary.json"), "--out", str(tmp_path)])
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == ["parity (custom)", "rt-block-2", "ceiling", "chance"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no finished study: train with runners.mad, or name folders"),
        (lambda folder: (folder / "studies" / "a").mkdir(parents=True), "has no finished study"),
        (lambda folder: write(folder / "studies" / "a" / "summary.json", "{}"), "has no finished study"),
        (lambda folder: write(folder / "studies" / "a" / "summary.json", "[torn"), "is damaged"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(SystemExit) as stop:
        compare.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "figures").exists()


def test_studies_of_an_earlier_version_are_left_out_in_one_line_unless_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summary_of(*RT)
    content = in_file(summary)
    write(tmp_path / "studies" / "rt-now" / "summary.json", json.dumps(content))
    del content["family"]
    for name in ("rt-before", "lstm-before"):
        write(tmp_path / "studies" / name / "summary.json", json.dumps(content))
    compare.main(["--out", str(tmp_path)])
    said, *table = capsys.readouterr().out.splitlines()
    assert said == (
        "left out 2 of 3 studies, whose summaries are of an earlier version or damaged: "
        "run their commands again, or delete the folders: lstm-before, rt-before"
    )
    rows = [line.split("│")[1].strip() for line in table if line.startswith("│")]
    assert rows == ["parity", "rt", "ceiling", "chance"]
    with pytest.raises(SystemExit) as stop:
        compare.main(["--out", str(tmp_path), *map(str, (tmp_path / "studies").iterdir())])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "before/summary.json is no summary of a study, or of an earlier version" in line


def damaged(values: Any) -> Iterator[Any]:
    """What JSON becomes when one of its values is gone or another, at any depth."""
    if isinstance(values, dict | list):
        for at in values if isinstance(values, dict) else range(len(values)):
            without = copy.copy(values)
            del without[at]
            yield without
            for value in (None, "words", *damaged(values[at])):
                other = copy.copy(values)
                other[at] = value
                yield other


def test_whatever_is_damaged_in_a_summary_is_refused_in_one_line_or_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, refused, drawn = in_file(summary_of(*RT)), {}, set[str]()
    file = tmp_path / "study" / "summary.json"
    file.parent.mkdir()
    for content in (None, [], *damaged(good)):
        file.write_text(json.dumps(content))
        try:
            summaries = compare.read_summaries([file.parent])
        except ValueError as error:
            refused[json.dumps(content)] = str(error)
        else:
            (standing,) = told_apart(summaries)
            shown = repr(replace(standing, place=()))  # most damages are of the place, and a single row has no other
            if shown not in drawn:
                draw_bars([standing])
            drawn.add(shown)
    start = f"{file} is no summary of a study, or of an earlier version ("
    remedy = "): run the study's command of runners.mad again, or name the other studies"
    assert all(said.startswith(start) and said.endswith(remedy) and "\n" not in said for said in refused.values())

    # An entry that is missing is named.
    for gone in good.keys() - {"label"}:
        without = json.dumps({name: good[name] for name in good if name != gone})
        assert refused[without] == f"{start}{gone}: field required{remedy}"
    file.write_text(without)
    with pytest.raises(SystemExit) as stop:
        compare.main([str(file)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {refused[without]}\n"


def test_a_torn_summary_is_named_with_the_command_that_writes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted, or with ``runners.compare`` run again, the study would stay missing."""
    text = json.dumps(in_file(summary_of(*RT)))
    file = tmp_path / "studies" / "a" / "summary.json"
    write(file, text[: len(text) // 2])
    for named in ([], [str(file.parent)]):
        with pytest.raises(SystemExit) as stop:
            compare.main([*named, "--out", str(tmp_path)])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {file} is damaged (")
        assert line.endswith("): run the study's command of runners.mad again, or name the other studies")


def test_a_study_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "nothing")])
    assert "nothing is not there: name folders of studies that are finished\n" in capsys.readouterr().err

    (tmp_path / "c4-run").mkdir()
    (tmp_path / "c4-run" / "run.json").touch()
    with pytest.raises(ValueError, match=r"c4-run is a pretraining run, not a study: python -m runners\.c4 compare"):
        read_summary(tmp_path / "c4-run")

    (tmp_path / "studies" / "finished").mkdir(parents=True)
    (tmp_path / "studies" / "finished" / "summary.json").touch()
    for folder in (tmp_path, tmp_path / "studies"):
        with pytest.raises(SystemExit):
            compare.main([str(folder)])
        assert f"that are finished, such as {tmp_path}/studies/*\n" in capsys.readouterr().err


def test_nobody_is_told_to_delete_what_is_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "study" / "diagnosis.png", "an image")
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path / "study" / "diagnosis.png")])
    assert "diagnosis.png is no summary.json: name folders" in capsys.readouterr().err


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
