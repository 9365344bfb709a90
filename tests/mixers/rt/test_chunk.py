"""Chunk kernels against plain PyTorch, run thread by thread on a CPU; on a GPU whole passes against the naive form."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from mixers.ops import replay  # noqa: E402
from mixers.ops.ahead import without_launches  # noqa: E402
from mixers.ops.cuda import Kernel  # noqa: E402
from mixers.ops.weights import LayerWeights  # noqa: E402
from mixers.rt.wavefront import chunk, schedule  # noqa: E402
from mixers.rt.wavefront.backward import Backward  # noqa: E402
from mixers.rt.wavefront.forward import Forward  # noqa: E402
from mixers.rt.wavefront.schedule import Wave  # noqa: E402
from mixers.rt.wavefront.setup import Pass, Sizes, WavefrontSetting  # noqa: E402
from mixers.rt.wavefront.weights import Operands  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.rt.emulator import plain  # noqa: E402
from tests.mixers.rt.emulator.kernel import AVAILABLE, EmulatedKernel  # noqa: E402
from tests.mixers.rt.test_wavefront import Case, build, check_case, interpreted, passes  # noqa: E402

emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++ and an x86-64 processor")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
pytestmark = pytest.mark.usefixtures("nan_filled_scratch")
LENGTH = 96


class Chunk(NamedTuple):
    """A chunk: sizes, settings, layers at work (after one that is not), clusters that fit, and the order of threads."""

    D: int
    K: int
    B: int
    row_tiles: int
    qk_norm: bool
    persistent_norm: bool
    layers: int
    fit: int
    order: int

    @property
    def wave(self) -> Wave:
        return Wave(1, 1 + self.layers, 64)

    def setting(self, dtype: torch.dtype) -> WavefrontSetting:
        slopes = 2.0 ** -torch.linspace(1, 8, self.D // self.K)
        return WavefrontSetting(slopes_H=slopes, scale=0.37, persistent_norm=self.persistent_norm, dtype=dtype)

    def weights(self, layers: int | None = None) -> LayerWeights:
        D, layers = self.D, layers or 1 + self.layers

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(layers, rows, columns) * columns**-0.5

        def gain() -> Tensor:
            return 1 + 0.2 * torch.randn(layers, D)

        return LayerWeights(
            norm_D=gain(),
            wq_DD=matrix(D, D),
            wk_DD=matrix(D, D),
            wv_DD=matrix(D, D),
            q_norm_D=gain() if self.qk_norm else None,
            k_norm_D=gain() if self.qk_norm else None,
            wo_DD=matrix(D, D),
            mlp_norm_D=gain(),
            up_FD=matrix(4 * D, D),
            down_DF=matrix(D, 4 * D),
        )

    def kernel(self, owner: Pass, direction: chunk.Direction, folder: Path) -> chunk.ChunkKernel | None:
        """In place of ``ChunkKernel.of``; a pass in float32 has none."""
        if owner.sizes.low == torch.float32:
            return None
        shape = (self.D, self.K, self.row_tiles, self.qk_norm, self.persistent_norm)
        with patch.object(chunk, "compiled", partial(EmulatedKernel, fit=self.fit, order=self.order, folder=folder)):
            kernel: Any = chunk.chunk_kernel.__wrapped__(direction, *shape, owner.sizes.device)  # without its cache
        made = chunk.ChunkKernel(owner, direction, self.row_tiles, kernel)
        made.room.fill_(255)
        return made


CHUNKS = [
    Chunk(256, 64, 29, 1, True, True, layers=2, fit=4, order=3),  # a cluster for each tile
    Chunk(256, 32, 50, 2, True, False, layers=1, fit=1, order=1),  # a cluster takes two tiles
    Chunk(384, 16, 2, 1, False, True, layers=1, fit=2, order=2),
    Chunk(384, 32, 13, 4, True, True, layers=1, fit=2, order=3),
]


def tensors_of(*holders: Any) -> dict[str, Tensor]:
    return {name: y for holder in holders for name, y in vars(holder).items() if isinstance(y, Tensor)}


def randomise(tensors: dict[str, Tensor]) -> None:
    """Random numbers that bfloat16 can hold; roots and denominators are positive, and the chunk's own pairs count."""
    for name, y in tensors.items():
        y.copy_(torch.randn(y.shape).bfloat16())
        if name in ("l", "r_x", "r_z", "r_u", "r_k"):
            y.abs_().add_(0.5)
        elif name == "m":
            y.sub_(3)
        elif name in ("dk", "dv"):
            y.mul_(0.125)


