"""Optimizer steps on data that lies on the device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from runners.device import captured
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Protocol
from tasks.base import Batch


class Stepper:
    """Takes optimizer steps on data that lies on the device; after ``capture`` a step replays one CUDA graph.

    Attributes:
        order_NRB: sequences that each run reads in each of the N steps of ``epoch``.
        loss_sum_R: sum of the losses since ``take_loss_sum``.
    """

    def __init__(self, ensemble: Ensemble, data: Batch, protocol: Protocol) -> None:
        """Copy the data to the ensemble's device."""
        device = ensemble.device
        runs = len(ensemble.runs)

        self.ensemble = ensemble
        self.inputs_ST = torch.from_numpy(data.inputs_ST).to(device)
        self.targets_ST = torch.from_numpy(data.targets_ST).to(device)
        self.steps_per_epoch = protocol.steps_per_epoch(len(data))
        self.order_NRB = torch.zeros(self.steps_per_epoch, runs, protocol.batch_size, dtype=torch.int64, device=device)
        self.loss_sum_R = torch.zeros(runs, device=device)
        self.epoch = -1
        self.take_step = self._take_step

    def begin(self, epoch: int) -> None:
        """Let the next steps be those of an epoch; its last batch is filled up from its start."""
        if epoch == self.epoch:
            return
        seeds = [run.seed for run in self.ensemble.runs]
        orders = [data_order(seed, epoch, len(self.inputs_ST)) for seed in seeds]
        shape = self.order_NRB[:, 0].shape
        order_NRB = torch.from_numpy(np.stack([np.resize(order, shape) for order in orders], axis=1))

        # From pinned memory the copy does not wait for the device.
        if self.ensemble.device.type == "cuda":
            order_NRB = order_NRB.pin_memory()
        self.order_NRB.copy_(order_NRB, non_blocking=True)
        self.epoch = epoch

    def take_loss_sum(self) -> Tensor:
        """Return the sum of the losses (R,) since the last call."""
        taken_R = self.loss_sum_R.clone()
        self.loss_sum_R.zero_()
        return taken_R

    def capture(self, compiling: bool = True) -> None:
        """Compile a step and capture it as a CUDA graph; parameters, optimizer and losses are left as they are.

        Runs that are computed one after another stay as they are: a graph holds no random seed, and no value is read.

        Args:
            compiling: whether to compile it, which takes as long as some thousand steps.
        """
        if self.ensemble.model.one_by_one:
            return
        if compiling:
            self.ensemble.compile(*self._batches())

        touched = [*self.ensemble.rows.values(), self.ensemble.optimizer.step, self.loss_sum_R]
        before = [tensor.clone() for tensor in touched]

        self.take_step = captured(self._take_step)
        for tensor, value in zip(touched, before, strict=True):
            tensor.copy_(value)

    def _take_step(self) -> None:
        self.loss_sum_R += self.ensemble.train_step(*self._batches())

    def _batches(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets (R, B, T) of the next step."""
        within_epoch = (self.ensemble.optimizer.step % self.steps_per_epoch)[None]
        index_RB = self.order_NRB.index_select(0, within_epoch).squeeze(0)
        return self.inputs_ST[index_RB], self.targets_ST[index_RB]


def data_order(seed: int, epoch: int, examples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order in which a run with ``seed`` sees its examples in ``epoch``; the same on every device."""
    return np.random.default_rng([seed, epoch]).permutation(examples)
