"""Layers made of the matrix recurrence: what the plain forms (``test_plain_loops.py``) do not say of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from mixers.base import Shape
from mixers.deltanet import DeltaNet, GatedDeltaNet
from mixers.deltaproduct import DeltaProduct
from mixers.gdn2 import GatedDeltaNet2
from mixers.gla import GatedLinearAttention
from mixers.kda import KimiDeltaAttention
from mixers.linear_attention import LinearAttention
from mixers.mamba2 import Mamba2
from mixers.mamba3 import Mamba3
from mixers.mlstm import MLSTM, running_sum
from mixers.parts import MixerLayer, ShortConvolution
from mixers.retnet import RetNet
from mixers.rwkv import RWKV6, RWKV7

FAMILY = [
    *(RetNet, GatedLinearAttention, Mamba2, Mamba3, MLSTM, DeltaNet, GatedDeltaNet, RWKV6, RWKV7),
    *(KimiDeltaAttention, GatedDeltaNet2, DeltaProduct),
]
WITH_SWITCH = [DeltaNet, GatedDeltaNet, RWKV7, KimiDeltaAttention, GatedDeltaNet2, DeltaProduct]
HEADS, SIZE, LENGTH = 2, 4, 19
WIDTH = HEADS * SIZE


def build(layer: type[MixerLayer], **values: Any) -> Any:
    """A layer with two heads in float64, parameters away from their special starting values."""
    torch.manual_seed(0)
    built = layer(layer.Config(heads=HEADS, **values), Shape(width=WIDTH, mlp_width=8)).double().requires_grad_(False)
    for p in built.parameters():
        p += 0.2 * torch.randn_like(p)
    return built


def sequence(length: int = LENGTH) -> Tensor:
    """One sequence (T, D)."""
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def convolve(y: Tensor, convolution: ShortConvolution) -> Tensor:
    """PyTorch's convolution of (T, D), zeros before the first position."""
    weight, bias = convolution.weight_DW, convolution.bias_D
    padded = F.pad(y.T, (weight.shape[1] - 1, 0))
    return F.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0].T


@pytest.mark.parametrize(
    ("layer", "values"),
    [*((layer, {}) for layer in FAMILY), *((layer, {"negative_eigenvalues": True}) for layer in WITH_SWITCH)],
)
def test_decoding_over_several_chunks_equals_the_parallel_pass(
    layer: type[MixerLayer], values: dict[str, bool]
) -> None:
    built, x = build(layer, **values), torch.stack([sequence(37), sequence(37).flip(0)])
    state, outputs = built.init_state(2), []
    for t in range(37):
        y, state = built.mix_one(x[:, t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), built.mix(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_short_convolution_equals_that_of_pytorch(length: int, size: int, bias: bool) -> None:
    torch.manual_seed(0)
    convolution, x = ShortConvolution(WIDTH, size, bias).double(), sequence(length)
    want, state, steps = convolve(x, convolution), convolution.init_state(1), []
    for x_D in x:
        y, state = convolution.step(x_D[None], state)
        steps.append(y[0])
    torch.testing.assert_close(convolution(x[None])[0], want)
    torch.testing.assert_close(torch.stack(steps), want)


@pytest.mark.parametrize(
    ("layer", "values", "message"),
    [
        (RetNet, {"heads": 8}, "heads: 8 must leave heads of even size, not 1"),
        (GatedLinearAttention, {"heads": 8}, "heads: 8 must divide half the model width 8"),
        (Mamba2, {"heads": 2, "state_size": 0}, "state_size: 0 must be at least 1"),
        (
            Mamba3,
            {"heads": 2, "state_size": 4, "rotated": 0.4},
            "rotated: 0.4: rows are rotated in pairs",
        ),
        (MLSTM, {"heads": 2, "block": 3}, "block: 3 must divide the width inside the mixer, 16"),
        (DeltaNet, {"heads": 2, "convolution": 0}, "convolution size: 0 must be at least 1"),
        (DeltaProduct, {"heads": 2, "householders": 0}, "householders: 0 must be at least 1"),
        (RWKV7, {"heads": 2, "rank": 0}, "rank: 0 must be at least 1"),
        (RWKV7, {"heads": 8}, "heads: 8 leave heads of size 1"),
        (RWKV6, {"heads": 2, "shift_rank": 0}, "shift_rank: 0 must be at least 1"),
        (GatedLinearAttention, {"heads": 2, "gate_rank": 0}, "gate_rank: 0, gate_temperature: 16.0: give both > 0"),
    ],
)
def test_bad_settings_are_refused(layer: type[MixerLayer], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(layer.Config(**values), Shape(width=WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_is_finite_where_all_features_of_a_head_vanish(dtype: torch.dtype) -> None:
    """Heads of one channel and weights 50 times as large: features under 1e-40 or rounded to 0 in many positions."""
    torch.manual_seed(0)
    layer = LinearAttention(LinearAttention.Config(heads=WIDTH), Shape(width=WIDTH))
    for projection in (layer.q, layer.k):
        projection.weight.data *= 50
    x_BTD = sequence(64)[None].float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        z_BTD = layer(x_BTD)
    (gradient,) = torch.autograd.grad(z_BTD.sum(), x_BTD)
    assert z_BTD.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("length", [1, 128, 129, 300])
def test_sums_in_blocks_are_those_of_all_positions(length: int) -> None:
    x = torch.randn(2, 3, length, 2, dtype=torch.float64)
    torch.testing.assert_close(vmap(running_sum)(x), x.cumsum(2), rtol=1e-13, atol=1e-13)


def test_rwkv6_has_finite_gradients_at_the_strongest_decays() -> None:
    layer = build(RWKV6)
    layer.decay.bias_D.data.fill_(1000.0)
    x_BTD = sequence()[None].requires_grad_()
    assert torch.autograd.grad(layer(x_BTD).square().sum(), x_BTD)[0].isfinite().all()
