"""AdamW on the stacked parameters of all runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runners.mad.training.kernels import kernels_run_on
from runners.mad.training.protocol import Optimizer, Run


class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) on stacked parameters (R, P), one row per run.

    Each run has its own learning rate, weight decay and clipping. A run whose loss or gradient is not finite is frozen:
    its parameters do not change any more. A step waits for nothing on the host, so that it fits into a CUDA graph.

    Attributes:
        step: steps done, common to all runs, int64 on the device.
        diverged_R: step, counted from 1, at which a run's loss or gradient was first not finite; -1 before.
    """

    def __init__(self, settings: Optimizer, runs: Sequence[Run], decayed_P: Tensor, total_steps: int) -> None:
        """Start at step 0.

        Args:
            settings: constants of AdamW and its schedule.
            runs: learning rate and weight decay of each run.
            decayed_P: bool, the parameters that weight decay applies to; its device is that of the optimizer.
            total_steps: steps of the whole schedule.
        """
        self.settings = settings
        self.total_steps = total_steps
        device = decayed_P.device

        # Each run's own settings.
        self.lr_R1 = _column([run.lr for run in runs], device)
        self.decay_RP = _column([run.weight_decay for run in runs], device) * decayed_P

        # What a step changes.
        self.moment1_RP = torch.zeros_like(self.decay_RP)
        self.moment2_RP = torch.zeros_like(self.decay_RP)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.diverged_R = torch.full((len(runs),), -1, dtype=torch.int64, device=device)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Tensors that a step changes and that have a row for each run; live, so that copying into them restores."""
        return {"moment1": self.moment1_RP, "moment2": self.moment2_RP, "diverged": self.diverged_R}

    def update(self, params_RP: Tensor, gradient_RP: Tensor, loss_R: Tensor) -> None:
        """Take one step in place.

        Args:
            params_RP: parameters, one row per run.
            gradient_RP: their gradient, not clipped.
            loss_R: losses that the gradient is of.
        """
        if kernels_run_on(params_RP.device):
            self.update_fused(params_RP, gradient_RP, loss_R)
        else:
            self.update_naive(params_RP, gradient_RP, loss_R)
        self.step += 1

    def update_naive(self, params_RP: Tensor, gradient_RP: Tensor, loss_R: Tensor) -> None:
        """Change parameters and moments as ``update`` does, in PyTorch; the step is not counted."""
        settings = self.settings
        step = self.step + 1

        # Runs that are not finite are frozen.
        norm_R1 = torch.linalg.vector_norm(gradient_RP, dim=1, keepdim=True)
        self.mark_diverged(~(loss_R.isfinite() & norm_R1.squeeze(1).isfinite()), step)
        alive_R1 = (self.diverged_R < 0)[:, None]
        lr_R1 = torch.where(alive_R1, self.learning_rate(), 0.0)
        clipped_RP = torch.where(alive_R1, gradient_RP * (settings.clip / norm_R1).clamp(max=1.0), 0.0)

        # Moments.
        self.moment1_RP.lerp_(clipped_RP, 1 - settings.beta1)
        self.moment2_RP.lerp_(clipped_RP.square(), 1 - settings.beta2)
        corrected1 = 1 - settings.beta1**step
        corrected2 = 1 - settings.beta2**step

        # Parameters.
        denominator_RP = (self.moment2_RP / corrected2).sqrt_().add_(settings.eps)
        params_RP.mul_(1 - lr_R1 * self.decay_RP)
        params_RP.sub_(self.moment1_RP.div(denominator_RP).mul_(lr_R1 / corrected1))

    def update_fused(self, params_RP: Tensor, gradient_RP: Tensor, loss_R: Tensor) -> None:
        """Change parameters and moments as ``update`` does, in Triton kernels; the step is not counted."""
        from runners.mad.training.kernels.adamw import adamw_step

        adamw_step(
            params_RP,
            self.moment1_RP,
            self.moment2_RP,
            gradient_RP.contiguous(),
            self.decay_RP,
            loss_R.contiguous(),
            self.lr_R1,
            self.step,
            self.diverged_R,
            self.total_steps,
            self.settings,
        )

    def mark_diverged(self, failed_R: Tensor, step: Tensor) -> None:
        """Freeze the runs that failed at a step, counted from 1."""
        self.diverged_R.copy_(torch.where((self.diverged_R < 0) & failed_R, step, self.diverged_R))

    def learning_rate(self) -> Tensor:
        """Return the learning rates (R, 1) of the step under way: cosine from a run's peak to ``final_lr``."""
        final_R1 = self.lr_R1.clamp(max=self.settings.final_lr)
        progress = self.step / self.total_steps
        return final_R1 + (self.lr_R1 - final_R1) * 0.5 * (1 + torch.cos(torch.pi * progress))


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype(), device=device)[:, None]
