"""What holds of the attention variants beside the equations of their plain forms (``test_plain_loops.py``)."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mixers import MIXERS
from mixers.base import Layer, Shape
from mixers.ops.path_attention import CHUNK
from mixers.rmt import RecurrentMemoryTransformer
from mixers.sliding_attention import SlidingAttention
from mixers.staircase import Staircase
from mixers.transformer import Transformer
from mixers.transformer_fam import TransformerFAM
from mixers.transformer_xl import TransformerXL

SHAPE = Shape(width=12, mlp_width=20, layers=2)
HEADS, LENGTH = 3, 11


def build(layer: Any, shape: Shape = SHAPE, **values: object) -> Any:
    """A layer in float64, none of whose parameters is still at a constant."""
    torch.manual_seed(0)
    built = layer(layer.Config(heads=HEADS, **values), shape).double()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return built


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, SHAPE.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("gated", [False, True])
def test_path_goes_from_chunk_to_chunk_as_it_decodes(gated: bool) -> None:
    """Four chunks, of which the last is not full; nearly equal inputs, so that triangular systems are far from 1."""
    layer, x = build(MIXERS["path"], forget_gate=gated), inputs(1) + 0.1 * inputs(3 * CHUNK + 5)
    state, steps = layer.init_state(2), []
    for x_BD in x.unbind(1):
        z_BD, state = layer.step(x_BD, state)
        steps.append(z_BD)
    torch.testing.assert_close(torch.stack(steps, 1), layer(x), rtol=1e-12, atol=1e-12)


def test_no_gradient_flows_through_the_memory_of_transformer_xl_to_its_inputs() -> None:
    layer, x = build(TransformerXL, segment=4), inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 4:8].square().sum(), x)
    assert (gradient[:, :4] == 0).all()
    assert (gradient[:, 4:8] != 0).all()
    assert (gradient[:, 8:] == 0).all()


def test_the_memory_of_transformer_xl_teaches_the_key_and_value_maps() -> None:
    """With a segment of one position, attention to the own position alone would give q and k no gradient."""
    layer = build(TransformerXL, segment=1)
    gradients = torch.autograd.grad(layer(inputs()).square().sum(), [layer.q.weight, layer.k.weight])
    assert all((gradient != 0).any() for gradient in gradients)


def memories(layer: Layer, blocks: int, length: int) -> list[Tensor]:
    """The memory before each of some blocks, and behind the last, over random inputs."""
    x = inputs(blocks * length)
    state = layer.init_state(2)
    found = [state["memory"]]
    with torch.no_grad():
        for t in range(blocks * length):
            _, state = layer.step(x[:, t], state)
            if (t + 1) % length == 0:
                found.append(state["memory"])
    return found


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize(
    ("layer", "values"), [(RecurrentMemoryTransformer, {"segment": 2}), (TransformerFAM, {"block": 2})]
)
def test_the_memory_stays_at_one_scale_and_takes_in_late_blocks(layer: Any, values: Any, scale: float) -> None:
    """Over 64 blocks, also under larger weights, as training may make them; unnormed it grew 50 times."""
    built = build(layer, **values, memory=2)
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.data *= scale
    found = memories(built, 64, 2)
    sizes = torch.stack([memory.square().mean().sqrt() for memory in found])
    assert sizes.max() < 1.5 * built.memory_norm.gain.square().mean().sqrt()
    assert sizes.min() > 0.5 * built.memory_norm.gain.square().mean().sqrt()

    # The change from one block to the next is as large at the end as at the start.
    changes = torch.stack([(b - a).norm() / a.norm() for a, b in pairwise(found)])
    assert changes[-8:].mean() > 0.3 * changes[:8].mean()


BAD: list[tuple[type[Layer], dict[str, int], str]] = [
    (SlidingAttention, {"window": 0}, "window: 0 must be at least 1"),
    (TransformerXL, {"segment": 0}, "segment: 0 must be at least 1"),
    (RecurrentMemoryTransformer, {"segment": 0}, "segment: 0 must be at least 1"),
    (RecurrentMemoryTransformer, {"memory": 0}, "memory: 0 must be at least 1"),
    (Staircase, {"chunk": 0}, "chunk: 0 must be at least 1"),
    (Staircase, {"steps": 0}, "steps: 0 must be at least 1"),
    (TransformerFAM, {"block": 0}, "block: 0 must be at least 1"),
    (TransformerFAM, {"earlier": -1}, "earlier: -1 must be at least 0"),
    (TransformerFAM, {"memory": 0}, "memory: 0 must be at least 1"),
]


@pytest.mark.parametrize(("layer", "values", "message"), BAD)
def test_settings_out_of_range_are_refused(layer: type[Layer], values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(layer, **values)


@pytest.mark.parametrize("layer", [Transformer, SlidingAttention, Staircase])
def test_equal_tokens_are_one_to_attention_without_positions(layer: type[Layer]) -> None:
    """An average of equal values is that value, whatever the weights: relative positions cannot count equal tokens.

    So these layers cannot tell the parity of ``1`` from that of ``1 1``, at any depth; RT can.
    """
    x_BTD = inputs(1).expand(-1, LENGTH, -1)
    for blocks in (build(layer), torch.nn.Sequential(*(build(layer) for _ in range(3)))):
        z_BTD = blocks(x_BTD)
        same(z_BTD, z_BTD[:, :1].expand_as(z_BTD))

    z_BTD = build(MIXERS["rt"])(x_BTD)
    assert (z_BTD[:, 1:] - z_BTD[:, :-1]).norm(dim=-1).min() > 1e-6
