"""R runs of one shape as one model: stacked parameters, one training step, evaluation.

Layers are written for one run. ``torch.func`` adds the leading run axis R, and nothing waits for the device. Where
``torch.func.vmap`` cannot compute a layer, the runs are computed one after another, and the host reads the step. All
parameters of a run lie in one row of a matrix (R, P), so that the optimizer, clipping, freezing and checkpoints are a
few operations on whole rows.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from mixers.base import decayed
from mixers.contract import equal
from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from mixers.ops.runs import over_runs
from runners.device import keep_freed_memory
from runners.mad.training.kernels import kernels_run_on
from runners.mad.training.optimizer import AdamW
from runners.mad.training.protocol import Optimizer, Run
from tasks.base import IGNORE, Batch
from tasks.metrics import Counts, count

ELEMENTS_PER_FORWARD = {"cpu": 2**26, "cuda": 2**31}
"""Size in elements of the largest tensor that an evaluation may make at once, by type of device."""

ELEMENTS_PER_TOKEN = 8_192
"""Least size of that tensor per token: Mamba's scan holds two of 256 channels with 16 states."""

# PyTorch would warn of a slow operation again and again; docs/your-layer.md says which ones are slow.
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps parameters (R, P), inputs and targets (R, B, T) to losses (R,) and gradients (R, P)."""


class Ensemble:
    """Models of all runs, as one: their stacked parameters (R, P) and the optimizer that changes them.

    Initial parameters depend on a run's seed alone. They are drawn on the CPU, whatever the device. So are buffers,
    which the runs share unless they depend on the seed.
    """

    def __init__(
        self,
        build: Callable[[], Backbone],
        runs: Sequence[Run],
        settings: Optimizer,
        total_steps: int,
        device: torch.device,
    ) -> None:
        """Draw the initial parameters.

        Args:
            build: makes the model of one run, with parameters from torch's global generator.
            runs: members of the ensemble.
            settings: constants of AdamW and its schedule, the same for all runs.
            total_steps: steps of the learning rate schedule.
            device: where the parameters lie.
        """
        self.runs = tuple(runs)
        self.device = device
        if device.type == "cpu":
            keep_freed_memory()

        rows, buffers = [], []
        for run in runs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(run.seed)
                model = build()
            rows.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            buffers.append(dict(model.named_buffers()))

        # Buffers (R, *shape) that differ from run to run.
        differing = [name for name, y in buffers[0].items() if not all(equal(y, of_run[name]) for of_run in buffers)]
        self.own = {name: torch.stack([of_run[name] for of_run in buffers]).to(device) for name in differing}

        self.model = model.to(device)
        self.gradient: Step = self._gradient
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.params_RP = torch.stack(rows).to(device)

        parts = [torch.full((p.numel(),), decays) for p, decays in zip(model.parameters(), decayed(model), strict=True)]
        self.optimizer = AdamW(settings, runs, torch.cat(parts).to(device), total_steps)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Tensors that training changes and that have a row for each run; live, so that copying into them restores."""
        return {"params": self.params_RP, **self.optimizer.rows}

    @property
    def diverged_R(self) -> Tensor:
        """Step, counted from 1, at which a run diverged; -1 while it has not."""
        return self.optimizer.diverged_R

    @property
    def is_compiled(self) -> bool:
        """Whether ``compile`` was called and PyTorch compiled the gradient."""
        return self.gradient != self._gradient

    def named(self, params_RP: Tensor) -> dict[str, Tensor]:
        """Return parameters by name, each (R, *shape), as views of the rows."""
        parts = params_RP.split([shape.numel() for shape in self.shapes.values()], dim=1)
        runs = len(params_RP)
        return {name: part.view(runs, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def logits(self, params_RP: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits (R, B, T, V) of tokens (R, B, T), or of one batch (B, T) that all runs read.

        If the runs are computed one after another, these are without gradients and in evaluation mode.
        """
        if self.model.one_by_one:
            with torch.no_grad(), product_autocast(self.device):
                parts = tokens if tokens.ndim == 3 else [tokens] * len(self.runs)
                return torch.stack([self._model_of(r, params_RP).eval()(part) for r, part in enumerate(parts)])

        # Kernels read gains without gaps: a copy here serves all of them.
        tensors = {name: p.contiguous() if p.ndim == 2 else p for name, p in self.named(params_RP).items()} | self.own
        tokens_axis = 0 if tokens.ndim == 3 else None
        with product_autocast(self.device):
            logits: Tensor = vmap(partial(functional_call, self.model), in_dims=(0, tokens_axis))(tensors, tokens)
        return logits

    def train_step(self, inputs_RBT: Tensor, targets_RBT: Tensor) -> Tensor:
        """Take one optimizer step of every run.

        Args:
            inputs_RBT: tokens, a batch for each run.
            targets_RBT: targets, ``IGNORE`` where there is none.

        Returns:
            Losses (R,): means over the targets of each run.
        """
        loss_R, gradient_RP = self.gradient(self.params_RP, inputs_RBT, targets_RBT)
        self.optimizer.update(self.params_RP, gradient_RP, loss_R)
        return loss_R

    def compile(self, inputs_RBT: Tensor, targets_RBT: Tensor) -> None:
        """Compile the gradient for batches such as this one, unless kernels compute all of the layers."""
        kinds = dict.fromkeys(type(layer) for layer in self.model.stack)
        if any(kind.compile_step for kind in kinds):
            from runners.mad.training.compiled import compiled  # a GPU alone needs it

            name = "+".join(kind.__name__ for kind in kinds)
            self.gradient = compiled(self._gradient, (self.params_RP, inputs_RBT, targets_RBT), name)

    def _gradient(self, params_RP: Tensor, inputs_RBT: Tensor, targets_RBT: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses (R,) and their gradients (R, P)."""
        if self.model.one_by_one:
            return self._gradient_in_turn(params_RP, inputs_RBT, targets_RBT)
        params_RP = params_RP.detach().requires_grad_()
        loss_R = mean_cross_entropy(self.logits(params_RP, inputs_RBT), targets_RBT)
        (gradient_RP,) = torch.autograd.grad(loss_R, params_RP, torch.ones_like(loss_R))
        return loss_R.detach(), gradient_RP

    def _gradient_in_turn(self, params_RP: Tensor, inputs_RBT: Tensor, targets_RBT: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and gradients as plain PyTorch computes them, of one run after another.

        What a layer draws, as for dropout, depends on the run's seed and the step.
        """
        losses, gradients, step = [], [], int(self.optimizer.step)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            for r, run in enumerate(self.runs):
                torch.manual_seed(run.seed * 2**32 + step)
                model = self._model_of(r, params_RP).train()
                with product_autocast(self.device):
                    logits_BTV = model(inputs_RBT[r])
                losses.append(mean_cross_entropy(logits_BTV[None], targets_RBT[r : r + 1]))
                parts = torch.autograd.grad(
                    losses[-1], [*model.parameters()], allow_unused=True, materialize_grads=True
                )
                gradients.append(torch.cat([part.flatten() for part in parts]))
        return torch.cat(losses).detach(), torch.stack(gradients)

    @torch.no_grad()
    def _model_of(self, r: int, params_RP: Tensor) -> Backbone:
        """Return the model with the parameters and buffers of a run."""
        for parameter, rows in zip(self.model.parameters(), self.named(params_RP).values(), strict=True):
            parameter.copy_(rows[r])
        for name, rows in self.own.items():
            self.model.get_buffer(name).copy_(rows[r])
        return self.model


def mean_cross_entropy(logits_RBTV: Tensor, targets_RBT: Tensor) -> Tensor:
    """Return the cross-entropy (R,) in nats, averaged over the positions of each run that have a target.

    Args:
        logits_RBTV: logits of each run.
        targets_RBT: tokens, int64; ``IGNORE`` where a position has no target.
    """
    if kernels_run_on(logits_RBTV.device):
        from runners.mad.training.kernels.cross_entropy import MAX_VOCABULARY, cross_entropy_method

        if logits_RBTV.shape[-1] <= MAX_VOCABULARY:
            (loss_R,) = vmap(partial(over_runs, cross_entropy_method()))(logits_RBTV, targets_RBT)
            return loss_R

    losses_N = F.cross_entropy(
        logits_RBTV.float().flatten(0, 2), targets_RBT.flatten(), reduction="none", ignore_index=IGNORE
    )
    targets_R = (targets_RBT != IGNORE).flatten(1).sum(1)
    return losses_N.view(len(targets_RBT), -1).sum(1) / targets_R


class Resident(NamedTuple):
    """A split on the device."""

    inputs_ST: Tensor
    targets_ST: Tensor
    scored_ST: Tensor

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "Resident":
        """Copy a split to a device."""
        arrays = (batch.inputs_ST, batch.targets_ST, batch.scored_ST)
        return Resident(*(torch.from_numpy(array).to(device) for array in arrays))


@torch.no_grad()
def evaluate(ensemble: Ensemble, params_RP: Tensor, data: Resident, vocab_size: int) -> Counts:
    """Count what all runs get right in a whole split, without host synchronisation.

    Args:
        ensemble: the runs.
        params_RP: parameters to evaluate, one row per run.
        data: the split.
        vocab_size: size of the vocabulary, which bounds the sequences of a forward pass.
    """
    examples, length = data.inputs_ST.shape

    # As many sequences at once as the largest tensor leaves room for.
    per_sequence = len(ensemble.runs) * length * max(vocab_size, ELEMENTS_PER_TOKEN)
    chunk = max(1, ELEMENTS_PER_FORWARD[ensemble.device.type] // per_sequence)

    parts = [
        count(ensemble.logits(params_RP, data.inputs_ST[here]), data.targets_ST[here], data.scored_ST[here])
        for here in (slice(start, start + chunk) for start in range(0, examples, chunk))
    ]
    return functools.reduce(operator.add, parts)
