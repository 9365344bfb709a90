"""Kernels of short convolutions and scans against the plain forms in float64: outputs and every gradient."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import vmap

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.deltanet import DeltaNet  # noqa: E402
from mixers.lru import LRU  # noqa: E402
from mixers.mamba import Mamba  # noqa: E402
from mixers.mamba2 import Mamba2  # noqa: E402
from mixers.ops.convolution import short_convolution  # noqa: E402
from mixers.ops.diagonal_scan import diagonal_scan  # noqa: E402
from mixers.ops.kernels.diagonal_scan import diagonal_scan_method  # noqa: E402
from mixers.ops.kernels.selective_scan import selective_scan_method  # noqa: E402
from mixers.ops.kernels.short_convolution import short_convolution_method  # noqa: E402
from mixers.ops.method import Method  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from mixers.ops.selective_scan import selective_scan  # noqa: E402
from mixers.parts import MixerLayer  # noqa: E402
from mixers.s5 import S5  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import errors  # noqa: E402
from tests.mixers.runs import check_repeats  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")


class Case(NamedTuple):
    """An operation for one run, its kernels in a dtype, and what goes in with a run axis: rows, then parameters."""

    plain: Callable[..., Tensor]
    method: Callable[[torch.dtype], Method]
    rows: list[Tensor]
    parameters: list[Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def convolution_case(R: int, B: int, T: int, D: int, taps: int, bias: bool = True, silu: bool = True) -> Case:
    parameters = [normal(R, D, taps, seed=1), *([normal(R, D, seed=2)] if bias else [])]

    def method(dtype: torch.dtype) -> Method:
        full = short_convolution_method(dtype, silu)
        if bias:
            return full
        return Method(
            lambda x, weight: full.forward(x, weight, None),
            lambda g, tensors, outputs, saved: full.backward(g, (*tensors, None), outputs, saved)[:2],
        )

    return Case(partial(short_convolution, silu=silu), method, [normal(R, B, T, D, seed=0)], parameters)


def selective_case(R: int, B: int, T: int, E: int, N: int, negative: bool = False) -> Case:
    """Steps go through a unit matrix; they and the rates are spread from almost no decay to states that are lost."""

    def plain(u: Tensor, z: Tensor, dt: Tensor, b: Tensor, c: Tensor, A: Tensor, *others: Tensor) -> Tensor:
        skip, bias = others
        return selective_scan(u, z, dt, b, c, A, skip, torch.eye(E, dtype=u.dtype, device=u.device), bias, negative)

    rows = [normal(R, B, T, E, seed=i) for i in range(3)] + [normal(R, B, T, N, seed=i) for i in (3, 4)]
    parameters = [-(1.5 * normal(R, E, N, seed=5)).exp(), normal(R, E, seed=6), 3 * normal(R, E, seed=7) - 3]
    return Case(plain, partial(selective_scan_method, negative=negative), rows, parameters)


def diagonal_case(R: int, B: int, T: int, N: int) -> Case:
    """Decays of modulus 0.9 to 1, so that errors of many positions would show."""

    def plain(x: Tensor, dynamics: Tensor) -> Tensor:
        decay_re, decay_im, gain_re, gain_im = dynamics
        return diagonal_scan(x, torch.complex(decay_re, decay_im), torch.complex(gain_re, gain_im))

    decay = torch.polar(1 - 0.1 * normal(R, N, seed=1).sigmoid(), normal(R, N, seed=2))
    dynamics = torch.stack([decay.real, decay.imag, normal(R, N, seed=3), normal(R, N, seed=4)], 1)
    return Case(plain, diagonal_scan_method, [normal(R, B, T, 2 * N, seed=0)], [dynamics])


SMALL = {
    "convolution": convolution_case(2, 3, 7, 20, 4),
    "convolution-one-position": convolution_case(1, 1, 1, 3, 3),
    "convolution-without-silu": convolution_case(1, 2, 5, 130, 3, silu=False),
    "convolution-without-bias": convolution_case(2, 2, 9, 16, 4, bias=False),
    "convolution-one-tap": convolution_case(1, 1, 2, 4, 1),
    "convolution-two-parts": convolution_case(1, 1, 35, 4, 4),
    "selective": selective_case(2, 2, 7, 20, 16),
    "selective-one-position": selective_case(1, 1, 1, 3, 3),
    "selective-two-parts": selective_case(1, 1, 5, 70, 12),
    "selective-negative": selective_case(2, 2, 7, 20, 16, negative=True),
    "diagonal": diagonal_case(2, 2, 9, 6),
    "diagonal-one-position": diagonal_case(1, 1, 1, 1),
    "diagonal-two-parts": diagonal_case(1, 1, 5, 70),
}
LARGE = {
    "convolution": partial(convolution_case, 3, 16, 100, 256, 4),
    "convolution-768": partial(convolution_case, 1, 5, 63, 768, 3, silu=False),
    "convolution-without-bias": partial(convolution_case, 3, 1, 100, 384, 4, bias=False),
    "convolution-eight-taps": partial(convolution_case, 1, 3, 63, 100, 8),
    "selective": partial(selective_case, 3, 16, 100, 256, 16),
    "selective-one-position": partial(selective_case, 3, 1, 1, 256, 16),
    "selective-narrow": partial(selective_case, 1, 5, 63, 40, 5),
    "selective-negative": partial(selective_case, 3, 16, 100, 256, 16, negative=True),
    "selective-long": partial(selective_case, 1, 2, 1024, 256, 16),
    "diagonal": partial(diagonal_case, 3, 16, 100, 64),
    "diagonal-narrow": partial(diagonal_case, 1, 5, 63, 20),
    "diagonal-one-position": partial(diagonal_case, 3, 1, 1, 64),
    "diagonal-long": partial(diagonal_case, 1, 2, 1024, 100),
}


def run(case: Case, function: Callable[..., Tensor], rows: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Output and gradients of ``function``."""
    leaves = [y.to(rows).requires_grad_() for y in case.rows] + [y.to(wide).requires_grad_() for y in case.parameters]
    output = vmap(function)(*leaves)
    upstream = normal(*output.shape, seed=9).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream, materialize_grads=True)]


