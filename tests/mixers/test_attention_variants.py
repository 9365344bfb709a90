"""What holds of the attention variants beside the equations of their plain forms (``test_plain_loops.py``)."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Shape
from mixers.ops.path_attention import CHUNK

SHAPE = Shape(width=12, mlp_width=20, layers=2)
HEADS, LENGTH = 3, 11


def build(name: str, **values: object) -> Any:
    """A layer in float64, none of whose parameters is still at a constant."""
    torch.manual_seed(0)
    built = MIXERS[name](MIXERS[name].Config(heads=HEADS, **values), SHAPE).double()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return built


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, SHAPE.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("gated", [False, True])
def test_path_goes_from_chunk_to_chunk_as_it_decodes(gated: bool) -> None:
    """Four chunks, of which the last is not full; nearly equal inputs, so that triangular systems are far from 1."""
    layer, x = build("path", forget_gate=gated), inputs(1) + 0.1 * inputs(3 * CHUNK + 5)
    state, steps = layer.init_state(2), []
    for x_BD in x.unbind(1):
        z_BD, state = layer.step(x_BD, state)
        steps.append(z_BD)
    torch.testing.assert_close(torch.stack(steps, 1), layer(x), rtol=1e-12, atol=1e-12)


def test_no_gradient_flows_through_the_memory_of_transformer_xl_to_its_inputs() -> None:
    layer, x = build("transformer-xl", segment=4), inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 4:8].square().sum(), x)
    assert (gradient[:, :4] == 0).all()
    assert (gradient[:, 4:8] != 0).all()
    assert (gradient[:, 8:] == 0).all()


def test_the_memory_of_transformer_xl_teaches_the_key_and_value_maps() -> None:
    """With a segment of one position, attention to the own position alone would give q and k no gradient."""
    layer = build("transformer-xl", segment=1)
    gradients = torch.autograd.grad(layer(inputs()).square().sum(), [layer.q.weight, layer.k.weight])
    assert all((gradient != 0).any() for gradient in gradients)


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(("name", "values"), [("rmt", {"segment": 2}), ("transformer-fam", {"block": 2})])
def test_the_memory_stays_at_one_scale_and_takes_in_late_blocks(name: str, values: Any, scale: float) -> None:
    """Over 64 blocks, also under larger weights, as training may make them; unnormed it grew 50 times."""
    built = build(name, **values, memory=2)
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.data *= scale
    state, x = built.init_state(2), inputs(128)
    found = [state["memory"]]  # before each block, and behind the last
    with torch.no_grad():
        for t in range(128):
            _, state = built.step(x[:, t], state)
            if t % 2:
                found.append(state["memory"])
    sizes = torch.stack([memory.square().mean().sqrt() for memory in found])
    assert sizes.max() < 1.5 * built.memory_norm.gain.square().mean().sqrt()
    assert sizes.min() > 0.5 * built.memory_norm.gain.square().mean().sqrt()

    # The change from one block to the next is as large at the end as at the start.
    changes = torch.stack([(b - a).norm() / a.norm() for a, b in pairwise(found)])
    assert changes[-8:].mean() > 0.3 * changes[:8].mean()


@pytest.mark.parametrize("name", ["transformer", "sliding-attention", "staircase"])
def test_equal_tokens_are_one_to_attention_without_positions(name: str) -> None:
    """An average of equal values is that value, whatever the weights: relative positions cannot count equal tokens.

    So these layers cannot tell the parity of ``1`` from that of ``1 1``, at any depth; RT can.
    """
    x_BTD = inputs(1).expand(-1, LENGTH, -1)
    for blocks in (build(name), torch.nn.Sequential(*(build(name) for _ in range(3)))):
        z_BTD = blocks(x_BTD)
        torch.testing.assert_close(z_BTD, z_BTD[:, :1].expand_as(z_BTD), rtol=1e-11, atol=1e-11)

    z_BTD = build("rt")(x_BTD)
    assert (z_BTD[:, 1:] - z_BTD[:, :-1]).norm(dim=-1).min() > 1e-6
