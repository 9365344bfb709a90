"""The convolution before any layer: step form, reach, costs, and what the layer inside reads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Layer, Shape, State
from mixers.costs import LENGTHS, Costs, costs
from mixers.deep import DeepLayer
from mixers.hyena import Hyena
from mixers.models import LanguageModel
from mixers.rt.layer import RecurrentTransformer
from mixers.short_convolution import ConvolvedLayer, mixer_label, with_short_convolution

SIZE, WIDTH = 3, 32
SHAPE = Shape(width=WIDTH, mlp_width=32)
each_mixer = pytest.mark.parametrize("name", MIXERS)


class PositionWise(Layer):
    """A user's layer that sees its own position alone; its state has a name that the convolution's might have."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.tanh()

    def init_state(self, batch: int) -> State:
        return {"convolution": torch.zeros(batch, 0)}

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        assert list(state) == ["convolution"]
        return x_BD.tanh(), state


class OwnGrowth(RecurrentTransformer):
    """A subclass without a ``growth_period`` of its own."""


def build(layer_class: type[Layer], size: int = SIZE, shape: Shape = SHAPE, **options: Any) -> Any:
    torch.manual_seed(0)
    convolved = with_short_convolution(layer_class, size)
    return convolved(convolved.Config(**options), shape).double().requires_grad_(False)


def inputs(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@each_mixer
def test_steps_equal_the_whole(name: str) -> None:
    layer, x_BTD = build(MIXERS[name]), inputs(7)
    try:
        state = layer.init_state(2)
    except NotImplementedError:
        pytest.skip("no step form")
    for t, want_BD in enumerate(layer(x_BTD).unbind(1)):
        z_BD, state = layer.step(x_BTD[:, t], state)
        torch.testing.assert_close(z_BD, want_BD, rtol=1e-9, atol=1e-9)


@each_mixer
def test_the_layer_inside_reads_the_convolved_sequence(name: str) -> None:
    """And is called itself, so that it computes as it does alone; L = 4 layers halve the residual branch."""
    layer, x_BTD = build(MIXERS[name], shape=Shape(width=WIDTH, mlp_width=32, layers=4)), inputs(7)
    assert type(layer.layer) is MIXERS[name]
    taps_DW = layer.convolution.weight_DW
    y_BTD = x_BTD.clone()
    for back in range(SIZE):
        y_BTD[:, back:] += 0.5 * taps_DW[:, SIZE - 1 - back] * x_BTD[:, : 7 - back]
    torch.testing.assert_close(layer(x_BTD), layer.layer(y_BTD), rtol=1e-9, atol=1e-9)


def test_the_convolution_reaches_its_size_and_no_later_position() -> None:
    layer, x_BTD = build(PositionWise), inputs(9)
    changed_BTD = x_BTD.clone()
    changed_BTD[:, 4] += 1.0
    seen_T = (layer(changed_BTD) != layer(x_BTD)).any(0).any(1)
    assert seen_T.tolist() == [4 <= t < 4 + SIZE for t in range(9)]


def test_it_adds_parameters_and_state_and_no_counted_operations() -> None:
    for name in ("transformer", "rt", "lstm"):
        plain, convolved = MIXERS[name], with_short_convolution(MIXERS[name], SIZE)
        before, after = (costs(layer, layer.Config(), SHAPE) for layer in (plain, convolved))
        assert after == Costs(
            parameters=before.parameters + SIZE * WIDTH,
            state_floats={n: before.state_floats[n] + (SIZE - 1) * WIDTH for n in LENGTHS},
            flops_per_token=before.flops_per_token,
        )


@each_mixer
def test_what_a_class_says_of_itself_is_what_the_layer_inside_says(name: str) -> None:
    plain, convolved = MIXERS[name], with_short_convolution(MIXERS[name], SIZE)
    config = plain.Config()
    assert convolved.Config is plain.Config
    assert (convolved.family, convolved.paper) == (plain.family, plain.paper)
    assert convolved.growth_period(config) == plain.growth_period(config)
    assert convolved.loop_period(config) == plain.loop_period(config)
    assert convolved.remark(config, 1) == plain.remark(config, 1)
    assert convolved.plain_config(config) == plain.plain_config(config)
    assert issubclass(convolved, DeepLayer) == issubclass(plain, DeepLayer)


def test_a_growth_period_is_that_of_the_class_that_defines_it() -> None:
    assert "growth_period" in vars(with_short_convolution(RecurrentTransformer, SIZE))
    assert "growth_period" not in vars(with_short_convolution(OwnGrowth, SIZE))


def test_stacked_layers_have_a_convolution_each_and_run_one_by_one() -> None:
    """RT computes several layers at once, and a stack of convolved ones must not: the convolutions stand between."""
    convolved = with_short_convolution(RecurrentTransformer, SIZE)
    shape = Shape(width=WIDTH, mlp_width=32, layers=2)
    torch.manual_seed(0)
    model = LanguageModel(convolved, convolved.Config(), shape, 5).requires_grad_(False)
    assert sum(isinstance(layer, ConvolvedLayer) for layer in model.stack) == 2
    x_BTD = inputs(6).float()
    first, second = model.stack
    torch.testing.assert_close(model.layers(x_BTD), second(first(x_BTD)))
    assert not model.layers.at_once(x_BTD)


def test_a_layer_class_is_made_once_and_0_is_the_class_itself() -> None:
    assert with_short_convolution(Hyena, SIZE) is with_short_convolution(Hyena, SIZE)
    assert with_short_convolution(Hyena, 0) is Hyena
    assert (mixer_label("hyena", 0), mixer_label("hyena", SIZE)) == ("hyena", "hyena+conv3")
