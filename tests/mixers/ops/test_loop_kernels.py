"""Kernels of loops over positions against plain PyTorch in float64: outputs and every gradient."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers import MIXERS  # noqa: E402
from mixers.base import Shape  # noqa: E402
from mixers.ops.kernels import lstm as pinning  # noqa: E402
from mixers.ops.kernels.lstm import lstm_method  # noqa: E402
from mixers.ops.kernels.lstm_loop import lstm_loop_method  # noqa: E402
from mixers.ops.kernels.m2rnn import m2rnn_method  # noqa: E402
from mixers.ops.kernels.slstm import slstm_method  # noqa: E402
from mixers.ops.lstm import lstm  # noqa: E402
from mixers.ops.m2rnn import m2rnn  # noqa: E402
from mixers.ops.method import Method  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from mixers.ops.slstm import slstm  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.runs import check_autocast  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")

Function = Callable[..., Tensor]
Inputs = list[Tensor]
"""Tensors of a function, then the gradient of its outputs."""


def rounded_lstm(inputs_BTG: Tensor, recurrent_GD: Tensor, bias_G: Tensor) -> Tensor:
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


def rounded_slstm(inputs_HBTG: Tensor, recurrent_HGK: Tensor, bias_HG: Tensor) -> Tensor:
    """The scalar memory, rounded likewise, by the paper's equations; m has no gradient, because h does not read it."""
    zeros_HBK = bias_HG.new_zeros(*inputs_HBTG.shape[:2], recurrent_HGK.shape[-1])
    c, n, m, h, outputs = zeros_HBK, zeros_HBK, zeros_HBK - torch.inf, zeros_HBK.bfloat16(), []
    for inputs_HBG in inputs_HBTG.unbind(2):
        gates_HBG = inputs_HBG.float() + (h @ recurrent_HGK.bfloat16().mT).float() + bias_HG[:, None]
        i, f, z, o = gates_HBG.chunk(4, dim=-1)
        kept, m = F.logsigmoid(f) + m, torch.maximum(F.logsigmoid(f) + m, i).detach()
        forget, write = (kept - m).exp(), (i - m).exp()
        c, n = forget * c + write * z.tanh(), forget * n + write
        h = (o.sigmoid() * c / n).bfloat16()
        outputs.append(h)
    return torch.stack(outputs, dim=2)


def rounded_m2rnn(q_BTK: Tensor, k_BTK: Tensor, v_BTHV: Tensor, f_BTH: Tensor, weight_HVV: Tensor) -> Tensor:
    S, outputs = f_BTH.new_zeros(len(f_BTH), len(weight_HVV), q_BTK.shape[-1], v_BTHV.shape[-1]), []
    for t in range(f_BTH.shape[1]):
        written = k_BTK[:, t, None, :, None].float() * v_BTHV[:, t, :, None].float()
        new = torch.tanh((S.bfloat16() @ weight_HVV.bfloat16()).float() + written)
        S = torch.lerp(new, S, f_BTH[:, t, :, None, None])
        outputs.append((q_BTK[:, t, None, None].float() @ S).squeeze(-2).bfloat16())
    return torch.stack(outputs, dim=1)


class Kernel(NamedTuple):
    """Forms of one loop, and the sizes at which they are compared, of which the first is R.

    Attributes:
        plain: in the precision of its inputs.
        rounded: products in bfloat16.
        method: the fused kernels.
        draw: inputs of one run from the other sizes; those of ``normal`` are numbers that bfloat16 holds.
        halves: number of tensors that autocast rounds.
        times: how much larger the error of the kernels in bfloat16 may be than that of ``rounded``.
        small: sizes for the interpreter.
        large: sizes for a GPU.
    """

    plain: Function
    rounded: Function
    method: Callable[[torch.dtype], Method]
    draw: Callable[..., Inputs]
    halves: int
    times: float
    small: list[tuple[int, ...]]
    large: list[tuple[int, ...]]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).bfloat16().double()


def of_lstm(B: int, T: int, D: int) -> Inputs:
    bias_G = torch.randn(4 * D, dtype=torch.float64)
    return [normal(B, T, 4 * D), normal(4 * D, D, scale=D**-0.5), bias_G, normal(B, T, D)]


def of_slstm(H: int, B: int, T: int, K: int) -> Inputs:
    bias_HG = 2 * torch.randn(H, 4 * K, dtype=torch.float64)
    return [normal(H, B, T, 4 * K), normal(H, 4 * K, K, scale=K**-0.5), bias_HG, normal(H, B, T, K)]


def of_m2rnn(B: int, T: int, H: int, K: int, V: int) -> Inputs:
    f_BTH = torch.randn(B, T, H, dtype=torch.float64).sigmoid()
    weight_HVV = normal(H, V, V, scale=V**-0.5)
    return [normal(B, T, K), normal(B, T, K), normal(B, T, H, V), f_BTH, weight_HVV, normal(B, T, H, V)]


