"""RMS normalisation on the CPU against PyTorch's own."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from mixers.ops.native import norm
from mixers.ops.norm import naive_rms_norm, rms_norm

RUNS, WIDTH = 3, 8


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (0, 5), (2, 4, 5)])
def test_outputs_and_gradients_of_all_runs_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    x, gain, upstream = draw(RUNS, *shape).requires_grad_(), draw(RUNS).requires_grad_(), 2 * draw(RUNS, *shape)
    found, expected = (
        (y := vmap(function)(x, gain), *torch.autograd.grad(y, (x, gain), upstream))
        for function in (rms_norm, naive_rms_norm)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_results_repeat_bitwise_for_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "NUMBERS_OF_A_PART", 5 * WIDTH)
    x, gain = draw(RUNS, 23).requires_grad_(), draw(RUNS).requires_grad_()
    results = []
    for threads in (1, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        y = vmap(rms_norm)(x, gain)
        results.append((y, *torch.autograd.grad(y, (x, gain), draw(RUNS, 23))))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    torch.testing.assert_close(results[0][0], vmap(naive_rms_norm)(x, gain), rtol=1e-12, atol=1e-12)


def test_a_single_vector_and_rows_of_zeros_have_finite_gradients() -> None:
    gain = torch.ones(WIDTH, requires_grad=True)
    x = torch.zeros(WIDTH, requires_grad=True)
    y = rms_norm(x, gain)
    assert torch.equal(y, torch.zeros(WIDTH))
    (dx,) = torch.autograd.grad(y, x, torch.ones(WIDTH))
    torch.testing.assert_close(dx, torch.full((WIDTH,), 1e3))  # 1 / sqrt(eps)


@pytest.mark.parametrize("width", [1, WIDTH - 1, WIDTH + 1])
def test_a_gain_of_another_width_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"width of the layer, which is {width}"):
        rms_norm(draw(5), torch.ones(width, dtype=torch.float64))


def test_passes_gradcheck() -> None:
    leaves = draw(2, 3).requires_grad_(), draw().requires_grad_()
    assert torch.autograd.gradcheck(rms_norm, leaves, check_undefined_grad=False)


def test_bfloat16_rows_have_float32_statistics() -> None:
    """A sum of 1,000 squares of 1 has no exact form in bfloat16 (256 + 1 = 256); the norm of equal rows is 1."""
    x = torch.ones(2, 1000, dtype=torch.bfloat16)
    y = rms_norm(x, torch.ones(1000))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, x)
