"""The shared fused kernels against plain PyTorch in float64: outputs and every gradient."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.ops.attention import alibi_slopes  # noqa: E402
from mixers.ops.block_maps import block_maps  # noqa: E402
from mixers.ops.kernels.attention import attention_method  # noqa: E402
from mixers.ops.kernels.block_maps import block_maps_method  # noqa: E402
from mixers.ops.kernels.embedding import embedding_method  # noqa: E402
from mixers.ops.kernels.mlp import mlp_method  # noqa: E402
from mixers.ops.kernels.norm import rms_norm_method  # noqa: E402
from mixers.ops.kernels.projection import project_method  # noqa: E402
from mixers.ops.kernels.rotation import rotated_pairs_method  # noqa: E402
from mixers.ops.kernels.token_shift import token_shifts_method  # noqa: E402
from mixers.ops.method import Method  # noqa: E402
from mixers.ops.rotation import rotated_pairs  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from mixers.ops.token_shift import token_shifts  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import errors  # noqa: E402
from tests.mixers.runs import check_autocast, check_repeats  # noqa: E402

SCALE = 0.7
pytestmark = pytest.mark.usefixtures("nan_filled_scratch", "few_groups")


class Case(NamedTuple):
    """An operation in plain PyTorch for one run, as a method in a dtype, and what goes in with a run axis."""

    plain: Callable[..., tuple[Tensor, ...]]
    method: Callable[[torch.dtype], Method]
    data: list[Tensor]
    parameters: list[Tensor]


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return (x.to(gain.dtype) * (x.to(gain.dtype).square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain).to(x.dtype)


class Draw:
    def __init__(self, *seed: int) -> None:
        self.generator = torch.Generator().manual_seed(hash(seed))

    def __call__(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(*shape, generator=self.generator, dtype=torch.float64)).to(DEVICE)


def norm_case(R: int, B: int, T: int, D: int, branching: bool = False) -> Case:
    draw = Draw(R, B, T, D)

    def plain(x: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        return (rms_norm(x, gain), x) if branching else (rms_norm(x, gain),)

    method = partial(rms_norm_method, branching=branching)
    return Case(plain, method, [draw(R, B, T, D)], [draw(R, D, std=0.2, mean=1.0)])


def project_case(R: int, B: int, T: int, D: int, normed: bool) -> Case:
    draw = Draw(R, B, T, D)

    def plain(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        gain, *norms, wq, wk, wv = parameters
        n = rms_norm(x, gain)
        q, k, v = (F.linear(n, w) for w in (wq, wk, wv))
        return (rms_norm(q, norms[0]), rms_norm(k, norms[1]), v) if norms else (q, k, v)

    def method(dtype: torch.dtype) -> Method:
        full = project_method()

        def backward(gradients, tensors, outputs, saved):  # type: ignore[no-untyped-def]
            computed = full.backward(gradients, completed(tensors), outputs, saved)
            return [y for y in computed if y is not None]

        def completed(tensors):  # type: ignore[no-untyped-def]
            x, gain, *others = tensors
            w = torch.stack(others[-3:], 1).to(dtype)
            return x, gain, *(others if normed else (None, None, *others)), w

        return replace(full, forward=lambda *tensors: full.forward(*completed(tensors)), backward=backward)

    gains = [draw(R, D, std=0.2, mean=1.0) for _ in range(3 if normed else 1)]
    return Case(plain, method, [draw(R, B, T, D)], gains + [draw(R, D, D, std=D**-0.5) for _ in range(3)])


def mlp_case(R: int, B: int, T: int, D: int, hidden: int) -> Case:
    draw = Draw(R, B, T, D, hidden)

    def plain(x: Tensor, y: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        u = x + SCALE * y
        return (u + SCALE * F.linear(F.gelu(F.linear(rms_norm(u, gain), up)), down),)

    def method(dtype: torch.dtype) -> Method:
        full = mlp_method(SCALE)

        def completed(tensors):  # type: ignore[no-untyped-def]
            return *tensors, *(w.to(dtype) for w in tensors[3:])

        return replace(
            full,
            forward=lambda *tensors: full.forward(*completed(tensors)),
            backward=lambda gradients, tensors, *kept: full.backward(gradients, completed(tensors), *kept)[:-2],
        )

    parameters = [draw(R, D, std=0.2, mean=1.0), draw(R, hidden, D, std=D**-0.5), draw(R, D, hidden, std=hidden**-0.5)]
    return Case(plain, method, [draw(R, B, T, D), draw(R, B, T, D)], parameters)


def attention_case(R: int, B: int, T: int, D: int, H: int, window: int | None = None) -> Case:
    draw, slopes = Draw(R, B, T, D, H), alibi_slopes(H).to(DEVICE)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (rearrange(y, "b t (h k) -> b h t k", h=H) for y in (q, k, v))
        t = torch.arange(T, device=q.device)
        logits = q @ k.mT * (D // H) ** -0.5 - slopes.to(q)[:, None, None] * (t[:, None] - t)
        seen = (t <= t[:, None]) & (t > t[:, None] - (window or T))
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (rearrange(weights @ v, "b h t k -> b t (h k)"),)

    return Case(plain, lambda _: attention_method(slopes, window), [draw(R, B, T, D) for _ in range(3)], [])


def rotation_case(R: int, B: int, T: int, H: int, N: int, A: int) -> Case:
    draw = Draw(R, B, T, H, N, A)

    def plain(q: Tensor, k: Tensor, q_bias: Tensor, k_bias: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
        q, k, qk = rotated_pairs(q[:, :, None], k[:, :, None], q_bias[None], k_bias[None], angle)
        return q[:, :, 0], k[:, :, 0], qk[:, :, 0, 0]

    parameters = [draw(R, H, N), draw(R, H, N), draw(R, B, T, H, A, std=9.0)]
    return Case(plain, rotated_pairs_method, [draw(R, B, T, N), draw(R, B, T, N)], parameters)


def shift_case(R: int, B: int, T: int, D: int, N: int, changes: bool = False) -> Case:
    draw = Draw(R, B, T, D, N)
    parameters = [draw(R, N, D), *(draw(R, B, T, D) for _ in range(N if changes else 0))]
    return Case(token_shifts, partial(token_shifts_method, N), [draw(R, B, T, D)], parameters)


def maps_case(R: int, B: int, T: int, D: int, I: int) -> Case:
    draw = Draw(R, B, T, D, I)
    data = [draw(R, B, T, D), draw(R, B, T, D), draw(R, 3, D // I, I, I)]
    return Case(block_maps, lambda _: block_maps_method(), data, [])


SMALL = {
    "norm": norm_case(2, 3, 5, 24),
    "norm-wide": norm_case(1, 2, 3, 300),
    "norm-branching": norm_case(2, 3, 5, 24, branching=True),
    "project": project_case(2, 3, 7, 32, True),
    "project-one-row": project_case(1, 1, 1, 64, False),
    "project-many-rows": project_case(2, 5, 29, 32, False),
    "mlp": mlp_case(2, 3, 7, 32, 128),
    "mlp-one-row": mlp_case(1, 1, 1, 64, 64),
    "mlp-many-rows": mlp_case(2, 5, 29, 32, 64),
    "rotation": rotation_case(2, 3, 7, 3, 24, 5),
    "rotation-one-row": rotation_case(1, 1, 1, 1, 2, 1),
    "rotation-many-rows": rotation_case(2, 3, 23, 2, 128, 64),
    "shift": shift_case(2, 3, 7, 24, 3),
    "shift-one-row": shift_case(1, 1, 1, 1, 1),
    "shift-many-rows": shift_case(2, 3, 23, 136, 2),
    "shift-by-position": shift_case(2, 3, 23, 136, 2, changes=True),
    "maps": maps_case(2, 3, 7, 32, 4),
    "maps-one-row": maps_case(1, 1, 1, 16, 1),
    "maps-many-rows": maps_case(2, 3, 200, 192, 16),
    "attention": attention_case(2, 2, 7, 32, 4),
    "attention-one-position": attention_case(1, 1, 1, 16, 1),
    "attention-long": attention_case(1, 1, 131, 32, 2),
    "attention-wide-heads": attention_case(1, 2, 70, 64, 2),
    "attention-window": attention_case(2, 2, 75, 32, 4, window=8),
    "attention-window-of-one": attention_case(1, 1, 5, 16, 1, window=1),
    "attention-window-wide": attention_case(1, 1, 100, 32, 1, window=40),
}
LARGE = {
    "norm": partial(norm_case, 3, 16, 100, 128),
    "norm-1024": partial(norm_case, 1, 4, 63, 1024),
    "norm-branching": partial(norm_case, 3, 16, 100, 128, branching=True),
    "project": partial(project_case, 3, 16, 100, 128, True),
    "project-64": partial(project_case, 1, 5, 63, 64, False),
    "project-32": partial(project_case, 2, 5, 33, 32, True),
    "mlp": partial(mlp_case, 3, 16, 100, 128, 512),
    "mlp-64": partial(mlp_case, 1, 5, 63, 64, 256),
    "rotation": partial(rotation_case, 3, 16, 100, 4, 64, 16),
    "rotation-wide": partial(rotation_case, 1, 5, 63, 16, 128, 33),
    "shift": partial(shift_case, 3, 16, 100, 128, 6),
    "shift-wide": partial(shift_case, 1, 5, 63, 1000, 6),
    "shift-by-position": partial(shift_case, 3, 16, 100, 128, 5, changes=True),
    "maps": partial(maps_case, 3, 16, 100, 128, 4),
    "maps-wide": partial(maps_case, 1, 5, 333, 2048, 4),
    "attention-8": partial(attention_case, 3, 8, 100, 128, 16),
    "attention-16": partial(attention_case, 1, 3, 63, 64, 4),
    "attention-32": partial(attention_case, 1, 3, 220, 128, 4),
    "attention-64": partial(attention_case, 2, 2, 1024, 128, 2),
    "attention-128": partial(attention_case, 1, 2, 65, 256, 2),
    "attention-one-position": partial(attention_case, 1, 1, 1, 16, 2),
    "attention-window-8": partial(attention_case, 3, 8, 100, 128, 16, window=8),
    "attention-window-64": partial(attention_case, 1, 2, 1024, 128, 2, window=100),
}


def run(case: Case, function: Callable[..., tuple[Tensor, ...]], data: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of ``function``; rows x of a residual stream stay wide, other data are in ``data``."""
    leaves = [y.to(wide if i == 0 and case.parameters else data) for i, y in enumerate(case.data)]
    leaves = [y.requires_grad_() for y in leaves + [y.to(wide) for y in case.parameters]]
    outputs = vmap(function)(*leaves)
    upstream = [Draw(i, y.numel())(*y.shape).to(y.dtype) for i, y in enumerate(outputs)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def fused(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return run(case, partial(over_runs, case.method(dtype)), dtype, torch.float32)


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        *((name, torch.float32, 1e-5) for name in SMALL),
        *((name, torch.float16, 1e-3) for name in ("attention", "attention-wide-heads", "attention-window-wide")),
    ],
)
def test_interpreted(name: str, dtype: torch.dtype, most: float) -> None:
    """Also in 16 bits, where tiles are others; the interpreter's bfloat16 is not one."""
    case = SMALL[name]
    got, want = fused(case, dtype), run(case, case.plain, torch.float64, torch.float64)
    assert max(errors(got, want)) <= most


