"""An optimizer step of pretraining, as ``runners.c4.train`` takes it and ``runners.bench`` times it."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mixers.models import LanguageModel
from mixers.ops.numerics import product_autocast
from runners.c4.config import Config
from runners.c4.distributed import World, distribute, gradients_together
from runners.c4.model import mean_loss


class Objective(nn.Module):
    """Mean cross-entropy of a batch of windows (B, T + 1); what several processes wrap."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return mean_loss(self.model, tokens_BT)


class Stepper:
    """A model and its optimizer, which step together.

    Args:
        model: what is trained; on the device of ``world``.
        config: the batch, the optimizer and the clipping.
        world: the processes.

    Attributes:
        micro: sequences of a forward pass.
        objective: the model's loss as this process calls it.
        optimizer: whoever steps sets its learning rate.
    """

    def __init__(self, model: LanguageModel, config: Config, world: World) -> None:
        self.model, self.clip = model, config.clip
        self.micro = config.micro_batch_size or config.batch_size // world.size
        self.objective = distribute(Objective(model), model, (self.micro, config.seq_len), world, config.parallel)
        self.optimizer = build_optimizer(model, config)
        self._autocast = product_autocast(world.device)

    def keep_gradients(self) -> None:
        """Give each parameter a gradient that stays, so that none is the buffer of a graph.

        To be called once before the first step, and after a checkpoint is restored, which needs there to be none.
        """
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Train on windows (B, T + 1), this process's of a batch.

        Returns:
            Their mean loss, and the norm of the gradient of the whole batch before clipping.
        """
        loss = torch.zeros((), device=tokens_BT.device)
        parts = tokens_BT.split(self.micro)
        for i, part in enumerate(parts):
            with gradients_together(self.objective, i == len(parts) - 1):
                with self._autocast:
                    share = self.objective(part) * (len(part) / len(tokens_BT))
                share.backward()
            loss += share.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss, norm.full_tensor() if isinstance(norm, DTensor) else norm


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices and embeddings, not on gains."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of step ``step``, counted from 0: linear warm-up, then a cosine to its final fraction."""
    warmup = round(config.warmup_fraction * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step + 1 - warmup) / (config.steps - warmup)
    final = config.final_lr_fraction
    return config.lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
