"""R runs of one shape as one model: stacked parameters, one AdamW, one training step without host synchronisation.

Layers are written for one run; ``torch.func`` adds the leading run axis R. All parameters of a run lie in one row of
a matrix (R, P), so that the optimizer, clipping, freezing and checkpoints are a few operations on whole rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from mixers.base import ContractError
from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from mixers.ops.runs import over_runs
from runners.mad.training.protocol import Optimizer, Run
from tasks.base import IGNORE


class Ensemble:
    """Stacked parameters (R, P) of ``runs`` and their optimizer state; ``build`` makes the model of one run.

    Initial parameters depend on a run's seed alone, and are drawn on the CPU whatever the device.
    """

    def __init__(
        self,
        build: Callable[[], Backbone],
        runs: Sequence[Run],
        optimizer: Optimizer,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self.runs, self.optimizer, self.total_steps, self.device = tuple(runs), optimizer, total_steps, device
        rows, buffers = [], None
        for run in runs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(run.seed)
                model = build()
            rows.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            buffers = _same_buffers(buffers, model)
        self.model = model.to(device)
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        decayed = torch.cat([torch.full((p.numel(),), p.ndim > 1) for p in model.parameters()]).to(device)

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self.lr_R1 = column([run.lr for run in runs])
        self.decay_RP = column([run.weight_decay for run in runs]) * decayed
        self.params_RP = torch.stack(rows).to(device)
        self.moment1_RP = torch.zeros_like(self.params_RP)
        self.moment2_RP = torch.zeros_like(self.params_RP)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.diverged_R = torch.full((len(runs),), -1, dtype=torch.int64, device=device)
        """Step, counted from 1, at which loss or gradient of a run was first not finite; -1 while there is none."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors that training changes, the rows of runs first; ``step`` is common to all."""
        return {
            "params": self.params_RP,
            "moment1": self.moment1_RP,
            "moment2": self.moment2_RP,
            "diverged": self.diverged_R,
        }

    def named(self, params_RP: Tensor) -> dict[str, Tensor]:
        """Parameters by name, each (R, *shape), as views of the rows."""
        parts = params_RP.split([shape.numel() for shape in self.shapes.values()], dim=1)
        rows = len(params_RP)
        return {name: part.view(rows, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def logits(self, params_RP: Tensor, tokens: Tensor) -> Tensor:
        """Logits (R, B, T, V) of tokens (R, B, T), or of one batch (B, T) that all runs read."""

        def one(params: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
            result: Tensor = functional_call(self.model, params, (tokens_BT,))
            return result

        try:
            with product_autocast(self.device):
                logits: Tensor = vmap(one, in_dims=(0, 0 if tokens.ndim == 3 else None))(self.named(params_RP), tokens)
        except RuntimeError as error:
            if any(sign in str(error) for sign in ("vmap", "Batching rule")):
                error.add_note(
                    "All runs are trained at once by torch.func.vmap; CONTRIBUTING.md says what a layer may do."
                )
            raise
        return logits

    def train_step(self, inputs_RBT: Tensor, targets_RBT: Tensor) -> Tensor:
        """One optimizer step of every run; returns the losses (R,), means over the targets of each run."""
        params_RP = self.params_RP.detach().requires_grad_()
        loss_R = mean_cross_entropy(self.logits(params_RP, inputs_RBT), targets_RBT)
        (gradient_RP,) = torch.autograd.grad(loss_R, params_RP, torch.ones_like(loss_R))
        loss_R = loss_R.detach()
        if kernels := _fused_kernels(self.device):
            kernels.update(self, gradient_RP.contiguous(), loss_R.contiguous())
        else:
            self.update(gradient_RP, loss_R)
        self.step += 1
        return loss_R

    def update(self, gradient_RP: Tensor, loss_R: Tensor) -> None:
        """Clip the gradients and take the step after ``step``; runs whose loss or gradient is not finite are frozen."""
        hyper, step = self.optimizer, self.step + 1
        norm_R1 = torch.linalg.vector_norm(gradient_RP, dim=1, keepdim=True)
        self.mark_diverged(~(loss_R.isfinite() & norm_R1.squeeze(1).isfinite()), step)
        alive_R1 = (self.diverged_R < 0)[:, None]
        gradient_RP = torch.where(alive_R1, gradient_RP * (hyper.clip / norm_R1).clamp(max=1.0), 0.0)
        lr_R1 = torch.where(alive_R1, self.learning_rate(), 0.0)

        self.moment1_RP.lerp_(gradient_RP, 1 - hyper.beta1)
        self.moment2_RP.lerp_(gradient_RP.square(), 1 - hyper.beta2)
        corrected1 = 1 - hyper.beta1**step
        corrected2 = 1 - hyper.beta2**step
        denominator_RP = (self.moment2_RP / corrected2).sqrt_().add_(hyper.eps)
        self.params_RP.mul_(1 - lr_R1 * self.decay_RP)
        self.params_RP.sub_(self.moment1_RP.div(denominator_RP).mul_(lr_R1 / corrected1))

    def mark_diverged(self, failed_R: Tensor, step: Tensor) -> None:
        """Freeze the runs that failed at a step, counted from 1."""
        self.diverged_R.copy_(torch.where((self.diverged_R < 0) & failed_R, step, self.diverged_R))

    def learning_rate(self) -> Tensor:
        """Learning rate (R, 1) of the step under way: cosine from a run's peak to ``final_lr``."""
        final_R1 = self.lr_R1.clamp(max=self.optimizer.final_lr)
        progress = self.step / self.total_steps
        return final_R1 + (self.lr_R1 - final_R1) * 0.5 * (1 + torch.cos(torch.pi * progress))


def _same_buffers(expected: dict[str, Tensor] | None, model: Backbone) -> dict[str, Tensor]:
    """A model's buffers.

    Raises:
        ContractError: they are not as expected; there is one set for all runs.
    """
    buffers = dict(model.named_buffers())
    for name, of_other in (expected or {}).items():
        buffer = buffers[name]
        if not (buffer.shape == of_other.shape and ((buffer == of_other) | (buffer.isnan() & of_other.isnan())).all()):
            raise ContractError(
                f"buffer {name!r} of mixer {type(model.stack[0]).__name__} depends on the seed, but all runs share "
                "one: draw it from a generator of its own, torch.Generator().manual_seed(0), and leave no values unset"
            )
    return buffers


def mean_cross_entropy(logits_RBTV: Tensor, targets_RBT: Tensor) -> Tensor:
    """Cross-entropy (R,) in nats, averaged over the positions of each run that have a target."""
    kernels = _fused_kernels(logits_RBTV.device)
    if kernels and kernels.fits_cross_entropy(logits_RBTV.shape[-1]):
        (loss_R,) = vmap(partial(over_runs, kernels.cross_entropy_method()))(logits_RBTV, targets_RBT)
        return loss_R
    losses = F.cross_entropy(
        logits_RBTV.float().flatten(0, 2), targets_RBT.flatten(), reduction="none", ignore_index=IGNORE
    )
    return losses.view(len(targets_RBT), -1).sum(1) / (targets_RBT != IGNORE).flatten(1).sum(1)


def _fused_kernels(device: torch.device) -> ModuleType | None:
    """``runners.kernels`` where a step should run in them: on a GPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from runners.mad.training import step_kernels as kernels  # Triton is not there on every platform

    return kernels
