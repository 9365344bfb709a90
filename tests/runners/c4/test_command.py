"""The command line: what it prints, and what it refuses."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers.base import Shape  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from runners.c4 import __main__ as command  # noqa: E402
from runners.c4 import checkpoints  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.data import convert  # noqa: E402
from runners.ending import run_command  # noqa: E402
from runners.files import load_tensors, save_tensors  # noqa: E402
from tests.runners.c4.runs import configured, corpus_of, folder_of, run  # noqa: E402


def test_generating_from_a_checkpoint_of_another_version_is_one_line(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    run(config)
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    tensors, info = load_tensors(path)
    values = info["config"]
    for other in (
        {**info, "config": {**values, "dropout": 0.1}},
        {**info, "config": {name: value for name, value in values.items() if name != "data"}},
        {**info, "config": {**values, "width": 32}},
        {**info, "mixer_options": {"window": 3}},
    ):
        save_tensors(path, tensors, other)
        with pytest.raises(SystemExit) as stop:
            command.main(["generate", str(path), "--device", "cpu"])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is of another version")
        assert error.count("\n") == 1


def test_the_command_trains_plots_and_generates(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    arguments = [
        "--width=16", "--heads=2", "--layers=2", "--mixer=rt", "--mixer.persistent-norm=False", "--seq-len=12",
        "--batch-size=4", "--steps=4", "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}",
        f"--tokenizer={config.tokenizer}", "--data", *config.data,
    ]  # fmt: skip
    command.main(arguments)
    out = capsys.readouterr().out
    assert "asked for" not in out
    (folder,) = (tmp_path / "c4").iterdir()
    assert "validation cross-entropy" in out
    assert "compare:" not in out
    assert f"generate: python -m runners.c4 generate {folder} --prompt ..." in out
    assert len(list((tmp_path / "figures").glob("c4-*.png"))) == 1
    assert json.loads((folder / "run.json").read_text())["mixer_options"] == {"persistent_norm": False}
    command.main(["generate", str(folder), "--prompt", "kan lor", "--max-new-tokens", "5", "--device", "cpu"])
    assert "kan lor" in capsys.readouterr().out

    # A second run has something to be compared with.
    command.main([*arguments, "--lr=0.1"])
    assert f"compare: python -m runners.c4 compare --out {tmp_path}\n" in capsys.readouterr().out


def test_a_corpus_that_is_too_small_is_said_and_recorded(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path, batch_size=200, steps=2, validation_tokens=999_999_999)
    corpus = corpus_of(config)
    train_tokens, validation_tokens = (corpus.manifest.splits[split].tokens for split in ("train", "validation"))
    read = (validation_tokens - 1) // 12 * 12
    command.main([
        "--width=16", "--mlp-width=32", "--heads=2", "--layers=2", "--mixer=transformer", "--seq-len=12",
        "--batch-size=200", "--steps=2", "--lr=1e-2", "--validation-tokens=999999999", "--evaluations=3",
        "--checkpoint-every=3", "--device=cpu", f"--out={tmp_path}", f"--tokenizer={config.tokenizer}",
        f"--data={texts}",
    ])  # fmt: skip
    assert (
        f"the train split has {train_tokens:,} tokens: read {4800 / train_tokens:.2f} times; "
        f"validation reads {read:,} tokens of 999,999,999 asked for\n"
    ) in capsys.readouterr().out
    for name in ("run.json", "result.json"):
        record = json.loads((folder_of(config) / name).read_text())
        assert record["config"]["validation_tokens"] == read


def test_a_layer_may_read_values_while_it_is_built(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Decay(Transformer):
        def __init__(self, config: Transformer.Config, shape: Shape) -> None:
            super().__init__(config, shape)
            if shape.layers == 3:
                raise RuntimeError("three are too many")
            self.rates = torch.linspace(0.5, 0.9, shape.width).tolist()

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Decay=Decay))
    arguments = [
        "--mixer=layers_of_others:Decay", "--width=16", "--heads=2", "--seq-len=12", "--batch-size=4", "--steps=2",
        "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}", f"--data={texts}",
    ]  # fmt: skip
    command.main([*arguments, "--layers=2", "--dry-run"])
    command.main([*arguments, "--layers=2"])
    assert "validation cross-entropy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--layers=3"])
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot build mixer 'layers_of_others:Decay': {__file__}:")
    assert error.endswith("Decay.__init__: three are too many\n")
    assert error.count("\n") == 1


def test_a_layer_without_steps_gets_the_hint_to_generate_that_works(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(
        sys.modules, "layers_of_others", SimpleNamespace(Whole=type("Whole", (Transformer,), {"init_state": none}))
    )
    command.main([
        "--mixer=layers_of_others:Whole", "--width=16", "--heads=2", "--layers=2", "--seq-len=12", "--batch-size=4",
        "--steps=2", "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}", f"--data={texts}",
        f"--tokenizer={texts / 'tokenizer' / 'tokenizer.json'}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    (folder,) = (tmp_path / "c4").iterdir()
    assert f"generate: python -m runners.c4 generate {folder} --prompt ..." in out
    command.main(["generate", str(folder), "--prompt", "kan", "--max-new-tokens", "2", "--device", "cpu"])
    assert "kan" in capsys.readouterr().out


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_one_line_before_anything_is_written(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = texts / "tokenizer" / "tokenizer.json", tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        command.main([
            "--preset=tiny", "--device=cpu", f"--data={texts}", f"--tokenizer={tokenizer}", f"--out={out}",
            "--wandb=online",
        ])  # fmt: skip
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "run wandb login, or give --wandb offline" in error
    assert not out.exists()


def test_a_dry_run_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--layers", "6", "--dry-run"])
    out = capsys.readouterr().out
    for word in ("parameters", "FLOPs", "tokens", "GiB"):
        assert word in out
    assert "search" not in out


def test_a_dry_run_refuses_data_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--dry-run", "--data", str(tmp_path / "none")])
    assert f"error: no file or folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_downstream_sets_that_cannot_be_read_are_found_before_anything_is_tokenised(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    given = ["--preset", "tiny", "--device", "cpu", "--downstream", "hub", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="2"):
        command.main([*given, "--tokenizer", config.tokenizer, "--data", *config.data])
    assert capsys.readouterr().err.startswith("error: no questions in hub: give a folder of *.jsonl")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_search_counts_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--preset", "tiny", "--search", "--dry-run"])
    assert capsys.readouterr().out.endswith("the search trains 6 such runs\n")  # 3 learning rates, 2 values of beta2


def test_a_dry_run_of_a_layer_that_breaks_is_an_error_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that raises may need a GPU: only with ``--device cpu`` is that known to be a fault."""

    class OnePosition(Transformer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BTD)[:, 0]

    class WrongProduct(Transformer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return x_BTD @ x_BTD[:, :, :1]

    layers = SimpleNamespace(OnePosition=OnePosition, WrongProduct=WrongProduct)
    monkeypatch.setitem(sys.modules, "layers_of_others", layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--preset", "tiny", "--dry-run"]
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--mixer", "layers_of_others:OnePosition"])
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "it returned (2, " in error

    broken = [*arguments, "--mixer", "layers_of_others:WrongProduct"]
    with pytest.raises(RuntimeError, match="Expected size"):
        command.main([*broken, "--device", "cpu"])
    assert capsys.readouterr() == ("", "")


def test_a_layer_that_needs_a_gpu_can_be_planned_without_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class WrongProduct(Transformer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return x_BTD @ x_BTD[:, :, :1]

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(WrongProduct=WrongProduct))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.main(["--preset", "tiny", "--dry-run", "--mixer", "layers_of_others:WrongProduct"])
    out, error = capfd.readouterr()
    assert "FLOPs per token" in out
    assert [record.name for record in caplog.records] == ["runners.c4.cost"] * 2
    assert "two per parameter are assumed: RuntimeError: Expected size" in caplog.text
    assert "Traceback" not in error


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
def test_a_layer_that_sees_later_positions_is_refused_before_data_are_prepared(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    further: list[str],
) -> None:
    class Peeking(Transformer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BTD.roll(-1, 1))

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Peeking=Peeking))
    config = configured(texts, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command.main([
            "--preset", "tiny", "--mixer", "layers_of_others:Peeking", "--tokenizer", config.tokenizer,
            "--data", *config.data, "--out", str(tmp_path), "--device", "cpu", *further,
        ])  # fmt: skip
    assert capsys.readouterr().err.startswith("error: mixer 'layers_of_others:Peeking' is not causal")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "7"], "6, 12"),
        (["--steps", "0"], "steps"),
        (["--mixer", "nope"], "no mixer 'nope'"),
        (
            ["--mixer", "rt", "--steps", "3", "4"],
            "no option takes 4: --steps takes one value, so run the command once for each",
        ),
        (["--mixer"], "Missing value for argument '--mixer'"),
        (["--preset"], "Missing value for argument '--preset'"),
        (["--mixer", "transformer", "--mixer.block", "3"], "does not apply"),
        (["--validation-tokens", "10"], "fill no sequence"),
        (["--search", "--lr", "0.1"], "leave --lr"),
        (["--search", f"--beta2={Config.beta2}"], "leave --lr"),
        (["--heads", "3"], "heads: 3"),
        (["--preset", "tiny", "--size", "150m"], "--size has no effect on a model of width 64: leave it"),
        (["--width", "128", "--size=150m"], "--size has no effect on a model of width 128: leave it"),
        (["--mixer", "lstm", "--heads", "4"], "--heads does not apply to mixer lstm: leave it out"),
        (["--downstream", "/nowhere"], "nowhere"),
        (["--data", "/nowhere/at/all", "--tokenizer", "nowhere.json"], "no file or folder /nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments, "--out", str(tmp_path), "--device", "cpu"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "c4").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "1000000000000"], "--batch-size 1000000000000 must be at most 10,000,000"),
        (["--batch-size", "1000000000000", "--dry-run"], "--batch-size 1000000000000 must be at most 10,000,000"),
        (["--seq-len", "1000000000000", "--dry-run"], "--seq-len 1000000000000 must be at most 10,000,000"),
        (
            ["--batch-size", "10000000", "--seq-len", "1024", "--micro-batch-size", "1"],
            "the tokens of a step: at least",
        ),
        (["--batch-size", "10000000"], "give --micro-batch-size"),
        (["--seq-len", "10000000", "--validation-tokens", "10000000"], "a forward pass: at least"),
        (["--width", "1048576"], "lower --width"),
        (["--layers", "100000000"], "--layers 100000000 must be at most 1,000"),
        (["--steps", "1" + 30 * "0"], "must be at most 1,000,000,000"),
        (["--evaluations", "1" + 30 * "0"], "must be at most 100,000"),
    ],
)
def test_what_cannot_fit_is_refused_in_one_line_before_anything_is_written(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("runners.memory.total_memory", lambda device: 16 * 2**30)
    config, out = configured(texts, tmp_path), tmp_path / "out"
    data = ["--tokenizer", config.tokenizer, "--data", *config.data, "--out", str(out)]
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--device", "cpu", *arguments, *data])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_split_shorter_than_a_sequence_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = configured(texts, tmp_path), tmp_path / "out"
    data = ["--tokenizer", config.tokenizer, "--data", *config.data, "--out", str(out)]
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--device", "cpu", "--seq-len", "5000", "--validation-tokens", "5000", *data])
    assert "fewer than one window of 5,001" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["find_texts", "train_tokenizer"])
