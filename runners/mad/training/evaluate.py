"""Accuracies of an ensemble over a split."""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from runners.mad.training.ensemble import Ensemble
from runners.mad.training.result import Metrics
from tasks.base import Batch
from tasks.metrics import Counts, count, score

ELEMENTS_PER_FORWARD = {"cpu": 2**26, "cuda": 2**31}

"""Size in elements of the largest tensor that an evaluation may make at once."""

ELEMENTS_PER_TOKEN = 8_192

"""Least size of that tensor per token: Mamba's scan holds two of 256 channels with 16 states."""


class Resident(NamedTuple):
    """A split on the device."""

    inputs_ST: Tensor
    targets_ST: Tensor
    scored_ST: Tensor

    @staticmethod
    def of(batch: Batch, device: torch.device) -> "Resident":
        arrays = (batch.inputs_ST, batch.targets_ST, batch.scored_ST)
        return Resident(*(torch.from_numpy(array).to(device) for array in arrays))


@torch.no_grad()
def evaluate(ensemble: Ensemble, params_RP: Tensor, data: Resident, vocab_size: int) -> Counts:
    """Counts of all runs over a whole split, without host synchronisation."""
    examples, length = data.inputs_ST.shape
    per_sequence = len(ensemble.runs) * length * max(vocab_size, ELEMENTS_PER_TOKEN)
    chunk = max(1, ELEMENTS_PER_FORWARD[ensemble.device.type] // per_sequence)
    parts = [
        count(ensemble.logits(params_RP, data.inputs_ST[here]), data.targets_ST[here], data.scored_ST[here])
        for here in (slice(start, start + chunk) for start in range(0, examples, chunk))
    ]
    return functools.reduce(operator.add, parts)


def _metrics(counts: Counts) -> list[Metrics]:
    columns = (counts.sequence_accuracy, counts.token_accuracy, counts.loss, score(counts))
    return [
        Metrics(sequence_accuracy=s, token_accuracy=t, loss=loss, score=value)
        for s, t, loss, value in zip(*(column.tolist() for column in columns), strict=True)
    ]
