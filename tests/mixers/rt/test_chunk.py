"""Chunk kernels against plain PyTorch, run thread by thread on a CPU; on a GPU whole passes against the naive form."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from mixers.ops.weights import LayerWeights  # noqa: E402
from mixers.rt.wavefront import chunk, schedule  # noqa: E402
from mixers.rt.wavefront.backward import Backward  # noqa: E402
from mixers.rt.wavefront.forward import Forward  # noqa: E402
from mixers.rt.wavefront.schedule import Wave  # noqa: E402
from mixers.rt.wavefront.setup import Setting  # noqa: E402
from mixers.rt.wavefront.weights import Operands  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.rt.emulator import plain  # noqa: E402
from tests.mixers.rt.emulator.kernel import AVAILABLE, EmulatedKernel  # noqa: E402
from tests.mixers.rt.test_wavefront import Case, build, check_float32, interpreted, passes  # noqa: E402

emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++ and an x86-64 processor")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
pytestmark = pytest.mark.usefixtures("nan_filled_scratch")
LAYERS, LENGTH, WAVE, AT = 2, 64, Wave(0, 2, 32), 16  # the second chunk of the groups of two layers


class Chunk(NamedTuple):
    """A chunk: sizes, settings, clusters of a layer, and the order of the emulator's threads."""

    D: int
    K: int
    B: int
    row_tiles: int
    qk_norm: bool
    persistent_norm: bool
    clusters: int
    order: int

    def setting(self, dtype: torch.dtype) -> Setting:
        slopes = 2.0 ** -torch.linspace(1, 8, self.D // self.K)
        return Setting(slopes_H=slopes, scale=0.37, persistent_norm=self.persistent_norm, dtype=dtype)

    def kernel(self, done: Any, direction: chunk.Direction) -> chunk.ChunkKernel:
        shape, fit = (self.D, self.K, self.row_tiles, self.qk_norm, self.persistent_norm), LAYERS * self.clusters
        kernel = EmulatedKernel(direction, *shape, fit=fit, order=self.order)
        made = chunk.ChunkKernel(done, direction, self.row_tiles, kernel)  # type: ignore[arg-type]
        made.room.fill_(255)
        operands = done.operands if direction == "forward" else done.transposed
        tensors = (*vars(done.kept).values(), *vars(done.scratch).values(), *operands, done.slopes_H, made.room)
        kernel.memory = [y for y in tensors if y is not None]
        return made


CHUNKS = [
    Chunk(256, 64, 17, 1, True, True, clusters=2, order=3),
    Chunk(256, 16, 19, 1, False, False, clusters=1, order=1),  # a cluster takes two tiles
    Chunk(256, 32, 34, 2, True, False, clusters=2, order=0),
    Chunk(384, 64, 2, 1, False, True, clusters=1, order=2),
    Chunk(384, 32, 5, 4, True, True, clusters=1, order=3),
]


def tensors_of(holder: Any) -> dict[str, Tensor]:
    return {name: y for name, y in vars(holder).items() if isinstance(y, Tensor)}


def weights_of(case: Chunk) -> LayerWeights:
    D = case.D

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(LAYERS, rows, columns) * columns**-0.5

    def gain() -> Tensor:
        return 1 + 0.2 * torch.randn(LAYERS, D)

    return LayerWeights(
        norm_D=gain(),
        wq_DD=matrix(D, D),
        wk_DD=matrix(D, D),
        wv_DD=matrix(D, D),
        q_norm_D=gain() if case.qk_norm else None,
        k_norm_D=gain() if case.qk_norm else None,
        wo_DD=matrix(D, D),
        mlp_norm_D=gain(),
        up_FD=matrix(4 * D, D),
        down_DF=matrix(D, 4 * D),
    )


def randomise(*holders: Any) -> None:
    """Random numbers that bfloat16 can hold; roots and denominators are positive, and the chunk's own pairs count."""
    for holder in holders:
        for name, y in tensors_of(holder).items():
            y.copy_(torch.randn(y.shape).bfloat16())
            if name in ("l", "r_x", "r_z", "r_u", "r_k"):
                y.abs_().add_(0.5)
            elif name == "m":
                y.sub_(3)
            elif name in ("dk", "dv"):
                y.mul_(0.125)


def check(wanted: dict[str, Tensor], got: dict[str, Tensor], before: dict[str, Tensor], names: list[str]) -> None:
    """Compare what the oracle changed, and see that nothing else has changed."""
    for name in names:
        changed = wanted[name] != before[name]
        assert changed.any(), name
        assert error(got[name][changed], wanted[name][changed]) <= 0.006, name
        torch.testing.assert_close(got[name][~changed].float(), before[name][~changed], rtol=1 / 128, atol=0)


@emulated
@pytest.mark.parametrize("case", CHUNKS)
def test_a_chunk_agrees_with_plain_pytorch(case: Chunk) -> None:
    torch.manual_seed(1)
    weights = weights_of(case)
    x, dz = (torch.randn(1, case.B, LENGTH, case.D) for _ in range(2))

    # Forward.
    wide, low = (Forward(x, weights, case.setting(dtype)) for dtype in (torch.float32, torch.bfloat16))
    wide.operands = Operands(*(w.float() for w in low.operands))
    randomise(wide.kept, wide.scratch)
    for holder, of in ((low.kept, wide.kept), (low.scratch, wide.scratch)):
        for name, y in tensors_of(holder).items():
            y.copy_(getattr(of, name))
    before = {name: y.clone() for name, y in (tensors_of(wide.kept) | tensors_of(wide.scratch)).items()}
    plain.forward(wide, wide.groups_of(WAVE, wide.scratch.x, wide.scratch.z), AT)
    low.finish_chunk(case.kernel(low, "forward"), low.groups_of(WAVE, low.scratch.x, low.scratch.z), AT)
    names = ["a", "lse", "n_u", "r_u", "k", "v", "n_z", "z"]
    names += ["r_k"] * case.qk_norm + ["r_z"] * case.persistent_norm
    check(
        tensors_of(wide.kept) | tensors_of(wide.scratch), tensors_of(low.kept) | tensors_of(low.scratch), before, names
    )

    # Backward, from what the oracle kept.
    saved = [y.to(of.dtype) for y, of in zip(wide.saved, low.saved, strict=True)]
    wide_bwd = Backward(dz, weights, case.setting(torch.float32), tuple(y.float() for y in saved))
    low_bwd = Backward(dz, weights, case.setting(torch.bfloat16), tuple(saved))
    wide_bwd.operands = Operands(*(w.float() for w in low_bwd.operands))
    low_bwd.transposed = Operands(*(w.mT.contiguous() for w in low_bwd.operands))
    randomise(wide_bwd.scratch)
    groups = wide_bwd.groups_of(WAVE, wide_bwd.scratch.dz, wide_bwd.scratch.dx)
    hidden = groups.kept.n_u @ wide_bwd.operands.layers(*WAVE[:2]).up.mT[:, None]  # on which sums over rows rely
    wide_bwd.scratch.h.copy_(hidden.bfloat16())
    for name, y in tensors_of(low_bwd.scratch).items():
        y.copy_(getattr(wide_bwd.scratch, name))
    before = {name: y.clone() for name, y in tensors_of(wide_bwd.scratch).items()}
    plain.backward(wide_bwd, groups, AT)
    groups = low_bwd.groups_of(WAVE, low_bwd.scratch.dz, low_bwd.scratch.dx)
    low_bwd.finish_chunk(case.kernel(low_bwd, "backward"), groups, AT)
    names = ["dkv", "dz", "dy", "h", "dh", "du", "da", "delta"]
    check(tensors_of(wide_bwd.scratch), tensors_of(low_bwd.scratch), before, names)


@interpreted
@pytest.mark.parametrize("case", [Case(2, 1, 2, 40, 16, 1, 16), Case(1, 2, 1, 18, 16, 1, 16)])
def test_a_pass_over_chunks_agrees_with_the_naive_form(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def forward(done: Forward, kernel: object, groups: Any, at: int) -> None:
        chunks.append(("forward", at))
        plain.forward(done, groups, at)

    def backward(done: Backward, kernel: object, groups: Any, at: int) -> None:
        chunks.append(("backward", at))
        plain.backward(done, groups, at)

    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: 32)
    monkeypatch.setattr(chunk.ChunkKernel, "of", lambda done, direction: object())
    monkeypatch.setattr(Forward, "finish_chunk", forward)
    monkeypatch.setattr(Backward, "finish_chunk", backward)
    check_float32(case)
    assert {*chunks} == {("forward", 0), ("forward", 16), ("backward", 16), ("backward", 0)}


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
    class Fake:
        def __init__(self) -> None:
            self.fit = fit

    case = Chunk(256, 64, sequences, 1, True, True, clusters=1, order=0)
    monkeypatch.setattr(chunk, "supported", lambda sizes: True)
    monkeypatch.setattr(chunk, "chunk_kernel", lambda *_: None if fit is None else Fake())
    weights = LayerWeights._make(y if y is None else y[:1].expand(layers, *y.shape[1:]) for y in weights_of(case))
    x = torch.randn(1, sequences, 512, 256, device="meta")
    weights = LayerWeights._make(y if y is None else y.to("meta") for y in weights)
    done = chunk.Pass(x, weights, case.setting(torch.bfloat16))
    made = [chunk.ChunkKernel.of(done, direction) for direction in ("forward", "backward")]
    assert tuple(None if kernel is None else kernel.row_tiles for kernel in made) == tiles


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("row_tiles", chunk.ROW_TILES)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 17, 48, 256, 4, 1024),
        Case(3, 1, 64, 100, 256, 8, 1024),
        Case(2, 1, 130, 64, 256, 16, 1024, qk_norm=False),
        Case(1, 3, 20, 70, 256, 4, 1024, persistent_norm=False),
        Case(1, 1, 17, 48, 384, 6, 1536, persistent_norm=False),
        Case(3, 1, 64, 100, 384, 12, 1536),
        Case(2, 1, 66, 64, 384, 24, 1536, qk_norm=False),
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


def test_the_arguments_are_those_of_the_sources() -> None:
    for direction, arguments in (("forward", chunk.ForwardArguments), ("backward", chunk.BackwardArguments)):
        text = chunk.source(direction)  # type: ignore[arg-type]
        declaration = text.partition("struct Arguments {")[2].partition("};")[0]
        lines = [line.partition("//")[0].strip() for line in declaration.splitlines()]
        fields = [
            name.strip().lstrip("*")
            for line in lines
            if line
            for name in line.removeprefix("const ").partition(" ")[2].rstrip(";").split(",")
        ]
        assert fields == [name for name, _ in arguments._fields_]
