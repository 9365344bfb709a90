"""Kernels of the linear recurrence against the chunked form in float64: outputs and every gradient."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers.ops.kernels import chunked_recurrence  # noqa: E402
from mixers.ops.kernels.chunked_recurrence import chunked_recurrence_method  # noqa: E402
from mixers.ops.kernels.common import GpuLimits  # noqa: E402
from mixers.ops.kernels.linear_recurrence import recurrence_method  # noqa: E402
from mixers.ops.kernels.matrix_chunks import fits_chunks, matrix_chunks_method  # noqa: E402
from mixers.ops.linear_recurrence import matrix_recurrence, weighted_recurrence  # noqa: E402
from mixers.ops.method import Method  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.runs import check_repeats  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")


class Case(NamedTuple):
    """Channels of a key and a value, decays of a head (0: none), other parts, and whether all heads share keys.

    The delta rule has right factors alone; ``pairs`` is the number of keys and values a position.
    """

    K: int
    V: int
    G: int = 0
    rank_one: bool = False
    bonus: bool = False
    shared: bool = False
    pairs: int = 0


KINDS = {
    "linear attention": Case(8, 8),
    "RetNet": Case(4, 8, G=1),
    "GLA": Case(4, 8, G=4),
    "RWKV-6": Case(4, 4, G=4, bonus=True),
    "DeltaNet": Case(4, 4, rank_one=True),
    "Gated DeltaNet": Case(5, 3, G=1, rank_one=True),
    "RWKV-7": Case(8, 4, G=8, rank_one=True),
    "everything": Case(4, 8, G=4, rank_one=True, bonus=True),
    "KDA": Case(8, 4, G=8, pairs=1),
    "gated DeltaProduct": Case(5, 3, G=1, pairs=2),
    "DeltaProduct": Case(4, 8, pairs=3),
}
SHARED = {"Mamba-2": Case(4, 8, G=1, shared=True), "shared keys without decays": Case(4, 8, shared=True)}
"""Kinds that only the kernels for chunks take as they are."""


def draw(case: Case, R: int, B: int, T: int, H: int, scale: int = 1) -> list[Tensor | None]:
    """Arguments of ``matrix_recurrence`` in float64, with a run axis; decays from none to very strong ones."""
    K, V = case.K * scale, case.V * scale
    G = K if case.G > 1 else case.G
    generator = torch.Generator().manual_seed(K + V + T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    g = -normal(R, B, T, H, G).pow(4) if G else None
    a, b = ((K**-0.5) * normal(R, B, T, H, K) for _ in range(2)) if case.rank_one else (None, None)
    bonus = normal(R, H, K) if case.bonus else None
    if case.pairs:  # factors of length one and at most 30 degrees apart, or the state would grow with the length
        k, turn = (F.normalize(normal(R, B, T * case.pairs, H, K), dim=-1) for _ in range(2))
        b = F.normalize(k + 0.5 * turn, dim=-1)
        return [normal(R, B, T, H, K), k, normal(R, B, T * case.pairs, H, V), g, None, b, None]
    M = 1 if case.shared else H
    return [normal(R, B, T, M, K), normal(R, B, T, M, K), normal(R, B, T, H, V), g, a, b, bonus]


def results(
    tensors: list[Tensor | None], dtype: torch.dtype | None, kernels: Callable[..., Method] = recurrence_method
) -> list[Tensor]:
    """Output and gradients: in kernels with rows in ``dtype``, or in plain PyTorch in float64 if that is None.

    Args:
        tensors: arguments with a run axis.
        dtype: of the rows.
        kernels: the method of these kernels; those of one decay per head take no other tensors.
    """
    rows = torch.float64 if dtype is None else dtype
    wide = torch.float64 if dtype is None else torch.float32
    kinds = (rows, rows, rows, wide, rows, rows, wide)
    leaves = [y if y is None else y.to(kind).requires_grad_() for y, kind in zip(tensors, kinds, strict=True)]
    present = [y for y in leaves if y is not None]

    def recurrence(*given: Tensor) -> Tensor:
        some = iter(given)
        arguments: list[Any] = [y if y is None else next(some) for y in leaves]
        if dtype is None:
            return matrix_recurrence(*arguments)
        if kernels is chunked_recurrence_method:
            arguments = arguments[:4]
        return over_runs(kernels(dtype), *arguments)[0]

    o = vmap(recurrence)(*present)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(o)
    return [o.detach(), *torch.autograd.grad(o, present, do)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-3)) for a, b in zip(got, want, strict=True)]


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 2, 6, 2), (1, 1, 1, 1)], ids=["several", "one position"])
def test_interpreted(kind: str, shape: tuple[int, int, int, int]) -> None:
    tensors = draw(KINDS[kind], *shape)
    assert max(errors(results(tensors, torch.float32), results(tensors, None))) <= 1e-5


@interpreted
@pytest.mark.parametrize("kernels", [recurrence_method, chunked_recurrence_method, matrix_chunks_method])
def test_queries_in_float32_beside_rows_of_16_bits(kernels: Callable[..., Method]) -> None:
    """Their gradient is in float32, too. At the second position it is the sum of both keys, here 1 + 2^-12."""
    q_BTHK, k_BTHK = torch.ones(1, 2, 1, 1), torch.tensor([1, 2**-12]).half().view(1, 2, 1, 1)
    absent = [None] * (1 if kernels is chunked_recurrence_method else 4)
    o_BTHV = over_runs(kernels(torch.float16), q_BTHK.requires_grad_(), k_BTHK, torch.ones_like(k_BTHK), *absent)[0]
    assert o_BTHV.dtype == torch.float16

    (dq_BTHK,) = torch.autograd.grad(o_BTHV.sum(), q_BTHK)
    torch.testing.assert_close(dq_BTHK, k_BTHK.float().cumsum(1), rtol=0, atol=0)


CHUNKED = [
    *((chunked_recurrence_method, kind) for kind in ("linear attention", "RetNet", *SHARED)),
    *((matrix_chunks_method, kind) for kind in KINDS),
]
"""Kernels for chunks, with the kinds that they take."""
ROUNDED_SUMS = 1e-4
"""Tolerance of the kernels for chunks: sums of up to 64 strong decays reach hundreds, which float32 holds to 1e-5."""


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # in entries that are masked
@pytest.mark.parametrize(("kernels", "kind"), CHUNKED)
@pytest.mark.parametrize("shape", [(2, 1, 130, 1), (1, 1, 1, 1)], ids=["several chunks", "one position"])
def test_chunks_interpreted(kernels: Callable[..., Method], kind: str, shape: tuple[int, int, int, int]) -> None:
    tensors = draw((KINDS | SHARED)[kind], *shape)
    assert max(errors(results(tensors, torch.float32, kernels), results(tensors, None))) <= ROUNDED_SUMS


@interpreted
@pytest.mark.parametrize("kind", ["linear attention", "RetNet", *SHARED])
def test_segments_and_blocks_of_values_interpreted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments, the last of which ends inside a chunk; two blocks of values."""
    monkeypatch.setattr(chunked_recurrence, "SHORTEST", 64)
    monkeypatch.setattr(chunked_recurrence, "_sizes", chunked_recurrence._sizes.__wrapped__)  # which others have filled
    tensors = draw((KINDS | SHARED)[kind]._replace(V=128), 2, 1, 300, 2)
    found = results(tensors, torch.float32, chunked_recurrence_method)
    assert max(errors(found, results(tensors, None))) <= ROUNDED_SUMS


