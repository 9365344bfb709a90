"""Accuracy along the sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasks.base import Tokens


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
