"""Examples of a linear probe: scored positions of a split, and their folds.

Dimensions: S sequences, T positions, N sampled positions.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from tasks.base import Batch, Tokens

FOLDS = 5
SEED = 0
"""Seed of the subsample and of the folds, so that a diagnosis is reproducible."""
MAX_EXAMPLES = 4_000
POOL = 4 * MAX_EXAMPLES
"""Examples are drawn from this number of leading scored positions, so that a large split need not be read whole."""
MAX_CLASSES = 128
"""Largest number of classes of a probe: the most frequent answers. With ``MAX_EXAMPLES``, this limits its cost."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Scored positions to probe, in order of their sequences.

    Attributes:
        sequence_N: index of the sequence; a probe is never tested on a sequence that it was fitted on.
        position_N: position in the sequence.
        answer_N: target at that position.
        dropped_classes: number of answers left out. They are not among the ``MAX_CLASSES`` most frequent, or occur in
            fewer than ``FOLDS`` sequences of the sample.
    """

    sequence_N: Tokens
    position_N: Tokens
    answer_N: Tokens
    dropped_classes: int


def draw_sample(batch: Batch, position: int | None = None) -> Sample:
    """Draw at most ``MAX_EXAMPLES`` scored positions, without answers that are too rare.

    Args:
        batch: the split.
        position: the one position to sample; None for all.
    """
    scored_ST = batch.scored_ST
    if position is not None:
        scored_ST = scored_ST & (np.arange(scored_ST.shape[1]) == position)
    sequence_N, position_N = np.nonzero(scored_ST)
    answer_N = batch.targets_ST[sequence_N, position_N]

    # Positions with the most frequent answers.
    classes, count = np.unique(answer_N, return_counts=True)
    frequent = classes[np.argsort(-count, kind="stable")[:MAX_CLASSES]]
    kept = np.flatnonzero(np.isin(answer_N, frequent))[:POOL]
    if len(kept) > MAX_EXAMPLES:
        kept = np.sort(np.random.default_rng(SEED).choice(kept, MAX_EXAMPLES, replace=False))

    # Answers that occur in enough sequences for the folds.
    pairs = np.unique(np.column_stack([answer_N[kept], sequence_N[kept]]), axis=0)
    present, sequences = np.unique(pairs[:, 0], return_counts=True)
    spread = present[sequences >= FOLDS]
    kept = kept[np.isin(answer_N[kept], spread)]

    return Sample(
        sequence_N=sequence_N[kept],
        position_N=position_N[kept],
        answer_N=answer_N[kept],
        dropped_classes=len(classes) - len(spread),
    )


def split_folds(sample: Sample) -> list[tuple[Tokens, Tokens]]:
    """Return ``FOLDS`` pairs of training and test indices, with balanced classes and no sequence on both sides."""
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=SEED)
    return list(splitter.split(sample.answer_N, sample.answer_N, sample.sequence_N))
