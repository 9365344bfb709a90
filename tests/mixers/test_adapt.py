"""Modules that know nothing of this project become layers."""

import copy
import pickle
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch

from mixers import ContractError, Shape, build, costs, find_mixer
from mixers.adapt import adapt
from mixers.base import decayed
from tests.mixers import strangers

NAME = "tests.mixers.strangers"


def defaults(name: str) -> dict[str, tuple[Any, Any]]:
    return {f.name: (f.type, f.default) for f in fields(find_mixer(f"{NAME}:{name}").Config)}


LAYER = {"width_argument": (str | None, None), "whole_layer": (bool | None, None)}
SCALAR = bool | int | float | str


def test_arguments_become_options_with_their_types_and_defaults() -> None:
    assert defaults("GatedToy") == LAYER | {
        "num_heads": (int, 4),
        "use_gate": (bool, True),
        "mode": (str, "chunk"),
        "layer_idx": (int | None, None),
    }


def test_where_a_type_cannot_be_resolved_that_of_the_default_counts() -> None:
    """One name exists for type checkers alone, so that no annotation of this constructor can be resolved."""
    assert list(defaults("Plain")) == [*LAYER, "scale", "kind", "untyped"]


def test_arguments_without_a_default_and_of_several_types_become_options() -> None:
    assert defaults("Demanding") == LAYER | {
        "heads": (int | None, None),
        "window": (int | tuple[int, ...], 4),
        "activation": (str | None, None),
        "untyped": (SCALAR | None, None),
        "axes": (tuple[int, ...] | None, None),
    }
    mixer = build(f"{NAME}:Demanding", width=16, heads=2, window=(1, 2), untyped=0.5).mixer
    assert mixer.settings == (2, (1, 2), "gelu", 0.5, (3,))
    assert build(f"{NAME}:Demanding", width=16, heads=2, window=[1, 2], untyped=0.5).config.window == (1, 2)
    assert build(f"{NAME}:Optionally", width=16, extra=None, more=None).mixer.settings == (None, None, max)


def test_the_fields_of_a_configuration_object_become_options() -> None:
    assert list(defaults("Configured")) == [*LAYER, "states", "factor", "sizes", "layer_idx"]
    mixer = build(f"{NAME}:Configured", width=16, states=4, layer_idx=1).mixer
    assert mixer.settings == (strangers.Settings(d_model=16, states=4), 1)


@pytest.mark.parametrize("wrap", ["tuple", "list", "dict"])
def test_the_first_entry_of_what_a_module_returns_is_its_output(wrap: str) -> None:
    assert build(f"{NAME}:Wrapping", width=16, wrap=wrap)(torch.randn(2, 5, 16)).shape == (2, 5, 16)


def test_a_complex_parameter_is_trained_as_two_real_ones() -> None:
    layer, x = build(f"{NAME}:Complex", width=16), torch.randn(2, 5, 16)
    real, imaginary = layer.mixer.parameters()
    assert (real.dtype, real.shape, decayed(layer.mixer)) == (torch.float32, (16, 16), [False, False])
    torch.testing.assert_close(layer.mixer(x), (x.cumsum(1).to(torch.complex64) @ torch.complex(real, imaginary)).real)


@pytest.mark.parametrize(
    ("name", "whole"),
    [("PostNorm", True), ("PreNorm", True), ("GatedToy", False), ("OfPyTorch", False), ("Expanding", False)],
)
def test_a_whole_layer_is_noticed_and_used_as_it_is(name: str, whole: bool) -> None:
    x, layer = torch.randn(1, 8, 16), build(f"{NAME}:{name}", width=16)
    assert layer.seems_whole(x) == whole
    bare = build(f"{NAME}:{name}", width=16, whole_layer=True)
    torch.testing.assert_close(bare(x), bare.mix(x), rtol=0, atol=0)
    assert [*dict(bare.named_children())] == ["mixer"]


def test_a_class_says_itself_that_it_is_a_whole_layer() -> None:
    assert [*dict(build(f"{NAME}:SaysWhole", width=16).named_children())] == ["mixer"]


