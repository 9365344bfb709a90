"""The command line: what it trains and prints, and what it refuses."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers import MIXERS  # noqa: E402
from mixers.base import Shape  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from runners.c4 import __main__ as command  # noqa: E402
from runners.c4 import charts  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.loop import RunError  # noqa: E402
from runners.files import load_tensors, read_json, save_tensors  # noqa: E402
from tests.runners.c4.runs import configured, folder_of, newest_of, run, words_of  # noqa: E402


@pytest.fixture
def words(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains a moment, without the layer."""
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer = texts / "tokenizer" / "tokenizer.json"
    return [
        "--width=16", "--heads=2", "--layers=2", "--seq-len=12", "--batch-size=4", "--steps=2",
        "--validation-tokens=48", "--evaluations=1", "--device=cpu", f"--out={tmp_path}", f"--tokenizer={tokenizer}",
        "--data", str(texts),
    ]  # fmt: skip


@pytest.mark.usefixtures("drawn")
def test_the_command_trains_plots_and_generates(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([*words, "--mixer=rt+transformer", "--mixer.rt.persistent-norm=False"])
    out = capsys.readouterr().out
    (folder,) = (tmp_path / "c4").iterdir()
    assert "validation cross-entropy" in out
    assert f"generate: python -m runners.c4 generate {folder} --prompt ..." in out
    assert len(list((tmp_path / "figures").glob("c4-*.png"))) == 1
    assert read_json(folder / "run.json")["mixer_options"] == {"rt__persistent_norm": False}
    command.main(["generate", str(folder), "--prompt", "kan lor", "--max-new-tokens", "5", "--device", "cpu"])
    assert "kan lor" in capsys.readouterr().out


def test_a_checkpoint_of_another_version_is_one_line(texts: Path, tmp_path: Path, ended: Callable[..., str]) -> None:
    config = configured(texts, tmp_path)
    run(config)
    path = newest_of(config)
    tensors, info = load_tensors(path)
    for other in (
        {**info, "config": {**info["config"], "dropout": 0.1}},
        {**info, "config": {name: value for name, value in info["config"].items() if name != "data"}},
        {**info, "config": {**info["config"], "width": 32}},
        {**info, "mixer_options": {"window": 3}},
        {**info, "corpus": {}},
    ):
        save_tensors(path, tensors, other)
        error = ended(command.main, ["generate", str(path), "--device", "cpu"])
        assert error.startswith(f"error: {path} is ")
        assert "version" in error


def test_a_corpus_that_is_too_small_is_said_and_recorded(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([*words, "--mixer=transformer", "--validation-tokens=999999999", "--batch-size=200"])
    out = " ".join(capsys.readouterr().out.split())
    (folder,) = (tmp_path / "c4").iterdir()
    record = read_json(folder / "record.json")
    read = record["task_config"]["validation_tokens"]
    assert f"validation reads {read:,} tokens of 999,999,999 asked for" in out
    assert f"the train split has {record['task_config']['train_tokens']:,} tokens: read " in out
    assert read_json(folder / "run.json")["config"]["validation_tokens"] == read


def test_a_layer_may_read_values_while_it_is_built(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: Callable[..., str]
) -> None:
    class Decay(Transformer):
        def __init__(self, config: Transformer.Config, shape: Shape) -> None:
            super().__init__(config, shape)
            if shape.layers == 3:
                raise RuntimeError("three are too many")
            self.rates = torch.linspace(0.5, 0.9, shape.width).tolist()

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Decay=Decay, __file__=__file__))
    arguments = [*words, "--mixer=layers_of_others:Decay"]
    command.main([*arguments, "--dry-run"])
    command.main(arguments)
    assert "validation cross-entropy" in capsys.readouterr().out
    error = ended(command.main, [*arguments, "--layers=3"])
    assert error.startswith(f"error: cannot build mixer 'layers_of_others:Decay': {__file__}:")
    assert error.endswith("Decay.__init__: three are too many\n")


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_one_line_before_anything_is_written(
    words: list[str], tmp_path: Path, ended: Callable[..., str]
) -> None:
    error = ended(command.main, [*words, f"--out={tmp_path / 'out'}", "--mixer=lru", "--wandb=online"])
    assert "run wandb login, or give --wandb offline" in error
    assert not (tmp_path / "out").exists()


def test_a_dry_run_needs_no_data_and_counts_each_layer(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["--layers", "6", "--dry-run"])
    out = capsys.readouterr().out
    for word in ("parameters", "FLOPs", "tokens", "GiB", "a run takes minutes for each step on this CPU"):
        assert word in out
    assert "search" not in out

    command.main([*words, "--mixer", "transformer", "lru", "--lr", "0.01", "0.02", "--seed", "0", "1", "--dry-run"])
    out = capsys.readouterr().out
    assert (out.count("transformer, 2 layers"), out.count("lru, 2 layers"), out.count("a run takes about")) == (1, 1, 2)
    assert out.endswith("the command makes 8 runs, 4 of each model\n")
    command.main([*words, "--search", "--dry-run"])
    assert capsys.readouterr().out.endswith("each of 1 searches trains 6 runs\n")  # 3 learning rates, 2 values of beta2
    assert not (tmp_path / "c4").exists()