def outputs_and_gradients(operation: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [y.detach().requires_grad_() for y in tensors]
    outputs = vmap(operation)(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


@interpreted
@pytest.mark.parametrize("shape", [(2, 1, 70, 2), (1, 1, 1, 1)], ids=["two chunks", "one position"])
def test_weights_interpreted(shape: tuple[int, int, int, int]) -> None:
    q, k, v, g = (y for y in draw(KINDS["RetNet"], *shape) if y is not None)
    tensors = q, k, v, g, g - 1
    chunked = partial(over_runs, chunked_recurrence_method(torch.float32, weighted=True))
    got = outputs_and_gradients(chunked, [y.float() for y in tensors])
    assert max(errors(got, outputs_and_gradients(weighted_recurrence, tensors))) <= ROUNDED_SUMS


def test_sizes_without_a_kernel_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert fits_chunks(256, 256)
    assert not fits_chunks(64, 300)
    assert not fits_chunks(300, 300)
    (message,) = caplog.messages
    assert (
        message == "linear recurrence without its fast kernels, which take keys and values of up to 256 channels a head"
    )


@interpreted
@pytest.mark.parametrize("kernels", [recurrence_method, matrix_chunks_method])
def test_a_run_is_the_same_in_company(kernels: Callable[..., Method]) -> None:
    tensors = draw(KINDS["everything"], 3, 2, 4, 2)
    together = results(tensors, torch.float32, kernels)
    alone = results([None if y is None else y[:1] for y in tensors], torch.float32, kernels)
    assert torch.equal(together[0][:1], alone[0])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5, 63, 4), (1, 2, 100, 3), (2, 1, 300, 1)], ids=str)
