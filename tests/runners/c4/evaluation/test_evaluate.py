"""Validation loss and likelihoods against sums over single next-token probabilities, computed one prefix at a time."""

import contextlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mixers.base import Shape
from mixers.models import LanguageModel
from mixers.transformer import Transformer
from runners.c4.config import Config
from runners.c4.corpus.tokenizer import end_of_text
from runners.c4.corpus.windows import Windows
from runners.c4.evaluation.evaluate import (
    HIDDEN,
    Likelihood,
    Pair,
    encode_pair,
    evaluating,
    log_likelihoods,
    log_spaced,
    validation_loss,
    windows_together,
)

VOCAB, LENGTH, END = 40, 6, 0
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Transformer, Transformer.Config(heads=2), Shape(width=16, mlp_width=32, layers=2), VOCAB)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words join the space before them, as T5's do; every two letters of the text occur, so pairs of letters merge."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train_from_iterator(["the cat sat on the mat", "the hat of the cat", "ab ab ab"], trainer)
    return made


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


def test_too_few_validation_tokens_are_one_line(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=f"give --validation-tokens {LENGTH} at least") as raised:
        validation_loss(model, cast(Windows, Text(7)), LENGTH - 1, 2, CPU)
    assert "\n" not in str(raised.value)


def test_an_evaluation_reads_more_windows_at_once_than_training_where_memory_allows() -> None:
    small = Config(layers=4, width=256, seq_len=512, batch_size=64)
    assert windows_together(small, GPU) == 4 * 64
    assert windows_together(small, GPU, world_size=2) == 4 * 32
    assert windows_together(replace(small, micro_batch_size=8), GPU) == 4 * 8

    # With recomputation, a step, too, holds the activations of one layer; on a CPU, larger passes are slower.
    assert windows_together(replace(small, recompute=True), GPU) == 64
    assert windows_together(small, CPU) == 64

    # Large models: as many as half a GiB of hidden vectors, or as many as in training.
    large = Config(layers=24, size="300m", batch_size=64)
    assert windows_together(large, GPU) * large.seq_len * large.shape().width == HIDDEN
    assert windows_together(replace(large, batch_size=512), GPU) == 512


def test_evaluating_leaves_the_model_as_it_was(model: LanguageModel) -> None:
    for training in (True, False):
        model.train(training)
        seen = []
        with contextlib.suppress(RuntimeError), evaluating(model, CPU):
            seen = [model.training, torch.is_grad_enabled()]
            raise RuntimeError
        assert seen == [False, False]
        assert model.training is training
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("steps", [1, 2, 7, 12, 13, 100, 2001, 25_000])
@pytest.mark.parametrize("evaluations", [1, 2, 5, 12, 40])
def test_evaluations_grow_by_like_factors_to_the_last_step(steps: int, evaluations: int) -> None:
    points = log_spaced(steps, evaluations)
    assert len(points) == min(steps, evaluations)
    assert points[-1] == steps
    assert all(before < after for before, after in zip([0, *points], points, strict=False))
    factors = [after / before for before, after in pairwise(points) if before >= 100]
    assert not factors or max(factors) / min(factors) < 1.02


def test_evaluations_of_a_small_case() -> None:
    assert log_spaced(1000, 4) == [1, 10, 100, 1000]
    assert log_spaced(100, 8) == [1, 2, 4, 8, 15, 28, 53, 100]


@pytest.mark.parametrize(
    ("context", "continuation"), [("the cat", " sat"), ("the cat ", "sat"), ("the cat  ", "sat on")]
)
def test_spaces_between_context_and_continuation_belong_to_the_continuation(
    tokenizer: Tokenizer, context: str, continuation: str
) -> None:
    pair = encode_pair(tokenizer, context, continuation, END)
    assert pair.context == tokenizer.encode("the cat").ids
    assert pair.context + pair.continuation == tokenizer.encode(context + continuation).ids


@pytest.mark.parametrize("context", ["", "  "])
def test_without_a_context_an_end_of_text_stands_there(tokenizer: Tokenizer, context: str) -> None:
    whole = tokenizer.encode(context + "cat").ids
    assert encode_pair(tokenizer, context, "cat", END) == Pair([END], whole)


