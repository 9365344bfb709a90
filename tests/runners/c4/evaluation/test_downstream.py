"""Multiple-choice sets: likelihoods and scores of models whose probabilities are a table, and files at fault."""

import gzip
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import binomtest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from mixers.base import Shape
from mixers.models import LanguageModel
from mixers.transformer import Transformer
from runners.c4.evaluation import downstream
from runners.c4.evaluation.downstream import (
    Item,
    Pair,
    encode_pair,
    evaluate_items,
    log_likelihoods,
    print_scores,
    read_items,
)
from tests.runners.c4.evaluation.test_evaluate import log_probability

CPU, END = torch.device("cpu"), 0


# Likelihoods.
VOCAB, LENGTH = 40, 6


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Transformer, Transformer.Config(heads=2), Shape(width=16, mlp_width=32, layers=2), VOCAB)


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """Words join the space before them, as T5's do; every two letters of the text occur, so pairs of letters merge.

    As T5's, it ends each text with an end of text, which must not stand between context and continuation.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train_from_iterator(["the cat sat on the mat", "the hat of the cat", "ab ab ab"], trainer)
    special = [("<|endoftext|>", END)]
    made.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=special)
    assert made.encode("the cat").ids[-1] == END
    return made


@pytest.mark.parametrize(
    ("context", "continuation", "given"),
    [
        ("the cat", " sat", "the cat"),
        ("the cat ", "sat", "the cat"),  # white space belongs to the continuation
        ("the cat  ", "sat on", "the cat"),
        ("", "cat", ""),  # an end of text stands before it
        ("  ", "cat", ""),
        ("a", "b", ""),  # a continuation that joins the context's token is still predicted
    ],
)
def test_context_and_continuation_are_split_as_in_the_harness(
    merging: Tokenizer, context: str, continuation: str, given: str
) -> None:
    pair = encode_pair(merging, context, continuation, END)
    tokens = merging.encode(given, add_special_tokens=False).ids
    assert pair.context == (tokens or [END])
    assert [*tokens, *pair.continuation] == merging.encode(context + continuation, add_special_tokens=False).ids
    with pytest.raises(ValueError, match="no token of ''"):
        encode_pair(merging, "the cat", "", END)


def expected(model: LanguageModel, pair: Pair) -> float:
    """Sum over the continuation's tokens, each after what its part of ``LENGTH`` inputs holds before it."""
    tokens, first = pair.context + pair.continuation, len(pair.context)
    total = 0.0
    for place in range(first, len(tokens)):
        end = min(first + ((place - first) // LENGTH + 1) * LENGTH, len(tokens))
        total += log_probability(model, tokens[max(0, end - LENGTH - 1) : place], tokens[place])
    return total


@pytest.mark.parametrize(("batch_size", "rows"), [(1, 4096), (4, 2), (100, 4096)])
def test_likelihoods_are_sums_over_prefixes(
    model: LanguageModel, batch_size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts shorter and longer than the model reads, continuations of no, one and several readings."""
    monkeypatch.setattr(downstream, "LOGIT_ROWS", rows)
    rng = np.random.default_rng(1)
    sizes = [(1, 1), (3, 2), (2, LENGTH - 1), (40, 3), (4, LENGTH), (5, LENGTH + 1), (1, 3 * LENGTH + 2), (30, 20)]
    pairs = [Pair(rng.integers(VOCAB, size=a).tolist(), rng.integers(VOCAB, size=b).tolist()) for a, b in sizes]
    *answers, nothing = log_likelihoods(model, [*pairs, Pair([END], [])], batch_size, LENGTH, CPU)
    assert [total for total, _ in answers] == pytest.approx([expected(model, p) for p in pairs], rel=1e-5)
    assert nothing == (0.0, True)  # the harness asks for it


# Scores.
LETTERS = "abcdefgh"
WORDS = {"<|endoftext|>": 0, **{f"Ġ{letter}": i for i, letter in enumerate(LETTERS, start=1)}, "é": 9}


class Bigrams(nn.Module):
    """Log-probability of a token from the one before it alone: a row of a table."""

    def __init__(self, logits_VV: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits_VV.log_softmax(dim=-1))
        self.readout = nn.Identity()

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.table[tokens_BT]


def bigrams(known: dict[str, float]) -> Bigrams:
    """The log-probabilities of pairs of letters; the rest of each row goes to h."""
    logits_VV = torch.full((len(WORDS), len(WORDS)), -math.inf)
    for (first, second), y in known.items():
        logits_VV[WORDS[f"Ġ{first}"], 0 if second == "?" else WORDS[f"Ġ{second}"]] = y
    logits_VV[:, WORDS["Ġh"]] = torch.log(1 - logits_VV.exp().sum(dim=1))
    return Bigrams(logits_VV)


def choice(context: str, *continuations: str, gold: int = 0) -> Item:
    return Item(id="x", contexts=(context,) * len(continuations), continuations=continuations, gold=gold)


def score(model: Bigrams, items: list[Item], batch_size: int = 3) -> dict[str, Any]:
    """With a tokenizer of one token for each letter and the space before it."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<|endoftext|>"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return evaluate_items(cast(LanguageModel, model), tokenizer, items, batch_size, 64, CPU)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_are_those_of_the_table(batch_size: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def letters(most: int) -> str:
        number = int(torch.randint(1, most + 1, (), generator=generator))
        return "".join(f" {LETTERS[i]}" for i in torch.randint(len(LETTERS), (number,), generator=generator).tolist())

    items = [choice(letters(5), *(letters(4) for _ in range(2 + i % 3)), gold=i % 2) for i in range(60)]
    model = Bigrams(3 * torch.randn(len(WORDS), len(WORDS), generator=torch.Generator().manual_seed(0)))

    right = right_normalised = tokens = size = 0
    total = 0.0
    for item in items:
        known, costs = len(item.contexts[0].split()), []
        for rest in item.continuations:
            pairs = pairwise(WORDS[f"Ġ{letter}"] for letter in (item.contexts[0] + rest).split())
            costs.append(-sum(model.table[pair].item() for pair in [*pairs][known - 1 :]))
        per_character = [cost / (len(rest) - 1) for cost, rest in zip(costs, item.continuations, strict=True)]
        right += costs[item.gold] == min(costs)
        right_normalised += per_character[item.gold] == min(per_character)
        total += costs[item.gold]
        tokens += len(item.continuations[item.gold].split())
        size += len(item.continuations[item.gold])
    assert right != right_normalised  # else the two could be mixed up

    scores = score(model, items, batch_size)
    interval = binomtest(right, 60).proportion_ci(method="wilson")
    assert scores == {
        "items": 60,
        "accuracy": right / 60,
        "accuracy_low": pytest.approx(interval.low),
        "accuracy_high": pytest.approx(interval.high),
        "normalised_accuracy": right_normalised / 60,
        "normalised_accuracy_low": scores["normalised_accuracy_low"],
        "normalised_accuracy_high": scores["normalised_accuracy_high"],
        "chance": pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3),
        "gold_nats": pytest.approx(total / 60, rel=1e-5),
        "gold_nats_per_token": pytest.approx(total / tokens, rel=1e-5),
        "gold_bits_per_byte": pytest.approx(total / math.log(2) / size, rel=1e-5),
    }


@pytest.mark.parametrize(
    ("known", "continuations", "best", "best_normalised"),
    [
        # Length is counted in characters without the first space: -1.0 of one, and -2.9 of three.
        ({"ab": -1.0, "ac": -1.45, "cc": -1.45}, (" b", " c c"), 0, 1),
        # Letters with accents are one character each: -3 of three, and -2.4 of three; the first has six bytes.
        ({"a?": -3.0, "ab": -1.2, "bb": -1.2}, (" ééé", " b b"), 1, 1),
    ],
)
def test_length_is_counted_in_characters(
    known: dict[str, float], continuations: tuple[str, ...], best: int, best_normalised: int
) -> None:
    for gold in (0, 1):
        scores = score(bigrams(known), [choice(" a", *continuations, gold=gold)])
        assert scores["accuracy"] == (gold == best)
        assert scores["normalised_accuracy"] == (gold == best_normalised)
        assert scores["gold_bits_per_byte"] == pytest.approx(
            scores["gold_nats"] / math.log(2) / len(continuations[gold].encode())
        )


def test_each_choice_has_its_own_context() -> None:
    """WinoGrande: the contexts differ, and the text after them is the same."""
    for gold, contexts in enumerate([(" a b", " a d"), (" a d", " a b")]):
        item = Item(id="x", contexts=contexts, continuations=(" c", " c"), gold=gold)
        assert score(bigrams({"bc": -0.1, "dc": -3.0}), [item])["accuracy"] == 1.0


def test_a_table_has_a_row_for_each_set_and_their_mean(capsys: pytest.CaptureFixture[str]) -> None:
    score = {"items": 10042, "accuracy": 0.25, "accuracy_low": 0.1951, "accuracy_high": 0.3143}
    score |= {"normalised_accuracy": 0.265}
    score |= {"chance": 0.25, "gold_nats_per_token": 11.2004, "gold_nats": 44.1, "gold_bits_per_byte": 3.0468}
    print_scores({"openbookqa": score, "winogrande": {**score, "accuracy": 0.75, "chance": 0.5}}, Console(width=40))
    _, first, _, means = (line.split() for line in capsys.readouterr().out.splitlines())
    assert first == ["openbookqa", "10042", "0.195–0.314", "0.250", "0.265", "0.250", "11.200", "3.047"]
    assert means == ["mean", "0.500", "0.265", "0.375", "11.200", "3.047"]


# Files.
RECORD = {"id": "s-0", "contexts": ["Q: a?", "Q: a?"], "continuations": [" yes", " no"], "gold": 1}
ITEM = Item(id="s-0", contexts=("Q: a?", "Q: a?"), continuations=(" yes", " no"), gold=1)


def test_plain_and_packed_files_are_read_by_set(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps({**RECORD, "gold": 0, "more": 1}))
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(json.dumps(RECORD).encode()))
    (tmp_path / "notes.txt").write_text("not a set")
    other = Item(id="s-0", contexts=ITEM.contexts, continuations=ITEM.continuations, gold=0)
    assert read_items(str(tmp_path)) == {"one": [ITEM, other], "two": [ITEM]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid json"),
        ("", "invalid json"),
        ("[" * 100_000, "invalid json"),
        ("[]", "input should be an object"),
        (json.dumps({k: v for k, v in RECORD.items() if k != "gold"}), "gold: field required"),
        *((json.dumps({**RECORD, "gold": gold}), "gold is an index") for gold in (2, -1)),
        *((json.dumps({**RECORD, "gold": gold}), "gold: input should be a valid integer") for gold in (True, "1")),
        (json.dumps({**RECORD, "contexts": ["Q"]}), "a context and a continuation for each"),
        (json.dumps({**RECORD, "contexts": ["Q"], "continuations": [" a"], "gold": 0}), "two or more choices"),
        (json.dumps({**RECORD, "contexts": "QQ"}), "contexts: input should be a valid"),
        (json.dumps({**RECORD, "continuations": [" a", " "]}), "a context and a continuation for each"),
        (json.dumps({**RECORD, "continuations": [" a", 3]}), "continuations: 1: input should be a valid string"),
        (json.dumps({**RECORD, "continuations": [" a", " \ud800"]}), "invalid json"),
    ],
)
def test_a_malformed_line_is_named_in_one_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text("\n".join([json.dumps(RECORD), line, json.dumps(RECORD)]))
    with pytest.raises(ValueError, match=reason) as raised:
        read_items(tmp_path)
    assert str(raised.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage", [lambda y: y[:-20], lambda y: y[:99] + b"x" + y[100:], lambda _: b"no", lambda _: b""]
)
def test_a_damaged_file_or_none_is_named_in_one_line(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    content = "".join(json.dumps({**RECORD, "id": str(math.sin(i))}) + "\n" for i in range(500))
    (tmp_path / "sciq.jsonl.gz").write_bytes(damage(gzip.compress(content.encode())))
    with pytest.raises(ValueError, match=r"sciq\.jsonl\.gz|no questions in .*lm_eval reads sets of the hub"):
        read_items(tmp_path)
    with pytest.raises(ValueError, match="no questions in hub: give a folder"):
        read_items("hub")
