"""Linear probes: does the layer's hidden state at a scored position hold the answer, ready for a linear readout?

A logistic regression is fitted on the frozen hidden state (Alain & Bengio 2016, arXiv:1610.01644) and judged on
sequences that it was not fitted on. Beside it stand the same probe on the token embedding alone (what the input token
gives away by itself), the share of the most frequent class, and the model's own accuracy at the same positions. A model
that fails where its probe succeeds has the answer and does not read it out; where the probe fails too, the answer is
not there in linear form. On a task with one fixed map from key to answer (memorization) the probe can learn the map
itself, so that it tells only that the hidden state holds the key.

Dimensions: S sequences, T positions, N probed examples, D width.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mixers.models import Backbone
from mixers.ops.numerics import product_autocast
from runners.mad.training.evaluate import ELEMENTS_PER_FORWARD, ELEMENTS_PER_TOKEN
from tasks.base import Batch, Task, Tokens

FOLDS = 5
SEED = 0
"""Seed of the subsample and of the folds: a diagnosis is repeatable."""
MAX_EXAMPLES = 4_000
POOL = 4 * MAX_EXAMPLES
"""Leading scored positions that the examples are drawn from: a split of many needs no forward pass over all of it."""
MAX_CLASSES = 128
"""Most frequent answers that a probe tells apart; together with ``MAX_EXAMPLES`` this bounds its cost."""
MAX_POSITIONS = 5
"""Positions probed one by one where all positions share one hidden state."""
INVERSE_PENALTY = 0.01
"""``C`` of the logistic regression. On in-context recall at four stages of training (length 32) the probe came within
1.1 points of the model's own accuracy; 0.1 and more were slower and no better."""
MAX_ITERATIONS = 200

Features = NDArray[np.float64]


class UnreadableError(ValueError):
    """A model has no outputs for some sequences: its code fails on them, or its outputs are not finite."""


@contextmanager
def calling_the_model() -> Iterator[None]:
    """Turn what goes wrong in a model's own code into an ``UnreadableError`` of one line; want of memory stays that."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's layer may fail in any way, on lengths that it was not trained at above all
        raise UnreadableError(" ".join(f"{type(error).__name__}: {error}".split())) from error


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Scored positions to probe, in order of their sequences.

    Attributes:
        sequence_N: index of the sequence; a probe is never judged on a sequence that it was fitted on.
        position_N: position in the sequence.
        answer_N: the target there.
        dropped_classes: answers left out: too many different ones, or in fewer than ``FOLDS`` sequences of the sample.
    """

    sequence_N: Tokens
    position_N: Tokens
    answer_N: Tokens
    dropped_classes: int


@dataclass(frozen=True, kw_only=True)
class FoldAccuracy:
    """Accuracy on held-out sequences: mean and sample standard deviation over the folds, shares in [0, 1]."""

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
        dropped_classes: answers left out as too rare or too many.
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
    """All probes of a model, and means over those that could be fitted (None if none could)."""

    probes: list[Probe]
    hidden: float | None
    embedding: float | None
    majority: float | None
    model: float | None

    @staticmethod
    def of(probes: list[Probe]) -> "ProbeReport":
        """Average."""
        return ProbeReport(
            probes=probes,
            hidden=_mean([p.hidden.mean for p in probes if p.hidden is not None]),
            embedding=_mean([p.embedding.mean for p in probes if p.embedding is not None]),
            majority=_mean([p.majority for p in probes if p.majority is not None]),
            model=_mean([p.model for p in probes if p.model is not None]),
        )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def probe(model: Backbone, task: Task, batch: Batch, predictions_ST: Tokens) -> ProbeReport:
    """Probe a model's hidden state for the answers of a split.

    An autoencoder has one hidden state for all positions, its encoder's at the last position: up to ``MAX_POSITIONS``
    scored positions, evenly spaced, get a probe each, and the embedding is that of the last token. Otherwise one probe
    covers all scored positions, each read where it stands.

    Args:
        model: the trained model.
        task: tells which kind of backbone the model is.
        batch: the split.
        predictions_ST: the model's predictions on it.
    """
    right_ST = predictions_ST == batch.targets_ST
    if task.backbone != "autoencoder":
        sample = draw(batch)
        return ProbeReport.of([_fit(sample, *read(model, batch, sample.sequence_N, sample.position_N), right_ST)])
    sequence_S = np.arange(len(batch))
    hidden_SD, embedding_SD = read(model, batch, sequence_S, np.full_like(sequence_S, batch.inputs_ST.shape[1] - 1))
    positions = np.flatnonzero(batch.scored_ST.any(axis=0))
    chosen = positions[np.unique(np.linspace(0, len(positions) - 1, MAX_POSITIONS).round().astype(np.int64))]
    probes = []
    for position in chosen.tolist():
        sample = draw(batch, position)
        features = (hidden_SD[sample.sequence_N], embedding_SD[sample.sequence_N])
        probes.append(_fit(sample, *features, right_ST, position))
    return ProbeReport.of(probes)


