"""Zero-shot scores on multiple-choice sets, such as the paper's six: PIQA, HellaSwag, ARC-Easy, OpenBookQA, SciQ and
WinoGrande.

Each choice is a continuation of a context. The model's answer is the choice with the largest score. Sets on the Hugging
Face hub are for lm-evaluation-harness: ``python -m runners.c4 lm_eval``.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from mixers.models import LanguageModel
from runners.c4.data.tokenizer import Tokenizer, end_of_text
from runners.c4.evaluation.evaluate import evaluating
from runners.files import first_fault

LOGIT_ROWS = 4096
"""Number of positions whose logits are in memory at a time: half a GiB with T5's vocabulary."""
MEANS = {
    "accuracy": "accuracy",
    "normalised_accuracy": "by length",
    "chance": "chance",
    "gold_nats_per_token": "nats/token",
    "gold_bits_per_byte": "bits/byte",
}
"""Scores whose means over the sets are the last row of the table, and their headings."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question: a context and a continuation for each choice. In most sets, all choices share one of the two.

    Attributes:
        id: name of the question.
        contexts: for each choice, the text given to the model.
        continuations: for each choice, the text whose probability is the score, with the space before its first word.
        gold: index of the right choice.
    """

    id: str | int
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        """Raise ValueError if a choice lacks a text, or if ``gold`` is not the index of a choice."""
        texts, choices = self.contexts + self.continuations, len(self.contexts)
        if not (len(texts) == 2 * choices and choices >= 2 and 0 <= self.gold < choices and all(map(str.strip, texts))):
            raise ValueError(
                "it needs a context and a continuation for each of two or more choices, and gold is an index"
            )


def read_items(folder: str | Path) -> dict[str, list[Item]]:
    """Read questions by set.

    Args:
        folder: a folder with one ``<set>.jsonl`` or ``<set>.jsonl.gz`` per set. A line of a file is ``{"id": ...,
            "contexts": [...], "continuations": [...], "gold": 0}``, with one context and one continuation per choice.

    Raises:
        ValueError: there are no such files, a file is damaged, or a line is not a question.
    """
    question = TypeAdapter(Item)
    sets: dict[str, list[Item]] = {}
    for path in sorted([*Path(folder).glob("*.jsonl"), *Path(folder).glob("*.jsonl.gz")]):
        items = sets[path.name.partition(".")[0]] = []
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
                for line in lines:
                    items.append(question.validate_json(line, strict=True))
        except ValidationError as error:
            raise ValueError(f"{path}, line {len(items) + 1}: {first_fault(error)}: correct it") from error
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: {error}: replace the file") from error

    if not sets or not all(sets.values()):
        raise ValueError(
            f"no questions in {folder}: give a folder of *.jsonl or *.jsonl.gz that are not empty; "
            "python -m runners.c4 lm_eval reads sets of the hub"
        )
    return sets


class Pair(NamedTuple):
    """The tokens of a context, at least one, and the tokens of its continuation, which the model predicts."""

    context: list[int]
    continuation: list[int]


