"""Confusion matrix: targets against predictions.

Dimensions: N scored positions, C classes (tokens that are targets or predictions at scored positions).
"""

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import confusion_matrix

from tasks.base import Tokens

MAX_CLASSES = 64
"""Largest number of classes in a confusion matrix; if there are more, the most often missed ones are shown."""
TOP_CONFUSIONS = 20


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A token taken for another.

    Attributes:
        target: the right token.
        predicted: the model's token.
        count: number of scored positions with this target and this prediction.
        share: their share of the scored positions with this target, in [0, 1].
    """

    target: int
    predicted: int
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """Targets against predictions at the scored positions.

    Attributes:
        occurring: number of classes C.
        classes: tokens of the rows and columns: all C ascending, or the ``MAX_CLASSES`` targets most often missed.
        counts: rows are targets, columns predictions.
        targets: number of scored positions with each row's target, including predictions outside ``classes``.
        top: the most frequent confusions of all classes, most frequent first.
    """

    occurring: int
    classes: list[int]
    counts: list[list[int]]
    targets: list[int]
    top: list[Confusion]


def count_confusions(targets_N: Tokens, predictions_N: Tokens) -> ConfusionMatrix:
    """Count the confusions: at most ``MAX_CLASSES`` classes in the matrix, the most frequent ones of all classes."""
    classes, occurrences = np.unique(targets_N, return_counts=True)
    targets = dict(zip(classes.tolist(), occurrences.tolist(), strict=True))
    occurring = np.union1d(targets_N, predictions_N)
    wrong_N = targets_N != predictions_N

    # Classes of the matrix.
    shown = occurring
    if len(occurring) > MAX_CLASSES:
        missed = np.bincount(targets_N[wrong_N], minlength=classes[-1] + 1)[classes]
        shown = np.sort(classes[np.argsort(-missed, kind="stable")[:MAX_CLASSES]])

    # Most frequent confusions.
    wrong_pairs = np.column_stack([targets_N[wrong_N], predictions_N[wrong_N]])
    pairs, frequency = np.unique(wrong_pairs, axis=0, return_counts=True)
    first = np.argsort(-frequency, kind="stable")[:TOP_CONFUSIONS]
    top = [
        Confusion(target=target, predicted=predicted, count=times, share=times / targets[target])
        for (target, predicted), times in zip(pairs[first].tolist(), frequency[first].tolist(), strict=True)
    ]

    return ConfusionMatrix(
        occurring=len(occurring),
        classes=shown.tolist(),
        counts=confusion_matrix(targets_N, predictions_N, labels=shown).tolist(),
        targets=[targets.get(token, 0) for token in shown.tolist()],
        top=top,
    )
