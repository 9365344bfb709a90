"""Optimizer steps on data that lies on the device."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runners.mad.training.ensemble import Ensemble
from tasks.base import Batch


class Stepper:
    """Runs optimizer steps on data that lies on the device; each is a replay of one CUDA graph after ``capture``."""

    def __init__(self, ensemble: Ensemble, data: Batch, batch_size: int) -> None:
        device, runs = ensemble.device, len(ensemble.runs)
        self.ensemble = ensemble
        self.inputs_ST = torch.from_numpy(data.inputs_ST).to(device)
        self.targets_ST = torch.from_numpy(data.targets_ST).to(device)
        self.steps_per_epoch = math.ceil(len(data) / batch_size)
        self.order_NRB = torch.zeros(self.steps_per_epoch, runs, batch_size, dtype=torch.int64, device=device)
        """Sequences of each step of ``epoch``."""
        self.loss_sum_R = torch.zeros(runs, device=device)
        self.epoch = -1
        self.replay = self._step

    def run(self, epoch: int, steps: int) -> None:
        """Take ``steps`` steps, all within ``epoch``."""
        if epoch != self.epoch:
            seeds = [run.seed for run in self.ensemble.runs]
            orders = [data_order(seed, epoch, len(self.inputs_ST)) for seed in seeds]
            shape = self.order_NRB[:, 0].shape
            pinned = torch.from_numpy(np.stack([np.resize(order, shape) for order in orders], axis=1))
            if self.ensemble.device.type == "cuda":
                pinned = pinned.pin_memory()
            self.order_NRB.copy_(pinned, non_blocking=True)
            self.epoch = epoch
        for _ in range(steps):
            self.replay()

    def take_loss_sum(self) -> Tensor:
        """Sum of the losses (R,) since the last call."""
        taken = self.loss_sum_R.clone()
        self.loss_sum_R.zero_()
        return taken

    def capture(self) -> None:
        """Capture a step as a CUDA graph; parameters, optimizer and losses are left as they are."""
        touched = [*self.ensemble.state.values(), self.ensemble.step, self.loss_sum_R]
        before = [tensor.clone() for tensor in touched]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(touched, before, strict=True):
            tensor.copy_(value)
        self.replay = graph.replay

    def _step(self) -> None:
        within = (self.ensemble.step % self.steps_per_epoch)[None]
        index_RB = self.order_NRB.index_select(0, within).squeeze(0)
        self.loss_sum_R += self.ensemble.train_step(self.inputs_ST[index_RB], self.targets_ST[index_RB])


def data_order(seed: int, epoch: int, examples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Order in which a run with ``seed`` sees its examples in ``epoch``; the same on every device."""
    return np.random.default_rng([seed, epoch]).permutation(examples)
