"""Every layer equals a plain form of it: NumPy in float64, position by position, from the equations of its paper.

The plain forms (``tests/mixers/plain``) read a layer's parameters and call nothing of ``mixers``.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mixers import MIXERS
from tests.mixers.plain import attention, recurrences
from tests.mixers.plain.common import LENGTH, SHAPE, WIDTH, PlainForm

FLOAT32 = 1e-5
"""Tolerance of layers that hold angles or decays in float32."""


class Case(NamedTuple):
    name: str
    plain: PlainForm
    options: dict[str, Any] = {}  # noqa: RUF012
    tolerance: float = 1e-10


CASES = [
    Case("transformer", attention.transformer, {"heads": 2}),
    Case("sliding-attention", attention.sliding_attention, {"heads": 2, "window": 4}),
    Case("transformer-xl", attention.transformer_xl, {"heads": 2, "segment": 3}, FLOAT32),
    Case("fox", attention.forgetting_transformer, {"heads": 2}),
    Case("path", attention.path, {"heads": 2, "rank": 3}),
    Case("path", attention.path, {"heads": 2, "rank": 3, "forget_gate": True}),
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
    Case("lru", recurrences.lru, {"state_size": 5}),
    Case("hyena", recurrences.hyena, {"order": 2, "reach": 20}),
    Case("hyena", recurrences.hyena, {"order": 3, "bands": 3, "filter_width": 6}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_equals_its_plain_form(case: Case) -> None:
    # A layer whose parameters are away from their special starting values.
    torch.manual_seed(0)
    config = MIXERS[case.name].Config(**case.options)
    layer = MIXERS[case.name](config, SHAPE).double().requires_grad_(False)
    for parameter in layer.parameters():
        parameter += 0.2 * torch.randn_like(parameter)

    x = np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH))
    p = {key: value.numpy() for key, value in layer.state_dict().items()}
    want = np.stack([case.plain(p, config, sequence) for sequence in x])
    np.testing.assert_allclose(layer(torch.from_numpy(x)).numpy(), want, rtol=case.tolerance, atol=case.tolerance)


def test_every_layer_has_a_plain_form() -> None:
    assert {case.name for case in CASES} == MIXERS.keys()
