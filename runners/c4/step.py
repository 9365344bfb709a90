"""An optimizer step of pretraining, which ``runners.c4.loop`` repeats and ``runners.bench`` times."""

import math

import torch
from torch import Tensor, nn

from mixers.base import decayed
from mixers.models import LanguageModel
from mixers.ops.numerics import product_autocast
from runners.c4.config import Config, Parametrisation
from runners.c4.distributed import World, distribute, gathered, gradients_together
from runners.c4.model import mean_loss

WARMUP_FROM: dict[Parametrisation, float] = {"paper": 0.0, "authors": 0.1}
"""Learning rate at the start of the warm-up, as a fraction of its peak."""


class Objective(nn.Module):
    """Mean cross-entropy of a batch of windows (B, T + 1), as a module that several processes can wrap."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return mean_loss(self.model, tokens_BT)


class ModelStepper:
    """A model and its optimizer, which step together.

    Args:
        model: the model to train, on the device of ``world``.
        config: settings of the batch, the optimizer and the clipping.
        world: the processes.

    Attributes:
        micro: sequences per forward pass.
        objective: the loss of the model, as this process calls it.
        optimizer: the optimizer; the caller sets its learning rate before each step.
    """

    def __init__(self, model: LanguageModel, config: Config, world: World) -> None:
        self.model = model
        self.clip = config.clip
        self.micro = config.sequences_at_once(world.size)
        decays = decayed(model)  # marks on parameters are lost where these are sharded
        self.objective = distribute(Objective(model), model, (self.micro, config.seq_len), world, config.parallel)

        pairs = list(zip(model.parameters(), decays, strict=True))
        matrices = [p for p, decays in pairs if decays]
        others = [p for p, decays in pairs if not decays]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._autocast = product_autocast(world.device)

    def keep_gradients(self) -> None:
        """Give each parameter its own gradient tensor, so that no gradient is a buffer of a CUDA graph.

        Call this once before the first step. Restoring a checkpoint needs parameters without gradients, so it must come
        before.
        """
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Do one optimizer step.

        Args:
            tokens_BT: windows (B, T + 1), this process's share of the batch.

        Returns:
            The mean loss of these windows, and the norm of the gradient of the whole batch before clipping; scalars.
        """
        loss = torch.zeros((), device=tokens_BT.device)
        parts = tokens_BT.split(self.micro)

        # Accumulate gradients over the parts of the batch.
        for i, part in enumerate(parts):
            with gradients_together(self.objective, i == len(parts) - 1):
                with self._autocast:
                    share = self.objective(part) * (len(part) / len(tokens_BT))
                share.backward()
            loss += share.detach()

        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss, gathered(norm)


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine to the final fraction."""
    warmup = round(config.warmup_fraction * config.steps)
    if step < warmup:
        start = WARMUP_FROM[config.parametrisation]
        return config.lr * (start + (1 - start) * (step + 1) / warmup)

    progress = (step + 1 - warmup) / (config.steps - warmup)
    final = config.final_lr_fraction
    return config.lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
