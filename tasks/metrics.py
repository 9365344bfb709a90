"""Accuracies and loss of runs trained together.

Everything on tensors stays on their device: nothing here waits for the device or copies from it.
Dimensions: R runs, S sequences, T positions, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts that the accuracies of each run follow from; counts of two batches add up with ``+``.

    Attributes:
        sequences_R: sequences with a scored position.
        correct_sequences_R: those of them whose scored positions are all right.
        tokens_R: scored positions.
        correct_tokens_R: scored positions that are right.
        loss_sum_R: cross-entropy in nats, summed over the scored positions, float64.
    """

    sequences_R: Tensor
    correct_sequences_R: Tensor
    tokens_R: Tensor
    correct_tokens_R: Tensor
    loss_sum_R: Tensor

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            sequences_R=self.sequences_R + other.sequences_R,
            correct_sequences_R=self.correct_sequences_R + other.correct_sequences_R,
            tokens_R=self.tokens_R + other.tokens_R,
            correct_tokens_R=self.correct_tokens_R + other.correct_tokens_R,
            loss_sum_R=self.loss_sum_R + other.loss_sum_R,
        )

    @property
    def sequence_accuracy(self) -> Tensor:
        """Share of sequences whose scored positions are all right, float64, shape (R,)."""
        return self.correct_sequences_R.double() / self.sequences_R

    @property
    def token_accuracy(self) -> Tensor:
        """Share of scored positions that are right (micro average), float64, shape (R,)."""
        return self.correct_tokens_R.double() / self.tokens_R

    @property
    def loss(self) -> Tensor:
        """Mean cross-entropy of the scored positions in nats, float64, shape (R,)."""
        return self.loss_sum_R / self.tokens_R


def count(logits_RSTV: Tensor, targets_ST: Tensor, scored_ST: Tensor) -> Counts:
    """Count the right positions and sequences of one batch.

    Args:
        logits_RSTV: outputs of R runs on the same sequences, any floating type.
        targets_ST: the right tokens, int64; only read where ``scored_ST``.
        scored_ST: positions that count, bool. A sequence without any (padding of a batch) is not counted.

    Returns:
        The counts, with leading run axis R; integers int64. A NaN is never right.
    """
    runs = logits_RSTV.shape[0]
    answers_ST = torch.where(scored_ST, targets_ST, 0)

    # Cross-entropy.
    logits_RSTV = logits_RSTV.float()
    index_RST1 = answers_ST.expand(runs, *answers_ST.shape)[..., None]
    loss_RST = logits_RSTV.logsumexp(dim=-1) - logits_RSTV.gather(-1, index_RST1)[..., 0]

    # Right positions; argmax would count the position of a NaN as a prediction.
    right_RST = (logits_RSTV.argmax(dim=-1) == answers_ST) & ~loss_RST.isnan()

    # Right sequences.
    counted_S = scored_ST.any(dim=-1)
    all_right_RS = (right_RST | ~scored_ST).all(dim=-1) & counted_S

    return Counts(
        sequences_R=counted_S.sum().expand(runs),
        correct_sequences_R=all_right_RS.sum(dim=-1),
        tokens_R=scored_ST.sum().expand(runs),
        correct_tokens_R=(right_RST & scored_ST).sum(dim=(-2, -1)),
        loss_sum_R=torch.where(scored_ST, loss_RST, 0.0).sum(dim=(-2, -1), dtype=torch.float64),
    )


def score(counts: Counts) -> Tensor:
    """Return the value by which a training picks its best evaluation, float64, shape (R,), in [0, 1].

    ``(correct sequences + (correct tokens + 1 / (1 + loss)) / (tokens + 1)) / (sequences + 1)``: more correct sequences
    win, then more correct tokens, then the lower loss. So runs differ even while no sequence is right. The score is
    close to the sequence accuracy. It is minus infinity for a run whose loss is not finite.
    """
    loss_R = counts.loss
    token_part_R = (counts.correct_tokens_R + 1 / (1 + loss_R)) / (counts.tokens_R + 1)
    score_R = (counts.correct_sequences_R + token_part_R) / (counts.sequences_R + 1)
    return torch.where(loss_R.isfinite(), score_R, -math.inf)


def macro_accuracy(predictions_RST: Tensor, targets_ST: Tensor, scored_ST: Tensor, vocab: int) -> Tensor:
    """Return the token accuracy averaged over classes, for comparison with suites that call this accuracy.

    Args:
        predictions_RST: predicted tokens of R runs on the same sequences, int64.
        targets_ST: the right tokens, int64; only read where ``scored_ST``.
        scored_ST: positions that count, bool.
        vocab: number V of classes.

    Returns:
        For each class among the scored targets, the share of its positions that are right; of these the mean, float64,
        shape (R,).
    """
    runs = predictions_RST.shape[0]
    answers_N = torch.where(scored_ST, targets_ST, 0).flatten()
    scored_N = scored_ST.flatten()
    right_RN = (predictions_RST.flatten(start_dim=1) == answers_N) & scored_N

    # Positions of each class.
    zeros_RV = torch.zeros(runs, vocab, dtype=torch.float64, device=targets_ST.device)
    totals_V = zeros_RV[0].scatter_add(0, answers_N, scored_N.double())
    correct_RV = zeros_RV.scatter_add(1, answers_N.expand(runs, -1), right_RN.double())

    return (correct_RV / totals_V.clamp(min=1)).sum(dim=1) / (totals_V > 0).sum()