def test_a_continuation_that_joins_the_contexts_token_is_still_predicted(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("ab").ids) == 1
    assert encode_pair(tokenizer, "a", "b", END) == Pair([END], tokenizer.encode("ab").ids)


def test_a_continuation_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token of ''"):
        encode_pair(tokenizer, "the cat", "", END)


def test_tokens_that_an_encoder_adds_are_left_out(tokenizer: Tokenizer) -> None:
    """T5's tokenizer ends each text with an end of text, which must not stand between context and continuation."""
    from tokenizers.processors import TemplateProcessing

    adding = Tokenizer.from_str(tokenizer.to_str())
    adding.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", END)])
    assert adding.encode("the cat").ids[-1] == END
    assert encode_pair(adding, "the cat", " sat", END) == encode_pair(tokenizer, "the cat", " sat", END)


def test_an_end_of_text_is_a_special_token(tokenizer: Tokenizer) -> None:
    assert end_of_text(tokenizer) == END
    plain = Tokenizer(models.WordLevel({"</s>": 0, "<|endoftext|>": 1}, unk_token="</s>"))
    with pytest.raises(ValueError, match="has no end-of-text"):
        end_of_text(plain)
    plain.add_special_tokens(["<|endoftext|>"])
    assert end_of_text(plain) == 1


def expected(model: LanguageModel, pair: Pair) -> float:
    """Sum over the continuation's tokens, each after what its part of ``LENGTH`` inputs holds before it."""
    tokens, first = pair.context + pair.continuation, len(pair.context)
    total = 0.0
    for place in range(first, len(tokens)):
        end = min(first + ((place - first) // LENGTH + 1) * LENGTH, len(tokens))
        total += log_probability(model, tokens[max(0, end - LENGTH - 1) : place], tokens[place])
    return total


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_likelihoods_are_sums_over_prefixes(model: LanguageModel, batch_size: int) -> None:
    """Contexts shorter and longer than the model reads, continuations of one token and of several readings."""
    rng = np.random.default_rng(1)
    sizes = [(1, 1), (3, 2), (2, LENGTH - 1), (40, 3), (4, LENGTH), (5, LENGTH + 1), (1, 3 * LENGTH + 2), (30, 20)]
    pairs = [Pair(rng.integers(VOCAB, size=a).tolist(), rng.integers(VOCAB, size=b).tolist()) for a, b in sizes]
    answers = log_likelihoods(model, pairs, batch_size, LENGTH, CPU)
    assert [answer.tokens for answer in answers] == [b for _, b in sizes]
    assert [answer.log_probability for answer in answers] == pytest.approx(
        [expected(model, p) for p in pairs], rel=1e-5
    )


def test_greedy_is_what_decoding_would_give(model: LanguageModel) -> None:
    tokens = [3, 8]
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    likely = Pair(tokens[:2], tokens[2:])
    other = Pair(tokens[:2], [*tokens[2:-1], (tokens[-1] + 1) % VOCAB])
    answers = log_likelihoods(model, [other, likely], 2, LENGTH, CPU)
    assert [answer.greedy for answer in answers] == [False, True]


def test_nothing_to_predict_is_certain(model: LanguageModel) -> None:
    """The harness asks for the likelihood of an empty text."""
    nothing = Likelihood(log_probability=0.0, tokens=0, greedy=True)
    assert log_likelihoods(model, [Pair([END], [])], 2, LENGTH, CPU) == [nothing]


def test_logits_in_parts_change_nothing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [Pair([1, 2], [3, 4, 5]), Pair([6], [7, 8])]
    whole = log_likelihoods(model, pairs, 2, LENGTH, CPU)
    monkeypatch.setattr("runners.c4.evaluation.evaluate.LOGIT_ROWS", 2)
    parts = log_likelihoods(model, pairs, 2, LENGTH, CPU)
    assert all(
        math.isclose(a.log_probability, b.log_probability, rel_tol=1e-6) for a, b in zip(whole, parts, strict=True)
    )
