"""The kernels of the Recurrent Transformer against the oracle in float64: outputs and every gradient."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.feedback_transformer import FeedbackTransformer  # noqa: E402
from mixers.ops.kernels import common  # noqa: E402
from mixers.rt.dispatch import choose  # noqa: E402
from mixers.rt.fused import passes, tiles  # noqa: E402
from mixers.rt.fused.padding import PaddedSizes  # noqa: E402
from mixers.rt.fused.passes import fused_backward, fused_forward, unsupported  # noqa: E402
from mixers.rt.layer import RecurrentTransformer  # noqa: E402
from mixers.rt.naive import Weights, naive_recurrence  # noqa: E402
from mixers.rt.wavefront import schedule  # noqa: E402
from tests.kernel_marks import interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402

SCALE = 0.7
pytestmark = pytest.mark.usefixtures("nan_filled_scratch", "few_groups")

Inputs = tuple[list[Tensor], Weights, Tensor]
"""[x, q, k, v, dz], weights and ALiBi slopes."""


def draw(
    R: int, B: int, T: int, D: int, H: int, F: int, kv_norm: bool = True, k_norm: bool = True, share: bool = False
) -> Inputs:
    generator = torch.Generator().manual_seed(R + 2 * B + 3 * T + 5 * D + 7 * H)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    weights = Weights(
        wo_DD=normal(R, D, D) * D**-0.5,
        mlp_norm_D=1 + 0.2 * normal(R, D),
        up_FD=normal(R, F, D) * D**-0.5,
        down_DF=normal(R, D, F) * F**-0.5,
        kv_norm_D=1 + 0.2 * normal(R, D) if kv_norm else None,
        wk_DD=normal(R, D, D) * D**-0.5,
        k_norm_D=1 + 0.2 * normal(R, D) if k_norm else None,
        wv_DD=normal(R, D, D) * D**-0.5,
        share=normal(R, 1).sigmoid() if share else None,
    )
    slopes = torch.exp2(-8.0 * torch.arange(1, H + 1, dtype=torch.float64, device=device) / H)
    return [normal(R, B, T, D) for _ in range(5)], weights, slopes


def names(weights: Weights) -> list[str]:
    return ["z", "dx", "dq", "dk", "dv", *(f"d{n}" for n, w in weights._asdict().items() if w is not None)]


def oracle(inputs: Inputs, block: int = 1, dtype: torch.dtype = torch.float64, autocast: bool = False) -> list[Tensor]:
    """z and all gradients, in the order of ``names``."""
    (*xs, dz), weights, slopes = inputs
    leaves = [y.to(dtype).requires_grad_() for y in xs]
    leaf_weights = Weights._make(None if w is None else w.to(dtype).requires_grad_() for w in weights)
    x, q, k, v = leaves
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        if autocast:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        runs = []
        for r in range(len(x)):
            of_run = Weights._make(None if w is None else w[r] for w in leaf_weights)
            runs.append(naive_recurrence(x[r], q[r], k[r], v[r], of_run, slopes.to(dtype), SCALE, block))
    z = torch.stack(runs)
    wrt = leaves + [w for w in leaf_weights if w is not None]
    return [z.detach(), *torch.autograd.grad(z, wrt, dz.to(z.dtype), materialize_grads=True)]


@torch.no_grad()
def kernels(inputs: Inputs, dtype: torch.dtype, block: int = 1) -> list[Tensor]:
    (x, q, k, v, dz), weights, slopes = inputs
    x, dz, slopes, q, k, v = x.float(), dz.float(), slopes.float(), q.to(dtype), k.to(dtype), v.to(dtype)
    weights = Weights._make(None if w is None else w.float() for w in weights)
    z, saved = fused_forward(x, q, k, v, weights, slopes, SCALE, block)
    *gradients, dweights = fused_backward(dz, x, q, k, v, weights, slopes, SCALE, block, z, saved)
    return [z, *gradients, *(w for w in dweights if w is not None)]


def share_error(got: Tensor, want: Tensor, inputs: Inputs) -> float:
    """Return the error of the share's gradient (R, 1) relative to the norm of its parts, one part a sequence.

    The gradient is one number a run, and the parts of a run's sequences have both signs and may nearly cancel: 128 of
    them gave -31 where single parts have a norm of hundreds. Their rounding errors do not cancel.
    """
    (*xs, dz), weights, slopes = inputs
    parts = []
    for r in range(len(dz)):
        x, q, k, v = (y[r] for y in xs)
        of_run = Weights._make(None if w is None else w[r] for w in weights)
        share_B11 = of_run.share.expand(len(x), 1, 1).clone().requires_grad_()
        z = naive_recurrence(x, q, k, v, of_run._replace(share=share_B11), slopes, SCALE, 1)
        parts.append(torch.autograd.grad(z, share_B11, dz[r])[0].norm())
    return float((got - want).norm() / torch.stack(parts).norm())


def check_float32(inputs: Inputs, block: int = 1) -> None:
    """Against the oracle."""
    (*_, dz), weights, _ = inputs
    results = zip(names(weights), kernels(inputs, torch.float32, block), oracle(inputs, block), strict=True)
    for name, got, want in results:
        assert got.dtype == torch.float32
        assert got.shape == want.shape
        if name == "dshare":
            assert share_error(got, want, inputs) <= 1e-5
        elif want.any():
            assert error(got, want) <= 1e-5, name
        else:  # a softmax of one entry, or pairs that nothing attends to
            assert got.norm() <= 1e-6 * dz.norm(), name


def check_bfloat16(inputs: Inputs, block: int = 1) -> None:
    want, naive = oracle(inputs, block), oracle(inputs, block, torch.float32, autocast=True)
    got, again = (kernels(inputs, torch.bfloat16, block) for _ in range(2))
    for name, y, y_again, y_naive, reference in zip(names(inputs[1]), got, again, naive, want, strict=True):
        assert torch.equal(y, y_again), f"{name} is not repeatable"
        if name == "dshare":
            assert share_error(y, reference, inputs) <= 0.02
        elif reference.any():
            assert error(y, reference) <= 1.5 * error(y_naive, reference) + 1e-6, name
        else:  # a softmax of one entry, or pairs that nothing attends to
            assert y.norm() <= 1e-6 * inputs[0][-1].norm(), name


@interpreted
@pytest.mark.parametrize(
    ("sizes", "norms", "block", "share"),
    [
        ((1, 1, 1, 64, 8, 64), (True, True), 1, False),
        ((2, 1, 2, 64, 8, 64), (True, True), 1, False),
        ((1, 17, 7, 64, 4, 128), (False, True), 1, False),
        ((2, 2, 17, 64, 2, 64), (True, False), 1, False),
        ((1, 1, 33, 64, 8, 64), (False, False), 1, False),
        ((1, 1, 2, 128, 16, 64), (True, True), 1, False),
        ((1, 1, 2, 64, 1, 64), (True, True), 1, False),
        # Blocks.
        ((2, 3, 7, 64, 8, 64), (True, True), 2, False),
        ((1, 9, 20, 64, 4, 64), (False, False), 4, False),
        ((1, 1, 37, 64, 8, 64), (True, True), 16, False),
        ((1, 2, 70, 64, 8, 64), (False, False), 32, False),
        ((1, 1, 20, 64, 8, 64), (True, True), 64, False),
        # Sizes that are no power of two.
        ((2, 2, 3, 24, 3, 40), (True, True), 1, False),
        ((2, 2, 6, 48, 6, 100), (True, True), 4, False),
        ((2, 2, 3, 60, 4, 64), (False, False), 1, False),
        ((2, 2, 3, 72, 4, 288), (True, True), 1, False),
        # Mixtures of inputs and outputs.
        ((1, 2, 18, 64, 4, 64), (False, False), 1, True),
        ((2, 17, 3, 40, 5, 64), (True, True), 1, True),
    ],
)
def test_interpreted(sizes: tuple[int, ...], norms: tuple[bool, bool], block: int, share: bool) -> None:
    check_float32(draw(*sizes, *norms, share=share), block)


@interpreted
@pytest.mark.parametrize(("D", "H", "block"), [(40, 5, 1), (64, 8, 4)])
def test_interpreted_inputs_in_another_order_in_memory(D: int, H: int, block: int) -> None:
    """Inputs of a vmapped layer may be strided, and padding may keep their strides."""
    xs, weights, slopes = draw(2, 2, 3, D, H, 64)
    check_float32(([x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) for x in xs], weights, slopes), block)
    check_float32(([x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in xs], weights, slopes), block)


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's case")
def test_a_layer_whose_block_holds_all_positions_runs_in_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    shape = Shape(width=40, mlp_width=64)
    outputs = []
    for implementation in ("naive", "fused"):
        torch.manual_seed(0)
        config = RecurrentTransformer.Config(heads=5, block=100, implementation=implementation)  # type: ignore[arg-type]
        z = RecurrentTransformer(config, shape)(torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1)))
        z += 1  # what a layer returns may be written into
        outputs.append(z)
    assert not caplog.records
    assert error(outputs[1].detach(), outputs[0].detach().double()) <= 1e-5


@interpreted
@pytest.mark.parametrize(("F", "kv_norm", "k_norm"), [(64, True, True), (128, False, False)])
def test_interpreted_with_the_mlp_held(F: int, kv_norm: bool, k_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns of the MLP are taken at once, as in parts in bfloat16; in float32 the choice would be 32."""
    choose_tiles = tiles.choose_tiles

    def held(*case: Any) -> tiles.Tiles:
        chosen = choose_tiles(*case)
        return chosen._replace(rt_fwd={**chosen.rt_fwd, "W": F}, rt_bwd={**chosen.rt_bwd, "W": F})

    monkeypatch.setattr(passes, "choose_tiles", held)
    check_float32(draw(2, 3, 3, 64, 8, F, kv_norm, k_norm))


