"""What layers cost: the table of --list, the widths of --match, and the figures beside results."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from mixers import MIXERS
from mixers.base import Layer, Shape
from runners.cost_cells import FOOTNOTE
from runners.mad import __main__ as mad
from runners.mad import plan as plan_module
from runners.mad.layers import choose_layers
from runners.mad.results.standings import Standing, print_comparison
from runners.mad.results.summary import summarise
from runners.mad.search.study import note
from tasks.base import Accuracy
from tests.runners.mad.commands import planned

HEADS = ["--mixer.heads", "2"]
SMALL = ["--width", "16", "--mlp-width", "32", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("wide_terminal")


def rows(text: str) -> dict[str, list[str]]:
    """Cells of each row of a table, by the first."""
    cells = ([cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line)
    return {first: rest for first, *rest in cells}


def test_the_registry_is_in_order_of_families() -> None:
    unstated = [name for name, layer in MIXERS.items() if vars(layer).get("family", Layer.family) == Layer.family]
    assert not unstated, f"{unstated} state no family"
    families = [(family, next(members)[0]) for family, members in groupby(MIXERS.items(), lambda m: m[1].family)]
    assert families[:2] == [("attention", "transformer"), ("recurrent attention", "rt")]
    counts = Counter(family for family, _ in families)
    split = [family for family, count in counts.items() if count > 1]
    assert not split, f"mixers/__init__.py has {split} in two places: a layer's line stands beside those of its family"


def test_list_shows_the_whole_registry(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_module, "MIXERS", {name: MIXERS[name] for name in ("transformer", "lstm")})
    monkeypatch.chdir(tmp_path)
    mad.main(["--list", *SMALL])
    text = capsys.readouterr().out
    table = rows(text)
    flops = 2 * (4 * 16**2 + 2 * 16 * 32) + 4 * 128 * 16
    figures = [4 * 16**2 + 2 * 16 * 32 + 4 * 16, 2 * 128 * 16, 2 * 1024 * 16, flops]
    assert table["transformer"] == ["16 / 32", *(f"{figure:,}" for figure in figures)]
    assert table["lstm"][2:4] == ["32", "32"]
    names = list(table)
    assert names[names.index("attention") :][:2] == ["attention", "transformer"]
    assert names[names.index("recurrent net") :][:2] == ["recurrent net", "lstm"]
    assert "arXiv:1706.03762" in text
    assert "matrix products" in text
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("columns", "size"), [(80, []), (60, []), (80, ["--width", "1024", "--mlp-width", "4096"])])
def test_a_list_shows_every_name_and_figure_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, size: list[str]
) -> None:
    command = ["--list", "--mixer", "feedback-transformer", "staircase", "rt", *size]
    mad.main(command)
    whole = {name: cells for name, cells in rows(capsys.readouterr().out).items() if any(cells)}
    assert len(whole) == 3
    monkeypatch.setenv("COLUMNS", str(columns))
    mad.main(command)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    words = [line.replace("│", " ").split() for line in lines]
    first_words = [row[0] if row else "" for row in words]
    for name, (width, *figures) in whole.items():
        at = first_words.index(name)
        assert words[at][-len(figures) :] == figures
        assert width in " ".join(words[at] + words[at + 1])


def test_list_respects_the_options_of_the_layers_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    states = []
    for heads in ("2", "4"):
        mad.main(["--list", "--mixer", "linear-attention", "--mixer.heads", heads, *SMALL])
        states.append(rows(capsys.readouterr().out)["linear-attention"][2])
    assert states == [str(16 * 8 + 16 + 1), str(16 * 4 + 16 + 1)]


def test_a_list_has_each_family_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the table of results, though layers from outside come last."""
    mad.main(["--list", "--mixer", "transformer", "lstm", "sliding-attention", *SMALL])
    families = ["attention", "transformer", "sliding-attention", "recurrent net", "lstm"]
    lines = capsys.readouterr().out.splitlines()
    firsts = [line.strip("│").split("│")[0].strip() for line in lines if line.startswith("│")]
    assert [first for first in firsts if first in families] == families


