"""Stacks of Recurrent Transformer layers as a wavefront against the naive form in float64: outputs and gradients."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.models import Stack  # noqa: E402
from mixers.rt.layer import RecurrentTransformer  # noqa: E402
from mixers.rt.wavefront import schedule  # noqa: E402
from mixers.rt.wavefront.launch import add_outer_products  # noqa: E402
from mixers.rt.wavefront.passes import unsupported  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.rt.test_native import Cold  # noqa: E402
from tests.mixers.runs import Case, check_errors, check_graph, drawn, outputs_and_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")


def build(case: Case) -> tuple[list[Stack], Tensor, Tensor]:
    """Stacks of R runs in float64, inputs (R, B, T, D), and gradients of outputs."""
    torch.manual_seed(sum(case))
    shape = Shape(width=case.D, mlp_width=case.F, layers=case.L)
    config = RecurrentTransformer.Config(
        heads=case.H,
        qk_norm=case.qk_norm,
        persistent_norm=case.persistent_norm,
        block=case.block,
        implementation="naive",
    )
    return drawn(case, [Stack(RecurrentTransformer(config, shape) for _ in range(case.L)) for _ in range(case.R)], 0.2)


def passes(runs: Sequence[Stack], x_RBTD: Tensor, dz_RBTD: Tensor, implementation: str) -> dict[str, Tensor]:
    """Outputs and every gradient, runs stacked by vmap where there are several."""
    for stack in runs:
        for layer in stack:
            object.__setattr__(layer.config, "implementation", implementation)
    return outputs_and_gradients(runs, x_RBTD, dz_RBTD)


def compared(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """What is wanted, what there is, and in bfloat16 what the naive form makes of it."""
    runs, x, dz = build(case)
    wanted = passes(runs, x, dz, "naive")
    runs = [stack.float() for stack in runs]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        got = passes(runs, x.float(), dz.float(), "wavefront")
        return wanted, got, passes(runs, x.float(), dz.float(), "naive") if dtype == torch.bfloat16 else {}


def check_case(case: Case) -> None:
    check_errors(*compared(case, torch.float32)[:2])


@interpreted
@pytest.mark.parametrize(
    ("group", "case"),
    [
        (16, Case(1, 1, 1, 1, 48, 3, 40)),
        (16, Case(3, 1, 1, 17, 16, 1, 16)),
        (32, Case(2, 1, 1, 18, 32, 2, 24)),
        (16, Case(2, 2, 1, 3, 16, 1, 16, persistent_norm=False)),
        (16, Case(1, 2, 2, 18, 16, 1, 40, qk_norm=False)),
        (32, Case(1, 1, 1, 20, 16, 1, 16, block=4)),
        (16, Case(2, 1, 2, 18, 32, 2, 24, block=16, qk_norm=False)),
        (16, Case(1, 2, 1, 18, 16, 1, 16, block=8, persistent_norm=False)),
        (16, Case(1, 1, 1, 3, 16, 1, 16, block=16)),
    ],
)
def test_interpreted(group: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: group)
    check_case(case)


class Doubled(RecurrentTransformer):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return 2 * super().forward(x_BTD)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers that work at the same time, in groups of 16 positions."""
    found: list[int] = []
    wavefront = RecurrentTransformer._wavefront

    def watched(layers: Sequence[RecurrentTransformer], x_BTD: Tensor) -> Tensor:
        found.append(len(layers))
        return wavefront(layers, x_BTD)

    monkeypatch.setattr(RecurrentTransformer, "_wavefront", staticmethod(watched))
    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: 16)
    return found


@interpreted
@pytest.mark.parametrize(
    ("reason", "together"),
    [
        ("none", [2]),
        ("hook", [1, 1]),
        ("backward hook", [1, 1]),
        ("no gradients", [1, 1]),
        ("another configuration", [1, 1]),
        ("another forward", [1, 1]),
        ("another projection", []),
        ("another module", [1]),
    ],
)
def test_layers_work_at_the_same_time_unless_there_is_a_reason_not_to(
    reason: str, together: list[int], counts: list[int]
) -> None:
    kind = {"another forward": Doubled, "another projection": Cold}.get(reason, RecurrentTransformer)
    shape = Shape(width=32, mlp_width=16, layers=2)
    config = kind.Config(heads=2, implementation="wavefront")
    torch.manual_seed(0)
    stack = Stack(kind(config, shape) for _ in range(2)).to(DEVICE)
    called = []
    if reason == "hook":
        stack[1].register_forward_hook(lambda module, inputs, output: called.append(module))
    elif reason == "backward hook":
        stack[1].register_full_backward_hook(lambda module, inputs, outputs: called.append(module))
    elif reason == "another configuration":
        stack[1] = kind(kind.Config(heads=1, implementation="wavefront"), shape).to(DEVICE)
    elif reason == "another module":
        stack[1] = torch.nn.Identity()
    x = torch.randn(1, 3, 32, device=DEVICE)
    with torch.set_grad_enabled(reason != "no gradients"):
        z = stack(x)
    if reason == "backward hook":
        z.sum().backward()
    assert counts == together
    assert len(called) == ("hook" in reason)
    for layer in stack:
        if isinstance(layer, RecurrentTransformer):
            object.__setattr__(layer.config, "implementation", "naive")
    torch.testing.assert_close(z, stack(x), rtol=1e-5, atol=1e-5)