@pytest.mark.parametrize(
    ("width", "heads", "hidden", "block", "dtype", "device", "reason"),
    [
        *((128, 16, 512, block, torch.bfloat16, "cuda", "None") for block in (1, 4)),
        (128, 16, 512, 6, torch.bfloat16, "cuda", "blocks of 6"),
        (124, 4, 496, 1, torch.bfloat16, "cuda", "None"),
        (320, 8, 512, 1, torch.bfloat16, "cuda", "width 320"),
        (250, 10, 512, 1, torch.bfloat16, "cuda", "width 250 in 10 heads"),  # of 32 channels
        (130, 2, 512, 1, torch.bfloat16, "cuda", "heads of 65"),
        (128, 16, 513, 1, torch.bfloat16, "cuda", "MLP width 513"),
        (128, 16, 512, 1, torch.float64, "cuda", "float64"),
        (128, 16, 512, 1, torch.bfloat16, "cpu", "cpu"),
    ],
)
def test_unsupported_says_why(
    width: int, heads: int, hidden: int, block: int, dtype: torch.dtype, device: str, reason: str
) -> None:
    assert reason in str(unsupported(width, heads, hidden, block, dtype, torch.device(device)))


@pytest.mark.parametrize(
    ("multiprocessors", "memory"), [(20, 101376), (108, 166912), (132, 232448)], ids=["laptop", "A100", "H200"]
)
def test_settings_suit_the_gpu(multiprocessors: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for each other must be on the GPU at once, and pinned weights must fit into shared memory."""
    limits = common.GpuLimits(multiprocessors, memory, early_launch=False)
    monkeypatch.setattr(tiles, "gpu_limits", lambda device: limits)
    shares = []
    widths = ((64, 256), (128, 512), (128, 384), (128, 192), (256, 1024))
    for R, B, (D, F), block in itertools.product((1, 2, 6, 30), (1, 16, 128), widths, (1, 4, 32)):
        sizes = PaddedSizes(16, D, D // 8, F, block)
        for loop in tiles.choose_tiles(B, R, sizes, torch.bfloat16, torch.device("cpu"))[:2]:
            parts = loop["PARTS"]
            shares.append(parts)
            assert F % (parts * loop["W"]) == 0
            assert loop["W"].bit_count() == 1
            assert parts == 1 or loop["launch_cooperative_grid"]
            assert parts == 1 or (loop["M"] == 16 and D % (16 * loop["WARPS"]) == 0)  # whole words of a thread
            assert loop["M"] % loop["STEP"] == 0
            assert parts == 1 or R * parts * math.ceil(B * loop["STEP"] / loop["M"]) <= multiprocessors
            assert not (loop["PINNED"] and D == 128) or memory >= 180224  # as compiled by Triton 3.6
    assert max(shares) == 8
    assert min(shares) == 1


# In bfloat16 on an H200 these shapes have 8, 4, 2 or 1 parts; some parts hold their slice of the MLP on the chip.
SHAPES = [
    (1, 1, 1, 128, 16, 512),
    (1, 37, 63, 128, 16, 512),
    (3, 37, 100, 128, 16, 512),
    (1, 128, 128, 128, 16, 512),
    (4, 128, 33, 128, 16, 512),
    (6, 128, 20, 128, 16, 512),
    (30, 128, 18, 128, 16, 512),
    (1, 2, 1024, 128, 16, 512),
    (3, 5, 100, 64, 8, 256),
    (1, 37, 63, 64, 1, 256),
    (1, 1, 1024, 64, 2, 128),
    (1, 128, 63, 256, 16, 1024),
    (3, 1, 100, 256, 32, 1024),
    (1, 37, 128, 256, 4, 512),
]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("R", "B", "T", "D", "H", "F"), SHAPES)
@pytest.mark.parametrize(("kv_norm", "k_norm"), [(True, True), (False, False)])
def test_gpu_float32(R: int, B: int, T: int, D: int, H: int, F: int, kv_norm: bool, k_norm: bool) -> None:
    check_float32(draw(R, B, T, D, H, F, kv_norm, k_norm))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("R", "B", "T", "D", "H", "F", "normed"),
    [(*shape, True) for shape in SHAPES] + [(*shape, False) for shape in SHAPES[2:6]],
)
def test_gpu_bfloat16(R: int, B: int, T: int, D: int, H: int, F: int, normed: bool) -> None:
    check_bfloat16(draw(R, B, T, D, H, F, normed, normed))


# Blocks that are a part of a chunk of 16 positions, a chunk, several chunks, and all positions.
BLOCKS = [
    (1, 37, 63, 128, 16, 512, 2),
    (3, 5, 100, 64, 8, 256, 4),
    (30, 128, 18, 128, 16, 512, 8),
    (1, 128, 128, 128, 16, 512, 16),
    (2, 37, 63, 64, 1, 256, 32),
    (1, 2, 1024, 128, 16, 512, 64),
    (1, 37, 128, 256, 4, 512, 4),
    (6, 20, 40, 128, 16, 512, 128),
]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("R", "B", "T", "D", "H", "F", "block"), BLOCKS)
@pytest.mark.parametrize("normed", [True, False])
def test_gpu_blocks(R: int, B: int, T: int, D: int, H: int, F: int, block: int, normed: bool) -> None:
    inputs = draw(R, B, T, D, H, F, normed, normed)
    check_float32(inputs, block)
    check_bfloat16(inputs, block)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("R", "B", "T", "D", "H", "F", "block"),
    [(1, 37, 40, 124, 4, 496, 1), (6, 20, 33, 96, 12, 384, 1), (2, 5, 40, 200, 8, 800, 4), (1, 128, 20, 40, 5, 100, 1)],
)
def test_gpu_sizes_that_are_no_power_of_two(R: int, B: int, T: int, D: int, H: int, F: int, block: int) -> None:
    inputs = draw(R, B, T, D, H, F)
    check_float32(inputs, block)
    check_bfloat16(inputs, block)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("R", "B", "T", "D", "H", "F"), [*SHAPES[1:7], SHAPES[8], (6, 20, 33, 96, 12, 384)])
def test_gpu_mixtures_of_inputs_and_outputs(R: int, B: int, T: int, D: int, H: int, F: int) -> None:
    inputs = draw(R, B, T, D, H, F, share=True)
    check_float32(inputs)
    check_bfloat16(inputs)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_alone_and_in_company(dtype: torch.dtype) -> None:
    xs, weights, slopes = draw(3, 37, 40, 128, 16, 512)
    together = kernels((xs, weights, slopes), dtype)
    for r in range(3):
        one = [x[r : r + 1] for x in xs], Weights._make(None if w is None else w[r : r + 1] for w in weights), slopes
        for name, y, y_one in zip(names(weights), together, kernels(one, dtype), strict=True):
            if name in ("z", "dx", "dq", "dk", "dv"):
                assert torch.equal(y[r : r + 1], y_one), name
            else:  # sums over sequences are grouped by the number of runs
                assert error(y[r : r + 1], y_one.double()) <= 1e-6, name


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_graph(dtype: torch.dtype) -> None:
    """Inputs change before each replay, so that results of the replay before are wrong."""
    (x, q, k, v, dz), weights, slopes = draw(1, 20, 40, 128, 4, 512)
    x, dz, slopes, q, k, v = x.float(), dz.float(), slopes.float(), q.to(dtype), k.to(dtype), v.to(dtype)
    weights = Weights._make(None if w is None else w.float() for w in weights)

    def call() -> list[Tensor]:
        z, saved = fused_forward(x, q, k, v, weights, slopes, SCALE, 1)
        *gradients, dweights = fused_backward(dz, x, q, k, v, weights, slopes, SCALE, 1, z, saved)
        return [z, *gradients, *(w for w in dweights if w is not None)]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(3):
        want = call()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        x.mul_(-0.5)
        dz.add_(x)


@on_gpu
@pytest.mark.gpu
def test_gpu_two_passes_at_the_same_time() -> None:
    """Programs that wait for each other are all on the GPU at once, or none of them is."""
    runs = [draw(1, 128, 24, 128, 16, 512), draw(2, 100, 24, 128, 16, 512)]
    alone = [kernels(inputs, torch.bfloat16) for inputs in runs]
    streams = [torch.cuda.Stream() for _ in runs]
    together: list[list[Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(20):
        for inputs, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(kernels(inputs, torch.bfloat16))
    torch.cuda.synchronize()
    for i, got in enumerate(together):
        assert all(torch.equal(a, b) for a, b in zip(got, alone[i % 2], strict=True))


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's case; on a GPU the tests above run compiled")
def test_the_layer_trains_through_the_kernels_with_runs_stacked_by_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: 16)
    shape = Shape(width=32, mlp_width=32)
    gradients = {}
    for implementation in ("naive", "fused", "wavefront"):
        layers = []
        for seed in range(2):
            torch.manual_seed(seed)
            config = RecurrentTransformer.Config(heads=2, implementation=implementation)  # type: ignore[arg-type]
            layers.append(RecurrentTransformer(config, shape))
        params, _ = torch.func.stack_module_state(layers)
        x = torch.randn(2, 2, 5, 32, generator=torch.Generator().manual_seed(2))
        z = torch.func.vmap(lambda p, y, layer=layers[0]: torch.func.functional_call(layer, p, (y,)))(params, x)
        gradients[implementation] = [z, *torch.autograd.grad(z.square().sum(), list(params.values()))]
    for method in ("fused", "wavefront"):
        for got, want in zip(gradients[method], gradients["naive"], strict=True):
            assert torch.linalg.vector_norm(got - want) <= 1e-5 * torch.linalg.vector_norm(want), method


@pytest.mark.parametrize(
    ("width", "heads", "block", "dtype", "chosen"),
    [
        (128, 16, 1, torch.bfloat16, "fused"),
        (128, 16, 4, torch.bfloat16, "fused"),
        (128, 16, 6, torch.bfloat16, "tiled"),
        (124, 4, 1, torch.bfloat16, "fused"),
        (256, 16, 1, torch.bfloat16, "wavefront"),
        (256, 16, 32, torch.bfloat16, "fused"),
        (256, 32, 1, torch.bfloat16, "fused"),
        (128, 1, 1, torch.bfloat16, "wavefront"),
        (1024, 16, 1, torch.bfloat16, "wavefront"),
        (1024, 16, 2, torch.bfloat16, "wavefront"),
        (1024, 16, 3, torch.bfloat16, "tiled"),
        (1024, 16, 32, torch.bfloat16, "tiled"),
        (250, 10, 1, torch.bfloat16, "tiled"),
        (1024, 16, 1, torch.float32, "tiled"),
    ],
)
def test_auto_on_a_gpu(width: int, heads: int, block: int, dtype: torch.dtype, chosen: str) -> None:
    with FakeTensorMode():
        q_BTD = torch.zeros(1, 4, width, device="cuda", dtype=dtype)
    assert choose("auto", q_BTD, 4 * width, heads, block) == chosen


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's case; on a GPU the tests above run compiled")
@pytest.mark.parametrize("qk_norm", [True, False])
def test_one_layer_of_the_feedback_transformer_trains_through_the_kernels(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = []
    for seed in range(2):
        torch.manual_seed(seed)
        layer = FeedbackTransformer(FeedbackTransformer.Config(heads=4, qk_norm=qk_norm), Shape(width=64, mlp_width=64))
        layer.depth.data = torch.tensor([0.3, -0.5 + seed])
        layers.append(layer)

    # The plain loop, then the kernels.
    params, _ = torch.func.stack_module_state(layers)
    x = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(2))
    results = []
    for fused in (False, True):
        monkeypatch.setattr("mixers.feedback_transformer.runs_fused", lambda x, fused=fused: fused)
        z = torch.func.vmap(lambda p, y: torch.func.functional_call(layers[0], p, (y,)))(params, x)
        results.append([z.detach(), *torch.autograd.grad(z.square().sum(), list(params.values()))])
    for name, want, got in zip(["z", *params], *results, strict=True):
        assert error(got, want.double()) <= 1e-5, name
