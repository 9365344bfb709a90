"""The switch ``negative_eigenvalues``: spectra of the state's transition, and parity, which needs a negative one."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mixers.base import Shape
from mixers.deltanet import DeltaNet, GatedDeltaNet
from mixers.deltaproduct import DeltaProduct
from mixers.gdn2 import GatedDeltaNet2
from mixers.kda import KimiDeltaAttention
from mixers.ops.selective_scan import discretise
from mixers.parts import MixerLayer
from mixers.rwkv import RWKV7

HEADS, WIDTH, LENGTH = 2, 8, 37
FAMILY = [DeltaNet, GatedDeltaNet, RWKV7, KimiDeltaAttention, GatedDeltaNet2, DeltaProduct]
START, ZERO, ONE = range(3)
SURE = 40.0
"""A logit whose sigmoid is 1 in float64."""


def build(layer: type[MixerLayer], on: bool, heads: int = HEADS, **values: Any) -> Any:
    torch.manual_seed(0)
    config = layer.Config(heads=heads, negative_eigenvalues=on, **values)
    return layer(config, Shape(width=WIDTH, mlp_width=8)).double().requires_grad_(False)


def sequence() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def eigenvalues(layer: Any, x_BTD: Tensor) -> Tensor:
    """Eigenvalues (..., K) of the matrices with which the layer multiplies its state, or of their first factors."""
    if isinstance(layer, RWKV7):
        _q, k, _v, g, a, b = layer._project(layer._mixed(x_BTD))[0]
    elif isinstance(layer, KimiDeltaAttention):
        _q, k, _v, g, a, b = layer._project(x_BTD, layer.convolution(layer.qkv(x_BTD)))[0]
    elif isinstance(layer, DeltaProduct):
        controls = [controls_of(x_BTD) for controls_of in layer._maps[1:]]
        _q, k, _v, g, b = layer._pairs(layer.convolution.parts(layer.qkv(x_BTD), layer._shapes), *controls)
        k, a, b = k[:, :, 0], None, b[:, :, 0]
    else:
        _q, k, _v, g, a, b = layer._recurrence(x_BTD, layer.convolution(layer.qkv(x_BTD)))
    if a is None:
        a, b = -k, g.exp() * b
    decay_BTHK = torch.ones_like(b) if g is None else g.exp().expand_as(b)
    found = torch.linalg.eigvals(torch.diag_embed(decay_BTHK) + a[..., None] * b[..., None, :])
    assert found.imag.abs().max() < 1e-9
    return found.real


@pytest.mark.parametrize(("on", "least"), [(False, 0.0), (True, -1.0)])
@pytest.mark.parametrize("layer", FAMILY)
def test_a_transition_has_a_negative_eigenvalue_with_the_switch_alone(
    layer: type[MixerLayer], on: bool, least: float
) -> None:
    """Write strengths or learning rates near their largest value, and decays near 1."""
    built, x_BTD = build(layer, on), sequence()
    if isinstance(built, RWKV7):
        built.rate.bias_D += 6
        built.decay.bias_D -= 12
    else:
        x_BTD[..., 0], built.strength.weight[:, 0] = 1.0, 6.0
    if isinstance(built, GatedDeltaNet | KimiDeltaAttention | DeltaProduct):
        built.decay.log_rate_H -= 12

    found = eigenvalues(built, x_BTD)
    assert found.min() > least
    assert found.max() < 1 + 1e-12
    assert (found.amin(-1) < 0).any() == on
    if on:
        assert found.min() < -0.9


@pytest.mark.parametrize(("on", "least"), [(False, torch.e ** -(torch.e**-0.5) - 1), (True, -1.0)])
def test_eigenvalues_of_rwkv7_stay_in_their_range_with_any_decay(on: bool, least: float) -> None:
    """Without the switch, a strong decay with a large learning rate gives one as low as -0.455."""
    built = build(RWKV7, on)
    for p in built.parameters():
        p *= 8
    built.rate.bias_D += 20
    found = eigenvalues(built, sequence())
    assert least - 1e-12 < found.min() < least + 0.06
    assert found.max() < 1 + 1e-12


def test_decays_of_mamba_lie_between_minus_one_and_one() -> None:
    one_1 = torch.ones(1)
    decays = [discretise(one_1, dt * one_1, -torch.ones(1, 1), one_1, True)[0].item() for dt in (1e-9, 0.5, 99.0)]
    assert decays == pytest.approx([1.0, 2 * torch.e**-0.5 - 1, -1.0])


def parity_layer(on: bool) -> Any:
    """One head whose key is the first axis for every token, which are the first three axes of the input.

    The first token writes 1 with β = 1, a zero writes with β = 0, and a one writes 0 with the largest β.
    """
    layer = build(DeltaNet, on, heads=1, convolution=1)
    for p in layer.parameters():
        p.zero_()
    layer.convolution.weight_DW.fill_(1.0)
    layer.norm.gain.fill_(1.0)
    layer.out.weight.copy_(torch.eye(WIDTH))

    q_DD, k_DD, v_DD = layer.qkv.weight.chunk(3)
    q_DD[0, :3] = k_DD[0, :3] = 1e6
    v_DD[0, START] = 1.0
    layer.strength.weight[0, :3] = torch.tensor([0.0 if on else SURE, -SURE, SURE])
    return layer


def test_the_delta_rule_computes_parity_with_one_number_of_state() -> None:
    bits_SN = torch.tensor(list(product((0, 1), repeat=6)))
    tokens_ST = torch.cat([torch.full((64, 1), START), ZERO + bits_SN], 1)
    x_STD = torch.eye(WIDTH, dtype=torch.float64)[tokens_ST]
    sign_ST = torch.cat([torch.ones(64, 1), (-1.0) ** bits_SN.cumsum(1)], 1).double()

    layer = parity_layer(on=True)
    y_STD, state = layer.mix(x_STD), layer.init_state(64)
    torch.testing.assert_close(y_STD[..., 0], sign_ST * y_STD[0, 0, 0], rtol=1e-5, atol=0)
    for x_SD in x_STD.unbind(1):
        _, state = layer.mix_one(x_SD, state)
    (S_SKK,) = state["S"].unbind(1)
    torch.testing.assert_close(S_SKK[:, 0, 0], sign_ST[:, -1] * S_SKK[0, 0, 0], rtol=1e-9, atol=0)
    assert S_SKK.count_nonzero() == 64

    # The same layer without the switch forgets with each one, and never changes the sign.
    assert (parity_layer(on=False).mix(x_STD)[..., 0] >= 0).all()