@pytest.mark.parametrize("scale", [1, 4, 8])
def test_float32(kind: str, shape: tuple[int, int, int, int], scale: int) -> None:
    """Gradients of decays are running sums over all pairs: their rounding grows with the pairs of a position."""
    tensors = draw(KINDS[kind], *shape, scale)
    found = errors(results(tensors, torch.float32), results(tensors, None))
    if KINDS[kind].G:
        assert found.pop(4) <= 1e-5 * max(1, KINDS[kind].pairs)
    assert max(found) <= 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rounds_rows_alone(kind: str) -> None:
    """Inputs that bfloat16 holds exactly: what is left is the rounding of outputs and of gradients, 2^-9 each.

    What several pairs of a position write to the state are rows in memory too, and are rounded once more.
    """
    tensors = draw(KINDS[kind], 2, 5, 100, 4, 4)
    tensors = [None if y is None else y.bfloat16().double() for y in tensors]
    roundings = 3 if KINDS[kind].pairs > 1 else 2
    assert max(errors(results(tensors, torch.bfloat16), results(tensors, None))) <= roundings * 2**-9


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("kernels", "kind", "scale"),
    [
        *((*case, scale) for case in CHUNKED for scale in (1, 4, 8) if case[0] is chunked_recurrence_method),
        *((*case, 12) for case in CHUNKED if case[0] is matrix_chunks_method),
    ],
)
@pytest.mark.parametrize("shape", [(3, 5, 63, 4), (1, 2, 100, 3), (2, 1, 300, 1)], ids=str)
def test_chunks_in_float32(
    kernels: Callable[..., Method], kind: str, scale: int, shape: tuple[int, int, int, int]
) -> None:
    """With a scale of 12, keys have 48 to 96 channels: one block of channels, or two, that are not full."""
    tensors = draw((KINDS | SHARED)[kind], *shape, scale)
    assert max(errors(results(tensors, torch.float32, kernels), results(tensors, None))) <= ROUNDED_SUMS


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("kernels", "kind", "scale"),
    [
        *((*case, 8) for case in CHUNKED),
        (matrix_chunks_method, "linear attention", 16),
        *((matrix_chunks_method, kind, 32) for kind in ("RWKV-7", "KDA", "everything")),
    ],
)
def test_chunks_in_bfloat16(kernels: Callable[..., Method], kind: str, scale: int) -> None:
    """Weights and states are rounded for the products, too, and with a rank-one part what solves its system."""
    tensors = draw((KINDS | SHARED)[kind], 2, 5, 200, 4, scale)
    tensors = [None if y is None else y.bfloat16().double() for y in tensors]
    most = 2**-6 if kernels is chunked_recurrence_method else 2**-5
    assert max(errors(results(tensors, torch.bfloat16, kernels), results(tensors, None))) <= most


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("V", [24, 64, 128])
@pytest.mark.parametrize("T", [32, 128])
@pytest.mark.parametrize("row", [520, 528])
@pytest.mark.parametrize("operation", [matrix_recurrence, weighted_recurrence])
def test_as_in_a_search(operation: Callable[..., Any], row: int, T: int, V: int) -> None:
    """Thousands of programs, which read slices of wider rows. With V = 24, compiled kernels for chunks were wrong."""
    generator = torch.Generator().manual_seed(T)
    rows = torch.randn(10, 128, T, row, generator=generator).bfloat16().to(DEVICE)
    q, k = (rows[..., n : n + 256].unflatten(-1, (4, 64)) for n in (0, 256))
    v = torch.randn(10, 128, T, 4, V, generator=generator).bfloat16().to(DEVICE)
    decays = [-torch.rand(10, 128, T, 4, 1, generator=generator).to(DEVICE) for _ in range(2)]
    rest = decays if operation is weighted_recurrence else decays[:1]

    with torch.autocast("cuda", torch.bfloat16):
        got = outputs_and_gradients(operation, [q, k, v, *rest])
    want = outputs_and_gradients(operation, [y.float() for y in (q, k, v, *rest)])
    assert max(errors(got, want)) <= 2**-6


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kernels", [recurrence_method, chunked_recurrence_method, matrix_chunks_method])
def test_repeats_bitwise(kernels: Callable[..., Method]) -> None:
    tensors = draw(KINDS["RetNet" if kernels is chunked_recurrence_method else "everything"], 3, 16, 100, 4, 8)
    check_repeats(lambda: results(tensors, torch.bfloat16, kernels))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["DeltaNet", "KDA", "RWKV-7"])
def test_settings_of_smaller_gpus_change_no_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(KINDS[kind], 2, 5, 200, 4, 8)
    expected = results(tensors, torch.bfloat16, matrix_chunks_method)
    limits = GpuLimits(20, 101376, early_launch=False)
    monkeypatch.setattr("mixers.ops.kernels.matrix_chunks.gpu_limits", lambda _: limits)
    assert max(errors(results(tensors, torch.bfloat16, matrix_chunks_method), expected)) <= 2**-8
