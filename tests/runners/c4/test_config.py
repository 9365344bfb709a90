"""The options of pretraining: the paper's table, what is refused, and what makes two runs the same run."""

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mixers.base import Shape
from runners.c4.config import PRESETS, TOKENIZER, Config, identity, with_tokenizer
from runners.c4.data.tokenizer import file_beside


def test_the_default_is_the_papers_300m_model_of_six_layers() -> None:
    config = PRESETS["paper"]
    shape = Shape(width=2048, mlp_width=8192, layers=6)
    assert (config.mixer, config.shape(), config.head_count()) == ("rt", shape, 32)
    assert config.tokens == pytest.approx(6.5e9, rel=0.01)  # "about 6b tokens"


def test_widths_of_ones_own_replace_those_of_the_table() -> None:
    config = Config(layers=7, width=192)
    assert (config.shape(), config.head_count()) == (Shape(width=192, mlp_width=768, layers=7), 3)
    config = Config(mlp_width=4096, heads=16)
    assert (config.shape(), config.head_count()) == (Shape(width=2048, mlp_width=4096, layers=6), 16)
    with pytest.raises(ValueError, match="give --heads"):  # not every layer has heads
        Config(layers=1, width=100).head_count()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 7}, "no 300m model of 7 layers, only 150m with 6, 12 layers; 300m with 6, 12, 24 layers"),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"width": 0}, "--width 0 must be at least 1"),
        ({"validation_tokens": 511}, "--validation-tokens 511 fill no sequence"),
        ({"seed": 2**64}, "--seed 18446744073709551616 must be 0 or more, and below 2**64"),
        ({"lr": 0.0}, "--lr 0 must be a positive number"),
        ({"lr": float("nan")}, "--lr nan must be a positive number"),
        ({"clip": float("inf")}, "--clip inf must be a positive number"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 must be 0 or a positive number"),
        ({"beta2": 1.0}, "--beta2 1 must be at least 0 and below 1"),
        ({"final_lr_fraction": 1.5}, "--final-lr-fraction 1.5 must be between 0 and 1"),
        ({"micro_batch_size": 100}, "--micro-batch-size 100 must divide the 512 sequences"),
        ({"wandb_project": "mine"}, "--wandb-project has no effect without --wandb online or --wandb offline"),
    ],
)
def test_impossible_values_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Config(**changes)
    assert "\n" not in str(error.value)


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    Config(batch_size=8, micro_batch_size=2).check_shares(4)
    with pytest.raises(ValueError, match="--batch-size 8 must be a multiple of the 3 processes"):
        Config(batch_size=8).check_shares(3)
    with pytest.raises(ValueError, match="--micro-batch-size 4 must divide the 2 sequences"):
        Config(batch_size=8, micro_batch_size=4).check_shares(4)


def test_the_tokenizer_made_with_the_data_is_taken_unless_one_is_given(tmp_path: Path) -> None:
    for name, content in (("one", "a"), ("same", "a"), ("other", "b")):
        file_beside(tmp_path / name).parent.mkdir(parents=True)
        file_beside(tmp_path / name).write_text(content)

    def chosen(*names: str, **given: str) -> str | None:
        return with_tokenizer(Config(data=tuple(str(tmp_path / name) for name in names), **given)).tokenizer

    own = str(file_beside(tmp_path / "one"))
    assert chosen("one") == chosen("one/c4-train.json.gz") == chosen("one", "same") == own
    assert (chosen("one", tokenizer="mine"), chosen(), chosen("none")) == ("mine", TOKENIZER, TOKENIZER)
    with pytest.raises(ValueError, match=r"different tokenizers, .*one/tok.*json and .*other/tok.*: give --tokenizer"):
        chosen("one", "other")


def another(value: Any) -> Any:
    """Another value of an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Path | tuple):
        return value / "other" if isinstance(value, Path) else (*value, "other")
    return f"{value} other" if isinstance(value, str | None) else value + (1 if isinstance(value, int) else 0.01)


def test_how_a_run_is_computed_makes_no_other_run_and_all_else_does() -> None:
    config = Config(width=16, heads=2, layers=2, wandb="offline")

    def of(options: Any = None, corpus: str = "text", **changes: Any) -> tuple[str, str]:
        made = object.__new__(Config)
        vars(made).update({**vars(config), **changes})  # values that no configuration accepts
        found = identity(made, options or {}, corpus)
        return found.folder.name, found.fingerprint

    computed = {"device", "parallel", "micro_batch_size", "recompute", "checkpoint_every", "data", "tokenizer"}
    commanded = {"out", "search", "dry_run", "preset", "downstream"}
    commanded |= {"wandb", "wandb_project", "wandb_entity", "wandb_tags"}
    values = {field.name: another(getattr(config, field.name)) for field in fields(Config)}
    values |= {"mixer": "gla", "mlp_width": 1, "width": 17, "heads": 1}
    found = {name: of(**{name: value}) for name, value in values.items()}
    assert {name for name, (folder, _) in found.items() if folder == of()[0]} == computed | commanded

    # Runs of a study differ in four options alone.
    assert {name for name, (_, study) in found.items() if study == of()[1]} == computed | commanded | {
        *("lr", "weight_decay", "beta2", "seed")
    }
    assert len({of(), of({"block": 2}), of(corpus="other")}) == 3


def test_a_users_module_with_another_text_makes_another_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "layer_of_a_user.py"
    text = (
        "from torch import nn\nclass Mine(nn.Linear):\n"
        "    def __init__(self, dim):\n        super().__init__(dim, dim)\n"
    )
    file.write_text(text)
    config = replace(PRESETS["tiny"], mixer="layer_of_a_user:Mine")
    first = identity(config, {}, "text")
    assert identity(config, {}, "text") == first
    file.write_text(text + "# changed\n")
    monkeypatch.delitem(sys.modules, "layer_of_a_user")
    assert identity(config, {}, "text").fingerprint != first.fingerprint
