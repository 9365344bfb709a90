"""Zero-shot scores on multiple-choice sets, such as the paper's six: PIQA, HellaSwag, ARC-Easy, OpenBookQA, SciQ and
WinoGrande.

Each choice is a continuation of a context. The model's answer is the choice with the largest score.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from mixers.models import LanguageModel
from runners.c4.corpus.tokenizer import end_of_text
from runners.c4.evaluation.evaluate import encode_pair, log_likelihoods
from runners.c4.evaluation.items import Item

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""
MEANS = ("accuracy", "normalised_accuracy", "chance", "gold_nats_per_token", "gold_bits_per_byte")
"""Fields of ``Scores`` in the table whose means over the sets are shown in its last row."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a model on one set.

    Attributes:
        items: number of questions.
        accuracy: share of questions for which the continuation of the right choice has the largest log-probability.
        accuracy_interval: 95% Wilson score interval of ``accuracy``.
        normalised_accuracy: the same for log-probabilities divided by the number of characters of the continuation,
            without the space before its first word (``acc_norm`` of lm-evaluation-harness).
        normalised_accuracy_interval: 95% Wilson score interval of ``normalised_accuracy``.
        chance: accuracy of choices drawn uniformly.
        gold_nats_per_token: total cross-entropy of the right continuations, divided by their total number of tokens.
        gold_nats: cross-entropy of a whole right continuation, averaged over the questions.
        gold_bits_per_byte: total cross-entropy of the right continuations, divided by their total number of UTF-8
            bytes, spaces included.
    """

    items: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    normalised_accuracy: float
    normalised_accuracy_interval: tuple[float, float]
    chance: float
    gold_nats_per_token: float
    gold_nats: float
    gold_bits_per_byte: float


def evaluate_items(
    model: LanguageModel,
    tokenizer: "Tokenizer",
    items: Sequence[Item],
    batch_size: int,
    seq_len: int,
    device: torch.device,
) -> Scores:
    """Evaluate a model on the questions of one set.

    Args:
        model: the model, on ``device``.
        tokenizer: the model's tokenizer.
        items: questions of the set.
        batch_size: choices per forward pass.
        seq_len: largest number of tokens that the model reads per choice.
        device: device of the model.
    """
    # Likelihoods of all choices of all questions.
    end = end_of_text(tokenizer)
    choices = [choice for item in items for choice in zip(item.contexts, item.continuations, strict=True)]
    pairs = [encode_pair(tokenizer, context, continuation, end) for context, continuation in choices]
    answers = iter(log_likelihoods(model, pairs, batch_size, seq_len, device))

    # Sums over the questions.
    right = right_normalised = gold_tokens = gold_bytes = 0
    gold_nats = []
    for item in items:
        mine = [next(answers) for _ in item.continuations]
        totals = [answer.log_probability for answer in mine]
        lengths = [len(continuation.removeprefix(" ")) for continuation in item.continuations]

        right += _is_best(totals, item.gold)
        right_normalised += _is_best([total / n for total, n in zip(totals, lengths, strict=True)], item.gold)
        gold_nats.append(-totals[item.gold])
        gold_tokens += mine[item.gold].tokens
        gold_bytes += len(item.continuations[item.gold].encode())

    nats = math.fsum(gold_nats)
    return Scores(
        items=len(items),
        accuracy=right / len(items),
        accuracy_interval=wilson_interval(right, len(items)),
        normalised_accuracy=right_normalised / len(items),
        normalised_accuracy_interval=wilson_interval(right_normalised, len(items)),
        chance=fmean(1 / len(item.continuations) for item in items),
        gold_nats_per_token=nats / gold_tokens,
        gold_nats=nats / len(items),
        gold_bits_per_byte=nats / math.log(2) / gold_bytes,
    )


def _is_best(scores: Sequence[float], gold: int) -> bool:
    """Return whether choice ``gold`` is the first one with the largest score; false if any score is NaN."""
    return not any(map(math.isnan, scores)) and max(range(len(scores)), key=scores.__getitem__) == gold


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95% score interval of the share ``right / count`` (Wilson 1927).

    Unlike the normal interval, it stays within 0 and 1 and has a positive width for shares of 0 and 1.
    """
    z2 = NORMAL_95**2
    share = right / count

    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))

    return max(0.0, middle - half), min(1.0, middle + half)


def print_scores(scores: dict[str, dict[str, Any]], console: Console) -> None:
    """Print one row per set and a row of means; the table may be wider than the console.

    Args:
        scores: by set, ``Scores`` as a dict.
        console: where to print.
    """
    table = Table(
        title="downstream: accuracy (normalised: by length), cross-entropy of the right choice", title_justify="left"
    )
    table.add_column("set", no_wrap=True, min_width=10)
    widths = {"items": 5, "accuracy (95%)": 19, "normal-\nised": 7, "chance": 6, "nats/\ntoken": 6, "bits/\nbyte": 5}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)

    # One row per set.
    for name, score in scores.items():
        low, high = score["accuracy_interval"]
        accuracy, *others = _cells(score)
        table.add_row(textwrap.fill(name, 10), str(score["items"]), f"{accuracy} ({low:.3f}–{high:.3f})", *others)

    # A row of means.
    means = {name: fmean(score[name] for score in scores.values()) for name in MEANS}
    table.add_section()
    table.add_row("mean", "", *_cells(means))
    console.print(table, crop=False)


def _cells(figures: dict[str, float]) -> list[str]:
    """Return the cells of a row with the figures of ``MEANS``."""
    return [f"{figures[name]:.3f}" for name in MEANS]
