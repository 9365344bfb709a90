"""Every layer equals a plain form of it: NumPy in float64, position by position, from the equations of its paper.

The plain forms (``tests/mixers/plain``) read a layer's parameters and call nothing of ``mixers``.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mixers import MIXERS
from mixers.base import Layer
from tests.mixers.plain import attention, recurrences
from tests.mixers.plain.common import LENGTH, SHAPE, WIDTH, PlainForm

FLOAT32 = 1e-5
"""Tolerance of layers that hold angles or decays in float32."""
STEP = 1e-6
"""Half the distance between the two points of a central difference."""


class Case(NamedTuple):
    name: str
    plain: PlainForm
    options: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 1e-10


CASES = [
    Case("transformer", attention.transformer, {"heads": 2}),
    Case("sliding-attention", attention.sliding_attention, {"heads": 2, "window": 4}),
    Case("transformer-xl", attention.transformer_xl, {"heads": 2, "segment": 3}, FLOAT32),
    Case("rt", attention.recurrent_transformer, {"heads": 2}),
    Case("rt", attention.recurrent_transformer, {"heads": 2, "block": 3}),
    Case("feedback-transformer", attention.feedback_transformer, {"heads": 2}),
    Case("staircase", attention.staircase, {"heads": 2, "chunk": 3, "steps": 3}),
    Case("transformer-fam", attention.transformer_fam, {"heads": 2, "block": 3, "earlier": 1, "memory": 2}),
    Case("rmt", attention.recurrent_memory, {"heads": 2, "segment": 4, "memory": 2}),
    Case("linear-attention", recurrences.linear_attention, {"heads": 2}, FLOAT32),
    Case("retnet", recurrences.retnet, {"heads": 2}, FLOAT32),
    Case("gla", recurrences.gla, {"heads": 2, "gate_rank": 3}),
    Case("rwkv6", recurrences.rwkv6, {"heads": 2, "shift_rank": 3, "decay_rank": 4}),
    Case("deltanet", recurrences.deltanet, {"heads": 2}),
    Case("deltanet", recurrences.deltanet, {"heads": 2, "negative_eigenvalues": True}),
    Case("gated-deltanet", recurrences.deltanet, {"heads": 2}),
    Case("rwkv7", recurrences.rwkv7, {"heads": 2, "rank": 3, "gate_rank": 4}),
    Case("rwkv7", recurrences.rwkv7, {"heads": 2, "rank": 3, "gate_rank": 4, "negative_eigenvalues": True}),
    Case("s5", recurrences.s5, {"state_size": 6}),
    Case("mamba", recurrences.mamba, {"state_size": 3}),
    Case("mamba2", recurrences.mamba2, {"heads": 2, "state_size": 3}),
    Case("lstm", recurrences.lstm),
    Case("slstm", recurrences.slstm, {"heads": 2}),
    Case("m2rnn", recurrences.m2rnn, {"heads": 2, "key_size": 3}),
    Case("lru", recurrences.lru, {"state_size": 5}),
    Case("hyena", recurrences.hyena, {"order": 2, "reach": 20}),
    Case("hyena", recurrences.hyena, {"order": 3, "bands": 3, "filter_width": 6}),
]


def drawn(case: Case) -> tuple[Layer, Any]:
    """A layer whose parameters are away from their special starting values, and its config."""
    torch.manual_seed(0)
    config = MIXERS[case.name].Config(**case.options)
    layer = MIXERS[case.name](config, SHAPE).double().requires_grad_(False)
    for parameter in layer.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return layer, config


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_equals_its_plain_form(case: Case) -> None:
    layer, config = drawn(case)
    x = np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH))
    p = {key: value.numpy() for key, value in layer.state_dict().items()}
    want = np.stack([case.plain(p, config, sequence) for sequence in x])
    np.testing.assert_allclose(layer(torch.from_numpy(x)).numpy(), want, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "transformer-xl"], ids=lambda case: case.name)
def test_its_gradients_are_those_of_its_plain_form(case: Case) -> None:
    """Along one direction in all parameters and inputs. Transformer-XL passes none to the segment before."""
    layer, config = drawn(case)
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    point = {"x": normal(LENGTH, WIDTH), **dict(layer.named_parameters())}
    along = {name: normal(*y.shape) for name, y in point.items()}
    weights = normal(LENGTH, WIDTH)

    # Central difference of the plain form.
    ends = []
    for step in (STEP, -STEP):
        p = {name: (y + step * along[name]).numpy() for name, y in point.items()}
        ends.append((weights.numpy() * case.plain(p, config, p.pop("x"))).sum())

    leaves = [y.requires_grad_() for y in point.values()]
    gradients = torch.autograd.grad((weights * layer(point["x"][None])[0]).sum(), leaves)
    slope = sum(float((y * d).sum()) for y, d in zip(gradients, along.values(), strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-4)


def test_every_layer_has_a_plain_form() -> None:
    assert {case.name for case in CASES} == MIXERS.keys()
