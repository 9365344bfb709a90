"""Layers made of the matrix recurrence: what the plain forms (``test_plain_loops.py``) do not say of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from mixers import MIXERS
from mixers.base import Shape
from mixers.linear_attention import LinearAttention
from mixers.mlstm import running_sum
from mixers.parts import ShortConvolution

FAMILY = [
    *("retnet", "gla", "mamba2", "mamba3", "mlstm", "deltanet", "gated-deltanet", "rwkv6", "rwkv7"),
    *("kda", "gdn2", "deltaproduct"),
]
WITH_SWITCH = ["deltanet", "gated-deltanet", "rwkv7", "kda", "gdn2", "deltaproduct"]
HEADS, SIZE, LENGTH = 2, 4, 19
WIDTH = HEADS * SIZE


def build(name: str, **values: Any) -> Any:
    """A layer with two heads in float64, parameters away from their special starting values."""
    torch.manual_seed(0)
    config = MIXERS[name].Config(heads=HEADS, **values)
    built = MIXERS[name](config, Shape(width=WIDTH, mlp_width=8)).double().requires_grad_(False)
    for p in built.parameters():
        p += 0.2 * torch.randn_like(p)
    return built


def sequence(length: int = LENGTH) -> Tensor:
    """One sequence (T, D)."""
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "values"),
    [*((name, {}) for name in FAMILY), *((name, {"negative_eigenvalues": True}) for name in WITH_SWITCH)],
)
def test_decoding_over_several_chunks_equals_the_parallel_pass(name: str, values: dict[str, bool]) -> None:
    built, x = build(name, **values), torch.stack([sequence(37), sequence(37).flip(0)])
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
    padded, weight = F.pad(x.T, (size - 1, 0)), convolution.weight_DW[:, None]
    want = F.conv1d(padded[None], weight, convolution.bias_D, groups=WIDTH)[0].T
    state, steps = convolution.init_state(1), []
    for x_D in x:
        y, state = convolution.step(x_D[None], state)
        steps.append(y[0])
    torch.testing.assert_close(convolution(x[None])[0], want)
    torch.testing.assert_close(torch.stack(steps), want)


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
    layer = build("rwkv6")
    layer.decay.bias_D.data.fill_(1000.0)
    x_BTD = sequence()[None].requires_grad_()
    assert torch.autograd.grad(layer(x_BTD).square().sum(), x_BTD)[0].isfinite().all()
