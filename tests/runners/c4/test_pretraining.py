"""The Python functions ``pretrain`` and ``load_model`` against the command line."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

import runners.c4
from runners.c4 import __main__ as command
from runners.c4 import load_model, pretrain
from runners.c4.curve import read_curve
from tests.runners.c4.runs import TINY

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL: dict[str, Any] = {**TINY, "lr": 1e-2}


def sources(texts: Path) -> dict[str, Any]:
    return {"data": texts, "tokenizer": texts / "tokenizer" / "tokenizer.json"}


def test_pretrain_trains_the_run_of_the_command(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same folder, same losses bit by bit; a second call returns what is finished.

    The command names the tokenizer, the function takes the one beside the data.
    """
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | sources(texts)).items()]
    command.main([*options, "--mixer=rt", "--mixer.persistent-norm=False", "--preset=tiny", f"--out={tmp_path / 'a'}"])
    (folder,) = (tmp_path / "a" / "c4").iterdir()
    printed = capsys.readouterr().out

    def call(out: str, progress: bool) -> runners.c4.Result:
        return pretrain(
            "rt",
            preset="tiny",
            out=tmp_path / out,
            mixer_options={"persistent_norm": False},
            progress=progress,
            data=texts,
            **SMALL,
        )

    result = call("b", progress=True)
    assert "step      4: training loss" in capsys.readouterr().out
    assert result.folder == tmp_path / "b" / "c4" / folder.name

    rows, expected = read_curve(result.folder), read_curve(folder)
    assert [(row.loss, row.validation_loss) for row in rows] == [(row.loss, row.validation_loss) for row in expected]
    assert result.validation_loss == expected[-1].validation_loss
    assert f"validation cross-entropy {result.validation_loss:.4f} nats per token" in printed

    # A word of the texts has two or three letters and is a token; there is a space between two words.
    assert result.bytes_per_token is not None
    assert 3 < result.bytes_per_token < 4
    bits = result.validation_loss / math.log(2) / result.bytes_per_token
    assert f"= {bits:.4f} bits per byte" in printed
    assert "which makes its loss uncertain" in printed

    assert call("a", progress=False).validation_loss == result.validation_loss
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("rate", "steps", "warned"), [(10.0, 4, True), (0.02, 100, False)])
def test_a_finite_loss_that_is_worse_than_guessing_is_said(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float, steps: int, warned: bool
) -> None:
    changes = {"mlp_width": 32, "lr": rate, "steps": steps, "out": tmp_path}
    result = pretrain("transformer", **SMALL | sources(texts) | changes)
    tokens = result.tokenizer.get_vocab_size()
    guessing, loss = math.log(tokens), result.validation_loss
    assert (loss > guessing) == warned
    warning = (
        f"the final validation loss {loss:.4f} is worse than guessing all {tokens} tokens alike ({guessing:.4f}): "
        "a smaller learning rate may help, or more steps\n"
    )
    printed = capsys.readouterr().out
    assert (warning in printed) == ("worse than" in printed) == warned


def test_a_result_has_a_curve_a_model_and_scores(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    (tmp_path / "items" / "pairs.jsonl").write_text(
        '{"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}'
    )
    result = pretrain(
        "transformer",
        preset="tiny",
        out=str(tmp_path / "out"),
        progress=False,
        downstream=tmp_path / "items",
        **sources(texts),
        **SMALL,
    )
    assert result.chart.is_file()
    assert result.downstream["pairs"]["items"] == 1
    assert [row["step"] for row in result.curve()] == [1, 2, 3, 4]
    assert result.curve()[-1]["validation_loss"] == result.validation_loss

    checkpoint = result.folder / "checkpoints" / "step-00000004.safetensors"
    for path in (result.folder, str(result.folder), checkpoint):
        model, tokenizer = load_model(path)
        assert not model.training
        for name, y in model.state_dict().items():
            assert torch.equal(y, result.model.state_dict()[name]), name
        assert tokenizer.to_str() == result.tokenizer.to_str()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "nope"}, "no mixer 'nope'"),
        ({"mixer_options": {"window": 3}}, "mixer_options['window'] does not apply to mixer rt"),
        ({"step": 3}, "unknown option step: did you mean steps? The options are size, layers, mixer"),
        ({"learning_rate": 1}, "unknown option learning_rate: did you mean lr? The options are size, layers, mixer"),
        ({"colour": 1}, "unknown option colour: the options are preset, mixer_options, size, layers, mixer"),
        ({"dry_run": True}, "unknown option dry_run"),
        ({"preset": "small"}, "preset: Input should be 'paper', 'tiny', 'ranking' or '30m', not 'small'"),
        ({"device": "tpu"}, "device: Input should be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ({"steps": 1e3}, "steps: Input should be a valid integer, not 1000.0"),
        ({"steps": 0}, "steps 0 must be at least 1"),
        ({"steps": "3"}, "steps: Input should be a valid integer, not '3'"),
        ({"steps": True}, "steps: Input should be a valid integer, not True"),
        ({"steps": None}, "steps: Input should be a valid integer, not None"),
        ({"seed": None}, "seed: Input should be a valid integer, not None"),
        ({"lr": None}, "lr: Input should be a valid number, not None"),
        ({"final_lr_fraction": "a tenth"}, "final_lr_fraction: Input should be a valid number, not 'a tenth'"),
        ({"recompute": "no"}, "recompute: Input should be a valid boolean, not 'no'"),
        ({"preset": ["tiny"]}, "preset: Input should be"),
        ({"data": 3}, "data: Input should be a valid tuple, not 3"),
        ({"data": ["texts", 3]}, "data: Input should be a valid string, not 3"),
        ({"downstream": 3}, "downstream: Input should be a valid string, not 3"),
        ({"out": 3}, "out: Input should be an instance of Path, not 3"),
        ({"search": True, "lr": 0.1}, "leave lr and beta2 out"),
        ({"data": "/nowhere/at/all"}, "no file or folder /nowhere/at/all"),
    ],
)
def test_what_does_not_fit_is_a_value_error_of_one_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pretrain(**{"preset": "tiny", "out": tmp_path / "out", "device": "cpu", **options})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_numbers_of_another_type_make_no_other_run(texts: Path, tmp_path: Path) -> None:
    one, two = (
        pretrain("transformer", preset="tiny", out=tmp_path, progress=False, data=data, tokenizer=tokenizer, **options)
        for data, tokenizer, options in (
            (
                [texts],
                str(texts / "tokenizer" / "tokenizer.json"),
                {**SMALL, "steps": np.int64(1), "clip": 1, "lr": np.float64(1e-2)},
            ),
            (str(texts), texts / "tokenizer" / "tokenizer.json", {**SMALL, "steps": 1, "clip": 1.0}),
        )
    )
    assert one == two


def test_importing_the_package_imports_no_slow_library() -> None:
    script = "import sys, runners.c4; print([m for m in ('optuna', 'matplotlib', 'tyro', 'rich') if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        runners.c4.nothing  # noqa: B018


def test_errors_name_arguments_and_leave_commands_and_paths_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give data C4-format files .* python -m runners\.c4 convert"):
        pretrain(preset="tiny", data=tmp_path / "a--lr")
    (tmp_path / "a--lr").mkdir()
    with pytest.raises(ValueError, match="a--lr"):
        pretrain(preset="tiny", data=tmp_path / "a--lr")