def draw(batch: Batch, position: int | None = None) -> Sample:
    """Draw at most ``MAX_EXAMPLES`` scored positions, of one position or of all, without answers that are too rare."""
    scored_ST = batch.scored_ST
    if position is not None:
        scored_ST = scored_ST & (np.arange(scored_ST.shape[1]) == position)
    sequence_N, position_N = np.nonzero(scored_ST)
    answer_N = batch.targets_ST[sequence_N, position_N]
    classes, count = np.unique(answer_N, return_counts=True)
    frequent = classes[np.argsort(-count, kind="stable")[:MAX_CLASSES]]
    kept = np.flatnonzero(np.isin(answer_N, frequent))[:POOL]
    if len(kept) > MAX_EXAMPLES:
        kept = np.sort(np.random.default_rng(SEED).choice(kept, MAX_EXAMPLES, replace=False))
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


@torch.no_grad()
def read(model: Backbone, batch: Batch, sequence_N: Tokens, position_N: Tokens) -> tuple[Features, Features]:
    """Hidden states and token embeddings (N, D) at the given positions; ``sequence_N`` ascends.

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
        picked = slice(*np.searchsorted(sequence_N, [here[0], here[-1] + 1]))
        row_N = torch.from_numpy(np.searchsorted(here, sequence_N[picked])).to(device)
        at_N = torch.from_numpy(position_N[picked]).to(device)
        with calling_the_model(), product_autocast(device):
            hidden_ND = model.hidden(tokens_BT)[row_N, at_N]
        embedding_ND = model.embedding(tokens_BT[row_N, at_N])
        parts.append((hidden_ND.double().cpu().numpy(), embedding_ND.double().cpu().numpy()))
    return np.concatenate([hidden for hidden, _ in parts]), np.concatenate([embedding for _, embedding in parts])


def sequences_per_forward(model: Backbone, batch: Batch) -> int:
    """Sequences of a split that fit into one forward pass."""
    elements: int = batch.inputs_ST.shape[1] * max(model.embedding.num_embeddings, ELEMENTS_PER_TOKEN)
    return max(1, ELEMENTS_PER_FORWARD[model.embedding.weight.device.type] // elements)


def folds(sample: Sample) -> list[tuple[Tokens, Tokens]]:
    """Indices to fit on and to judge on, ``FOLDS`` times: classes balanced, no sequence on both sides."""
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=SEED)
    return list(splitter.split(sample.answer_N, sample.answer_N, sample.sequence_N))


def _fit(
    sample: Sample,
    hidden_ND: Features,
    embedding_ND: Features,
    right_ST: NDArray[np.bool_],
    position: int | None = None,
) -> Probe:
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
    splits = folds(sample)
    (hidden, hidden_converged), (embedding, embedding_converged) = (
        _cross_validate(features_ND, sample.answer_N, splits) for features_ND in (hidden_ND, embedding_ND)
    )
    return Probe(
        **size,
        hidden=hidden,
        embedding=embedding,
        majority=float(counts.max() / counts.sum()),
        model=float(right_ST[sample.sequence_N, sample.position_N].mean()),
        converged=hidden_converged and embedding_converged,
    )


def _cross_validate(
    features_ND: Features, answer_N: Tokens, splits: list[tuple[Tokens, Tokens]]
) -> tuple[FoldAccuracy, bool]:
    accuracies, converged = [], True
    for fitted, judged in splits:
        regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS)
        classifier = make_pipeline(StandardScaler(), regression)
        with warnings.catch_warnings():
            # Reported as a field instead.
            warnings.simplefilter("ignore", ConvergenceWarning)
            classifier.fit(features_ND[fitted], answer_N[fitted])
        converged &= bool((regression.n_iter_ < MAX_ITERATIONS).all())
        accuracies.append(float(classifier.score(features_ND[judged], answer_N[judged])))
    return FoldAccuracy(mean=fmean(accuracies), deviation=float(np.std(accuracies, ddof=1))), converged
