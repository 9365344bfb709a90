"""The kernels of flash-linear-attention against the pure form, which is the oracle."""

import pytest
import torch
from torch import Tensor

from mixers.ops.linear_recurrence import library_kernels, matrix_recurrence

KINDS = ["plain", "head", "channel", "bonus", "delta", "gated delta", "rwkv7"]
on_gpu = pytest.mark.gpu


def arguments(kind: str, length: int, channels: int, values: int) -> dict[str, Tensor]:
    """What a layer of this kind hands to the recurrence, in float64."""
    generator = torch.Generator().manual_seed(length + channels)

    def draw(size: int) -> Tensor:
        return torch.randn(3, length, 4, size, generator=generator, dtype=torch.float64)

    q, k, v = draw(channels), draw(channels) * channels**-0.5, draw(values)
    unit = torch.nn.functional.normalize(k, dim=-1)
    decays = {"head": 1, "channel": channels, "bonus": channels, "gated delta": 1, "rwkv7": channels}
    given = {"q_BTHK": q, "k_BTHK": k, "v_BTHV": v}
    if kind in decays:
        given["g_BTHK"] = -0.6 * torch.rand(3, length, 4, decays[kind], generator=generator, dtype=torch.float64)
    if kind == "bonus":
        given["bonus_HK"] = draw(channels)[0, 0]
    if kind in ("delta", "gated delta", "rwkv7"):
        strength = torch.rand(3, length, 4, 1, generator=generator, dtype=torch.float64)
        given |= {"a_BTHK": -strength * unit, "b_BTHK": unit}
    return given


def results(given: dict[str, Tensor]) -> list[Tensor]:
    """Output, then gradients of all arguments."""
    leaves = {name: y.detach().requires_grad_() for name, y in given.items()}
    o_BTHV = matrix_recurrence(**leaves)
    weights = torch.randn(o_BTHV.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [o_BTHV.detach(), *torch.autograd.grad((o_BTHV * weights.to(o_BTHV)).sum(), list(leaves.values()))]


def error(got: Tensor, want: Tensor) -> float:
    """Relative, but absolute where nothing should be left: no decay matters before the second position."""
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=0.1))


@on_gpu
@pytest.mark.parametrize(("length", "channels", "values"), [(1, 8, 8), (63, 16, 32), (130, 32, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_pure_form(kind: str, length: int, channels: int, values: int) -> None:
    """Relative errors against float64 from inputs rounded to bfloat16, whose unit roundoff is 0.004."""
    pytest.importorskip("fla", reason="needs the extra baselines")
    given = {name: y.bfloat16().double() for name, y in arguments(kind, length, channels, values).items()}
    want = results(given)
    with torch.autocast("cuda", torch.bfloat16):
        got = results({name: y.float().cuda() for name, y in given.items()})
    for name, y, reference in zip(["o", *given], got, want, strict=True):
        assert error(y, reference) <= 0.01, (name, error(y, reference))


@on_gpu
@pytest.mark.parametrize("kind", ["bonus", "delta"])
def test_runs_together_equal_single_runs(kind: str) -> None:
    pytest.importorskip("fla", reason="needs the extra baselines")
    given = {name: y.float().cuda() for name, y in arguments(kind, 40, 32, 32).items()}
    stacked = {name: torch.stack([y, y.flip(-1)]) for name, y in given.items()}
    with torch.autocast("cuda", torch.bfloat16):
        together = torch.func.vmap(lambda arguments: matrix_recurrence(**arguments))(stacked)
        for r in range(2):
            alone = matrix_recurrence(**{name: y[r] for name, y in stacked.items()})
            torch.testing.assert_close(together[r], alone, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_any_number_of_sequences(kind: str) -> None:
    """More heads in all than the 65,535 of one launch."""
    pytest.importorskip("fla", reason="needs the extra baselines")
    few = {name: y.float().cuda() for name, y in arguments(kind, 8, 16, 16).items()}
    with torch.autocast("cuda", torch.bfloat16):
        o = matrix_recurrence(**{name: y.repeat(6000, 1, 1, 1) for name, y in few.items()})
        torch.testing.assert_close(o, matrix_recurrence(**few).repeat(6000, 1, 1, 1), rtol=0, atol=0)


def test_a_cpu_takes_the_pure_form() -> None:
    q = torch.zeros(1, 1, 1, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert library_kernels(q) is None
