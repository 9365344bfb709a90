"""Accuracies of an ensemble over a split."""

import functools
import operator

import torch
from torch import Tensor

from runners.mad.training.data import Resident
from runners.mad.training.ensemble import Ensemble
from tasks.metrics import Counts, count

ELEMENTS_PER_FORWARD = {"cpu": 2**26, "cuda": 2**31}
"""Size in elements of the largest tensor that an evaluation may make at once, by type of device."""

ELEMENTS_PER_TOKEN = 8_192
"""Least size of that tensor per token: Mamba's scan holds two of 256 channels with 16 states."""


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