def evaluate_items(
    model: LanguageModel,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    batch_size: int,
    seq_len: int,
    device: torch.device,
) -> dict[str, Any]:
    """Evaluate a model on the questions of one set, and return its scores for the record of the run.

    Scores:
        items: number of questions.
        accuracy: share of questions for which the continuation of the right choice has the largest log-probability.
        accuracy_low, accuracy_high: ends of the 95% Wilson score interval of ``accuracy``.
        normalised_accuracy: the same for log-probabilities divided by the number of characters of the continuation,
            without the space before its first word (``acc_norm`` of lm-evaluation-harness); with the ends ``_low`` and
            ``_high`` of its interval.
        chance: accuracy of choices drawn uniformly.
        gold_nats_per_token: total cross-entropy of the right continuations, divided by their total number of tokens.
        gold_nats: cross-entropy of a whole right continuation, averaged over the questions.
        gold_bits_per_byte: total cross-entropy of the right continuations, divided by their total number of UTF-8
            bytes, spaces included.

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
    answers = iter(zip(pairs, log_likelihoods(model, pairs, batch_size, seq_len, device), strict=True))

    # Sums over the questions.
    right = right_normalised = gold_tokens = gold_bytes = 0
    gold_nats = []
    for item in items:
        mine = [next(answers) for _ in item.continuations]
        totals = [total for _, (total, _) in mine]
        normalised = [y / len(text.removeprefix(" ")) for y, text in zip(totals, item.continuations, strict=True)]

        right += _is_best(totals, item.gold)
        right_normalised += _is_best(normalised, item.gold)
        gold_nats.append(-totals[item.gold])
        gold_tokens += len(mine[item.gold][0].continuation)
        gold_bytes += len(item.continuations[item.gold].encode())

    nats = math.fsum(gold_nats)
    low, high = wilson_interval(right, len(items))
    normalised_low, normalised_high = wilson_interval(right_normalised, len(items))
    return {
        "items": len(items),
        "accuracy": right / len(items),
        "accuracy_low": low,
        "accuracy_high": high,
        "normalised_accuracy": right_normalised / len(items),
        "normalised_accuracy_low": normalised_low,
        "normalised_accuracy_high": normalised_high,
        "chance": fmean(1 / len(item.continuations) for item in items),
        "gold_nats_per_token": nats / gold_tokens,
        "gold_nats": nats / len(items),
        "gold_bits_per_byte": nats / math.log(2) / gold_bytes,
    }


def _is_best(scores: Sequence[float], gold: int) -> bool:
    """Return whether choice ``gold`` is the first one with the largest score; false if any score is NaN."""
    return not any(map(math.isnan, scores)) and max(range(len(scores)), key=scores.__getitem__) == gold


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95% score interval of the share ``right / count`` (Wilson 1927)."""
    from scipy.stats import binomtest  # takes a second

    interval = binomtest(right, count).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def print_scores(scores: dict[str, dict[str, Any]], console: Console) -> None:
    """Print one row per set and a row of means; the table may be wider than the console.

    Args:
        scores: by set, what ``evaluate_items`` returns.
        console: where to print.
    """
    import pandas

    rows = pandas.DataFrame([*scores.values()], index=[*scores]).astype({"items": int}).astype({"items": str})
    low, high = (rows[f"accuracy_{end}"].map("{:.3f}".format) for end in ("low", "high"))
    rows["95%"] = low + "–" + high
    rows.loc["mean"] = rows[list(MEANS)].mean()
    table = rows[["items", "95%", *MEANS]].rename(columns=MEANS)
    console.print(table.to_string(float_format="{:.3f}".format, na_rep=""), soft_wrap=True)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, end_of_text: int) -> Pair:
    """Encode a context and its continuation, split in the same place as in lm-evaluation-harness.

    The whole text is encoded, and the context's tokens are cut off. White space at the end of the context belongs to
    the continuation, because a tokenizer joins it to the next word.

    Args:
        tokenizer: the tokenizer.
        context: text of the context.
        continuation: text of the continuation.
        end_of_text: token used as the context if no token precedes the continuation, because the context is empty or
            shares its only token with the continuation. Training documents follow this token, too.

    Raises:
        ValueError: the continuation encodes to no token.
    """
    given = tokenizer.encode(context.rstrip(), add_special_tokens=False).ids
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    if whole == given:
        raise ValueError(f"the tokenizer makes no token of {continuation!r} after {context[-40:]!r}: give another one")

    split = min(len(given), len(whole) - 1)
    return Pair(whole[:split] or [end_of_text], whole[split:])


def log_likelihoods(
    model: LanguageModel, pairs: Sequence[Pair], batch_size: int, seq_len: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return for each pair the log-probability of its continuation, in nats, and whether greedy decoding generates it.

    The model reads at most ``seq_len`` tokens at a time, so a longer context is cut on the left. A longer continuation
    is read in parts: each of its tokens is predicted once, and the last part has as much context as fits. A batch holds
    windows of similar length, padded on the right; causal models ignore the padding.

    Args:
        model: the model, on ``device``.
        pairs: contexts and continuations.
        batch_size: windows per forward pass.
        seq_len: largest number of tokens that the model reads at a time.
        device: device of the model.
    """
    # Windows of at most seq_len + 1 tokens, each with the number of its pair and the number of tokens to predict at its
    # end. The longest come first, so that memory runs out in the first batch or not at all.
    parts = []
    for number, (context, continuation) in enumerate(pairs):
        tokens = context + continuation
        for done in range(len(context), len(tokens), seq_len):
            end = min(done + seq_len, len(tokens))
            parts.append((number, tokens[max(0, end - seq_len - 1) : end], end - done))
    parts.sort(key=lambda part: len(part[1]), reverse=True)

    totals_P = torch.zeros(len(pairs), dtype=torch.float64)
    missed_P = torch.zeros(len(pairs), dtype=torch.int64)
    with evaluating(model, device):
        for start in range(0, len(parts), batch_size):
            owners, texts, counts = zip(*parts[start : start + batch_size], strict=True)
            tokens_BT = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)

            # Score the last tokens of each window before the padding.
            end_B1 = torch.tensor([len(text) for text in texts])[:, None]
            position_T = torch.arange(1, tokens_BT.shape[1])
            scored_BT = (position_T < end_B1) & (position_T >= end_B1 - torch.tensor(counts)[:, None])

            # Use float32: bfloat16 keeps two or three digits of a logit, too few to distinguish answers.
            tokens_BT, counted_BT = tokens_BT.to(device), scored_BT.to(device)
            hidden_ND, target_N = model.hidden(tokens_BT[:, :-1])[counted_BT], tokens_BT[:, 1:][counted_BT]
            log_probabilities, greedy = [], []
            for hidden, target in zip(hidden_ND.split(LOGIT_ROWS), target_N.split(LOGIT_ROWS), strict=True):
                with torch.autocast(tokens_BT.device.type, enabled=False):
                    logits = model.readout(hidden.float())
                log_probabilities.append(-F.cross_entropy(logits, target, reduction="none"))
                greedy.append(logits.argmax(dim=-1) == target)

            owner_N = torch.tensor(owners)[scored_BT.nonzero()[:, 0]]
            totals_P.index_add_(0, owner_N, torch.cat(log_probabilities).double().cpu())
            missed_P.index_add_(0, owner_N, (~torch.cat(greedy)).long().cpu())

    return [(total, missed == 0) for total, missed in zip(totals_P.tolist(), missed_P.tolist(), strict=True)]
