"""Operators of tensors in Triton's interpreter, as ``tests.interpreter`` quickens them, against PyTorch."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@triton.jit
def operators_kernel(x_ptr, i_ptr, y_ptr, j_ptr, N: tl.constexpr):
    """y = 1 - x (2.1 / (x + i)) where i < 3 and i >= 1, else x, read backwards; j = (7 - i) i + a wide integer.

    The second entry of x is not read, and 3 takes its place; the third one of y is not written.
    """
    n = tl.arange(0, N)
    x, i = tl.load(x_ptr + n, n != 1, 3), tl.load(i_ptr + n)
    y = tl.where((i < 3) & (i >= 1), 1 - x * (2.1 / (x + i)), x)
    tl.store(y_ptr + (N - 1) - n, y, n != 2)
    wide = tl.load(j_ptr)
    tl.store(j_ptr + n[:, None] * 1, ((7 - i) * i + wide)[:, None])


@triton.jit
def square_kernel(i_ptr):
    i = tl.load(i_ptr)
    tl.store(i_ptr, i * i)


@triton.jit
def division_kernel(i_ptr, k_ptr, q_ptr, r_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    i = tl.load(i_ptr + n)
    tl.store(q_ptr + n, i // 3)
    tl.store(r_ptr + n, i % tl.load(k_ptr))


@pytest.mark.parametrize("first", range(-4, 5))
@pytest.mark.parametrize("count", [1, 8])
def test_division_truncates_towards_zero(first: int, count: int) -> None:
    i, k = torch.arange(first, first + count, dtype=torch.int32), torch.tensor([-3], dtype=torch.int32)
    quotient, remainder = torch.zeros_like(i), torch.zeros_like(i)
    division_kernel[(1,)](i, k, quotient, remainder, N=count)
    assert torch.equal(quotient, torch.div(i, 3, rounding_mode="trunc"))
    assert torch.equal(remainder, i.fmod(-3))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-15)])
@pytest.mark.parametrize("count", [1, 8])
def test_operators_promote_and_broadcast(count: int, dtype: torch.dtype, bound: float) -> None:
    x, i = torch.linspace(0.5, 2.0, count, dtype=dtype), torch.arange(count, dtype=torch.int32)
    y, j = torch.zeros(count, dtype=dtype), torch.full((count,), 2**40)
    operators_kernel[(1,)](x, i, y, j, N=count)
    x[1:2] = 3
    expected = torch.where((i < 3) & (i >= 1), 1 - x * (2.1 / (x + i)), x)
    expected[2:3] = 0
    torch.testing.assert_close(y, expected.flip(0), rtol=bound, atol=bound)
    assert torch.equal(j, (7 - i.long()) * i + 2**40)


def test_int32_overflow_is_an_error_and_int64_has_room() -> None:
    with pytest.raises(Exception, match="int32 overflow in __mul__"):
        square_kernel[(1,)](torch.tensor([2**16], dtype=torch.int32))
    wide = torch.tensor([2**16])
    square_kernel[(1,)](wide)
    assert wide.item() == 2**32