def test_the_layer_is_the_standard_one_around_the_module() -> None:
    layer, x = build(f"{NAME}:GatedToy", width=16, layers=4, num_heads=2), torch.randn(2, 5, 16)
    u = x + 0.5 * layer.mixer(layer.mixer_norm(x))[0]
    torch.testing.assert_close(layer(x), u + 0.5 * layer.mlp(layer.mlp_norm(u)))
    assert layer.mixer.v.weight.shape == (16, 16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("OwnName", {}, "no argument of OwnName takes the model width: call it d_model, hidden_size, dim"),
        ("OwnName", {}, "if it takes a configuration object, write a subclass whose __init__ takes the width"),
        ("OwnName", {"width_argument": "sizes"}, "OwnName has no argument 'sizes': choose from size, heads"),
        ("OwnName", {"width_argument": "heads"}, "argument 'size' of OwnName has no default: give --mixer.size"),
        ("TwoNames", {}, "hidden_size and embed_dim of TwoNames may both take the model width: name one of them"),
        (
            "NeedsChannels",
            {},
            "'channels' of NeedsChannels has no default: give --mixer.channels, or --mixer.width-arg",
        ),
        ("NeedsChannels", {"width_argument": "dim"}, "argument 'channels' of NeedsChannels has no default"),
        ("Defaulted", {"width_argument": "size", "size": 32}, "size: it takes the model width: leave it out"),
        ("Demanding", {}, "argument 'heads' of Demanding has no default: give --mixer.heads"),
        ("Demanding", {"heads": 2}, "argument 'untyped' of Demanding has no default: give --mixer.untyped"),
        (
            "Hidden",
            {},
            "the constructor of Hidden names no argument for the model width: write a subclass whose __init__",
        ),
        ("Hidden", {"width_argument": "input_size"}, "the constructor of Hidden names no argument"),
    ],
)
def test_a_module_that_cannot_be_built_says_why_in_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(f"{NAME}:{name}", **options)
    assert f"mixer '{NAME}:{name}'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("OwnName", "size"), ("Defaulted", "size"), ("TwoNames", "embed_dim"), ("NeedsChannels", "channels")],
)
def test_an_option_names_the_argument_for_the_width(name: str, argument: str) -> None:
    assert build(f"{NAME}:{name}", width=16, width_argument=argument).mixer.out.in_features == 16


@pytest.mark.parametrize("name", ["NeedsDim", "TwoNames"])
def test_other_arguments_with_usual_names_remain_options(name: str) -> None:
    """The argument without a default takes the width; ``hidden_size`` comes before it in the list of usual names."""
    options = {} if name == "NeedsDim" else {"width_argument": "embed_dim"}
    mixer = build(f"{NAME}:{name}", width=16, hidden_size=24, **options).mixer
    assert (mixer.out.in_features, mixer.hidden_size) == (16, 24)


def test_another_shape_is_refused_and_not_broadcast() -> None:
    with pytest.raises(ContractError, match=r"for \(2, 5, 16\) it returned \(2, 1, 16\)"):
        build(f"{NAME}:LastPosition", width=16)(torch.randn(2, 5, 16))


def test_settings_are_pickled_and_copied() -> None:
    config = find_mixer(f"{NAME}:GatedToy").Config(use_gate=False, layer_idx=3)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_a_class_is_adapted_once() -> None:
    assert adapt(strangers.GatedToy) is find_mixer(f"{NAME}:GatedToy")
    assert asdict(find_mixer(f"{NAME}:GatedToy").Config(num_heads=2))["num_heads"] == 2


def test_a_layer_without_a_step_form_says_so(caplog: pytest.LogCaptureFixture) -> None:
    layer = build(f"{NAME}:GatedToy", width=16)
    for use in (lambda: layer.init_state(1), lambda: layer.step(torch.zeros(1, 16), {})):
        with pytest.raises(NotImplementedError, match="GatedToy has no step form: a class derived from"):
            use()
    figures = costs(type(layer), layer.config, Shape(width=16))
    assert figures.state_floats is None
    assert figures.flops_per_token is not None
    assert "state of GatedToy not counted: GatedToy has no step form" in caplog.text
