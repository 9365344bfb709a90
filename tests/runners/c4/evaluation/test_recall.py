"""Recall tokens, and the losses of recall tokens and others."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.checkpoints import load_model
from runners.c4.corpus.shards import open_shard
from runners.c4.corpus.windows import Windows
from runners.c4.evaluation import recall
from runners.c4.evaluation.recall import count_bigrams, seen_before, split_recall
from runners.c4.model import token_losses
from runners.c4.train import train
from tests.runners.c4.runs import ALONE, configured, corpus_of


def slow_recall(rows: list[list[int]], text: list[int], rare: int) -> list[list[bool]]:
    """Recall tokens by their definition."""
    known = Counter(pairwise(text))
    found = []
    for row in rows:
        pairs = list(pairwise(row))
        found.append([pair in pairs[:t] and known[pair] <= rare for t, pair in enumerate(pairs)])
    return found


def test_recall_tokens_are_those_of_a_slow_solver() -> None:
    rng = np.random.default_rng(0)
    rows_NT, text_N = rng.integers(5, size=(40, 30)), rng.integers(5, size=150)
    keys_NT = rows_NT[:, :-1] * 5 + rows_NT[:, 1:]
    known, place_N = np.unique(keys_NT, return_inverse=True)
    counts = count_bigrams(iter(np.array_split(text_N, 7)), known, 5)
    found_NT = seen_before(keys_NT) & (counts[place_N.reshape(keys_NT.shape)] <= 6)
    assert found_NT.tolist() == slow_recall(rows_NT.tolist(), text_N.tolist(), rare=6)
    assert 0.1 < found_NT.mean() < 0.9


def test_the_recall_tokens_of_a_corpus_are_rare_in_all_of_its_training_text(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(texts, tmp_path, validation_tokens=300, steps=400)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    shards = (open_shard(corpus.folder, shard)[0] for shard in corpus.manifest.splits["train"].shards)
    text = np.concatenate([*shards])[: corpus.tokens("train")].tolist()
    rows = windows.batch(0, config.validation_tokens // config.seq_len).tolist()
    repeated = {pair for row in rows for pair, times in Counter(pairwise(row)).items() if times > 1}
    counts = {Counter(pairwise(text))[pair] for pair in repeated} - {0}
    assert len(counts) > 1  # so that each threshold decides something
    for rare in counts:
        monkeypatch.setattr(recall, "RARE", (rare + 0.5) / len(text))
        split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
        assert split.rare == rare
        assert split.recall_NT.tolist() == slow_recall(rows, text, rare)


def test_a_bigram_that_no_training_text_has_is_rare() -> None:
    assert count_bigrams(iter([np.array([1, 2, 1, 2])]), np.array([5, 6, 12]), 4).tolist() == [0, 2, 0]


def test_the_two_losses_make_up_the_validation_loss(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, validation_tokens=300)
    corpus = corpus_of(config)
    result = train(config, {}, corpus, ALONE, [])
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    assert 0 < split.share < 0.5

    model, _ = load_model(next((tmp_path / "c4").iterdir()))
    recall, rest = split.losses(model, 7, torch.device("cpu"))
    assert split.share * recall + (1 - split.share) * rest == pytest.approx(result["validation_loss"], abs=1e-5)
    assert recall != pytest.approx(rest, abs=1e-3)
    for batch_size in (1, 10**6):
        assert split.losses(model, batch_size, torch.device("cpu")) == pytest.approx((recall, rest), rel=1e-6)

    # The recall tokens' own losses.
    tokens_NT = torch.from_numpy(windows.batch(0, len(split.recall_NT)))
    with torch.no_grad():
        losses_NT = token_losses(model, tokens_NT).numpy()
    assert losses_NT[split.recall_NT].mean() == pytest.approx(recall, abs=1e-5)
