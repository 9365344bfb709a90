"""Products and sums over rows against the same in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from mixers.ops.kernels import products  # noqa: E402
from mixers.ops.kernels.products import group_sum, rows_products  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


def check_rows_products(R: int, B: int, T: int, sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Against the same operands in float64; the left ones are not contiguous.

    Sums in tensor cores drop low bits: the library's products of 2096 rows in bfloat16, taken for a single pair and for
    many runs, are off by up to 5.2e-6 on an H200, the kernel's by 1.0e-6.
    """
    library = len(sizes) == 1 or R == 30
    tolerance = 1e-5 if library and dtype == torch.bfloat16 else 2e-6
    pairs = [(draw(R, T, B, I).to(dtype).mT.contiguous().mT, draw(R, T, B, J).to(dtype)) for I, J in sizes]
    for got, (left, right) in zip(rows_products(*pairs), pairs, strict=True):
        want = torch.einsum("rtbi,rtbj->rij", left.double(), right.double())
        assert got.shape == want.shape
        assert float((got - want).norm() / want.norm()) <= tolerance


@interpreted
@pytest.mark.parametrize("sizes", [[(64, 64), (96, 32), (32, 160)], [(64, 64)], [(128, 256), (256, 128)]])
@pytest.mark.parametrize(("B", "T"), [(3, 47), (1, 1)])
def test_rows_products_interpreted(B: int, T: int, sizes: list[tuple[int, int]]) -> None:
    check_rows_products(2, B, T, sizes, torch.float32)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("R", [1, 3, 30])
@pytest.mark.parametrize(
    "sizes", [[(128, 128), (512, 128), (128, 512), (256, 128)], [(256, 64), (64, 256)], [(32, 96)]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_rows_products(R: int, sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check_rows_products(R, 16, 131, sizes, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
def test_rows_products_have_room(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps a tile of both operands for all stages but the last; GPUs of 99 KiB for a program have the least."""
    launches: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *operands, **settings: launches.append(settings)

    monkeypatch.setattr(products, "rows_products_kernel", Recorder())
    monkeypatch.setattr(products, "group_sum", lambda parts: parts[:, 0])
    operand = torch.zeros(1, 2, 64, width, dtype=dtype)
    rows_products((operand, operand), (operand, operand))
    (settings,) = launches
    assert (settings["num_stages"] - 1) * 2 * settings["N"] * settings["S"] * dtype.itemsize <= 101376


@interpreted
@pytest.mark.parametrize("groups", [0, 1, 2, 5, 600])
@pytest.mark.parametrize("shape", [(1,), (3, 40), (3, 511)])
def test_group_sum_interpreted(groups: int, shape: tuple[int, ...]) -> None:
    parts = draw(2, groups, *shape)
    torch.testing.assert_close(group_sum(parts.float()).double(), parts.sum(1), rtol=1e-5, atol=1e-4)