class Peeking(Transformer):
    """A layer that sees later positions."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD.roll(-1, 1))


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
def test_every_layer_is_checked_before_data_are_prepared(
    words: list[str], tmp_path: Path, ended: Callable[..., str], further: list[str]
) -> None:
    error = ended(command.main, [*words, "--mixer", "transformer", f"{__name__}:Peeking", *further])
    assert error.startswith(f"error: mixer '{__name__}:Peeking' is not causal")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "7"], "6, 12"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--mixer", "nope"], "no mixer 'nope'"),
        (["--mixer", "rt", "nope"], "no mixer 'nope'"),
        (["--validation-tokens", "10"], "fill no sequence"),
        (["--search", "--lr", "0.1"], "leave --lr"),
        (["--heads", "3"], "heads: 3"),
        (["--seed"], "--lr and --seed take at least one value"),
        (["--downstream", "/nowhere"], "nowhere"),
        (["--data", "/nowhere/at/all", "--tokenizer", "nowhere.json"], "no file or folder /nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, ended: Callable[..., str]
) -> None:
    assert message in ended(command.main, [*arguments, "--out", str(tmp_path), "--device", "cpu"])
    assert not (tmp_path / "c4").exists()


@pytest.mark.parametrize("arguments", [["--batch-size", "10000000"], ["--width", "262144"]])
def test_what_cannot_fit_is_refused_in_one_line_before_anything_is_written(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Callable[..., str],
    arguments: list[str],
) -> None:
    monkeypatch.setattr("runners.device.total_memory", lambda device: 2**30)
    monkeypatch.setattr("runners.c4.pretraining._build_layer", lambda *_: None)
    error = ended(command.main, [*words, *arguments])
    assert "too little memory for training: at least" in error
    assert "lower --width" in error
    assert not any(tmp_path.iterdir())


def test_layers_rates_and_seeds_are_trained_one_after_another_and_compared(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    plot = charts.plot_curves
    monkeypatch.setattr(charts, "plot_curves", lambda groups, path: (plot(groups, path), drawn.append(groups)))
    line = [*words, "--mixer", "rt", "lru", "--seed", "0", "1", "0", "--mixer.block", "2"]
    command.main(line)
    out, error = capsys.readouterr()
    assert error == "--mixer.block does not apply to mixer lru\n"
    assert out.count("validation cross-entropy") == 4
    assert "generate:" not in out
    assert out.count("2 seeds") == 2
    assert len([*(tmp_path / "figures").glob("c4-comparison-*.png")]) == 1
    assert {label: len(seeds) for label, seeds in drawn[-1].items()} == {"rt-block-2": 2, "lru": 2}

    # The same command trains nothing again.
    before = {path: path.read_bytes() for path in (tmp_path / "c4").glob("*/curve.csv")}
    command.main(line)
    assert {path: path.read_bytes() for path in before} == before
    assert len(before) == 4


def test_one_word_names_all_layers(words: list[str]) -> None:
    runs = command.read([*words, "--mixer", "all", "--lr", "1e-3", "0.001", "2e-3"])
    assert [(config.mixer, config.lr) for config, _ in runs] == [(name, lr) for name in MIXERS for lr in (1e-3, 2e-3)]


def test_a_run_that_cannot_go_on_does_not_stop_the_others(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: Callable[..., str]
) -> None:
    trained = command.train_config

    def fails(config: Config, *rest: Any) -> Any:
        if config.mixer == "transformer":
            raise RunError("out of memory: lower --micro-batch-size")
        if config.mixer == "lstm":
            raise ZeroDivisionError("its own error")
        return trained(config, *rest)

    monkeypatch.setattr(command, "train_config", fails)
    with pytest.raises(SystemExit, match="1"):
        command.main([*words, "--mixer", "transformer", "lstm", "lru", "gla"])
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first == "transformer stopped: out of memory: lower --micro-batch-size"
    assert "ZeroDivisionError: its own error" in second
    assert out.count("validation cross-entropy") == 2
    assert "out of memory: lower --micro-batch-size" in ended(command.main, [*words, "--mixer", "transformer"])


def test_a_diverged_run_says_how_to_train_it_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Callable[..., str]
) -> None:
    monkeypatch.setattr("runners.c4.config._RANGES", {})
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=0.0)
    for _ in range(2):
        error = ended(command.main, [*words_of(config), "--warmup-fraction=0.0"])
        assert error.startswith("error: diverged at step ")
        assert error.endswith(f": lower --lr; to train it again, delete {folder_of(config) / 'record.json'}\n")
