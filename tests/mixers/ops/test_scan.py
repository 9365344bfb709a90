"""The elementwise linear recurrence against a loop over positions, and the scan of Mamba in C."""

import pytest
import torch
from torch import Tensor

from mixers.ops.scan import linear_scan
from mixers.ops.selective_scan import BLOCK, unfused_scan

each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])


def loop(a: Tensor, b: Tensor) -> Tensor:
    h, outputs = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@each_dtype
@pytest.mark.parametrize("length", [1, 2, 3, 8, 37])
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_a_loop(batch: int, length: int, dtype: torch.dtype) -> None:
    """Outputs and gradients; the decays of a batch may be common to all."""
    a, b = normal(0, batch, length, 2, 5, dtype=dtype), normal(1, 3, length, 2, 5, dtype=dtype)
    got, want = linear_scan(0.7 * a, b), loop(0.7 * a, b)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = normal(2, *want.shape, dtype=dtype)
    gradients = [
        torch.autograd.grad((y * weights).abs().square().sum(), (a, b), materialize_grads=True) for y in (got, want)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@each_dtype
def test_takes_an_axis_of_runs_by_vmap(dtype: torch.dtype) -> None:
    a, b = normal(0, 4, 3, 11, 5, dtype=dtype), normal(1, 4, 3, 11, 5, dtype=dtype)
    got = torch.func.vmap(linear_scan)(a, b)
    torch.testing.assert_close(got, torch.stack([loop(*run) for run in zip(a, b, strict=True)]))


@pytest.mark.parametrize("decay", [0.0, 1e-30, 1.0])
def test_is_safe_at_the_ends_of_the_range(decay: float) -> None:
    """Decays that underflow within a few positions, and none at all, over a long float32 sequence."""
    a = torch.full((1, 1000, 2), decay, requires_grad=True)
    b = torch.ones(1, 1000, 2, requires_grad=True)
    h = linear_scan(a, b)
    want = torch.arange(1.0, 1001) if decay == 1 else torch.ones(1000)
    torch.testing.assert_close(h, want[None, :, None].expand_as(h))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(h.sum(), (a, b)))


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("channels", [3, 2 * BLOCK])
def test_the_selective_scan_is_as_exact_in_float32(channels: int, negative: bool) -> None:
    """Which C computes, as heads of ``BLOCK`` channels where these divide the channels; float64 runs in PyTorch."""
    shapes = [(2, 40, channels), (2, 40, channels), (channels, 4), (2, 40, 4), (2, 40, 4)]
    leaves = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    leaves[2] = -leaves[2]
    found = []
    for dtype in (torch.float32, torch.float64):
        u, dt, A, B, C = (y.to(dtype).requires_grad_() for y in leaves)
        y = unfused_scan(u, dt, A, B, C, negative)
        found.append([z.double() for z in (y, *torch.autograd.grad(y.square().sum(), (u, dt, A, B, C)))])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
