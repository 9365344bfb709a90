"""Replays of operations as CUDA graphs: a training with them is that without them, bit by bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mixers.ops import loops, replay
from mixers.ops.runs import methods_met
from mixers.registry import build
from tests.kernel_marks import on_gpu
from tests.mixers.errors import error

LOOPS: list[tuple[str, dict[str, int]]] = [
    *[("slstm", {"heads": 1}), ("m2rnn", {"heads": 4})],
    *[(name, {"heads": 128}) for name in ("rmt", "transformer-fam", "staircase")],
    *[(name, {}) for name in ("lstm", "rmt", "transformer-fam", "staircase")],
]
"""Layers of width 512 without kernels of the whole loop; with the default heads, launches of its parts."""


def test_the_third_pass_over_a_shape_is_captured_and_the_shapes_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[int] = []

    def capture(function: replay.Function, given: Sequence[Any]) -> replay.Function:
        captured.append(len(given[0]))
        if len(given[0]) == 5:
            raise torch.OutOfMemoryError("no memory for a graph")
        return lambda given: [-1 * given[0]]

    monkeypatch.setattr(replay, "SHAPES", 2)
    replays = replay.Replays(capture)

    def passes(name: str, length: int, count: int) -> list[float]:
        results = [replays.run(name, lambda given: [2 * given[0]], [torch.ones(length), None]) for _ in range(count)]
        return [float(y[0]) for (y,) in results if y is not None]

    assert passes("a", 3, 4) == [2, 2, -1, -1]
    assert passes("a", 4, 2) == [2, 2]
    assert passes("b", 3, 1) == [2]  # in place of the first one
    assert passes("a", 4, 2) == [-1, -1]
    assert passes("a", 3, 1) == [2]
    assert passes("a", 5, 5) == [2] * 5
    assert captured == [3, 4, 5]


@pytest.mark.parametrize("name", ["lstm", "slstm", "m2rnn", "rmt", "transformer-fam", "staircase"])
def test_a_loop_that_could_be_replayed_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(name, width=32).double()
    x, dz = torch.randn(2, 2, 20, 32, dtype=torch.float64)
    parameters = [*layer.parameters()]
    plain = layer(x)
    expected = [plain, *torch.autograd.grad(plain, parameters, dz)]

    monkeypatch.setattr(loops, "_are_replayed", lambda tensors: not loops._of_thread.looping)
    with methods_met() as met:
        found = layer(x)
    assert "loop of operations, replayed" in met
    got = [found, *torch.autograd.grad(found, parameters, dz)]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_module_with_hooks_is_launched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build("staircase", width=32)
    getattr(layer.stack.blocks[0], f"register_{kind}_hook")(lambda *_: None)
    monkeypatch.setattr(loops, "_are_replayed", lambda tensors: not loops._of_thread.looping)
    with methods_met() as met:
        layer(torch.randn(2, 20, 32))
    assert "loop of operations, replayed" not in met


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> replay.Replays:
    """Graphs of this test alone."""
    own = replay.Replays(replay.Graph)
    monkeypatch.setattr(replay, "_replays", lambda device: own)
    return own


def graphs(replays: replay.Replays) -> int:
    return sum(isinstance(known, replay.Graph) for known in replays._known.values())


def trained(
    name: str, checkpointed: bool, wrap: Callable[[nn.Module], nn.Module] = nn.Sequential, seed: int = 0
) -> list[Tensor]:
    """Train a small model with two lengths, two backward passes a step and evaluations; return all that it computes."""
    torch.manual_seed(seed)
    deep = {"layers": 2} if name == "feedback-transformer" else {}  # one layer has another kernel
    layers = [wrap(build(name, width=256, heads=8, mlp_width=512, **deep).cuda()) for _ in range(2)]
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=1e-3)
    found = []

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return x.float().square().mean()

    for step in range(5):
        for length in (64, 96 if step % 2 else 64):
            run(torch.randn(3, length, 256, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(run(torch.randn(3, 64, 256, device="cuda")))
    return [*found, *(p.detach() for layer in layers for p in layer.parameters())]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["rt", "feedback-transformer"])
def test_a_training_with_replays_is_that_with_launches(
    name: str, checkpointed: bool, replays: replay.Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = trained(name, checkpointed)
    assert graphs(replays) > 0
    replays._known.clear()
    monkeypatch.setattr(replay, "PASSES", 10**6)
    assert all(torch.equal(a, b) for a, b in zip(replayed, trained(name, checkpointed), strict=True))


@pytest.mark.gpu
@on_gpu
def test_processes_that_train_together_replay(tmp_path: Path) -> None:
    multiprocessing.spawn(train_in_parallel, (f"file://{tmp_path}/store",), nprocs=2)


def train_in_parallel(rank: int, store: str) -> None:
    """Train with replays, then with launches, as one of two processes with data of their own."""
    distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    replayed = trained("rt", False, DistributedDataParallel, rank)
    assert graphs(replay._replays(torch.device("cuda", 0))) > 0
    replay._replays.cache_clear()
    replay.PASSES = 10**6
    launched = trained("rt", False, DistributedDataParallel, rank)
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))
    distributed.destroy_process_group()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("name", "heads"), LOOPS)
def test_replayed_loops_compute_what_launched_ones_do(
    name: str, heads: dict[str, int], checkpointed: bool, replays: replay.Replays
) -> None:
    torch.manual_seed(0)
    layer = build(name, width=512, **heads).cuda()
    parameters, inputs = [*layer.parameters()], torch.randn(2, 2, 64, 512, device="cuda")
    with methods_met() as met:
        passes = [outcome(layer, x, parameters, checkpointed) for x in (*inputs, *inputs, *inputs)]
    assert ("loop of operations, replayed" in met) == bool(heads)
    assert graphs(replays) > 0
    for launched, replayed in zip(passes[:2], passes[4:], strict=True):
        assert all(error(other, one) <= 1e-3 for one, other in zip(launched, replayed, strict=True))


def outcome(layer: nn.Module, x: Tensor, parameters: Sequence[Tensor], checkpointed: bool) -> list[Tensor]:
    """Return the outputs of a layer, and the gradients of a sum of their squares."""
    with torch.autocast("cuda", torch.bfloat16):
        z = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    return [z.detach(), *torch.autograd.grad(z.float().square().sum(), parameters)]


@pytest.mark.gpu
@on_gpu
def test_a_graph_of_the_caller_holds_the_launches() -> None:
    layer = build("rt", width=256, heads=8, mlp_width=512).cuda()
    x = torch.randn(3, 64, 256, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        with torch.cuda.stream(side):
            for _ in range(5):
                layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        expected = layer(x)
    graph.replay()
    assert torch.equal(y, expected)