def test_a_list_says_which_layers_an_option_leaves_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    mad.main(["--list", "--mixer", "linear-attention", "lstm", *HEADS, *SMALL])
    text = capsys.readouterr().out
    assert "--mixer.heads does not apply to mixer lstm" in text
    assert rows(text)["linear-attention"][2] == str(16 * 8 + 16 + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "0"], "--width 0 must be at least 1"),
        (["--mixer", "nope"], "no mixer 'nope'"),
        (["--mixer", "rt", "--width", "40"], "cannot build mixer 'rt': heads: 16 must divide the model width 40"),
        (["--mixer", "lstm", *HEADS], "--mixer.heads does not apply to mixer lstm"),
        (["--sped", "1"], "unknown option --sped"),
        (["--match", "speed"], "--match"),
    ],
)
def test_a_list_that_cannot_be_made_is_one_clear_line(
    refused: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert message in refused("--list", *arguments)


def test_match_widens_and_narrows_layers_and_says_so() -> None:
    lines: list[str] = []
    names = ["transformer", "rt", "linear-attention"]
    command = ["--mixer", *names, "--task", "compression", "memorization", "--mixer.heads", "2", "--match", "flops"]
    _, experiments = planned(command, lines.append)
    shapes = {(e.mixer, e.shape.width, e.shape.mlp_width) for e in experiments}
    assert shapes == {("transformer", 128, 512), ("rt", 124, 496), ("linear-attention", 132, 528)}
    assert len({e.fingerprint for e in experiments}) == 6
    assert lines[0] == "transformer: width 128, MLP 512: 58,720,256 FLOPs at N = 128, which others meet"
    assert [line.partition(":")[0] for line in lines] == names
    for line in lines[1:]:
        assert re.search(r"width 1\d\d, MLP \d+: [\d,]+ FLOPs at N = 128, \+[01]\.\d%$", line)


def test_a_matched_layer_of_the_preset_s_width_has_the_study_that_it_has_without_match() -> None:
    command = ["--preset", "quick", "--mixer", "transformer", "rt", "lstm", "--task", "memorization"]
    plain = [experiment.name for experiment in planned(command)[1]]
    matched = [experiment.name for experiment in planned([*command, "--match", "params"])[1]]
    assert matched[:2] == plain[:2]  # both have as many parameters
    assert "custom" in matched[2] != plain[2]


def test_match_takes_the_transformer_as_reference_even_if_it_is_not_trained() -> None:
    lines: list[str] = []
    command = ["--mixer", "lstm", "--task", "compression", "--width", "64", "--mlp-width", "256", "--match", "params"]
    (experiment,) = planned(command, lines.append)[1]
    target = 4 * 64**2 + 2 * 64 * 256 + 4 * 64
    width, hidden = experiment.shape.width, experiment.shape.mlp_width
    assert abs((9 * width**2 + 2 * width * hidden + 6 * width) / target - 1) <= 0.02
    assert hidden == 4 * width
    assert f"{target:,} parameters" in lines[0]


@pytest.mark.parametrize("option", ["qk_norm", "qk-norm"])
def test_the_transformer_to_meet_has_the_given_options_in_either_spelling(option: str) -> None:
    """Without norms of queries and keys, it lacks two vectors of a head's width."""
    lines: list[str] = []
    choose_layers(["rt"], {option: False}, Shape(width=64, mlp_width=256), 0, "params", lines.append, strict=True)
    assert f"transformer: width 64, MLP 256: {4 * 64**2 + 2 * 64 * 256 + 2 * 64:,} parameters" in lines[0]


def test_what_cannot_be_matched_is_one_clear_line(refused: Callable[..., str]) -> None:
    error = refused("--mixer", "lstm", "--task", "compression", *SMALL, "--match", "state")
    assert "--match state: lstm: no width up to 128 meets" in error
    assert "the nearest, 128, has 256" in error
    error = refused("--mixer", "lstm", "--task", "compression", "--width", "8", "--match", "params")
    assert "no Transformer of width 8 to meet: heads: 16 must divide the model width 8; give another --width" in error


@pytest.mark.usefixtures("undiagnosed")
def test_costs_stand_beside_every_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = ["--task.length", "16", "--task.train-examples", "64", "--task.eval-examples", "30", "--batch-size", "16"]
    command = ["--mixer", "transformer", "linear-attention", "--task", "in-context-recall", *task, *SMALL, *HEADS]
    mad.main([*command, "--evaluations", "1", "--steps", "2", "--lr", "1e-3", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    comparison = text[text.index("test accuracy of the points") :]
    assert FOOTNOTE in " ".join(comparison.split())
    last = {line.split("│")[1].strip(): line for line in comparison.splitlines() if line.startswith("│")}
    assert re.search(r"2\.11k │ +4\.10k │ +32\.8k │ +12\.3k │$", last["transformer"])
    (path,) = tmp_path.glob("studies/linear-attention*/summary.json")
    costs = json.loads(path.read_text())["costs"]
    assert costs["state_floats"] == {"128": 145, "1024": 145}
    assert costs["parameters"] == 4 * 16**2 + 2 * 16 * 32 + 2 * 16
    assert list(costs["flops_per_token"]) == ["128"]


def test_the_note_of_a_study_states_the_costs() -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization", *SMALL, *HEADS])[1]
    assert "2,112 parameters; state 4,096 floats after 128 positions" in note(experiment)


@pytest.mark.parametrize(("width", "tables"), [(60, 2), (80, 1)])
def test_a_narrow_terminal_gets_the_costs_in_a_table_of_their_own(width: int, tables: int) -> None:
    (experiment,) = planned(["--mixer", "transformer", "--task", "memorization", *SMALL, *HEADS])[1]
    none = Accuracy(sequence=1.0, token=1.0)
    summary = replace(summarise(experiment, [], None, {}), ceiling=none, chance=none)
    console = Console(width=width, file=io.StringIO())
    print_comparison([Standing.of(summary)], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("┏") == tables
    assert "12.3k" in text