def finish(owner: Forward | Backward, groups: Any, at: int) -> dict[str, Tensor]:
    """Compute the chunk at a position of its group with the emulated kernel; return the tensors as they were before."""
    made, scratch, kept = owner.chunk_kernel, tensors_of(owner.scratch), tensors_of(owner.kept)
    operands = owner.transposed if isinstance(owner, Backward) else owner.operands
    made.kernel.memory = [*kept.values(), *scratch.values(), *operands, owner.slopes_H, made.room]  # type: ignore[attr-defined]
    before = {name: y.clone() for name, y in (kept | scratch).items()}
    owner.finish_chunk(made, groups, at)

    tiles = -(-owner.sizes.B // (16 * made.row_tiles))
    layers = groups.wave.n
    used = layers * min(tiles, max(1, made.kernel.fit // layers))
    assert (made.room != 255).any(1).tolist() == [i < used for i in range(len(made.room))]
    return before


def check(wanted: dict[str, Tensor], got: dict[str, Tensor], before: dict[str, Tensor], changing: set[str]) -> None:
    """Compare what the oracle has changed, given both results and the kernel's tensors before; no more is changed."""
    assert {name for name, y in got.items() if not torch.equal(y, before[name])} == changing
    for name, y in got.items():
        changed = wanted[name] != before[name].float()
        if name not in changing:
            assert not changed.any(), name
            continue
        assert torch.equal(y.masked_fill(changed, 0), before[name].masked_fill(changed, 0)), name
        assert error(y.where(changed, 0), wanted[name].where(changed, 0)) <= 0.006, name


@emulated
@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_agrees_with_plain_pytorch(case: Chunk, cache: pytest.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk.ChunkKernel, "of", partial(case.kernel, folder=cache.mkdir("emulated")))
    torch.manual_seed(1)
    weights = case.weights()
    x, dz = (torch.randn(1, case.B, LENGTH, case.D) for _ in range(2))

    # Forward: the last chunk, from which nothing may be read ahead.
    at = 16
    wide, low = (Forward(x, weights, case.setting(dtype)) for dtype in (torch.float32, torch.bfloat16))
    wide.operands = Operands(*(w.float() for w in low.operands))
    wanted, got = (tensors_of(owner.kept, owner.scratch) for owner in (wide, low))
    randomise(wanted)
    for name, y in got.items():
        y.copy_(wanted[name])
    groups = wide.groups_of(case.wave, wide.scratch.x, wide.scratch.z)
    plain.forward(wide, groups, at)
    before = finish(low, low.groups_of(case.wave, low.scratch.x, low.scratch.z), at)
    changing = {"a", "lse", "n_u", "r_u", "k", "v", "n_z", "z"}
    changing |= {"r_k"} if case.qk_norm else set()
    changing |= {"r_z"} if case.persistent_norm else set()
    if case.persistent_norm and case.layers > 1:  # outputs are the next layer's inputs
        changing |= {"n_x", "r_x"}
    check(wanted, got, before, changing)

    # Backward of the first chunk, from what the oracle kept.
    at = 0
    plain.forward(wide, groups, at)
    saved = [y.to(of.dtype) for y, of in zip(wide.saved, low.saved, strict=True)]
    wide_bwd = Backward(dz, weights, case.setting(torch.float32), tuple(y.float() for y in saved))
    low_bwd = Backward(dz, weights, case.setting(torch.bfloat16), tuple(saved))
    wide_bwd.operands = Operands(*(w.float() for w in low_bwd.operands))
    wanted, got = tensors_of(wide_bwd.scratch), tensors_of(low_bwd.scratch)
    randomise(wanted)
    groups = wide_bwd.groups_of(case.wave, wide_bwd.scratch.dz, wide_bwd.scratch.dx)
    hidden = groups.kept.n_u @ wide_bwd.operands.layers(*case.wave[:2]).up.mT[:, None]  # on which sums over rows rely
    wide_bwd.scratch.h[: case.layers].copy_(hidden.bfloat16())
    for name, y in got.items():
        y.copy_(wanted[name])
    plain.backward(wide_bwd, groups, at)
    before = finish(low_bwd, low_bwd.groups_of(case.wave, low_bwd.scratch.dz, low_bwd.scratch.dx), at)
    kept = tensors_of(low_bwd.kept)
    check(wanted | kept, got | kept, before, {"dkv", "dz", "dy", "h", "dh", "du", "da", "delta"})


@interpreted
@pytest.mark.parametrize("case", [Case(2, 1, 2, 40, 16, 1, 16), Case(1, 2, 1, 18, 16, 1, 16)])
def test_a_pass_over_chunks_agrees_with_the_naive_form(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def watched(finish: Callable[..., None], owner: Forward | Backward, kernel: str, groups: Any, at: int) -> None:
        chunks.append((kernel, at))
        finish(owner, groups, at)

    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: 32)
    monkeypatch.setattr(chunk.ChunkKernel, "of", lambda owner, direction: direction)
    for kind, finish in ((Forward, plain.forward), (Backward, plain.backward)):
        monkeypatch.setattr(kind, "finish_chunk", lambda *given, finish=finish: watched(finish, *given))
        monkeypatch.delattr(kind, "finish_block")
    check_case(case)
    assert {*chunks} == {("forward", 0), ("forward", 16), ("backward", 16), ("backward", 0)}


class FakeKernel:
    """A compiled kernel that cannot be launched."""

    def __init__(self, fit: int) -> None:
        self.fit = fit


@pytest.mark.parametrize(
    ("layers", "sequences", "fit", "tiles"),
    [
        (1, 64, 15, (1, 1)),  # 4 of 15 clusters
        (4, 64, 15, (2, 2)),  # 8, where 16 of smaller tiles would not fit
        (6, 64, 7, (4, 4)),
        (6, 128, 7, (4, None)),  # 12 of 7: two turns
        (4, 256, 15, (4, None)),
        (6, 192, 7, (None, None)),
        (1, 1, 0, (None, None)),  # no cluster fits on the GPU
        (1, 1, None, (None, None)),  # nothing compiles
    ],
)
def test_a_cluster_takes_the_fewest_sequences_for_which_all_fit(
    layers: int, sequences: int, fit: int | None, tiles: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compile_kernel(*arguments: Any) -> FakeKernel | None:
        asked.append(arguments)
        return None if fit is None else FakeKernel(fit)

    case = Chunk(256, 64, sequences, 1, True, False, layers, fit=0, order=0)
    monkeypatch.setattr(chunk, "supported", lambda sizes: True)
    monkeypatch.setattr(chunk, "chunk_kernel", compile_kernel)
    x = torch.empty(1, sequences, 512, 256, device="meta")
    weights = LayerWeights._make(y if y is None else y.to("meta") for y in case.weights(layers))
    owner = Pass(x, weights, case.setting(torch.bfloat16))
    made = [chunk.ChunkKernel.of(owner, direction) for direction in ("forward", "backward")]
    assert tuple(None if kernel is None else kernel.row_tiles for kernel in made) == tiles
    known = {(direction, 256, 64, n, True, False, x.device) for direction in ("forward", "backward") for n in (1, 2, 4)}
    assert {*asked} <= known
    assert {arguments[0] for arguments in asked} == {"forward", "backward"}


def test_which_cases_have_a_chunk_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = Chunk(256, 64, 4, 1, True, True, layers=3, fit=1, order=0)
    sizes = replace(
        Sizes.of(torch.randn(1, 4, 32, 256), case.weights(), case.setting(torch.bfloat16)), device=torch.device("cuda")
    )
    assert chunk.supported(sizes)
    assert chunk.supported(replace(sizes, D=384, F=1536, H=24))
    for other in (
        {"device": torch.device("cpu")},
        {"low": torch.float32},
        {"wide": torch.bfloat16},
        {"block": 4},
        {"D": 512, "F": 2048, "H": 8},
        {"F": 512},
        {"H": 2},
    ):
        assert not chunk.supported(replace(sizes, **other)), other
    capability = (10, 0)
    assert not chunk.supported(sizes)


def test_a_trace_launches_nothing() -> None:
    launch = Kernel.launch
    with without_launches():
        assert Kernel.launch is not launch
        Kernel.launch(None, chunk.ForwardArguments, {}, (1, 1))  # type: ignore[arg-type]
    assert Kernel.launch is launch


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("row_tiles", chunk.ROW_TILES)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 29, 48, 256, 4, 1024),
        Case(3, 1, 64, 100, 256, 8, 1024),
        Case(2, 1, 300, 64, 256, 16, 1024, qk_norm=False),  # a position has more than 65,536 numbers
        Case(1, 3, 20, 70, 256, 4, 1024, persistent_norm=False),
        Case(1, 1, 17, 48, 384, 6, 1536, persistent_norm=False),
        Case(3, 1, 64, 100, 384, 12, 1536),
        Case(2, 1, 77, 64, 384, 24, 1536, qk_norm=False),
        Case(1, 2, 20, 70, 384, 6, 1536, qk_norm=False, persistent_norm=False),
    ],
)
def test_gpu_passes_agree_with_the_naive_form_and_repeat_bitwise(
    row_tiles: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, launch = [], chunk.ChunkKernel.launch

    def watched(kernel: chunk.ChunkKernel, *arguments: Any) -> None:
        launched.append(kernel.row_tiles)
        launch(kernel, *arguments)

    monkeypatch.setattr(replay, "may_replay", lambda y: False)  # a graph has the tiles with which it was captured
    monkeypatch.setattr(chunk, "ROW_TILES", (row_tiles,))
    monkeypatch.setattr(chunk, "MOST_TURNS", {"forward": 99, "backward": 99})
    monkeypatch.setattr(chunk.ChunkKernel, "launch", watched)
    runs, x, dz = build(case)
    wanted = passes(runs, x, dz, "naive")
    runs, x, dz = [stack.float() for stack in runs], x.float(), dz.float()
    with torch.autocast("cuda", torch.bfloat16):
        naive = passes(runs, x, dz, "naive")
        got, again = (passes(runs, x, dz, "wavefront") for _ in range(2))
    assert {*launched} == {row_tiles}
    for name, reference in wanted.items():
        assert error(got[name], reference) <= 1.5 * error(naive[name], reference) + 1e-6, name
        assert torch.equal(got[name], again[name]), name
