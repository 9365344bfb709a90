"""A command that names several layers and seeds trains each, and ends with their comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers import MIXERS  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from runners.c4 import __main__ as program  # noqa: E402
from runners.c4.__main__ import main  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.errors import RunError  # noqa: E402
from runners.c4.several import of_each_run  # noqa: E402


@pytest.fixture
def command(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer = texts / "tokenizer" / "tokenizer.json"
    return [
        "--width=16", "--layers=2", "--seq-len=12", "--batch-size=4", "--steps=2", "--validation-tokens=48",
        "--evaluations=1", "--device=cpu", f"--out={tmp_path}", f"--tokenizer={tokenizer}", "--data", str(texts),
    ]  # fmt: skip


def test_a_command_line_of_one_run_stays_as_it_is() -> None:
    for line in (
        ["--mixer", "rt", "--seed", "3"],
        ["--mixer=rt"],
        ["--steps", "4", "--steps", "2", "--seed", "1"],
        [],
    ):
        assert of_each_run(line) == [line]
    assert of_each_run(["word", "--mixer", "rt", "rt", "--seed", "1", "1"]) == [
        ["word", "--mixer", "rt", "--seed", "1"]
    ]


def test_values_are_read_with_an_equals_sign_and_equal_numbers_are_one() -> None:
    assert of_each_run(["--mixer=rt", "--seed", "0", "1"]) == [["--mixer", "rt", "--seed", seed] for seed in "01"]
    assert of_each_run(["--seed=0", "1"]) == [["--seed", seed] for seed in "01"]
    assert of_each_run(["--lr", "1e-3", "0.001", "2e-3"]) == [["--lr", "1e-3"], ["--lr", "2e-3"]]
    assert of_each_run(["--lr", "1e-3", "0.001"]) == [["--lr", "1e-3"]]
    assert of_each_run(["--lr", "1e-3", "fast"]) == [["--lr", "1e-3"], ["--lr", "fast"]]  # an error of its run


def test_one_word_names_all_layers() -> None:
    assert of_each_run(["--mixer", "all", "--steps", "3"]) == [["--mixer", name, "--steps", "3"] for name in MIXERS]


@pytest.mark.parametrize(
    "line", [["--seed", "1", "--seed", "2", "--mixer", "rt", "gla"], ["--lr=1e-3", "--lr", "2e-3", "3e-3"]]
)
def test_an_option_of_several_values_is_given_once(line: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^--(seed|lr) is given more than once: give it once, with all values$"):
        of_each_run(line)


def test_the_last_of_other_options_counts_as_for_a_single_run() -> None:
    line = ["--steps", "4", "--steps", "2", "--seed"]
    assert of_each_run([*line, "0", "1"]) == [[*line, "0"], [*line, "1"]]


def test_each_layer_has_the_options_that_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "--steps",
        "3",
        "--mixer",
        "rt",
        "lru",
        "--heads=2",
        "--mixer.block",
        "2",
        "--seed",
        "0",
        "1",
        "--data",
        "a",
        "b",
    ]
    found = of_each_run(line)
    rt = ["--steps", "3", "--mixer", "rt", "--heads=2", "--mixer.block", "2", "--seed", "0", "--data", "a", "b"]
    assert found[0] == rt
    assert found[1] == ["1" if word == "0" else word for word in rt]
    assert found[2:] == [["--steps", "3", "--mixer", "lru", "--seed", seed, "--data", "a", "b"] for seed in ("0", "1")]
    assert capsys.readouterr().err == (
        "--mixer.block does not apply to mixer lru\n--heads does not apply to mixer lru\n"
    )
    with pytest.raises(ValueError, match=r"^--heads does not apply to mixer lru, lstm: leave it out$"):
        of_each_run(["--mixer", "lru", "lstm", "--heads", "2"])
    with pytest.raises(ValueError, match=r"--mixer\.blok does not apply to mixer rt, gla: the options are --mixer\.h"):
        of_each_run(["--mixer", "rt", "gla", "--mixer.blok", "2"])
    with pytest.raises(ValueError, match="no mixer 'nope'"):
        of_each_run(["--mixer", "rt", "nope"])


def test_layers_and_seeds_are_trained_one_after_another_and_compared(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runners.c4 import charts as drawing

    charts: list[Mapping[str, Any]] = []
    plot, comparison = drawing.plot_curves, "c4-comparison"
    monkeypatch.setattr(
        drawing, "plot_curves", lambda c, path: (plot(c, path), charts.append(c) if comparison in path.name else None)
    )
    main([*command, "--mixer", "transformer", "lru", "--seed", "0", "1", "--heads", "2"])
    out = capsys.readouterr().out
    assert out.count("validation cross-entropy") == 4
    assert "generate:" not in out
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert sorted(rows) == ["2 seeds", "2 seeds", "lru", "transformer, heads 2"]
    assert len([*(tmp_path / "figures").glob("c4-comparison-*.png")]) == 1

    # The seeds of a model share a line of the legend.
    (look,) = charts
    assert {label: len(seeds) for label, seeds in look.items()} == {"lru": 2, "transformer, heads 2": 2}

    # A seed that is given twice is one seed.
    main([*command, "--mixer", "lru", "--seed", "0", "0"])
    assert "±" not in capsys.readouterr().out

    # The same command trains nothing again.
    before = {path: path.read_bytes() for path in (tmp_path / "c4").glob("*/curve.csv")}
    main([*command, "--mixer", "transformer", "lru", "--seed", "0", "1", "--heads", "2"])
    assert {path: path.read_bytes() for path in before} == before
    assert len(before) == 4


def test_rates_are_trained_like_seeds(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = [*command, "--mixer", "lru", "--lr", "0.01", "0.02", "--seed", "0", "1"]
    main([*line, "--dry-run"])
    out = capsys.readouterr().out
    assert out.count("lru, 2 layers") == 1
    assert out.endswith("the command makes 4 runs, 4 of each model\n")

    main(line)
    out = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert sorted(rows) == ["2 seeds", "2 seeds", "lru, lr 0.01", "lru, lr 0.02"]
    with pytest.raises(SystemExit, match="2"):
        main([*line, "--search"])
    assert "leave lr and beta2 out" in capsys.readouterr().err.replace("--", "")


def test_a_run_that_cannot_go_on_does_not_stop_the_others(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = program.run

    def fails(config: Config, *rest: Any) -> Any:
        if config.mixer == "transformer":
            raise RunError("loss nan is not finite at step 2")
        if config.mixer == "lstm":
            raise ZeroDivisionError("its own error")
        return run(config, *rest)

    monkeypatch.setattr(program, "run", fails)
    with pytest.raises(SystemExit, match="1"):
        main([*command, "--heads", "2", "--mixer", "transformer", "lstm", "lru"])
    out, err = capsys.readouterr()
    _, first, second = err.splitlines()
    assert first == "transformer stopped: loss nan is not finite at step 2"
    assert "lstm stopped: " in second
    assert "ZeroDivisionError: its own error" in second
    assert [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")] == ["lru"]


def test_every_layer_is_checked_before_one_is_trained(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--heads", "2", "--mixer", "transformer", f"{__name__}:Reversed"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not causal" in line
    assert not (tmp_path / "c4").exists()


class Reversed(Transformer):
    """A layer that sees later positions."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD.flip(1))


def test_a_dry_run_counts_each_layer(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "--mixer", "transformer", "lru", "--heads", "2", "--dry-run"])
    out = capsys.readouterr().out
    assert "transformer, 2 layers" in out
    assert "lru, 2 layers" in out
    assert "the command makes" not in out
    main([*command, "--mixer", "transformer", "lru", "--heads", "2", "--search", "--seed", "0", "1", "--dry-run"])
    assert capsys.readouterr().out.endswith("the command makes 4 searches, 2 of each model\n")
