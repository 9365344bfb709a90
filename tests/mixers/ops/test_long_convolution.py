"""The kernels of the gated long convolution against plain PyTorch in float64: outputs and every gradient."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import vmap

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.hyena import Hyena  # noqa: E402
from mixers.ops.convolution import long_convolution  # noqa: E402
from mixers.ops.kernels import long_convolution as kernels  # noqa: E402
from mixers.ops.kernels import short_convolution as short_kernels  # noqa: E402
from mixers.ops.kernels.long_convolution import gated_convolution_method  # noqa: E402
from mixers.ops.kernels.short_convolution import short_convolution_method  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.runs import check_autocast  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")

Inputs = tuple[Tensor, Tensor, Tensor]
"""v, the gate and something else side by side, the filters, and the gradient of the outputs."""


def draw(R: int, B: int, T: int, D: int) -> Inputs:
    generator = torch.Generator().manual_seed(R + 2 * B + 3 * T + 5 * D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double().to(DEVICE)

    return normal(R, B, T, 3 * D), normal(R, T, D), normal(R, B, T, D)


def results(function: Callable[..., Tensor], inputs: Inputs, data: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Outputs, and the gradients of v and the gate, and of the filters."""
    side_by_side, h, dy = inputs
    leaves = [side_by_side.to(data).requires_grad_(), h.to(wide).requires_grad_()]
    y = vmap(lambda both, h: function(*both.chunk(3, -1)[:2], h))(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def fused(dtype: torch.dtype, v_BTD: Tensor, gate_BTD: Tensor, h_TD: Tensor) -> Tensor:
    return over_runs(gated_convolution_method(dtype), v_BTD, gate_BTD, h_TD)[0]


def plain(v_BTD: Tensor, gate_BTD: Tensor, h_TD: Tensor) -> Tensor:
    return long_convolution(gate_BTD * v_BTD, h_TD)


def rounded(v_BTD: Tensor, gate_BTD: Tensor, h_TD: Tensor) -> Tensor:
    """The same of factors rounded to bfloat16, and of a sum in float32."""
    return long_convolution(gate_BTD * v_BTD, h_TD.bfloat16().float()).bfloat16()


def check_float32(inputs: Inputs) -> None:
    got = results(partial(fused, torch.float32), inputs, torch.float32, torch.float32)
    want = results(plain, inputs, torch.float64, torch.float64)
    for name, y, reference in zip(("y", "dv, dgate", "dh"), got, want, strict=True):
        assert y.shape == reference.shape
        assert error(y, reference) <= 1e-5, name


@interpreted
@pytest.mark.parametrize(
    ("R", "B", "T", "D"), [(1, 1, 1, 16), (3, 2, 5, 20), (1, 33, 32, 16), (2, 3, 63, 33), (1, 2, 100, 16)]
)
def test_interpreted(R: int, B: int, T: int, D: int) -> None:
    check_float32(draw(R, B, T, D))


@interpreted
@pytest.mark.parametrize("programs", [1, 10**6])
def test_filters_take_sequences_in_any_number_of_groups(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    check_float32(draw(1, 65, 33, 16))


@interpreted
def test_rows_of_any_layout_and_runs_alone() -> None:
    side_by_side, h, _ = (y.float() for y in draw(3, 2, 40, 16))
    v, gate, _ = side_by_side.chunk(3, -1)
    function = vmap(partial(fused, torch.float32))
    together = function(v, gate, h)
    assert torch.equal(together, function(v.contiguous(), gate, h))
    assert torch.equal(together, function(*(y.movedim(0, -1).contiguous().movedim(-1, 0) for y in (v, gate, h))))
    for r in range(3):
        assert torch.equal(together[r : r + 1], function(v[r : r + 1], gate[r : r + 1], h[r : r + 1]))


@interpreted
def test_the_layer_trains_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a skip in each of several filters; the kernels' dtype is float32 here."""
    torch.manual_seed(0)
    layer = Hyena(Hyena.Config(order=3), Shape(width=16, mlp_width=16))
    x = torch.randn(2, 2, 40, 16)
    params, _ = torch.func.stack_module_state([layer, Hyena(layer.config, layer.shape)])
    gradients = []
    for fast in (False, True):
        monkeypatch.setattr("mixers.ops.convolution.runs_fused", lambda x, fast=fast: fast)
        monkeypatch.setattr(kernels, "gated_convolution_method", lambda dtype: gated_convolution_method(torch.float32))
        monkeypatch.setattr(
            short_kernels,
            "short_convolution_method",
            lambda dtype, silu: short_convolution_method(torch.float32, silu),
        )
        z = vmap(lambda p, y: torch.func.functional_call(layer, p, (y,)))(params, x)
        gradients.append([z.detach(), *torch.autograd.grad(z.square().sum(), list(params.values()))])
    for want, got in zip(*gradients, strict=True):
        assert error(got, want.double()) <= 2e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("R", "B", "T", "D"), [(1, 1, 1, 128), (3, 37, 63, 64), (1, 16, 100, 92), (30, 64, 128, 128), (1, 4, 1024, 128)]
)
def test_gpu(R: int, B: int, T: int, D: int) -> None:
    inputs = draw(R, B, T, D)
    check_float32(inputs)

    bfloat16 = partial(fused, torch.bfloat16)
    want = results(plain, inputs, torch.float64, torch.float64)
    theirs = results(rounded, inputs, torch.bfloat16, torch.float32)
    got, again = (results(bfloat16, inputs, torch.bfloat16, torch.float32) for _ in range(2))
    for i, (y, y_again, y_theirs, reference) in enumerate(zip(got, again, theirs, want, strict=True)):
        assert torch.equal(y, y_again), i
        assert error(y, reference) <= 1.5 * error(y_theirs, reference) + 1e-6, i


@pytest.mark.gpu
@on_gpu
def test_the_layer_runs_in_them_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its output is that of plain operations up to bfloat16's rounding."""
    torch.manual_seed(0)
    check_autocast(Hyena(Hyena.Config(), Shape()), ["convolution"], monkeypatch, 2)
