"""The width at which a layer meets a cost, and what is said if there is none."""

import re
from typing import Any

import pytest
from torch import Tensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.matching import MLP_CHANGE, TOLERANCE, count, match
from mixers.parts import MixerLayer


@pytest.mark.parametrize(
    ("figure", "name", "values"),
    [
        ("params", "rt", {"heads": 2}),
        ("params", "lstm", {}),
        ("state", "linear-attention", {"heads": 2}),
        ("flops", "rt", {"heads": 1}),
    ],
)
def test_a_match_is_within_the_tolerance_and_keeps_ratio_and_heads(
    figure: Any, name: str, values: dict[str, int]
) -> None:
    layer, config = MIXERS[name], MIXERS[name].Config(**values)
    shape = Shape(width=64, mlp_width=256, layers=3)
    target = count(figure, MIXERS["transformer"], MIXERS["transformer"].Config(heads=2), shape)
    found, value = match(figure, target, layer, config, shape)
    assert found == Shape(width=found.width, mlp_width=4 * found.width, layers=3)
    assert found.width % values.get("heads", 1) == 0
    assert abs(value / target - 1) <= TOLERANCE
    assert value == count(figure, layer, config, found)


@pytest.mark.parametrize(
    ("aim", "excess", "width"), [(66, 0, 66), (97, 0, 97), (96, 500, 96), (8, 0, 8), (400, 0, 400)]
)
def test_a_match_finds_the_width_and_prefers_a_multiple_of_eight(aim: int, excess: int, width: int) -> None:
    layer = MIXERS["transformer"]
    config = layer.Config(heads=1)
    target = count("params", layer, config, Shape(width=aim, mlp_width=4 * aim)) + excess
    assert match("params", target, layer, config, Shape(width=60, mlp_width=240))[0].width == width


@pytest.mark.parametrize(
    ("figure", "name"),
    [*(("params", name) for name in ("gated-deltanet", "rwkv7", "mamba2", "gla")), ("flops", "m2rnn")],
)
def test_where_no_width_meets_the_target_the_mlp_does(figure: Any, name: str) -> None:
    layer, shape = MIXERS[name], Shape(width=64, mlp_width=256)
    transformer = MIXERS["transformer"]
    target = count(figure, transformer, transformer.Config(heads=4), shape)
    found, value = match(figure, target, layer, config := layer.Config(heads=4), shape)
    assert abs(value / target - 1) <= TOLERANCE
    assert value == count(figure, layer, config, found)
    assert 0 < abs(found.mlp_width / (4 * found.width) - 1) <= MLP_CHANGE


@pytest.mark.parametrize(
    ("figure", "name", "target", "message"),
    [
        ("state", "linear-attention", 100_000, "the nearest, 64, has 577 (-99.4%); try fewer heads or another figure"),
        ("state", "lstm", 100_000, "the nearest, 64, has 128 (-99.9%); try another figure"),
        ("params", "transformer", 1500, "the nearest, 8, has 800 (-46.7%); try fewer heads or a larger width"),
        ("params", "lstm", 100, "the nearest, 2, has 80 (-20.0%); try a larger width"),
        ("params", "retnet", 10, "the nearest, 16, has"),  # heads of even size
        ("params", "rwkv6", 1000, "the nearest, 16, has"),  # heads of more than one feature
    ],
)
def test_what_cannot_be_met_names_the_nearest_and_what_to_try(
    figure: Any, name: str, target: int, message: str
) -> None:
    config = MIXERS[name].Config(**({} if name == "lstm" else {"heads": 8}))
    with pytest.raises(ValueError, match="within 2%: " + re.escape(message)):
        match(figure, target, MIXERS[name], config, Shape(width=8, mlp_width=32))


@pytest.mark.parametrize("heads", [0, -3])
def test_a_layer_that_cannot_be_built_at_any_width_says_why(heads: int) -> None:
    layer = MIXERS["transformer"]
    with pytest.raises(ValueError, match=f"heads: {heads} must divide the model width 8"):
        match("params", 1000, layer, layer.Config(heads=heads), Shape(width=8, mlp_width=32))


class FourHeads(MixerLayer):
    """Its heads are no option, so that a match may try widths that they do not divide."""

    def mix(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (4, -1)).flatten(-2)


def test_a_layer_that_fails_at_a_width_is_an_error_that_names_the_width() -> None:
    shape = Shape(width=60, mlp_width=240)
    target = round(1.08 * count("flops", FourHeads, FourHeads.Config(), shape))
    with pytest.raises(ValueError, match=r"^at width \d+: ") as caught:
        match("flops", target, FourHeads, FourHeads.Config(), shape)
    width = int(str(caught.value).split()[2].rstrip(":"))
    assert width % 4 != 0
    assert isinstance(caught.value.__cause__, RuntimeError)