@interpreted
@pytest.mark.parametrize("name", ["norm", "project", "mlp", "rotation", "shift-by-position", "maps", "attention"])
def test_takes_tensors_of_any_layout(name: str) -> None:
    """As when all runs read the same tokens, where ``vmap`` hands over the run axis in the middle."""
    case = SMALL[name]
    leaves = [y.float() for y in case.data + case.parameters]
    scattered = [y.movedim(0, -1).contiguous().movedim(-1, 0) for y in leaves]
    fused = vmap(partial(over_runs, case.method(torch.float32)))
    for got, want in zip(fused(*scattered), fused(*leaves), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_float32(name: str) -> None:
    case = LARGE[name]()
    got, want = fused(case, torch.float32), run(case, case.plain, torch.float64, torch.float64)
    assert max(errors(got, want)) <= 1e-5


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", [name for name in LARGE if not name.startswith("rotation")])
def test_bfloat16_is_as_exact_as_plain_pytorch(name: str) -> None:
    """Both against float64, which starts from the same rounded inputs."""
    case = LARGE[name]()
    case = case._replace(data=[case.data[0], *(y.bfloat16().double() for y in case.data[1:])])
    if not case.parameters:
        case = case._replace(data=[y.bfloat16().double() for y in case.data])

    def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            return tuple(y if case.parameters and len(case.data) == 2 else y.bfloat16() for y in case.plain(*tensors))

    want = run(case, case.plain, torch.float64, torch.float64)
    got = errors(fused(case, torch.bfloat16), want)
    plain = errors(run(case, autocast, torch.bfloat16, torch.float32), want)
    for i, (ours, theirs) in enumerate(zip(got, plain, strict=True)):
        assert ours <= 1.5 * theirs + 1e-6, (i, ours, theirs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "name", ["norm", "project", "mlp", "rotation", "shift-by-position", "maps", "attention-8", "attention-64"]
)
def test_bitwise_repeatable(name: str) -> None:
    case = LARGE[name]()
    check_repeats(partial(fused, case, torch.bfloat16))


def embedded(shape: tuple[int, ...], shared: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradient of the table, then those of plain PyTorch in float64; two of the tokens are the last one."""
    R, B, T, V, D = shape
    draw = Draw(*shape)
    tokens = torch.randint(V, (B, T) if shared else (R, B, T), generator=draw.generator)
    tokens.flatten()[-2:] = V - 1
    tokens, table, dx = tokens.to(DEVICE), draw(R, V, D), draw(R, B, T, D)
    results = []
    for dtype, embed in ((torch.float32, partial(over_runs, embedding_method())), (torch.float64, F.embedding)):
        leaf = table.to(dtype).requires_grad_()
        x = vmap(embed, in_dims=(None if shared else 0, 0))(tokens, leaf)
        (x,) = (x,) if isinstance(x, Tensor) else x
        results += [x.detach(), torch.autograd.grad(x, leaf, dx.to(dtype))[0]]
    return results[0], results[1], results[2], results[3]


@interpreted
@pytest.mark.parametrize(
    ("shape", "shared"), [((2, 3, 7, 5, 24), False), ((1, 1, 2, 2, 16), False), ((2, 2, 40, 70, 32), True)]
)
def test_embedding_interpreted(shape: tuple[int, ...], shared: bool) -> None:
    x, dtable, want_x, want_dtable = embedded(shape, shared)
    assert torch.equal(x, want_x.float())
    torch.testing.assert_close(dtable.double(), want_dtable, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "shape", [(3, 128, 128, 16, 128), (1, 5, 63, 256, 128), (2, 7, 100, 65, 64), (30, 16, 33, 3, 256)]
)
def test_embedding_on_a_gpu(shape: tuple[int, ...]) -> None:
    x, dtable, want_x, want_dtable = embedded(shape, False)
    assert torch.equal(x, want_x.float())
    assert errors([dtable], [want_dtable])[0] <= 1e-6
    assert torch.equal(dtable, embedded(shape, False)[1])


@pytest.mark.gpu
@on_gpu
def test_the_transformer_runs_in_them_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its output is that of plain operations up to bfloat16's rounding."""
    torch.manual_seed(0)
    check_autocast(
        Transformer(Transformer.Config(), Shape()), ["norm", "projection", "attention", "mlp"], monkeypatch, 1.5
    )
