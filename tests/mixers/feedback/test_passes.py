"""All layers of the Feedback Transformer in kernels against its plain loop in float64: outputs and gradients."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.feedback.passes import unsupported  # noqa: E402
from mixers.feedback_transformer import FeedbackTransformer  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402
from tests.mixers.errors import error  # noqa: E402
from tests.mixers.runs import Case, check_errors, check_graph, drawn, outputs_and_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("nan_filled_scratch")
MIXTURE = "model.depth"  # the parameter that mixes the outputs of the layers into the memory


def build(case: Case) -> tuple[list[FeedbackTransformer], Tensor, Tensor]:
    """Models of R runs in float64, inputs (R, B, T, D), and gradients of outputs."""
    torch.manual_seed(sum(case[:8]))
    shape = Shape(width=case.D, mlp_width=case.F, layers=case.L)
    config = FeedbackTransformer.Config(heads=case.H, qk_norm=case.qk_norm)
    return drawn(case, [FeedbackTransformer(config, shape) for _ in range(case.R)], 0.3)


class Kernels(torch.nn.Module):
    """A model that trains through the kernels."""

    def __init__(self, model: FeedbackTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.model._stacked(x_BTD)


class Loop(Kernels):
    """A model that trains through its plain loop instead, also under autocast."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        state, outputs = self.model.init_state(len(x_BTD)), []
        for x_BD in x_BTD.unbind(1):
            z_BD, state = self.model.step(x_BD, state)
            outputs.append(z_BD)
        return torch.stack(outputs, dim=1)


def passes(
    kind: type[Kernels], runs: Sequence[FeedbackTransformer], x_RBTD: Tensor, dz_RBTD: Tensor
) -> dict[str, Tensor]:
    """Outputs and every gradient, runs stacked by vmap where there are several."""
    return outputs_and_gradients([kind(model) for model in runs], x_RBTD, dz_RBTD)


def check_case(case: Case) -> None:
    runs, x, dz = build(case)
    wanted = passes(Loop, runs, x, dz)
    check_errors(wanted, passes(Kernels, [model.float() for model in runs], x.float(), dz.float()))


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 1, 16, 1, 16),
        Case(2, 1, 2, 5, 32, 2, 24),
        Case(3, 1, 1, 17, 48, 3, 40),
        Case(2, 2, 1, 18, 16, 1, 16, qk_norm=False),
        Case(1, 1, 1, 33, 16, 1, 16),
    ],
)
def test_interpreted(case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize(
    ("width", "dtype", "device", "reason"),
    [
        (256, torch.bfloat16, "cuda", "None"),
        (1408, torch.bfloat16, "cuda", "16 heads of width 1408"),
        (256, torch.float64, "cuda", "float64"),
        (256, torch.bfloat16, "cpu", "cpu"),
    ],
)
def test_says_why_a_case_is_unsupported(width: int, dtype: torch.dtype, device: str, reason: str) -> None:
    assert reason in str(unsupported(width, 16, dtype, torch.device(device)))


SHAPES = [
    Case(1, 1, 1, 1, 192, 3, 768),
    Case(1, 1, 2, 300, 320, 5, 640),
    Case(1, 3, 5, 100, 256, 4, 512),
    Case(2, 1, 17, 70, 512, 4, 1000),
    Case(2, 2, 5, 64, 96, 6, 100),
    Case(3, 1, 3, 70, 96, 3, 384),
    Case(4, 1, 3, 130, 256, 16, 1024),
]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_gpu_float32(case: Case, qk_norm: bool) -> None:
    check_case(case._replace(qk_norm=qk_norm))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_gpu_bfloat16(case: Case) -> None:
    runs, x, dz = build(case)
    wanted = passes(Loop, runs, x, dz)
    runs = [model.float() for model in runs]
    with torch.autocast("cuda", torch.bfloat16):
        got, plain = (passes(kind, runs, x.float(), dz.float()) for kind in (Kernels, Loop))
    check_errors(wanted, got, lambda name, y: math.inf if name == MIXTURE else 1.5 * error(plain[name], y) + 1e-6)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", [SHAPES[1], SHAPES[-1]])
def test_gpu_bfloat16_mixture_of_the_memory(case: Case) -> None:
    """Its gradient is a few numbers, each a sum whose terms almost cancel; one draw says little about its error."""
    runs, x, dz = build(case)
    low = [model.float() for model in deepcopy(runs)]
    squares = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for _ in range(16):
        x, dz = torch.randn_like(x), torch.randn_like(dz)
        wanted = passes(Loop, runs, x, dz)[MIXTURE]
        with torch.autocast("cuda", torch.bfloat16):
            got, plain = (passes(kind, low, x.float(), dz.float())[MIXTURE] for kind in (Kernels, Loop))
        squares += torch.stack([(got - wanted).square().sum(), (plain - wanted).square().sum()])
    assert squares[0] <= 2**2 * squares[1]


@on_gpu
@pytest.mark.gpu
def test_gpu_graph_repeats_bitwise() -> None:
    (model,), x, dz = build(Case(3, 1, 20, 70, 128, 8, 512))
    check_graph(partial(passes, Kernels, [model.float()], x.float(), dz.float()))
