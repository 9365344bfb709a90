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
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mixers.models import Backbone
from runners.mad.diagnosis.outputs import Features, read_hidden_states
from runners.mad.diagnosis.samples import FOLDS, Sample, draw_sample, split_folds
from tasks.base import Batch, Task, Tokens

MAX_POSITIONS = 5
"""Number of positions that are probed separately if all positions share one hidden state."""
INVERSE_PENALTY = 0.01
"""``C`` of the logistic regression. On in-context recall of length 32, at four stages of training, the probe came
within 1.1 points of the model's own accuracy. Values of 0.1 and more were slower and no better."""
MAX_ITERATIONS = 200


@dataclass(frozen=True, kw_only=True)
class FoldAccuracy:
    """Accuracy on held-out sequences.

    Attributes:
        mean: mean over the folds, in [0, 1].
        deviation: sample standard deviation over the folds.
    """

    mean: float
    deviation: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One probe; accuracies are shares in [0, 1] of the same examples, None where no probe could be fitted.

    Attributes:
        position: the one position whose answer is probed; None if all scored positions are.
        examples: probed examples.
        sequences: different sequences among them.
        classes: different answers among them.
        dropped_classes: number of answers that are left out because they are too rare, or there are too many answers.
        hidden: the probe on the hidden state.
        embedding: the probe on the embedding of the token at which the hidden state is read.
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
    hidden: FoldAccuracy | None = None
    embedding: FoldAccuracy | None = None
    majority: float | None = None
    model: float | None = None
    converged: bool | None = None
    impossible: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All probes of a model, and means over those that could be fitted; a mean is None if none could."""

    probes: list[Probe]
    hidden: float | None
    embedding: float | None
    majority: float | None
    model: float | None

    @staticmethod
    def of(probes: list[Probe]) -> "ProbeReport":
        """Average over the probes."""
        return ProbeReport(
            probes=probes,
            hidden=_mean([p.hidden.mean for p in probes if p.hidden is not None]),
            embedding=_mean([p.embedding.mean for p in probes if p.embedding is not None]),
            majority=_mean([p.majority for p in probes if p.majority is not None]),
            model=_mean([p.model for p in probes if p.model is not None]),
        )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def fit_probes(model: Backbone, task: Task, batch: Batch, predictions_ST: Tokens) -> ProbeReport:
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
    if task.backbone == "autoencoder":
        return ProbeReport.of(_fit_each_position(model, batch, right_ST))

    sample = draw_sample(batch)
    hidden_ND, embedding_ND = read_hidden_states(model, batch, sample.sequence_N, sample.position_N)
    return ProbeReport.of([_fit(sample, hidden_ND, embedding_ND, right_ST)])


def _fit_each_position(model: Backbone, batch: Batch, right_ST: NDArray[np.bool_]) -> list[Probe]:
    """Fit one probe for each of the chosen positions on the hidden state at the last position."""
    sequence_S = np.arange(len(batch))
    last_S = np.full_like(sequence_S, batch.inputs_ST.shape[1] - 1)
    hidden_SD, embedding_SD = read_hidden_states(model, batch, sequence_S, last_S)

    positions = np.flatnonzero(batch.scored_ST.any(axis=0))
    chosen = positions[np.unique(np.linspace(0, len(positions) - 1, MAX_POSITIONS).round().astype(np.int64))]

    probes = []
    for position in chosen.tolist():
        sample = draw_sample(batch, position)
        hidden_ND, embedding_ND = hidden_SD[sample.sequence_N], embedding_SD[sample.sequence_N]
        probes.append(_fit(sample, hidden_ND, embedding_ND, right_ST, position))
    return probes


def _fit(
    sample: Sample,
    hidden_ND: Features,
    embedding_ND: Features,
    right_ST: NDArray[np.bool_],
    position: int | None = None,
) -> Probe:
    """Fit the probes on the hidden state and on the embedding of a sample."""
    _, counts = np.unique(sample.answer_N, return_counts=True)
    size: dict[str, Any] = {
        "position": position,
        "examples": len(sample.answer_N),
        "sequences": len(np.unique(sample.sequence_N)),
        "classes": len(counts),
        "dropped_classes": sample.dropped_classes,
    }
    if len(counts) < 2:
        return Probe(**size, impossible=f"fewer than 2 answers occur in {FOLDS} or more sequences")

    folds = split_folds(sample)
    hidden, hidden_converged = _cross_validate(hidden_ND, sample.answer_N, folds)
    embedding, embedding_converged = _cross_validate(embedding_ND, sample.answer_N, folds)

    return Probe(
        **size,
        hidden=hidden,
        embedding=embedding,
        majority=float(counts.max() / counts.sum()),
        model=float(right_ST[sample.sequence_N, sample.position_N].mean()),
        converged=hidden_converged and embedding_converged,
    )


def _cross_validate(
    features_ND: Features, answer_N: Tokens, folds: list[tuple[Tokens, Tokens]]
) -> tuple[FoldAccuracy, bool]:
    """Return the accuracy on held-out sequences, and whether the optimizer finished in all folds."""
    accuracies, converged = [], True
    for fitted, judged in folds:
        regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS)
        classifier = make_pipeline(StandardScaler(), regression)

        # The returned flag replaces the warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            classifier.fit(features_ND[fitted], answer_N[fitted])

        converged &= bool((regression.n_iter_ < MAX_ITERATIONS).all())
        accuracies.append(float(classifier.score(features_ND[judged], answer_N[judged])))

    return FoldAccuracy(mean=fmean(accuracies), deviation=float(np.std(accuracies, ddof=1))), converged
