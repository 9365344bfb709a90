"""The options of pretraining: the paper's table, what is refused and what the message advises."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import docstring_parser
import pytest

from mixers.base import Shape
from runners.c4.config import HEAD_WIDTH, SIZES, Config
from runners.c4.presets import PRESETS


def test_the_default_is_the_papers_300m_model_of_six_layers() -> None:
    config = PRESETS["paper"]
    assert config == Config()
    assert (config.mixer, config.shape(), config.head_count()) == (
        "rt",
        Shape(width=2048, mlp_width=8192, layers=6),
        32,
    )
    assert config.steps * config.batch_size * config.seq_len == pytest.approx(6.5e9, rel=0.01)  # "about 6b tokens"


@pytest.mark.parametrize(("size", "layers"), [(size, layers) for size in SIZES for layers in SIZES[size]])
def test_models_of_one_size_have_heads_of_64_and_as_many_parameters(size: Any, layers: int) -> None:
    config = Config(size=size, layers=layers)
    shape = config.shape()
    assert config.head_count() * HEAD_WIDTH == shape.width
    assert shape.mlp_width == 4 * shape.width
    assert 12 * shape.width**2 * layers == pytest.approx(int(size[:3]) * 1e6, rel=0.05)


def test_a_pair_outside_the_table_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match=re.escape("150m with 6 or 12 layers; 300m with 6, 12 or 24 layers")):
        Config(size="150m", layers=24).shape()
    with pytest.raises(ValueError, match="no 300m model of 7 layers"):
        Config(layers=7).check()


def test_a_width_of_ones_own_needs_no_row_of_the_table() -> None:
    config = Config(layers=7, width=192)
    assert config.shape() == Shape(width=192, mlp_width=768, layers=7)
    assert config.head_count() == 3
    config = replace(config, mlp_width=100, heads=2)
    assert (config.shape().mlp_width, config.head_count()) == (100, 2)


def test_the_table_s_mlp_and_heads_can_be_replaced_alone() -> None:
    config = Config(mlp_width=4096, heads=16)
    assert (config.shape(), config.head_count()) == (Shape(width=2048, mlp_width=4096, layers=6), 16)


def test_a_width_that_is_no_multiple_of_64_needs_heads() -> None:
    config = Config(layers=1, width=100)
    config.check()  # not every layer has heads
    with pytest.raises(ValueError, match="give --heads"):
        config.head_count()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"steps": 10**9 + 1}, "--steps 1000000001 must be at most 1,000,000,000"),
        ({"width": 0}, "--width 0 must be at least 1"),
        ({"micro_batch_size": -1}, "--micro-batch-size -1 must be at least 1"),
        ({"validation_tokens": 0}, "--validation-tokens 0"),
        ({"seed": -1}, "--seed -1 must be 0 or more"),
        ({"seed": 2**64}, "--seed 18446744073709551616 must be 0 or more, and below 2**64"),
        ({"lr": 0.0}, "--lr 0 must be a positive number"),
        ({"lr": 1e9}, "--lr 1e+09 must be a positive number, at most 10"),
        ({"lr": float("nan")}, "--lr nan must be a positive number"),
        ({"wandb_project": "mine"}, "--wandb-project has no effect without --wandb online or --wandb offline: give"),
        ({"clip": float("inf")}, "--clip inf must be a positive number"),
        ({"eps": -1e-8}, "--eps -1e-08 must be a positive number"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 must be 0 or a positive number"),
        ({"beta2": 1.0}, "--beta2 1 must be at least 0 and below 1"),
        ({"beta1": -0.1}, "--beta1 -0.1 must be at least 0 and below 1"),
        ({"warmup_fraction": 1.0}, "--warmup-fraction 1 must be at least 0 and below 1"),
        ({"final_lr_fraction": 1.5}, "--final-lr-fraction 1.5 must be between 0 and 1"),
        ({"micro_batch_size": 100}, "give 64"),
    ],
)
def test_impossible_values_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Config(**changes).check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_and_values_at_the_edge_of_their_range_pass(preset: Config) -> None:
    preset.check()
    replace(preset, steps=10**9).check()
    replace(preset, steps=1, lr=10.0, beta1=0.0, beta2=0.0, warmup_fraction=0.0, final_lr_fraction=1.0).check()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [None, 1, 5, 600])
def test_following_the_advice_leads_to_a_batch_that_divides_evenly(micro: int | None, world: int) -> None:
    for batch in (7, 8, 512):
        config = Config(batch_size=batch, micro_batch_size=micro)
        for _ in range(2):
            message = refusal(config, world)
            if message.startswith("--batch-size"):
                config = replace(config, batch_size=int(message.rpartition("give ")[2]))
            elif message:
                config = replace(config, micro_batch_size=int(message.rpartition("give ")[2]))
        assert not refusal(config, world)
        assert config.batch_size % (world * (config.micro_batch_size or 1)) == 0


def test_results_in_place_of_a_folder_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "results"
    file.write_text("")
    assert refusal(Config(out=file), 1) == f"--out {file} is a file: name a folder"


def refusal(config: Config, world: int) -> str:
    try:
        config.check(world)
    except ValueError as error:
        return str(error)
    return ""


def test_the_help_explains_every_option_in_one_line() -> None:
    """It keeps the line breaks of the docstring, wherever they fall in a terminal."""
    explained = {p.arg_name: p.description for p in docstring_parser.parse(Config.__doc__ or "").params}
    assert explained.keys() == {field.name for field in fields(Config)}
    assert not [text for text in explained.values() if "\n" in str(text)]
