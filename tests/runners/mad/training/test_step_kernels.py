"""The fused kernels of a step against the same in plain PyTorch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

triton = pytest.importorskip("triton")

from mixers.base import Shape  # noqa: E402
from mixers.models import LanguageModel  # noqa: E402
from mixers.ops.runs import over_runs  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from runners.mad.training.ensemble import Ensemble  # noqa: E402
from runners.mad.training.kernels.cross_entropy import cross_entropy_method  # noqa: E402
from runners.mad.training.protocol import Optimizer, Run  # noqa: E402
from tasks.base import IGNORE  # noqa: E402
from tests.kernel_marks import DEVICE, interpreted, on_gpu  # noqa: E402


def fused_cross_entropy(logits_RBTV: Tensor, targets_RBT: Tensor) -> Tensor:
    (loss_R,) = vmap(lambda *one: over_runs(cross_entropy_method(), *one))(logits_RBTV, targets_RBT)
    return loss_R


def plain_cross_entropy(logits_RBTV: Tensor, targets_RBT: Tensor) -> Tensor:
    both = zip(logits_RBTV, targets_RBT, strict=True)
    return torch.stack([F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=IGNORE) for x, y in both])


def check_cross_entropy(V: int, rows: tuple[int, int], dtype: torch.dtype, share: float, tolerance: float) -> None:
    """Losses and gradients of three runs, of which some positions have no target and one sequence has none at all."""
    generator = torch.Generator().manual_seed(V)
    logits = (4 * torch.randn(3, *rows, V, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(V, (3, *rows), generator=generator)
    targets[torch.rand(3, *rows, generator=generator) > share] = IGNORE
    targets[0, 0], targets[:, -1, -1] = IGNORE, V - 1
    targets = targets.to(DEVICE)
    weight_R = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)

    def loss_and_gradient(function: Callable[[Tensor, Tensor], Tensor], given: Tensor) -> tuple[Tensor, Tensor]:
        leaf = given.clone().requires_grad_()
        loss_R = function(leaf, targets)
        (gradient,) = torch.autograd.grad(loss_R @ weight_R.to(loss_R), leaf)
        return loss_R.detach().double(), gradient.double()

    for got, expected in zip(
        loss_and_gradient(fused_cross_entropy, logits),
        loss_and_gradient(plain_cross_entropy, logits.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@interpreted
@pytest.mark.parametrize("V", [3, 16, 40])
def test_cross_entropy_interpreted(V: int) -> None:
    check_cross_entropy(V, (4, 33), torch.float32, 0.6, 1e-5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("V", [3, 16, 40, 1000, 8192])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_gpu_cross_entropy(V: int, dtype: torch.dtype, tolerance: float) -> None:
    check_cross_entropy(V, (17, 33), dtype, 0.6, tolerance)


def members(width: int, clip: float) -> Ensemble:
    """Three runs in the middle of training, the last one stopped earlier."""
    runs = [
        Run(lr=1e-2, weight_decay=0.1, seed=0),
        Run(lr=1e-7, weight_decay=1.0, seed=1),
        Run(lr=1.0, weight_decay=0.0, seed=2),
    ]

    def build() -> LanguageModel:
        return LanguageModel(Transformer, Transformer.Config(heads=2), Shape(width=width, mlp_width=4 * width), 7)

    made = Ensemble(build, runs, Optimizer(clip=clip), 50, DEVICE)
    generator = torch.Generator().manual_seed(width)
    made.optimizer.moment1_RP.copy_(torch.randn(made.params_RP.shape, generator=generator))
    made.optimizer.moment2_RP.copy_(torch.rand(made.params_RP.shape, generator=generator))
    made.optimizer.step.fill_(7)
    made.diverged_R[2] = 3
    return made


def check_update(width: int, fault: str, clip: float = 0.5) -> None:
    """Three steps; the gradient of the second run is shorter than ``clip``."""
    fused, plain = members(width, clip), members(width, clip)
    gradient_RP = torch.randn(plain.params_RP.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    gradient_RP[1] *= 0.4 / gradient_RP[1].norm()
    loss_R = torch.ones(3, device=DEVICE)
    if fault == "loss":
        loss_R[0] = torch.nan
    elif fault == "gradient":
        gradient_RP[1, -1] = -torch.inf
    elif fault == "no gradient":
        gradient_RP[0] = 0.0
    before = plain.params_RP.clone()
    for _ in range(3):
        fused.optimizer.update_fused(fused.params_RP, gradient_RP, loss_R)
        plain.optimizer.update_naive(plain.params_RP, gradient_RP, loss_R)
        fused.optimizer.step += 1
        plain.optimizer.step += 1
    assert plain.diverged_R.tolist() == [8 if fault == "loss" else -1, 8 if fault == "gradient" else -1, 3]
    assert not torch.equal(fused.params_RP[0], before[0]) or fault == "loss"
    assert torch.equal(fused.params_RP[2], before[2])
    for name, expected in plain.rows.items():
        torch.testing.assert_close(fused.rows[name], expected, rtol=3e-6, atol=1e-7, msg=name)


FAULTS = ["none", "loss", "gradient", "no gradient"]


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_update_interpreted(fault: str) -> None:
    check_update(16, fault)


@interpreted
def test_update_without_clipping_interpreted() -> None:
    check_update(16, "none", clip=math.inf)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("width", [16, 1024])
def test_gpu_update(width: int, fault: str) -> None:
    check_update(width, fault)