KERNELS = {
    "lstm": Kernel(
        *(lstm, rounded_lstm, lstm_method, of_lstm, 1, 1.5),
        small=[(1, 1, 1, 32), (3, 17, 5, 32), (1, 2, 9, 64)],
        large=[(1, 1, 1, 128), (3, 37, 63, 64), (1, 16, 100, 128), (30, 128, 20, 128), (2, 20, 30, 256)],
    ),
    "lstm_loop": Kernel(
        *(lstm, rounded_lstm, lstm_loop_method, of_lstm, 1, 1.5),
        small=[(1, 1, 1, 32), (3, 4, 5, 24), (1, 2, 9, 640)],
        large=[(1, 1, 1, 128), (3, 37, 63, 96), (2, 16, 100, 1024), (1, 8, 30, 2048)],
    ),
    "slstm": Kernel(
        *(slstm, rounded_slstm, slstm_method, of_slstm, 1, 1.5),
        small=[(1, 1, 1, 1, 32), (2, 2, 17, 4, 32)],
        large=[(1, 1, 1, 1, 32), (3, 2, 37, 63, 16), (1, 4, 16, 100, 64), (30, 4, 128, 20, 32), (1, 2, 20, 30, 256)],
    ),
    "m2rnn": Kernel(
        *(m2rnn, rounded_m2rnn, m2rnn_method, of_m2rnn, 3, 2.0),
        small=[(1, 1, 1, 1, 16, 16), (2, 2, 5, 2, 16, 16), (1, 1, 4, 1, 64, 32)],
        large=[(1, 1, 1, 1, 64, 16), (3, 9, 63, 2, 64, 16), (30, 128, 9, 8, 64, 16), (1, 5, 30, 2, 64, 64)],
    ),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


def cases(which: str) -> pytest.MarkDecorator:
    """Every kernel at each of its sizes."""
    found = [(name, sizes) for name, kernel in KERNELS.items() for sizes in getattr(kernel, which)]
    return pytest.mark.parametrize(("name", "sizes"), found)


def draw(name: str, sizes: tuple[int, ...]) -> Inputs:
    torch.manual_seed(sum(sizes))
    runs = [KERNELS[name].draw(*sizes[1:]) for _ in range(sizes[0])]
    return [torch.stack(y).to(DEVICE) for y in zip(*runs, strict=True)]


def results(function: Function, name: str, inputs: Inputs, dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Outputs, and the gradients of all tensors."""
    *tensors, dy = inputs
    leaves = [y.to(dtype if n < KERNELS[name].halves else wide).requires_grad_() for n, y in enumerate(tensors)]
    y = vmap(function)(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype), materialize_grads=True)]


def fused(name: str, dtype: torch.dtype) -> Function:
    return lambda *tensors: over_runs(KERNELS[name].method(dtype), *tensors)[0]


def in_float32(name: str, inputs: Inputs) -> list[Tensor]:
    return results(fused(name, torch.float32), name, inputs, torch.float32, torch.float32)


def in_float64(name: str, inputs: Inputs) -> list[Tensor]:
    return results(KERNELS[name].plain, name, inputs, torch.float64, torch.float64)


def check_float32(name: str, inputs: Inputs) -> None:
    for n, (y, reference) in enumerate(zip(in_float32(name, inputs), in_float64(name, inputs), strict=True)):
        assert y.shape == reference.shape
        if reference.any():
            assert error(y, reference) <= 1e-5, n
        else:  # the gradient of a recurrent weight at a single position
            assert not y.any(), n


@interpreted
@cases("small")
def test_interpreted(name: str, sizes: tuple[int, ...]) -> None:
    check_float32(name, draw(name, sizes))


@interpreted
@pytest.mark.parametrize("name", ["lstm", "slstm"])
def test_interpreted_with_weights_that_are_read_at_every_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PINNED_BYTES", 0)
    for sizes in KERNELS[name].small:
        check_float32(name, draw(name, sizes))


@interpreted
def test_interpreted_with_large_tiles() -> None:
    """More tiles of 16 sequences than multiprocessors."""
    check_float32("lstm", draw("lstm", (45, 33, 2, 32)))


@interpreted
@each_kernel
def test_takes_tensors_of_any_layout(name: str) -> None:
    *tensors, _ = draw(name, KERNELS[name].small[1])
    plain = [y.float() for y in tensors]
    scattered = [y.movedim(0, -1).contiguous().movedim(-1, 0) for y in plain]
    function = vmap(fused(name, torch.float32))
    assert torch.equal(function(*scattered), function(*plain))


@interpreted
@each_kernel
def test_runs_alone_and_in_company(name: str) -> None:
    inputs = draw(name, KERNELS[name].small[1])
    together = in_float32(name, inputs)
    for r in range(len(inputs[0])):
        alone = in_float32(name, [y[r : r + 1] for y in inputs])
        for y, y_alone in zip(together, alone, strict=True):
            torch.testing.assert_close(y[r : r + 1], y_alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@cases("large")
def test_gpu(name: str, sizes: tuple[int, ...]) -> None:
    inputs = draw(name, sizes)
    check_float32(name, inputs)

    halves = (inputs, torch.bfloat16, torch.float32)
    want, plain = in_float64(name, inputs), results(KERNELS[name].rounded, name, *halves)
    got, again = (results(fused(name, torch.bfloat16), name, *halves) for _ in range(2))
    for n, (y, y_again, y_plain, reference) in enumerate(zip(got, again, plain, want, strict=True)):
        assert torch.equal(y, y_again), n
        if reference.any():
            # Plain PyTorch keeps these gradients in float32. With many rows the kernels' roundings average out: that of
            # the gates, and in the loop that of their gradients.
            alone = set(sizes[:3]) == {1} and n > KERNELS[name].halves
            rounding = (2 if name == "lstm_loop" else 1) * 2**-9 if alone else 1e-6
            assert error(y, reference) <= KERNELS[name].times * error(y_plain, reference) + rounding, n
        else:
            assert not y.any(), n


@pytest.mark.gpu
@on_gpu
@each_kernel
def test_the_layer_runs_in_them_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its output is that of plain operations up to bfloat16's rounding."""
    torch.manual_seed(0)
    mixer, width = name.removesuffix("_loop"), 96 if name == "lstm_loop" else 128
    layer = MIXERS[mixer](MIXERS[mixer].Config(), Shape(width=width))
    check_autocast(layer, [mixer], monkeypatch, 2)
