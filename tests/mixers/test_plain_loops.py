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
from tests.mixers.plain.common import LENGTH, SHAPE, WIDTH, Array, Parameters, PlainForm

FLOAT32 = 1e-5
"""Tolerance of layers that hold angles or decays in float32."""


class Case(NamedTuple):
    name: str
    plain: PlainForm
    options: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 1e-10


CASES = [
    *(Case("transformer", attention.transformer, {"heads": n}) for n in (1, 2, 8)),
    *(Case("sliding-attention", attention.sliding_attention, {"heads": 2, "window": n}) for n in (4, 12, 13, 64)),
    *(Case("transformer-xl", attention.transformer_xl, {"heads": 2, "segment": n}, FLOAT32) for n in (1, 3, 5, 12, 32)),
    Case("fox", attention.forgetting_transformer, {"heads": 2}),
    Case("path", attention.path, {"heads": 2, "rank": 3}),
    Case("path", attention.path, {"heads": 2, "rank": 3, "forget_gate": True}),
    Case("rt", attention.recurrent_transformer, {"heads": 2}),
    *(
        Case("rt", attention.recurrent_transformer, {"heads": 2, "implementation": name, **options})
        for name in ("naive", "tiled", "native")
        for options in ({}, {"persistent_norm": False}, {"block": 3}, {"block": 5}, {"block": 12}, {"block": 64})
        if name != "native" or "block" not in options
    ),
    Case("feedback-transformer", attention.feedback_transformer, {"heads": 2}),
    *(
        Case("staircase", attention.staircase, {"heads": 2, "chunk": chunk, "steps": steps})
        for chunk, steps in ((3, 3), (5, 2), (12, 1), (12, 3))
    ),
    *(
        Case("transformer-fam", attention.transformer_fam, {"heads": 2, "block": block, "earlier": n, "memory": 2})
        for block, n in ((3, 0), (3, 1), (5, 1), (3, 2))
    ),
    *(Case("rmt", attention.recurrent_memory, {"heads": 2, "segment": n, "memory": 2}) for n in (4, 5, 12, 32)),
    Case("linear-attention", recurrences.linear_attention, {"heads": 2}, FLOAT32),
    Case("linear-attention", recurrences.linear_attention, {"heads": 2, "positions": "none"}),
    Case("retnet", recurrences.retnet, {"heads": 2}, FLOAT32),
    Case("gla", recurrences.gla, {"heads": 2, "gate_rank": 3}),
    Case("rwkv6", recurrences.rwkv6, {"heads": 2, "shift_rank": 3, "decay_rank": 4}),
    Case("mlstm", recurrences.mlstm, {"heads": 2}),
    Case("deltanet", recurrences.deltanet, {"heads": 2}),
    Case("deltanet", recurrences.deltanet, {"heads": 2, "negative_eigenvalues": True}),
    Case("gated-deltanet", recurrences.deltanet, {"heads": 2}),
    Case("gated-deltanet", recurrences.deltanet, {"heads": 2, "negative_eigenvalues": True}),
    Case("rwkv7", recurrences.rwkv7, {"heads": 2, "rank": 3, "gate_rank": 4}),
    Case("rwkv7", recurrences.rwkv7, {"heads": 2, "rank": 3, "gate_rank": 4, "negative_eigenvalues": True}),
    Case("kda", recurrences.kda, {"heads": 2}),
    Case("kda", recurrences.kda, {"heads": 1, "convolution": 2, "negative_eigenvalues": True}),
    Case("gdn2", recurrences.gdn2, {"heads": 2}),
    Case("gdn2", recurrences.gdn2, {"heads": 4, "negative_eigenvalues": True}),
    Case("deltaproduct", recurrences.deltaproduct, {"heads": 2}),
    Case("deltaproduct", recurrences.deltaproduct, {"heads": 2, "householders": 4, "gated": False}),
    Case("deltaproduct", recurrences.deltaproduct, {"heads": 1, "householders": 1, "negative_eigenvalues": False}),
    Case("s5", recurrences.s5, {"state_size": 6}),
    Case("mamba", recurrences.mamba, {"state_size": 3}),
    Case("mamba2", recurrences.mamba2, {"heads": 2, "state_size": 3}),
    Case("mamba2", recurrences.mamba2, {"heads": 2, "state_size": 3, "convolution": 1}),
    Case("mamba3", recurrences.mamba3, {"heads": 2, "state_size": 8}),
    Case("mamba3", recurrences.mamba3, {"heads": 2, "state_size": 6, "rotated": 1.0, "rank": 3}),
    Case("lstm", recurrences.lstm),
    Case("slstm", recurrences.slstm, {"heads": 2}),
    Case("m2rnn", recurrences.m2rnn, {"heads": 2, "key_size": 3}),
    Case("lru", recurrences.lru, {"state_size": 5}),
    Case("hyena", recurrences.hyena, {"order": 2, "reach": 20}),
    Case("hyena", recurrences.hyena, {"order": 3, "bands": 3, "filter_width": 6}),
]


UNPASSED = ("transformer-xl",)
"""Layers that stop gradients, which a difference of outputs does not see."""


def build(case: Case) -> tuple[Layer, Parameters, Array]:
    """A layer whose parameters are away from their special starting values, these by name, and two sequences."""
    torch.manual_seed(0)
    layer = MIXERS[case.name](MIXERS[case.name].Config(**case.options), SHAPE).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    p = {key: value.detach().numpy() for key, value in layer.state_dict().items()}
    return layer, p, np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_equals_its_plain_form(case: Case) -> None:
    layer, p, x = build(case)
    want = np.stack([case.plain(p, layer.config, sequence) for sequence in x])
    got = layer(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in UNPASSED], ids=lambda case: case.name)
def test_gradients_of_a_layer_are_those_of_its_plain_form(case: Case) -> None:
    """A difference of the plain form along a random direction of all parameters and inputs at once."""
    layer, p, (x, _) = build(case)
    draw = np.random.default_rng(2)
    weights, dx = draw.standard_normal((2, *x.shape))
    dp = {key: draw.standard_normal(y.shape) for key, y in p.items()}

    def loss(h: float) -> float:
        moved = {key: y + h * dp[key] for key, y in p.items()}
        return float((weights * case.plain(moved, layer.config, x + h * dx)).sum())

    leaves = {"x": torch.from_numpy(x).requires_grad_(), **dict(layer.named_parameters())}
    output = (torch.from_numpy(weights) * layer(leaves["x"][None])[0]).sum()
    gradients = torch.autograd.grad(output, list(leaves.values()))
    got = sum(float((y.numpy() * {"x": dx, **dp}[key]).sum()) for key, y in zip(leaves, gradients, strict=True))
    assert got == pytest.approx((loss(1e-5) - loss(-1e-5)) / 2e-5, rel=1e-5)


def test_every_layer_has_a_plain_form() -> None:
    assert {case.name for case in CASES} == MIXERS.keys()
