"""The LSTM's kernels against plain PyTorch in float64: outputs and every gradient."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.lstm import LSTM  # noqa: E402
from mixers.ops.kernels import lstm as kernels  # noqa: E402
from mixers.ops.kernels.lstm import lstm_method  # noqa: E402
from mixers.ops.lstm import lstm  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from tests.kernel_marks import interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("nan_filled_scratch")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs' share in the gates, recurrent weight, bias, and the gradient of the outputs."""


def draw(R: int, B: int, T: int, D: int) -> Inputs:
    generator = torch.Generator().manual_seed(R + 2 * B + 3 * T + 5 * D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    # Numbers that bfloat16 holds, so that all forms start from the same ones.
    inputs, weight, dh = normal(R, B, T, 4 * D), normal(R, 4 * D, D) * D**-0.5, normal(R, B, T, D)
    inputs, weight, dh = (y.bfloat16().double() for y in (inputs, weight, dh))
    return inputs, weight, normal(R, 4 * D), dh


def results(function: object, inputs: Inputs, dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Outputs, and the gradients of the inputs' share, the weight and the bias."""
    *tensors, dh = inputs
    leaves = [y.to(dtype if i == 0 else wide).requires_grad_() for i, y in enumerate(tensors)]
    h = vmap(function)(*leaves)  # type: ignore[arg-type]
    return [h.detach(), *torch.autograd.grad(h, leaves, dh.to(h.dtype), materialize_grads=True)]


def fused(dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    return over_runs(lstm_method(dtype), *tensors)[0]


def rounded(inputs_BTG: Tensor, recurrent_GD: Tensor, bias_G: Tensor) -> Tensor:
    """The LSTM whose products with the recurrent weight are in bfloat16, and everything else in float32."""
    c_BD = bias_G.new_zeros(len(inputs_BTG), recurrent_GD.shape[1])
    h_BD, outputs = c_BD.bfloat16(), []
    for inputs_BG in inputs_BTG.unbind(1):
        gates_BG = inputs_BG.float() + F.linear(h_BD, recurrent_GD.bfloat16()).float() + bias_G
        i_BD, f_BD, g_BD, o_BD = gates_BG.chunk(4, dim=-1)
        c_BD = f_BD.sigmoid() * c_BD + i_BD.sigmoid() * g_BD.tanh()
        h_BD = (o_BD.sigmoid() * c_BD.tanh()).bfloat16()
        outputs.append(h_BD)
    return torch.stack(outputs, dim=1)


def check_float32(inputs: Inputs) -> None:
    got = results(partial(fused, torch.float32), inputs, torch.float32, torch.float32)
    want = results(lstm, inputs, torch.float64, torch.float64)
    for name, y, reference in zip(("h", "dinputs", "dweight", "dbias"), got, want, strict=True):
        assert y.shape == reference.shape
        if reference.any():
            assert error(y, reference) <= 1e-5, name
        else:  # the weight's gradient at a single position
            assert not y.any(), name


@interpreted
@pytest.mark.parametrize(("R", "B", "T", "D"), [(1, 1, 1, 32), (3, 17, 5, 32), (1, 2, 9, 64)])
@pytest.mark.parametrize("pinned", [True, False])
def test_interpreted(R: int, B: int, T: int, D: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PINNED_BYTES", 2**17 if pinned else 0)
    check_float32(draw(R, B, T, D))


@interpreted
def test_interpreted_with_large_tiles() -> None:
    """More tiles of 16 sequences than multiprocessors."""
    check_float32(draw(45, 33, 2, 32))


@interpreted
def test_takes_tensors_of_any_layout() -> None:
    *tensors, _ = draw(2, 3, 4, 32)
    plain = [y.float() for y in tensors]
    scattered = [y.movedim(0, -1).contiguous().movedim(-1, 0) for y in plain]
    function = vmap(partial(fused, torch.float32))
    assert torch.equal(function(*scattered), function(*plain))


@interpreted
def test_runs_alone_and_in_company() -> None:
    inputs = draw(3, 17, 5, 32)
    together = results(partial(fused, torch.float32), inputs, torch.float32, torch.float32)
    for r in range(3):
        one = tuple(y[r : r + 1] for y in inputs)
        alone = results(partial(fused, torch.float32), one, torch.float32, torch.float32)  # type: ignore[arg-type]
        for y, y_alone in zip(together, alone, strict=True):
            torch.testing.assert_close(y[r : r + 1], y_alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("R", "B", "T", "D"), [(1, 1, 1, 128), (3, 37, 63, 64), (1, 16, 100, 128), (30, 128, 20, 128), (2, 20, 30, 256)]
)
def test_gpu(R: int, B: int, T: int, D: int) -> None:
    inputs = draw(R, B, T, D)
    check_float32(inputs)

    bfloat16 = partial(fused, torch.bfloat16)
    want = results(lstm, inputs, torch.float64, torch.float64)
    plain = results(rounded, inputs, torch.bfloat16, torch.float32)
    got, again = (results(bfloat16, inputs, torch.bfloat16, torch.float32) for _ in range(2))
    for i, (y, y_again, y_plain, reference) in enumerate(zip(got, again, plain, want, strict=True)):
        assert torch.equal(y, y_again), i
        if reference.any():
            # The kernel adds up the bias' gradient from rows in bfloat16, plain PyTorch from rows in float32. With a
            # single row the rounding of that row remains; with many it averages out.
            rounding = 2**-9 if y is got[-1] and B * T == 1 else 1e-6
            assert error(y, reference) <= 1.5 * error(y_plain, reference) + rounding, i
        else:
            assert not y.any(), i


@pytest.mark.gpu
@on_gpu
def test_the_layer_runs_in_them_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its output is that of plain operations up to bfloat16's rounding."""
    torch.manual_seed(0)
    layer = LSTM(LSTM.Config(), Shape()).cuda()
    x = torch.randn(4, 100, 128, device="cuda")
    with torch.no_grad():
        want = layer(x)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        got = layer(x)
        monkeypatch.setattr("mixers.ops.lstm.runs_fused", lambda x: False)
        plain = layer(x)
    assert not torch.equal(got, plain)
    assert error(got, want.double()) <= 2 * error(plain, want.double())
