"""Models of several runs, stacked by ``torch.func.vmap``, and what a GPU makes of models."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from mixers.base import Layer
from tests.kernel_marks import DEVICE
from tests.mixers.errors import error

Model = TypeVar("Model", bound=nn.Module)


class Case(NamedTuple):
    """Layers on top of each other, runs, and the shape of one layer and its inputs."""

    L: int
    R: int
    B: int
    T: int
    D: int
    H: int
    F: int
    qk_norm: bool = True
    persistent_norm: bool = True
    block: int = 1


def drawn(case: Case, runs: Sequence[Model], spread: float) -> tuple[list[Model], Tensor, Tensor]:
    """Return models of R runs in float64 with changed vectors, inputs (R, B, T, D), and gradients of outputs."""
    for model in runs:
        for parameter in model.double().parameters():
            if parameter.ndim == 1:  # gains, and the mixture of a memory
                parameter.data += spread * torch.randn_like(parameter)
    x, dz = (torch.randn(case.R, case.B, case.T, case.D, dtype=torch.float64).to(DEVICE) for _ in range(2))
    return [model.to(DEVICE) for model in runs], x, dz


def outputs_and_gradients(runs: Sequence[nn.Module], x_RBTD: Tensor, dz_RBTD: Tensor) -> dict[str, Tensor]:
    """Outputs and every gradient, runs stacked by vmap where there are several."""
    params = {
        name: torch.stack([dict(stack.named_parameters())[name].detach() for stack in runs]).requires_grad_()
        for name, _ in runs[0].named_parameters()
    }
    x_RBTD = x_RBTD.clone().requires_grad_()
    call = partial(torch.func.functional_call, runs[0])
    if len(runs) == 1:
        z_RBTD = call({name: p[0] for name, p in params.items()}, (x_RBTD[0],))[None]
    else:
        z_RBTD = torch.func.vmap(lambda p, x: call(p, (x,)))(params, x_RBTD)
    gradients = torch.autograd.grad(
        z_RBTD, [x_RBTD, *params.values()], dz_RBTD.to(z_RBTD.dtype), materialize_grads=True
    )
    return dict(zip(["z", "x", *params], [z_RBTD.detach(), *gradients], strict=True))


def check_errors(
    wanted: dict[str, Tensor], got: dict[str, Tensor], most: Callable[[str, Tensor], float] = lambda *_: 1e-5
) -> None:
    """Compare results with those in float64; ``most`` returns the largest error of one, by default of float32."""
    for name, reference in wanted.items():
        if reference.norm() > 1e-9 * wanted["x"].norm():
            assert error(got[name], reference) <= most(name, reference), name
        else:  # one position: its softmax has one entry and no gradient, and nothing reads its memory
            assert got[name].norm() <= 1e-6 * wanted["x"].norm(), name


def check_graph(call: Callable[[], dict[str, Tensor]]) -> None:
    """Compare results of a CUDA graph, replayed twice, bitwise with those of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(y, want[name]) for name, y in got.items())


def check_repeats(call: Callable[[], Iterable[Tensor]]) -> None:
    """Call a function four times, and compare the results bitwise."""
    first = [*call()]
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))


def check_autocast(layer: Layer, operations: Iterable[str], monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Compare a layer in kernels under autocast with plain operations, of whose error it may have a few times."""
    layer.cuda()
    x = torch.randn(4, 100, layer.shape.width, device="cuda")
    with torch.no_grad():
        want = layer(x)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        got = layer(x)
        for name in operations:
            monkeypatch.setattr(f"mixers.ops.{name}.runs_fused", lambda x: False)
        plain = layer(x)
    assert not torch.equal(got, plain)
    assert error(got, want.double()) <= times * error(plain, want.double())
