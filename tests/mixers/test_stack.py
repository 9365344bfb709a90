"""Stacks of different layers against the same layers, one by one."""

import pickle
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mixers import MIXERS, Shape, build, costs, find_mixer
from mixers.base import NO_RECURRENCE
from mixers.costs import count_model, count_parameters, count_state
from mixers.matching import count, match
from mixers.models import LanguageModel
from mixers.rt.layer import RecurrentTransformer
from mixers.short_convolution import ConvolvedLayer, with_short_convolution
from mixers.stack import StackLayer

OWN = "tests.mixers.test_short_convolution:PositionWise"
SMALL: dict[str, Any] = {"width": 16, "mlp_width": 32}


@pytest.mark.parametrize(
    ("name", "layers", "kinds"),
    [
        ("2*deltanet+transformer", None, ["deltanet", "deltanet", "transformer"]),
        ("lstm+sliding-attention", 4, ["lstm", "sliding-attention"] * 2),
        ("2*rt+mamba2", None, ["rt", "rt", "mamba2"]),
        (f"{OWN}+transformer", 2, [OWN, "transformer"]),
    ],
)
def test_a_stack_is_its_layers_one_after_another(name: str, layers: int | None, kinds: list[str]) -> None:
    """Bit by bit in training, to rounding step by step; parameters, state and operations are the sums of theirs."""
    torch.manual_seed(0)
    stack = cast(StackLayer, build(name, layers=layers, **SMALL).double())
    torch.manual_seed(0)
    shape = Shape(**SMALL, layers=len(stack.layers))
    alone = [type(of_stack)(of_stack.config, shape).double() for of_stack in stack.layers]
    x_BTD = torch.randn(2, 9, 16, dtype=torch.float64)
    assert [type(layer) for layer in alone] == [find_mixer(kind) for kind in kinds]
    z_BTD = stack(x_BTD)
    y_BTD = x_BTD
    for layer in alone:
        y_BTD = layer(y_BTD)
    assert torch.equal(z_BTD, y_BTD)

    state = stack.init_state(2)
    held = [sum(y.numel() for y in state.values())]
    for t in range(x_BTD.shape[1]):
        z_BD, state = stack.step(x_BTD[:, t], state)
        torch.testing.assert_close(z_BD, z_BTD[:, t], rtol=1e-12, atol=1e-12)
        held.append(sum(y.numel() for y in state.values()))

    of_stack = costs(type(stack), stack.config, stack.shape)
    of_each = [costs(type(layer), layer.config, layer.shape) for layer in alone]
    assert of_stack.parameters == sum(each.parameters for each in of_each)
    for figures in ("state_floats", "flops_per_token"):
        sums = {n: sum(getattr(each, figures)[n] for each in of_each) for n in getattr(of_stack, figures)}
        assert getattr(of_stack, figures) == pytest.approx(sums, abs=len(of_each))  # rounded a token
    model = LanguageModel(type(stack), stack.config, stack.shape, 11)
    assert count_model(type(stack), stack.config, stack.shape, 11, name) == count_parameters(model)
    assert count_state(stack.float(), [9]) == {9: max(held) // 2}


def test_equal_layers_are_the_model_of_that_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names of its parameters; and RT still computes neighbours together."""
    together: list[int] = []
    through = RecurrentTransformer.through.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, layers: Sequence[Any], x_BTD: Tensor) -> Any:
        together.append(len(layers))
        return through(cls, layers, x_BTD)

    monkeypatch.setattr(RecurrentTransformer, "through", classmethod(watched))
    rt, kind, shape = MIXERS["rt"], find_mixer("2*rt"), Shape(**SMALL, layers=4)
    made = []
    for layer, config in ((rt, rt.Config(heads=2)), (kind, kind.Config(rt__heads=2))):
        torch.manual_seed(0)
        made.append(LanguageModel(layer, config, shape, 11))
    plain, stacked = made
    assert [*plain.state_dict()] == [*stacked.state_dict()]
    tokens_BT = torch.arange(7)[None]
    assert torch.equal(plain(tokens_BT), stacked(tokens_BT))

    build("2*rt+transformer+rt", **SMALL)(torch.randn(1, 5, 16))
    assert together == [4, 4, 2, 1]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("3*", "no mixer '3*': a stack is written as in 3*gated-deltanet+transformer"),
        ("0*rt+lstm", "no mixer '0*rt+lstm': a stack is written as"),
        ("rt++lstm", "no mixer 'rt++lstm': a stack is written as"),
        ("rt+lstn", "no mixer 'lstn': did you mean lstm"),
        ("rt+rmt", "mixer 'rt+rmt': rmt holds all layers of a model itself, so no stack can hold it"),
    ],
)
def test_what_is_no_stack_is_one_line(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as raised:
        find_mixer(name)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"layers": 6}, "its 4 layers cannot be repeated to 6: give --layers 8"),
        ({"heads": 4}, "has no option 'heads': choose from deltanet__heads, .*transformer__heads"),
    ],
)
def test_a_stack_needs_its_own_number_of_layers_and_its_own_options(given: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        build("3*deltanet+transformer", **given)


def test_settings_of_members_reach_them_and_are_pickled() -> None:
    stack = cast(StackLayer, build("rt+2*sliding-attention", **SMALL, rt__block=8, sliding_attention__window=3))
    assert [vars(layer.config).get("window", layer.config.heads) for layer in stack.layers] == [16, 3, 3]
    assert pickle.loads(pickle.dumps(stack.config)) == stack.config
    assert stack.remark(stack.config, 8) == f"rt: {NO_RECURRENCE}"
    assert stack.remark(stack.config, 9) is None
    assert stack.plain_config(stack.config).rt__implementation == "naive"
    assert (stack.family, find_mixer("2*gla").family) == ("stack", "linear attention")


def test_each_layer_of_a_stack_has_its_short_convolution() -> None:
    kind = with_short_convolution(find_mixer("deltanet+transformer"), 3)
    model = LanguageModel(kind, kind.Config(transformer__heads=2), Shape(**SMALL, layers=2), 11)
    assert all(isinstance(layer, ConvolvedLayer) for layer in model.stack)
    assert model.stack[1].config.heads == 2


def test_a_stack_is_matched_at_a_multiple_of_the_heads_of_all_members() -> None:
    kind, shape = find_mixer("deltanet+transformer"), Shape(width=24, mlp_width=96, layers=2)
    config = kind.Config(deltanet__heads=2, transformer__heads=3)
    target = count("params", kind, config, Shape(width=36, mlp_width=144, layers=2))
    assert match("params", target, kind, config, shape) == (Shape(width=36, mlp_width=144, layers=2), target)