def fused(case: Case, dtype: torch.dtype) -> list[Tensor]:
    method = case.method(dtype)
    return run(case, lambda *tensors: over_runs(method, *tensors)[0], dtype, torch.float32)


def exact(case: Case) -> list[Tensor]:
    return run(case, case.plain, torch.float64, torch.float64)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("convolution", "selective_scan", "diagonal_scan"):
        monkeypatch.setattr(f"mixers.ops.{name}.runs_fused", lambda x: False)


@interpreted
def test_a_convolution_in_parts_is_the_whole() -> None:
    """Outputs and gradients, bitwise."""
    x, weight, dy = (normal(*shape, seed=0).float() for shape in [(2, 2, 5, 12), (2, 12, 4), (2, 2, 5, 12)])
    whole, split = (short_convolution_method(torch.float32, True, shapes) for shapes in [(), ((4,), (2, 2, 2))])
    (y,), parts = (method.forward(x, weight, None)[0] for method in (whole, split))
    assert [part.shape[3:] for part in parts] == [(4,), (2, 2, 2)]
    assert torch.equal(torch.cat([part.flatten(3) for part in parts], -1), y)

    dparts = dy[..., :4], dy[..., 4:].unflatten(-1, (2, 2, 2))
    got, want = split.backward(dparts, (x, weight, None), parts, ()), whole.backward((dy,), (x, weight, None), (y,), ())
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        *((name, torch.float32, 1e-5) for name in SMALL),
        *((name, torch.float16, 2e-3) for name in ("convolution", "selective", "diagonal")),
    ],
)
def test_interpreted(name: str, dtype: torch.dtype, most: float) -> None:
    """Also in 16 bits; the interpreter's bfloat16 is not one."""
    assert max(errors(fused(SMALL[name], dtype), exact(SMALL[name]))) <= most


@interpreted
@pytest.mark.parametrize("name", ["convolution", "selective", "diagonal"])
@pytest.mark.parametrize("scatter", ["slices", "runs in the middle"])
def test_takes_tensors_of_any_layout(name: str, scatter: str) -> None:
    """Slices of wider rows, and what ``vmap`` hands over where the run axis is not the first."""
    case = SMALL[name]
    for i, y in enumerate(case.rows):
        wide = torch.stack([y.flip(-1), y], -2).flatten(-2)
        case.rows[i] = wide[..., y.shape[-1] :] if scatter == "slices" else y.movedim(0, 2).contiguous().movedim(2, 0)
    together = case._replace(rows=[y.contiguous() for y in case.rows])
    for got, want in zip(fused(case, torch.float32), fused(together, torch.float32), strict=True):
        assert torch.equal(got, want)


@interpreted
@pytest.mark.parametrize("name", ["convolution", "selective", "diagonal"])
def test_a_run_does_not_depend_on_the_others(name: str) -> None:
    case = SMALL[name]
    alone = case._replace(rows=[y[1:] for y in case.rows], parameters=[y[1:] for y in case.parameters])
    output, *_ = fused(case, torch.float32)
    assert torch.equal(output[1:], fused(alone, torch.float32)[0])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_float32(name: str) -> None:
    case = LARGE[name]()
    assert max(errors(fused(case, torch.float32), exact(case))) <= 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_bfloat16_is_as_exact_as_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both against float64, which starts from the same rounded rows."""
    without_kernels(monkeypatch)
    case = LARGE[name]()
    case = case._replace(rows=[y.bfloat16().double() for y in case.rows])

    def autocast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return case.plain(*tensors).bfloat16()

    want = exact(case)
    got = errors(fused(case, torch.bfloat16), want)
    plain = errors(run(case, autocast, torch.bfloat16, torch.float32), want)
    for i, (ours, theirs) in enumerate(zip(got, plain, strict=True)):
        assert ours <= 1.5 * theirs + 1e-5, (i, ours, theirs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["convolution", "selective", "diagonal"])
def test_bitwise_repeatable(name: str) -> None:
    case = LARGE[name]()
    check_repeats(partial(fused, case, torch.bfloat16))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layer", [Mamba, Mamba2, DeltaNet, S5, LRU])
def test_layers_run_in_them_under_autocast(layer: type[MixerLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    """And their outputs are those of plain operations up to bfloat16's rounding."""
    torch.manual_seed(0)
    built = layer(layer.Config(), Shape()).cuda()
    x = torch.randn(4, 100, 128, device="cuda")
    with torch.no_grad():
        want = built.double()(x.double())
        built.float()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        got = built(x)
        without_kernels(monkeypatch)
        plain = built(x)
    # S5's states change so slowly that both round to the same numbers.
    assert layer is S5 or not torch.equal(got, plain)
    assert errors([got], [want])[0] <= 1.5 * errors([plain], [want])[0]
