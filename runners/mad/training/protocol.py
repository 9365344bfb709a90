"""How runs are trained: optimizer, schedule, evaluations."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one member of an ensemble has for itself.

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
    """How every run of an experiment is trained.

    Attributes:
        batch_size: sequences a step.
        epochs: passes over the training split.
        steps: optimizer steps, in place of epochs.
        evaluations: evenly spaced evaluations on the validation split; the best one's parameters are kept.
        optimizer: AdamW and its schedule.
    """

    batch_size: int = 128
    epochs: int = 200
    steps: int | None = None
    evaluations: int = 40
    optimizer: Optimizer = field(default_factory=Optimizer)

    def total_steps(self, examples: int) -> int:
        """Optimizer steps for a training split of ``examples`` sequences."""
        return self.epochs * self.steps_per_epoch(examples) if self.steps is None else self.steps

    def check(self, examples: int) -> None:
        """Raise ValueError where a batch does not fit into a training split of ``examples`` sequences."""
        if self.batch_size > examples:
            raise ValueError(f"batch size {self.batch_size} is larger than the {examples} training examples: lower it")

    def steps_per_epoch(self, examples: int) -> int:
        """Steps in which every example is seen once (the last batch is filled up from the epoch's start)."""
        return math.ceil(examples / self.batch_size)

    def evaluation_steps(self, total_steps: int) -> list[int]:
        """Steps after which the validation split is read, the last step among them."""
        count = min(self.evaluations, total_steps)
        return [round(total_steps * (i + 1) / count) for i in range(count)]
