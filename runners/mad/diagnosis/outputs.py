"""What a trained model puts out on a split: predictions, hidden states, accuracy along the sequence, and confusions.

Everything is computed in the precision of training.
Dimensions: S sequences, B sequences of a forward pass, T positions, V vocabulary, N chosen positions, D width, C
classes (tokens that are targets or predictions at scored positions).
"""

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from runners.mad.training.ensemble import ELEMENTS_PER_FORWARD, ELEMENTS_PER_TOKEN
from tasks.base import Accuracy, Batch, Tokens
from tasks.metrics import count

Features = NDArray[np.float64]
MAX_CLASSES = 64
"""Largest number of classes in a confusion matrix; if there are more, the most often missed ones are shown."""


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


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Accuracy along the sequence, three aligned columns.

    Attributes:
        index: position, from 0; or number of the answer within its sequence, from 1.
        accuracy: share of right predictions among the scored positions at this index.
        sequences: number of sequences with a scored position at this index.
    """

    index: list[int]
    accuracy: list[float]
    sequences: list[int]


def profiles(share_ST: NDArray[np.float64], scored_ST: NDArray[np.bool_]) -> tuple[Profile, Profile]:
    """Return the accuracy by position, and the accuracy of the 1st, 2nd, … scored position of a sequence.

    Args:
        share_ST: share of runs whose prediction is right; only read where ``scored_ST`` is set.
        scored_ST: whether a position is scored.
    """
    position_N, ordinal_N = np.nonzero(scored_ST)[1], scored_ST.cumsum(axis=1)[scored_ST]
    return _profile(share_ST[scored_ST], position_N), _profile(share_ST[scored_ST], ordinal_N)


def along_the_sequence(by_position: Profile, by_answer: Profile) -> tuple[str, Profile]:
    """Return the profile to show, and the name of its axis: by answer if the positions of answers vary."""
    if len(by_position.index) > 2 * len(by_answer.index):
        return "answer", by_answer
    return "position", by_position


def _profile(share_N: NDArray[np.float64], index_N: Tokens) -> Profile:
    """Return the accuracy at each index that occurs."""
    total = np.bincount(index_N)
    correct = np.bincount(index_N, weights=share_N)
    index = np.flatnonzero(total)
    return Profile(
        index=index.tolist(), accuracy=(correct[index] / total[index]).tolist(), sequences=total[index].tolist()
    )


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """Targets against predictions at the scored positions.

    Attributes:
        occurring: number of classes C.
        classes: tokens of the rows and columns: all C ascending, or the ``MAX_CLASSES`` targets most often missed.
        counts: rows are targets, columns predictions.
        targets: number of scored positions with each row's target, including predictions outside ``classes``.
    """

    occurring: int
    classes: list[int]
    counts: list[list[int]]
    targets: list[int]


def count_confusions(targets_N: Tokens, predictions_N: Tokens) -> ConfusionMatrix:
    """Count the confusions of at most ``MAX_CLASSES`` classes."""
    classes, occurrences = np.unique(targets_N, return_counts=True)
    targets = dict(zip(classes.tolist(), occurrences.tolist(), strict=True))
    occurring = np.union1d(targets_N, predictions_N)
    wrong_N = targets_N != predictions_N

    # Classes of the matrix.
    shown = occurring
    if len(occurring) > MAX_CLASSES:
        missed = np.bincount(targets_N[wrong_N], minlength=classes[-1] + 1)[classes]
        shown = np.sort(classes[np.argsort(-missed, kind="stable")[:MAX_CLASSES]])

    return ConfusionMatrix(
        occurring=len(occurring),
        classes=shown.tolist(),
        counts=confusion_matrix(targets_N, predictions_N, labels=shown).tolist(),
        targets=[targets.get(token, 0) for token in shown.tolist()],
    )