def test_ctrl_c_in_convert_leaves_nothing_and_says_so(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, step, press)
    (tmp_path / "book.txt").write_text("A line of a book. " * 99)
    arguments = ["convert", str(tmp_path / "made"), str(tmp_path / "book.txt")]
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: command.main(arguments), command.when_interrupted(arguments))
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing is written, the same command begins again\n"
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_only_training_says_after_ctrl_c_that_it_continues() -> None:
    lines = {name: command.when_interrupted([name, "--help"]) for name in command.COMMANDS}
    assert not [line for line in lines.values() if "continues" in line or "checkpoint" in line]
    for arguments in ([], ["--layers", "6"], ["--data", "convert"]):
        assert "continues from the last checkpoint" in command.when_interrupted(arguments)


@pytest.mark.parametrize(
    ("variable", "value", "least"),
    [("WORLD_SIZE", "abc", 1), ("WORLD_SIZE", "0", 1), ("LOCAL_RANK", "-1", 0), ("RANK", "abc", 0), ("RANK", "-1", 0)],
)
def test_a_bad_variable_of_torchrun_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    least: int,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--device", "cpu", "--out", str(tmp_path / "out")])
    words = f"the environment variable {variable} is {value!r}, not a whole number of at least {least}"
    assert capsys.readouterr().err == f"error: {words}: unset it, or start the command with torchrun\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variable", "index", "size"),
    [("RANK", "5", "2"), ("RANK", "2", "2"), ("LOCAL_RANK", "2", "2"), ("RANK", "1", None)],
)
def test_a_rank_that_is_not_below_the_number_of_processes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    index: str,
    size: str | None,
) -> None:
    """PyTorch would wait for the other processes until its timeout."""

    def join(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the process has begun to wait for others")

    monkeypatch.setattr("torch.distributed.init_process_group", join)
    monkeypatch.setenv(variable, index)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--device", "cpu", "--out", str(tmp_path / "out")])
    words = f"the environment variable {variable} is {index}, but processes are counted from 0, and WORLD_SIZE is"
    assert capsys.readouterr().err == f"error: {words} {size or 1}: unset both, or start the command with torchrun\n"
    assert not (tmp_path / "out").exists()
