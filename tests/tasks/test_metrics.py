"""Metrics against plain Python and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, recall_score

from tasks.base import IGNORE
from tasks.metrics import Counts, count, macro_accuracy, score

RUNS, SEQUENCES, POSITIONS, VOCAB = 3, 40, 5, 4


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(VOCAB - 1, (SEQUENCES, POSITIONS), generator=generator)
    logits = torch.randn(RUNS, SEQUENCES, POSITIONS, VOCAB, generator=generator)
    logits += 3 * torch.nn.functional.one_hot(targets, VOCAB)
    scored = torch.rand(SEQUENCES, POSITIONS, generator=generator) < 0.5
    scored[0] = False  # a sequence that only fills up the batch
    targets[~scored] = IGNORE
    return logits, targets, scored


def make_counts(sequences: int, tokens: int, results: list[tuple[int, int, float]]) -> Counts:
    """Runs with the given numbers of correct sequences, correct tokens, and loss."""
    correct_sequences, correct_tokens, losses = zip(*results, strict=True)
    return Counts(
        sequences_R=torch.tensor(sequences).expand(len(results)),
        correct_sequences_R=torch.tensor(correct_sequences),
        tokens_R=torch.tensor(tokens).expand(len(results)),
        correct_tokens_R=torch.tensor(correct_tokens),
        loss_sum_R=torch.tensor(losses, dtype=torch.float64) * tokens,
    )


def test_counts_agree_with_scikit_learn_and_plain_python() -> None:
    logits, targets, scored = batch(0)
    counts = count(logits, targets, scored)
    for run in range(RUNS):
        predictions = logits[run].argmax(-1)
        sequences = [(targets[s][scored[s]], predictions[s][scored[s]]) for s in range(SEQUENCES) if scored[s].any()]
        assert counts.sequences_R[run] == len(sequences)
        assert counts.correct_sequences_R[run] == sum(bool((t == p).all()) for t, p in sequences)
        assert 0 < counts.correct_sequences_R[run] < len(sequences)
        assert counts.tokens_R[run] == scored.sum()
        flat = targets[scored].numpy(), predictions[scored].numpy()
        assert counts.token_accuracy[run] == pytest.approx(accuracy_score(*flat), rel=1e-12)
        probabilities = logits[run][scored].double().softmax(-1).numpy()
        assert counts.loss[run] == pytest.approx(log_loss(flat[0], probabilities, labels=range(VOCAB)), rel=1e-5)
        share = sum(bool((t == p).all()) for t, p in sequences) / len(sequences)
        assert counts.sequence_accuracy[run] == pytest.approx(share, rel=1e-12)


def test_counts_add_up_and_have_their_types() -> None:
    logits, targets, scored = batch(1)
    whole = count(logits, targets, scored)
    parts = count(logits[:, :7], targets[:7], scored[:7]) + count(logits[:, 7:], targets[7:], scored[7:])
    for name in ("sequences_R", "correct_sequences_R", "tokens_R", "correct_tokens_R"):
        assert getattr(whole, name).dtype == torch.int64
        assert getattr(whole, name).shape == (RUNS,)
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    assert whole.loss_sum_R.dtype == torch.float64
    torch.testing.assert_close(whole.loss_sum_R, parts.loss_sum_R, rtol=1e-7, atol=0)


def test_what_is_not_scored_does_not_matter() -> None:
    logits, targets, scored = batch(2)
    changed = torch.where(scored[None, :, :, None], logits, torch.nan)
    first, second = count(logits, targets, scored), count(changed, targets.where(scored, 1), scored)
    assert torch.equal(first.correct_sequences_R, second.correct_sequences_R)
    assert torch.equal(first.loss_sum_R, second.loss_sum_R)


def test_one_diverged_run_is_wrong_and_leaves_the_others_alone() -> None:
    logits, targets, scored = batch(3)
    healthy = count(logits, targets, scored)
    logits[1] = torch.nan
    counts = count(logits, targets, scored)
    assert counts.correct_tokens_R[1] == 0
    assert score(counts)[1] == -math.inf
    for run in (0, 2):
        assert score(counts)[run] == score(healthy)[run]


def test_nothing_waits_for_the_device() -> None:
    """On the meta device, which holds no values, every read of one is an error."""
    logits, targets, scored = (tensor.to("meta") for tensor in batch(4))
    counts = count(logits, targets, scored)
    total = counts + counts
    assert score(total).shape == total.sequence_accuracy.shape == total.token_accuracy.shape == (RUNS,)
    assert macro_accuracy(logits.argmax(-1), targets, scored, VOCAB).shape == (RUNS,)


def test_low_precision_logits_are_summed_in_high_precision() -> None:
    logits, targets, scored = batch(5)
    counts = count(logits.bfloat16(), targets, scored)
    expected = torch.nn.functional.cross_entropy(logits.bfloat16().double()[0][scored], targets[scored])
    assert counts.loss[0] == pytest.approx(float(expected), rel=1e-6)


def test_macro_accuracy_agrees_with_scikit_learn() -> None:
    logits, targets, scored = batch(6)
    predictions = logits.argmax(-1)
    macro = macro_accuracy(predictions, targets, scored, VOCAB)
    for run in range(RUNS):
        truth = targets[scored].numpy()
        expected = recall_score(truth, predictions[run][scored].numpy(), labels=np.unique(truth), average="macro")
        assert macro[run] == pytest.approx(expected, rel=1e-12)
        assert macro[run] != pytest.approx((truth == predictions[run][scored].numpy()).mean()), "not the micro average"


def test_score_orders_by_sequences_then_tokens_then_loss() -> None:
    """Property: for random pairs of results on the same data, many of them equal in part."""
    rng = np.random.default_rng(0)
    sequences, tokens = 1280, 1280 * 63
    results = []
    for _ in range(1000):
        right = int(rng.choice([0, 0, 0, 1, 640, 1279, 1280]))
        correct_tokens = int(rng.choice([right * 63, min(tokens, right * 63 + 1), max(right * 63, tokens - 1)]))
        loss = float(rng.choice([0.0, 1e-6, 0.5, 2.0, 2.001, 12.0, 12.1, 60.0, 61.0]))
        results.append((right, correct_tokens, loss))
    scores = score(make_counts(sequences, tokens, results)).tolist()
    ranks = [(right, correct_tokens, -loss) for right, correct_tokens, loss in results]
    for i, j in rng.integers(1000, size=(5000, 2)):
        assert (ranks[i] > ranks[j]) == (scores[i] > scores[j])
        assert (ranks[i] == ranks[j]) == (scores[i] == scores[j])
    for (right, _, _), value in zip(results, scores, strict=True):
        assert 0 <= value <= 1
        assert value == pytest.approx(right / sequences, abs=1 / sequences)


def test_score_of_the_best_and_of_the_undefined() -> None:
    scores = score(make_counts(10, 20, [(10, 20, 0.0), (10, 20, math.nan), (10, 20, math.inf)]))
    assert scores.dtype == torch.float64
    assert scores.tolist() == [1.0, -math.inf, -math.inf]
