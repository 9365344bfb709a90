"""Layers are found and built by name."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixers import MIXERS, Shape, build, find_mixer
from mixers.lru import LRU
from mixers.named import name_of
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer


def test_options_and_shape_are_those_given() -> None:
    layer = build("rt", width=256, heads=8, layers=4)
    assert layer.config == RecurrentTransformer.Config(heads=8)
    assert layer.shape == Shape(width=256, mlp_width=1024, layers=4)
    assert build("rt", mlp_width=64).shape == Shape(width=128, mlp_width=64)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lru", {"heads": 2}, "mixer 'lru' has no option 'heads': choose from state_size, r_min.*"),
        ("lstm", {"heads": 2}, "mixer 'lstm' has no option 'heads': choose from none"),
        ("perceptron", {}, "no mixer 'perceptron': choose from transformer, .*"),
        ("rt", {"heads": 3}, "cannot build mixer 'rt': heads: 3 must divide the model width 128"),
        ("rt", {"block": "4"}, "cannot build mixer 'rt': block: Input should be a valid integer, not '4'"),
        ("rt", {"heads": 2.0}, "cannot build mixer 'rt': heads: Input should be a valid integer, not 2[.]0"),
        (
            *("rt", {"persistent_norm": "no"}),
            "cannot build mixer 'rt': persistent_norm: Input should be a valid boolean, not 'no'",
        ),
        ("lru", {"r_min": float("nan")}, "cannot build mixer 'lru': r-min nan must be a finite number"),
        ("rt", {"width": 0}, "width: 0 must be a whole number of at least 1.*"),
        ("rt", {"width": "64"}, "width: '64' must be a whole number of at least 1.*"),
        ("rt", {"mlp_width": 2.0}, "mlp_width: 2[.]0 must be a whole number of at least 0.*"),
        ("rt", {"layers": -1}, "layers: -1 must be a whole number of at least 1.*"),
    ],
)
def test_what_cannot_be_built_is_one_line_that_says_why(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        build(name, **given)


def test_whole_numbers_serve_as_fractions_and_numbers_of_numpy_as_those_of_python() -> None:
    assert repr(build("lru", r_max=1).config) == repr(build("lru", r_max=1.0).config)
    swept = [build("rt", block=block, qk_norm=np.bool_(False)).config for block in np.array([1, 4])]
    assert repr(swept) == repr([build("rt", block=block, qk_norm=False).config for block in (1, 4)])


class Rounded(LRU):
    @dataclass(frozen=True, kw_only=True)
    class Config(LRU.Config):
        dtype: torch.dtype = torch.float32


def test_an_option_may_have_any_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "rounded", Rounded)
    assert build("rounded", dtype=torch.float16).config.dtype == torch.float16
    with pytest.raises(ValueError, match="dtype: Input should be an instance of dtype, not 'float16'"):
        build("rounded", dtype="float16")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (":Mine", "write package.module:Class$"),
        ("my_layers:", "write package.module:Class$"),
        ("my_layers:Mine,rt", "separate names by spaces$"),
        ("kernel_attention", "write kernel_attention:Class, with the class"),
    ],
)
def test_half_an_import_path_and_two_of_them_are_told_how_to_be_written(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the name of a file that is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel_attention.py").touch()
    with pytest.raises(ValueError, match=f"^no mixer {re.escape(repr(name))}: {advice}"):
        find_mixer(name)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("my_layers.py:Mine", "give the module, not its file: my_layers:Mine"),
        ("./some/my_layers.py:Mine", "give the module, not its file: some.my_layers:Mine"),
        ("/some/my_layers.py:Mine", "give the module, not its file: my_layers:Mine, with PYTHONPATH=/some"),
        ("../my_layers.py:Mine", "give the module, not its file: my_layers:Mine, with PYTHONPATH=.."),
        ("no_such_module:Mine", "modules are found in the current folder, for others set PYTHONPATH"),
        ("alone:Mine", "give its package, too: package.alone:Mine, from the folder that holds the package"),
        ("whole:Mean", "its layers are Mine, Other"),
        ("exporting:Mean", "its layers are Mine"),
        ("empty:Mean", "it has no torch.nn.Module: name another module"),
        ("kernels:Mean", "its kernels need a GPU: train it on one, or choose its plain form if it has one"),
        ("__main__:Mean", "a class of a notebook or a script is known there alone: save your layer in a module"),
    ],
)
def test_a_module_that_is_not_found_is_told_how_modules_are_named(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text("from .neighbour import Mine\n")
    (tmp_path / "whole.py").write_text(
        "from torch.nn import Linear, Module\nclass Mine(Module): pass\nclass Other(Mine): pass\nclass Config: pass\n"
    )
    (tmp_path / "exporting").mkdir()
    (tmp_path / "exporting" / "__init__.py").write_text("from torch.nn import Linear\nfrom .inner import Mine\n")
    (tmp_path / "exporting" / "inner.py").write_text("from torch.nn import Module\nclass Mine(Module): pass\n")
    (tmp_path / "kernels.py").write_text("raise RuntimeError('0 active drivers ([]). There should only be one.')\n")
    (tmp_path / "empty.py").write_text("from torch.nn import Linear\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"; {re.escape(advice)}$"):
        find_mixer(name)


def test_a_configuration_without_its_decorator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings would be no options, and nothing would say so."""

    class Bare(Transformer):
        class Config(Transformer.Config):
            decay: float = 0.9

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Bare=Bare))
    with pytest.raises(ValueError, match=r"Bare.Config is no dataclass: put @dataclass\(frozen=True, kw_only=True\)"):
        find_mixer("layers_of_others:Bare")


class Own(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


def test_a_class_stands_for_its_name() -> None:
    assert name_of("rt", MIXERS) == name_of(RecurrentTransformer, MIXERS) == "rt"
    assert name_of(Own, MIXERS) == f"{__name__}:Own"
    assert build(Own, 16)(torch.zeros(2, 3, 16)).shape == (2, 3, 16)
    assert type(build(RecurrentTransformer, 16, heads=2)) is RecurrentTransformer


def test_a_class_that_its_name_does_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results would be those of another class."""
    former = Own
    monkeypatch.setattr(sys.modules[__name__], "Own", type("Own", (nn.Module,), {"__module__": __name__}))
    with pytest.raises(ValueError, match="has no Own, or another one by now: give the class that has this name"):
        name_of(former, MIXERS)
    assert name_of(sys.modules[__name__].Own, MIXERS) == f"{__name__}:Own"
