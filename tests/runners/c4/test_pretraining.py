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
from runners import records
from runners.c4 import __main__ as command
from runners.c4 import load_model, pretrain
from tests.runners.c4.runs import TINY

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
        options = {"persistent_norm": False, "block": np.int64(1)}
        places = {"out": tmp_path / out, "data": [texts]}
        return pretrain("rt", preset="tiny", mixer_options=options, progress=progress, **places, **SMALL)

    result = call("b", progress=True)
    assert "from step 0" in capsys.readouterr().out
    assert result.folder == tmp_path / "b" / "c4" / folder.name
    (_, found), (_, expected) = records.read_all(result.folder, folder)
    assert (found.curve, found.metrics) == (expected.curve, expected.metrics)
    assert result.validation_loss == expected.curve["loss"][-1]
    assert f"validation cross-entropy {result.validation_loss:.3f} nats per token" in printed

    # A word of the texts has two or three letters and is a token; there is a space between two words.
    bytes_per_token = result.record.task_config["bytes_per_token"]
    assert 3 < bytes_per_token < 4
    assert f"= {result.validation_loss / math.log(2) / bytes_per_token:.3f} bits per byte" in printed

    assert call("a", progress=False).validation_loss == result.validation_loss
    assert capsys.readouterr().out == ""


def test_a_result_has_a_curve_a_model_and_scores(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    question = '{"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}'
    (tmp_path / "items" / "pairs.jsonl").write_text(question)
    places = {"out": str(tmp_path / "out"), "downstream": tmp_path / "items"}
    result = pretrain("transformer", preset="tiny", progress=False, **places, **sources(texts), **SMALL)
    assert result.chart.is_file()
    assert result.record.metrics["pairs"]["items"] == 1
    assert [row["step"] for row in result.curve()] == [1, 2, 3, 4]
    assert result.curve()[-1]["validation_loss"] == pytest.approx(result.validation_loss, rel=1e-12)

    checkpoint = result.folder / "checkpoints" / "step-00000004.safetensors"
    first, *others = (load_model(path) for path in (result.folder, str(result.folder), checkpoint))
    assert not first[0].training
    for model, tokenizer in others:
        assert tokenizer.to_str() == first[1].to_str()
        for name, y in model.state_dict().items():
            assert torch.equal(y, first[0].state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 3}, TypeError, "pretrain() has no argument 'step': choose from preset, size"),
        ({"mixer": "nope"}, ValueError, "no mixer 'nope'"),
        ({"mixer_options": {"window": 3}}, ValueError, "--mixer.window does not apply to mixer rt"),
        ({"mixer_options": {"block": "four"}}, ValueError, "block: Input should be a valid integer, not 'four'"),
        ({"mixer_options": {"heads": 3}}, ValueError, "heads: 3 must divide"),
        ({"preset": "small"}, ValueError, "no preset 'small': choose from paper, tiny"),
        ({"device": "tpu"}, ValueError, "device: Input should be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ({"steps": 1e3}, ValueError, "steps: Input should be a valid integer, not 1000.0"),
        ({"steps": 0}, ValueError, "--steps 0 must be at least 1"),
        ({"data": 3}, ValueError, "data"),
        ({"data": "/nowhere/at/all"}, ValueError, "no file or folder /nowhere/at/all"),
    ],
)
def test_what_does_not_fit_is_an_error_of_one_line(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised:
        pretrain(**{"preset": "tiny", "out": tmp_path / "out", "device": "cpu", **options})
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_importing_the_package_imports_no_slow_library() -> None:
    script = "import sys, runners.c4; print([m for m in ('optuna', 'matplotlib', 'tyro', 'rich') if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        runners.c4.nothing  # noqa: B018
