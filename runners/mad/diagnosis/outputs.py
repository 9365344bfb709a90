"""Outputs and hidden states of a trained model on a split, in the precision of training.

Dimensions: S sequences, B sequences of a forward pass, T positions, V vocabulary, N chosen positions, D width.
"""

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from runners.mad.training.evaluate import ELEMENTS_PER_FORWARD, ELEMENTS_PER_TOKEN
from tasks.base import Accuracy, Batch, Tokens
from tasks.metrics import count

Features = NDArray[np.float64]


class UnreadableError(ValueError):
    """A model has no valid outputs for some sequences: its code fails on them, or its outputs are not finite."""


@contextmanager
def failures_as_unreadable() -> Iterator[None]:
    """Turn errors of a model's own code, except out-of-memory errors, into an ``UnreadableError`` of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's layer may raise anything, especially at lengths that it was not trained on
        raise UnreadableError(" ".join(f"{type(error).__name__}: {error}".split())) from error


def sequences_per_forward(model: Backbone, batch: Batch) -> int:
    """Return the number of a split's sequences that fit into one forward pass."""
    elements: int = batch.inputs_ST.shape[1] * max(model.embedding.num_embeddings, ELEMENTS_PER_TOKEN)
    return max(1, ELEMENTS_PER_FORWARD[model.embedding.weight.device.type] // elements)


@torch.no_grad()
def predict(model: Backbone, batch: Batch) -> tuple[Tokens, Accuracy]:
    """Return the most likely token (S, T) at every position of a split, and the accuracy at the scored ones.

    Raises:
        UnreadableError: the model fails on the split, or its output at a scored position is not finite.
    """
    device = next(model.parameters()).device
    chunk = sequences_per_forward(model, batch)

    predictions, counts = [], []
    for here in (slice(start, start + chunk) for start in range(0, len(batch), chunk)):
        arrays = (batch.inputs_ST[here], batch.targets_ST[here], batch.scored_ST[here])
        inputs_BT, targets_BT, scored_BT = (torch.from_numpy(array).to(device) for array in arrays)

        with failures_as_unreadable(), product_autocast(device):
            logits_BTV = model(inputs_BT)
            finite = bool(logits_BTV[scored_BT].isfinite().all())
        if not finite:
            raise UnreadableError("the model's outputs are not finite")

        predictions.append(logits_BTV.float().argmax(-1).cpu().numpy())
        counts.append(count(logits_BTV[None], targets_BT, scored_BT))

    total = functools.reduce(operator.add, counts)
    accuracy = Accuracy(sequence=total.sequence_accuracy.item(), token=total.token_accuracy.item())
    return np.concatenate(predictions), accuracy


@torch.no_grad()
def read_hidden_states(
    model: Backbone, batch: Batch, sequence_N: Tokens, position_N: Tokens
) -> tuple[Features, Features]:
    """Return hidden states (N, D) and token embeddings (N, D) at chosen positions.

    Args:
        model: the trained model.
        batch: the split.
        sequence_N: index of each position's sequence, ascending.
        position_N: positions in their sequences.

    Raises:
        UnreadableError: the model fails on these sequences.
    """
    device = next(model.parameters()).device
    rows = np.unique(sequence_N)
    chunk = sequences_per_forward(model, batch)
    width = model.embedding.embedding_dim

    parts = [(np.empty((0, width)), np.empty((0, width)))]
    for here in (rows[start : start + chunk] for start in range(0, len(rows), chunk)):
        tokens_BT = torch.from_numpy(batch.inputs_ST[here]).to(device)

        # Positions in these sequences.
        chosen = slice(*np.searchsorted(sequence_N, [here[0], here[-1] + 1]))
        row_N = torch.from_numpy(np.searchsorted(here, sequence_N[chosen])).to(device)
        at_N = torch.from_numpy(position_N[chosen]).to(device)

        with failures_as_unreadable(), product_autocast(device):
            hidden_ND = model.hidden(tokens_BT)[row_N, at_N]
        embedding_ND = model.embedding(tokens_BT[row_N, at_N])
        parts.append((hidden_ND.double().cpu().numpy(), embedding_ND.double().cpu().numpy()))

    return np.concatenate([hidden for hidden, _ in parts]), np.concatenate([embedding for _, embedding in parts])
