"""Settings of training: runs, optimizer, schedule, evaluations."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of one member of an ensemble.

    Attributes:
        lr: peak learning rate.
        weight_decay: decoupled weight decay, applied to matrices and embeddings, not to gains.
        seed: seed of the initial parameters and of the data order.
    """

    lr: float
    weight_decay: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with a cosine schedule, the same for all runs.

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        final_lr: learning rate at the end of the cosine schedule.
        clip: largest gradient norm of a run; larger gradients are scaled down to it.
    """

    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    final_lr: float = 1e-6
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of training that all runs of an experiment share.

    Attributes:
        batch_size: sequences per step.
        epochs: passes over the training split.
        steps: optimizer steps, in place of epochs; None for epochs.
        evaluations: evenly spaced evaluations on the validation split; the parameters of the best one are kept.
        optimizer: AdamW and its schedule.
    """

    batch_size: int = 128
    epochs: int = 200
    steps: int | None = None
    evaluations: int = 40
    optimizer: Optimizer = field(default_factory=Optimizer)

    def total_steps(self, examples: int) -> int:
        """Return the optimizer steps for a training split of ``examples`` sequences."""
        return self.epochs * self.steps_per_epoch(examples) if self.steps is None else self.steps

    def check(self, examples: int) -> None:
        """Check that a batch fits into a training split of ``examples`` sequences.

        Raises:
            ValueError: it does not.
        """
        if self.batch_size > examples:
            raise ValueError(f"batch size {self.batch_size} is larger than the {examples} training examples: lower it")

    def steps_per_epoch(self, examples: int) -> int:
        """Return the steps that show every example once; the last batch is filled up from the epoch's start."""
        return math.ceil(examples / self.batch_size)

    def evaluation_steps(self, total_steps: int) -> list[int]:
        """Return the steps after which the validation split is read, the last step among them."""
        count = min(self.evaluations, total_steps)
        return [round(total_steps * (i + 1) / count) for i in range(count)]
