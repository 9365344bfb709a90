"""Linear probes: does the layer's hidden state at a scored position hold the answer, ready for a linear readout?

A logistic regression is fitted on the frozen hidden state (Alain & Bengio 2016, arXiv:1610.01644) and judged on
sequences that it was not fitted on. Beside it stand three references: the same probe on the token embedding alone (what
the input token gives away by itself), the share of the most frequent answer, and the model's own accuracy at the same
positions.

A model that fails where its probe succeeds has the answer and does not read it out. Where the probe fails too, the
answer is not there in linear form. On a task with one fixed map from key to answer (memorization) the probe can learn
the map itself; there it shows only that the hidden state holds the key.

Dimensions: S sequences, T positions, N probed examples, D width.
"""

import warnings
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mixers.models import Backbone
from runners.mad.diagnosis.outputs import Features, read_hidden_states
from tasks.base import Batch, Task, Tokens

MAX_POSITIONS = 5
"""Number of positions that are probed separately if all positions share one hidden state."""
INVERSE_PENALTY = 0.01
"""``C`` of the logistic regression. On in-context recall of length 32, at four stages of training, the probe came
within 1.1 points of the model's own accuracy. Values of 0.1 and more were slower and no better."""
MAX_ITERATIONS = 200
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


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One probe; accuracies are shares in [0, 1] of the same examples, None where no probe could be fitted.

    Attributes:
        position: the one position whose answer is probed; None if all scored positions are.
        examples: probed examples.
        sequences: different sequences among them.
        classes: different answers among them.
        dropped_classes: number of answers that are left out because they are too rare, or there are too many answers.
        hidden: the probe on the hidden state: its accuracy on held-out sequences, ``mean`` and sample standard
            ``deviation`` over the folds.
        embedding: the probe on the embedding of the token at which the hidden state is read, likewise.
        majority: share of the most frequent answer.
        model: accuracy of the model's own prediction.
        converged: whether the optimizer finished within ``MAX_ITERATIONS`` in all folds.
        impossible: why no probe could be fitted; None if it could.
    """

    position: int | None
    examples: int
    sequences: int
    classes: int
    dropped_classes: int
    hidden: dict[str, float] | None = None
    embedding: dict[str, float] | None = None
    majority: float | None = None
    model: float | None = None
    converged: bool | None = None
    impossible: str | None = None


def fit_probes(model: Backbone, task: Task, batch: Batch, predictions_ST: Tokens) -> list[Probe]:
    """Probe a model's hidden state for the answers of a split.

    In a language model, one probe covers all scored positions, and reads the hidden state at each. An autoencoder has
    one hidden state for all positions: its encoder's output at the last position. There, up to ``MAX_POSITIONS`` evenly
    spaced scored positions get a probe each, which is compared with a probe of the last token's embedding.

    Args:
        model: the trained model.
        task: task of the model, which determines the kind of backbone.
        batch: the split.
        predictions_ST: the model's predictions on it.

    Raises:
        UnreadableError: the model fails on the split.
    """
    right_ST = predictions_ST == batch.targets_ST
    positions: list[int | None] = [None]
    if task.backbone == "autoencoder":
        scored = np.flatnonzero(batch.scored_ST.any(axis=0))
        positions = scored[np.unique(np.linspace(0, len(scored) - 1, MAX_POSITIONS).round().astype(np.int64))].tolist()

    probes, last = [], batch.inputs_ST.shape[1] - 1
    for position in positions:
        sample = draw_sample(batch, position)
        read_N = sample.position_N if position is None else np.full_like(sample.position_N, last)
        hidden_ND, embedding_ND = read_hidden_states(model, batch, sample.sequence_N, read_N)

        _, counts = np.unique(sample.answer_N, return_counts=True)
        size: dict[str, Any] = {
            "position": position,
            "examples": len(sample.answer_N),
            "sequences": len(np.unique(sample.sequence_N)),
            "classes": len(counts),
            "dropped_classes": sample.dropped_classes,
        }
        if len(counts) < 2:
            probes.append(Probe(**size, impossible=f"fewer than 2 answers occur in {FOLDS} or more sequences"))
            continue

        hidden, hidden_converged = _cross_validate(hidden_ND, sample)
        embedding, embedding_converged = _cross_validate(embedding_ND, sample)
        probe = Probe(
            **size,
            hidden=hidden,
            embedding=embedding,
            majority=float(counts.max() / counts.sum()),
            model=float(right_ST[sample.sequence_N, sample.position_N].mean()),
            converged=hidden_converged and embedding_converged,
        )
        probes.append(probe)
    return probes


def _cross_validate(features_ND: Features, sample: Sample) -> tuple[dict[str, float], bool]:
    """Return the accuracy on held-out sequences, and whether the optimizer finished in all folds.

    The folds have balanced classes, and no sequence is both fitted and judged.
    """
    regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the returned flag replaces it
        found = cross_validate(
            make_pipeline(StandardScaler(), regression),
            features_ND,
            sample.answer_N,
            groups=sample.sequence_N,
            cv=StratifiedGroupKFold(FOLDS, shuffle=True, random_state=SEED),
            return_estimator=True,
        )
    converged = all((pipeline[-1].n_iter_ < MAX_ITERATIONS).all() for pipeline in found["estimator"])
    accuracies = found["test_score"].tolist()
    return {"mean": fmean(accuracies), "deviation": stdev(accuracies)}, converged
