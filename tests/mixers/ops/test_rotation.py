"""Kernels of biased rotations against the plain form in float64: outputs and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

triton = pytest.importorskip("triton")

from mixers.ops.kernels.rotation import rotation_method  # noqa: E402
from mixers.ops.rotation import biased_rotation  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from tests.kernel_marks import interpreted, on_gpu  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("nan_filled_scratch")


def errors(shape: tuple[int, ...], late: bool, dtype: torch.dtype) -> list[float]:
    """Relative errors of outputs and gradients, for runs, sequences, positions, vectors, heads, channels and angles."""
    R, B, T, M, H, N, A = shape
    generator = torch.Generator().manual_seed(T)
    sizes = ((R, B, T, M, N), (R, M, H, N), (R, B, T, H, A), (R, B, T, M, H, N))
    y, bias, angle, gradient = (torch.randn(size, generator=generator).to(dtype).double().to(DEVICE) for size in sizes)
    given = [y, bias, 5 * angle]

    def results(compute: object, kinds: list[torch.dtype]) -> list[Tensor]:
        leaves = [x.to(kind).requires_grad_() for x, kind in zip(given, kinds, strict=True)]
        out = vmap(compute)(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]

    want = results(lambda *x: biased_rotation(*x, late=late), 3 * [torch.float64])
    single = [dtype, torch.float32, torch.float32]
    got = results(lambda *x: over_runs(rotation_method(dtype, late), *x)[0], single)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@interpreted
@pytest.mark.parametrize(("shape", "late"), [((2, 2, 5, 2, 3, 7, 2), False), ((1, 1, 2, 1, 1, 2, 1), True)])
def test_interpreted(shape: tuple[int, ...], late: bool) -> None:
    assert max(errors(shape, late, torch.float32)) <= 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 130, 1, 4, 64, 16), (2, 2, 63, 4, 3, 20, 10)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...], late: bool, dtype: torch.dtype, tolerance: float) -> None:
    assert max(errors(shape, late, dtype)) <= tolerance
