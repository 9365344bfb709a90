"""What --list and --dry-run say, the widths of --match, and that none leaves a trace."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mixers import MIXERS
from mixers.base import Layer
from mixers.linear_attention import LinearAttention
from mixers.short_convolution import ConvolvedLayer
from mixers.transformer import Transformer
from runners.mad import __main__ as mad
from runners.mad import preview
from runners.tables import abbreviated
from tests.runners.mad.commands import HEADS, TINY, planned

SMALL = ["--width", "16", "--mlp-width", "32", "--device", "cpu"]
COMMAND = ["--task", "in-context-recall", *HEADS, *TINY, "--weight-decay", "0"]
STRANGER = "tests.mixers.strangers:GatedToy"
pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, list[str]], str]]:
    """Words of each line behind the first, and all that a command prints."""

    def run(*arguments: str) -> tuple[dict[str, list[str]], str]:
        capsys.readouterr()
        mad.main(arguments)
        text = capsys.readouterr().out
        lines = [line.replace("│", " ").split() for line in text.splitlines()]
        return {words[0]: words[1:] for words in lines if words}, text

    return run


def test_the_registry_is_in_order_of_families() -> None:
    unstated = [name for name, layer in MIXERS.items() if vars(layer).get("family", Layer.family) == Layer.family]
    assert not unstated, f"{unstated} state no family"
    families = [(family, next(members)[0]) for family, members in groupby(MIXERS.items(), lambda m: m[1].family)]
    assert families[:2] == [("attention", "transformer"), ("recurrent attention", "rt")]
    counts = Counter(family for family, _ in families)
    split = [family for family, count in counts.items() if count > 1]
    assert not split, f"mixers/__init__.py has {split} in two places: a layer's line stands beside those of its family"


def test_a_list_shows_costs_of_the_layers_with_their_options(
    printed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, text = printed("--list", "--mixer", "transformer", "linear-attention", "lstm", *HEADS, *SMALL)
    flops = 2 * (4 * 16**2 + 2 * 16 * 32) + 4 * 128 * 16
    figures = [4 * 16**2 + 2 * 16 * 32 + 4 * 16, 2 * 128 * 16, 2 * 1024 * 16, flops]
    assert rows["transformer-heads-2"] == [*map(abbreviated, figures), "attention", "arXiv:1706.03762"]
    assert rows["linear-attention-heads-2"][1] == str(16 * 8 + 16 + 1)
    assert rows["lstm"][1:3] == ["32", "32"]
    for part in ("width 16, MLP 32", "arXiv:1706.03762", "recurrent net", "--mixer.heads does not apply to mixer lstm"):
        assert part in text
    assert not any(tmp_path.iterdir())

    # With a convolution.
    rows, _ = printed("--list", "--mixer", "transformer", *HEADS, *SMALL, "--short-convolution", "3")
    assert rows["transformer-heads-2+conv3"][:2] == [abbreviated(figures[0] + 3 * 16), abbreviated(figures[1] + 2 * 16)]

    # Of several layers.
    rows, _ = printed("--list", "--mixer", "transformer", "4*transformer", *SMALL, "--layers", "4")
    assert rows["transformer-4-layers"][:3] == [abbreviated(4 * figure) for figure in figures[:3]]
    assert rows["transformer-4-layers"][:4] == rows["4*transformer"][:4]


def test_the_longest_names_stay_whole_at_80_columns(
    printed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    mixer = max(MIXERS, key=len)
    for command in (["--list"], ["--task", "noisy-in-context-recall", *TINY, "--dry-run", "--out", str(tmp_path)]):
        rows, text = printed("--mixer", mixer, *command)
        assert mixer in rows
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("undiagnosed")
def test_a_dry_run_says_what_is_left_to_do_and_writes_nothing(printed: Callable[..., Any], tmp_path: Path) -> None:
    def dry_run() -> tuple[list[str], str]:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        rows, text = printed(*command, "--dry-run")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return rows["transformer-heads-2"], text

    command = [*COMMAND, "--mixer", "transformer", "--lr", "1e-4", "1e-3", "--out", str(tmp_path / "out")]
    command += ["--seeds", "2", "--seeds-of", "chosen"]
    row, text = dry_run()
    assert row == ["0", "/", "2", "6", "2.11k", "4.10k", "32.8k", "12.3k"]
    assert "the chosen point of each experiment is repeated with 1 more seed" in text
    assert re.search(r"\ntraining takes about \d+ s here", text)

    mad.main([*command[:-2], "--lr", "1e-3", "--seeds", "1"])
    row, text = dry_run()
    assert row[:3] == ["1", "/", "2"]
    mad.main(command)
    row, text = dry_run()
    assert row[:3] == ["2", "/", "2"]
    assert text.endswith("all runs are finished\n")


def test_the_time_of_a_dry_run_is_that_of_the_steps_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second, and evaluations of 3 x 30 sequences where a step has 16."""
    now = [0.0]
    monkeypatch.setattr(preview.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(preview.Stepper, "_take_step", lambda *_: now.__setitem__(0, now[0] + 1.0))
    monkeypatch.setattr(preview.Stepper, "take_loss_sum", lambda self: self.loss_sum_R)
    options, (experiment,) = planned([*COMMAND, "--mixer", "transformer", "--lr", "1e-3", "--seeds", "2"])
    seconds = preview.seconds_left(experiment, options.runs, options)
    assert seconds == pytest.approx(6 * (1 + 3 * 30 / 3 / (6 * 16)))


def test_it_says_where_a_layer_has_no_recurrence(printed: Callable[..., Any], tmp_path: Path) -> None:
    """The task has 16 tokens."""
    for segment, said in (("15", False), ("16", True)):
        mixers = ["--mixer", "transformer", "rmt", "--mixer.segment", segment]
        _, text = printed(*COMMAND, *mixers, "--lr", "1e-3", "--out", str(tmp_path), "--dry-run")
        assert ("no recurrence at this length" in text) == said


def test_what_cannot_be_counted_is_a_question_mark_and_said_once(
    printed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Stepless(Transformer):
        def step(self, *_: Any) -> Any:
            raise NotImplementedError("no step form")

    monkeypatch.setitem(MIXERS, "stepless", Stepless)
    rows, text = printed(*COMMAND, "--mixer", "stepless", "--out", str(tmp_path), "--dry-run")
    assert rows["stepless-heads-2"][-4:] == ["2.11k", "?", "?", "12.3k"]
    assert text.count("state of Stepless not counted: no step form") == 1
    assert caplog.messages == []  # which ``study(..., quiet=True)`` would show


@pytest.mark.parametrize("more", [[], ["--short-convolution", "3"]])
def test_match_meets_the_transformer_with_its_options_and_says_so(more: list[str]) -> None:
    """Even if it is not trained; without norms of queries and keys it lacks two vectors of a head's width."""
    lines: list[str] = []
    command = ["--mixer", "lstm", "rt", "--task", "compression", "--width", "64", "--mlp-width", "256", *more]
    experiment, rt = planned([*command, "--match", "params", "--mixer.qk-norm", "False"], lines.append)[1]
    target = 4 * 64**2 + 2 * 64 * 256 + 2 * 64 + (3 * 64 if more else 0)
    assert f"transformer: width 64, MLP 256: {abbreviated(target)} parameters, which others meet" in lines
    width, hidden = experiment.shape.width, experiment.shape.mlp_width
    assert hidden == 4 * width
    assert abs((9 * width**2 + 2 * width * hidden + (9 if more else 6) * width) / target - 1) <= 0.02
    assert re.search(r"^lstm: width \d+, MLP \d+: [\d.]+k parameters, [+-][01]\.\d%$", "\n".join(lines), re.MULTILINE)
    assert rt.shape.width == 64


def test_a_matched_layer_of_the_preset_s_width_has_the_study_that_it_has_without_match() -> None:
    command = ["--preset", "quick", "--mixer", "transformer", "rt", "lstm", "--task", "memorization"]
    plain = [experiment.name for experiment in planned(command)[1]]
    matched = [experiment.name for experiment in planned([*command, "--match", "params"])[1]]
    assert matched[:2] == plain[:2]  # both have as many parameters
    assert "custom" in matched[2] != plain[2]


def test_what_cannot_be_matched_is_one_clear_line(refused: Callable[..., str]) -> None:
    error = refused("--mixer", "lstm", "--task", "compression", *SMALL, "--match", "state")
    assert "--match state: lstm: no width up to 128 meets" in error
    error = refused("--mixer", "lstm", "--task", "compression", "--width", "8", "--match", "params")
    assert "no Transformer of width 8: heads: 16 must divide the model width 8" in error


def test_a_convolution_names_and_identifies_a_study_also_of_a_layer_from_outside() -> None:
    size = ["--short-convolution", "3", "--task", "in-context-recall", *TINY]
    convolved, stranger = planned(["--mixer", "linear-attention", STRANGER, *size])[1]
    assert convolved.name.startswith("linear-attention+conv3 in-context-recall custom ")
    assert issubclass(convolved.layer, ConvolvedLayer)
    assert planned(["--mixer", "linear-attention", *size[2:]])[1][0].layer is LinearAttention
    names = [name for name, _ in stranger.build().stack[0].named_parameters()]
    assert {"convolution.weight_DW", "layer.mixer.v.weight"} <= set(names)
