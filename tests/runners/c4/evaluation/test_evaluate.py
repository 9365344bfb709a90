"""Validation loss and recall tokens against sums over single probabilities, computed one prefix at a time."""

import contextlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mixers.base import Shape
from mixers.models import LanguageModel
from mixers.transformer import Transformer
from runners.c4.config import Config
from runners.c4.data.corpus import Windows, open_shard
from runners.c4.evaluation import evaluate
from runners.c4.evaluation.evaluate import (
    HIDDEN,
    evaluating,
    log_spaced,
    split_recall,
    validation_loss,
    windows_together,
)
from runners.c4.model import build, token_losses
from tests.runners.c4.runs import configured, corpus_of

VOCAB, LENGTH = 40, 6
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Transformer, Transformer.Config(heads=2), Shape(width=16, mlp_width=32, layers=2), VOCAB)


class Text:
    """Windows of a text in order, as ``Windows`` gives them: they overlap by one token and start anew at the end."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.tokens_N = np.random.default_rng(0).integers(VOCAB, size=windows * LENGTH + 1)
        self.calls = self.largest = 0

    def __len__(self) -> int:
        return self.windows

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> np.ndarray:
        self.calls, self.largest = self.calls + 1, max(self.largest, batch_size)
        numbers = [n % self.windows for n in range(step * batch_size + rank, (step + 1) * batch_size, world)]
        return np.stack([self.tokens_N[n * LENGTH : (n + 1) * LENGTH + 1] for n in numbers])


def log_probability(model: LanguageModel, context: Any, token: int) -> float:
    """Of one token after its context."""
    with torch.no_grad():
        logits_V = model(torch.tensor([list(context)]))[0, -1].double()
    return (logits_V[token] - logits_V.logsumexp(dim=0)).item()


def mean_loss(model: LanguageModel, text: Text, windows: int) -> float:
    places = [(n * LENGTH, n * LENGTH + i) for n in range(windows) for i in range(1, LENGTH + 1)]
    values = [log_probability(model, text.tokens_N[start:end], text.tokens_N[end]) for start, end in places]
    return -sum(values) / len(values)


@pytest.mark.parametrize(("tokens", "windows"), [(7 * LENGTH, 7), (5 * LENGTH + 3, 5), (LENGTH, 1), (10**9, 7)])
@pytest.mark.parametrize("batch_size", [1, 3, 9])
def test_the_validation_loss_is_the_mean_over_the_windows_that_fit(
    model: LanguageModel, tokens: int, windows: int, batch_size: int
) -> None:
    text = Text(7)
    loss = validation_loss(model, cast(Windows, text), tokens, batch_size, CPU)
    assert loss == pytest.approx(mean_loss(model, text, windows), rel=1e-6)
    assert text.largest <= windows


@pytest.mark.parametrize(("world", "batch_size"), [(2, 1), (4, 1), (2, 3)])
def test_all_ranks_have_the_loss_of_one_and_make_as_many_passes(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, world: int, batch_size: int
) -> None:
    sums: list[torch.Tensor] = []
    passes = []

    def measure(rank: int) -> float:
        text = Text(7)
        loss = validation_loss(model, cast(Windows, text), 5 * LENGTH, batch_size, CPU, rank, world)
        passes.append(text.calls)
        return loss

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda mine: sums.append(mine.clone()))
    for rank in range(world):
        measure(rank)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda mine: mine.copy_(torch.stack(sums).sum(dim=0)))
    assert {measure(rank) for rank in range(world)} == {measure(0)}
    assert measure(1) == pytest.approx(mean_loss(model, Text(7), 5), rel=1e-6)
    assert len(set(passes)) == 1


@pytest.mark.parametrize(
    ("changes", "device", "world", "windows"),
    [
        ({}, GPU, 1, 4 * 64),
        ({}, GPU, 2, 4 * 32),
        ({"micro_batch_size": 8}, GPU, 1, 4 * 8),
        ({"recompute": True}, GPU, 1, 64),  # a step, too, holds the activations of one layer
        ({}, CPU, 1, 64),  # larger passes are slower
        ({"layers": 24, "width": 1024}, GPU, 1, HIDDEN // (512 * 1024)),  # half a GiB of hidden vectors
        ({"layers": 24, "width": 1024, "batch_size": 512}, GPU, 1, 512),  # as many as in training
    ],
)
def test_an_evaluation_reads_more_windows_at_once_than_training_where_memory_allows(
    changes: dict[str, Any], device: torch.device, world: int, windows: int
) -> None:
    config = Config(**{"layers": 4, "width": 256, "seq_len": 512, "batch_size": 64, **changes})
    assert windows_together(config, device, world) == windows


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_model_as_it_was(model: LanguageModel, training: bool) -> None:
    model.train(training)
    with contextlib.suppress(RuntimeError), evaluating(model, CPU):
        assert not model.training
        assert not torch.is_grad_enabled()
        raise RuntimeError
    assert model.training is training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("steps", [1, 2, 7, 12, 13, 100, 2001, 25_000])
@pytest.mark.parametrize("evaluations", [1, 2, 5, 8, 12, 40])
def test_evaluations_grow_by_like_factors_to_the_last_step(steps: int, evaluations: int) -> None:
    points = log_spaced(steps, evaluations)
    assert len(points) == min(steps, evaluations)
    assert points[-1] == steps
    assert all(before < after for before, after in zip([0, *points], points, strict=False))
    factors = [after / before for before, after in pairwise(points) if before >= 100]
    assert not factors or max(factors) / min(factors) < 1.02

    if (steps, evaluations) == (100, 8):
        assert points == [1, 2, 4, 8, 15, 28, 53, 100]


def slow_recall(rows: list[list[int]], text: list[int], rare: int) -> list[list[bool]]:
    """Recall tokens by their definition."""
    known = Counter(pairwise(text))
    found = []
    for row in rows:
        pairs = list(pairwise(row))
        found.append([pair in pairs[:t] and known[pair] <= rare for t, pair in enumerate(pairs)])
    return found


def test_the_losses_of_recall_tokens_and_others_make_up_the_validation_loss(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(texts, tmp_path, validation_tokens=300, steps=400)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    shards = (open_shard(corpus.folder, shard)[0] for shard in corpus.manifest.splits["train"].shards)
    text = np.concatenate([*shards])[: corpus.tokens("train")].tolist()
    tokens_NT = windows.batch(0, config.validation_tokens // config.seq_len)

    # Each limit decides something.
    times = Counter(pairwise(text))
    repeated = {pair for row in tokens_NT.tolist() for pair, count in Counter(pairwise(row)).items() if count > 1}
    for rare in (counts := sorted({times[pair] for pair in repeated} - {0})):
        monkeypatch.setattr(evaluate, "RARE", (rare + 0.5) / len(text))
        split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
        assert split.rare == rare
        assert split.recall_NT.tolist() == slow_recall(tokens_NT.tolist(), text, rare)
    assert len(counts) > 1
    assert 0 < split.share < 0.5

    # Losses.
    model = build(config, {}, corpus.manifest.vocab_size)
    recall, rest = split.losses(model, 7, CPU)
    whole = validation_loss(model, windows, config.validation_tokens, 7, CPU)
    assert split.share * recall + (1 - split.share) * rest == pytest.approx(whole, abs=1e-5)
    for batch_size in (1, 10**6):
        assert split.losses(model, batch_size, CPU) == pytest.approx((recall, rest), rel=1e-6)
    with torch.no_grad():
        losses_NT = token_losses(model, torch.from_numpy(tokens_NT)).numpy()
    assert losses_NT[split.recall_NT].mean() == pytest.approx(recall, abs=1e-5)