@interpreted
def test_layers_that_are_computed_again_work_at_the_same_time_in_parts(counts: list[int]) -> None:
    (stack,), x, dz = build(Case(3, 1, 1, 3, 16, 1, 16))
    wanted = passes([stack], x, dz, "naive")
    for layer in stack.float():
        object.__setattr__(layer.config, "implementation", "wavefront")
    stack.recompute = True
    x_BTD = x[0].float().requires_grad_()
    gradients = torch.autograd.grad(z_BTD := stack(x_BTD), [x_BTD, *stack.parameters()], dz[0].float())
    assert counts == [2, 1, 1, 2]
    names = ["z", "x", *(name for name, _ in stack.named_parameters())]
    for name, y in zip(names, [z_BTD.detach(), *gradients], strict=True):
        assert error(y, wanted[name][0]) <= 1e-5, name


@interpreted
def test_runs_may_be_mapped_over_the_last_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "group_size", lambda layers, sequences: 16)
    runs, x, _ = build(Case(1, 2, 1, 5, 32, 2, 16))
    for stack in runs:
        object.__setattr__(stack[0].config, "implementation", "wavefront")
    params = {
        name: torch.stack([dict(stack.named_parameters())[name].detach().float() for stack in runs])
        for name, _ in runs[0].named_parameters()
    }
    call = partial(torch.func.functional_call, runs[0].float())
    first = torch.func.vmap(lambda p, x: call(p, (x,)))(params, x.float())
    moved = {name: p.movedim(0, -1).contiguous() for name, p in params.items()}
    last = torch.func.vmap(lambda p, x: call(p, (x,)), in_dims=(-1, 0))(moved, x.float())
    torch.testing.assert_close(last, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layers", "groups"), [(1, 1), (1, 5), (3, 1), (2, 4), (5, 3)])
def test_waves_do_every_group_of_every_layer_after_what_it_waits_for(layers: int, groups: int) -> None:
    done: set[tuple[int, int]] = set()
    for lo, hi, base in schedule.Schedule(layers, length=groups * 32, group=32, skew=32).waves():
        starts = {(layer, base // 32 - (layer - lo)) for layer in range(lo, hi)}
        for layer, group in starts:
            assert (layer, group) not in done
            assert layer == 0 or (layer - 1, group) in done
            assert group == 0 or (layer, group - 1) in done
        done |= starts
    assert done == {(layer, group) for layer in range(layers) for group in range(groups)}


def test_sums_of_outer_products_have_a_fake_form() -> None:
    """TorchInductor learns the shapes of a backward pass from it."""
    with FakeTensorMode():
        y, total = torch.empty(2, 5, 3, dtype=torch.bfloat16), torch.zeros(2, 3, 3)
        add_outer_products(total, y, y)


@pytest.mark.parametrize(
    ("heads", "block", "dtype", "device", "reason"),
    [
        *((22, block, torch.bfloat16, "cuda", "None") for block in (1, 16)),
        *((22, block, torch.bfloat16, "cuda", f"blocks of {block}") for block in (3, 32)),
        (16, 1, torch.bfloat16, "cuda", "16 heads of width 1408"),
        (22, 1, torch.float64, "cuda", "float64"),
        (22, 1, torch.bfloat16, "cpu", "cpu"),
    ],
)
def test_says_why_a_case_is_unsupported(heads: int, block: int, dtype: torch.dtype, device: str, reason: str) -> None:
    assert reason in str(unsupported(1408, heads, block, dtype, torch.device(device)))


SHAPES = [
    Case(1, 1, 1, 1, 192, 3, 768),
    Case(1, 1, 2, 1024, 320, 5, 640),
    Case(1, 1, 33, 63, 704, 11, 2816),
    Case(1, 3, 5, 100, 256, 4, 512),
    Case(2, 1, 3, 40, 2048, 32, 4096),
    Case(2, 1, 17, 70, 512, 4, 1000),
    Case(2, 2, 5, 100, 96, 6, 100),
    Case(3, 1, 3, 70, 96, 3, 384),
    Case(4, 1, 3, 200, 256, 4, 512),
    Case(12, 1, 2, 130, 128, 2, 256),
    Case(1, 1, 33, 63, 704, 11, 2816, block=4),
    Case(1, 3, 5, 100, 256, 4, 512, block=2),
    Case(2, 1, 17, 70, 512, 4, 1000, block=16),
    Case(4, 1, 3, 200, 256, 4, 512, block=8),
]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("norms", [True, False])
def test_gpu_float32(case: Case, norms: bool) -> None:
    check_case(case._replace(qk_norm=norms, persistent_norm=norms))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_gpu_bfloat16(case: Case) -> None:
    wanted, got, naive = compared(case, torch.bfloat16)
    check_errors(wanted, got, lambda name, y: 1.5 * error(naive[name], y) + 1e-6)


@on_gpu
@pytest.mark.gpu
def test_gpu_graph_repeats_bitwise() -> None:
    (stack,), x, dz = build(Case(3, 1, 20, 140, 128, 2, 512))
    check_graph(partial(passes, [stack.float()], x.float(), dz.float(), "wavefront"))
