"""The paper's six multiple-choice sets, zero-shot: PIQA, HellaSwag, ARC-Easy, OpenBookQA, SciQ and WinoGrande.

Every choice is a continuation of a context, and the model's answer is the choice with the largest score. Prompts are
those of lm-evaluation-harness, except that PIQA's begins with "Goal:" (there "Question:"), that OpenBookQA's stem
stands in the frame of ARC's and that SciQ without a supporting text begins with the question. From the hub the
validation split is read, of all six sets: the answers to the test splits of PIQA, HellaSwag and WinoGrande are not
public.
"""

import gzip
import json
import math
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from mixers.models import LanguageModel
from runners.c4.corpus.prepare import end_of_text
from runners.c4.corpus.sources import first_line, hub
from runners.c4.evaluation.evaluate import encode_pair, log_likelihoods

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HUB = "hub"
NORMAL_95 = 1.959963984540054
MEANS = ("accuracy", "normalised_accuracy", "chance", "gold_nats_per_token", "gold_bits_per_byte")
"""Figures of ``Scores`` that the table shows, also as means over the sets."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question: one context and one continuation for each choice, which mostly differ in one of the two alone.

    Attributes:
        id: name of the question.
        contexts: what the model is given, by choice.
        continuations: what it is to find likely, by choice, the space before the first word included.
        gold: the right choice.
    """

    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model makes of one set.

    Attributes:
        items: how many questions.
        accuracy: share of questions whose right choice has the largest log-probability of its continuation.
        accuracy_interval: 95% Wilson score interval of ``accuracy``.
        normalised_accuracy: the same with log-probabilities divided by the characters of the continuation, the space
            before its first word not counted (``acc_norm`` of lm-evaluation-harness).
        normalised_accuracy_interval: 95% Wilson score interval of ``normalised_accuracy``.
        chance: accuracy of drawing a choice, each with the same probability.
        gold_nats_per_token: cross-entropy of the right continuations, over all their tokens.
        gold_nats: cross-entropy of a right continuation as a whole, mean over the questions.
        gold_bits_per_byte: cross-entropy of the right continuations over all their UTF-8 bytes, spaces included.
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
    """Scores of one set's questions; ``batch_size`` choices are read at a time, ``seq_len`` tokens of each at most."""
    end = end_of_text(tokenizer)
    choices = [choice for item in items for choice in zip(item.contexts, item.continuations, strict=True)]
    pairs = [encode_pair(tokenizer, context, continuation, end) for context, continuation in choices]
    answers = iter(log_likelihoods(model, pairs, batch_size, seq_len, device))
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
    """Whether the first of the largest scores is the gold one's; a NaN is never right."""
    return not any(map(math.isnan, scores)) and max(range(len(scores)), key=scores.__getitem__) == gold


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """95% score interval of a share (Wilson 1927): within 0 and 1, and not a point there as the normal one is."""
    z2 = NORMAL_95**2
    share = right / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def print_scores(scores: dict[str, dict[str, Any]], console: Console) -> None:
    """One row a set, ``Scores`` by name, and a row of their means; wider than the console if it must be."""
    table = Table(
        title="downstream: accuracy (normalised: by length), cross-entropy of the right choice", title_justify="left"
    )
    table.add_column("set", no_wrap=True, min_width=10)
    widths = {"items": 5, "accuracy (95%)": 19, "normal-\nised": 7, "chance": 6, "nats/\ntoken": 6, "bits/\nbyte": 5}
    for heading, width in widths.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    means = {name: fmean(score[name] for score in scores.values()) for name in MEANS}
    for name, score in scores.items():
        low, high = score["accuracy_interval"]
        accuracy, *others = _cells(score)
        table.add_row(textwrap.fill(name, 10), str(score["items"]), f"{accuracy} ({low:.3f}–{high:.3f})", *others)
    table.add_section()
    table.add_row("mean", "", *_cells(means))
    console.print(table, crop=False)


def _cells(figures: dict[str, float]) -> list[str]:
    return [f"{figures[name]:.3f}" for name in MEANS]


def read_items(source: str | Path) -> dict[str, list[Item]]:
    """Questions by set: from a folder with a ``<set>.jsonl`` or ``<set>.jsonl.gz`` for each, or from the hub.

    A line of a file is ``{"id": ..., "contexts": [...], "continuations": [...], "gold": 0}``, one context and one
    continuation for each choice.

    Args:
        source: the folder, or ``hub`` for the Hugging Face hub.

    Raises:
        ValueError: no such files, a damaged one, or a line that is no question; the hub cannot be reached.
    """
    if str(source) == HUB:
        return {name: _read_hub(name, hub_set) for name, hub_set in HUB_SETS.items()}
    files = sorted([*Path(source).glob("*.jsonl"), *Path(source).glob("*.jsonl.gz")])
    sets: dict[str, list[Item]] = {}
    for path in files:
        name = path.name.partition(".")[0]
        if name in sets:
            raise ValueError(f"{path}: there is another file of the set {name}: keep one of them")
        sets[name] = list(_read_file(path))
    if not sets:
        raise ValueError(f"no *.jsonl or *.jsonl.gz in {source}: give a folder with such files, or {HUB}")
    return sets


def _read_file(path: Path) -> Iterator[Item]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                yield _parse(line)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        where = f"{path}, line {number}" if isinstance(error, ValueError) else f"{path}, after line {number}"
        raise ValueError(f"{where}: {error}; mend or replace the file") from error
    if not number:
        raise ValueError(f"{path} is empty: replace or remove it")


def _parse(line: bytes) -> Item:
    values = json.loads(line)
    if not isinstance(values, dict) or (missing := {"id", "contexts", "continuations", "gold"} - values.keys()):
        raise ValueError(f"no {', '.join(sorted(missing))}" if isinstance(values, dict) else "not a JSON object")
    contexts, continuations, gold = values["contexts"], values["continuations"], values["gold"]
    for name, texts in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{name} must be a list of texts, none of them blank")
    if len(contexts) != len(continuations) or len(contexts) < 2:
        raise ValueError(
            f"{len(contexts)} contexts and {len(continuations)} continuations: one of each for every choice"
        )
    if type(gold) is not int or not 0 <= gold < len(contexts):
        raise ValueError(f"gold {gold!r} must be a number from 0 to {len(contexts) - 1}")
    return Item(id=str(values["id"]), contexts=tuple(contexts), continuations=tuple(continuations), gold=gold)


Row = dict[str, Any]
Choices = tuple[list[str], list[str], int]
"""Contexts, choices without the space before them, and the number of the right one."""


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Where a set lies on the Hugging Face hub and how one of its rows becomes a question.

    Attributes:
        path: name of the data set.
        config: its configuration, if it has several.
        choices: contexts and choices of a row.
    """

    path: str
    config: str | None
    choices: Callable[[Row], Choices]


def _read_hub(name: str, hub_set: HubSet) -> list[Item]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("the hub needs the package datasets: pip install '.[pretraining]'") from error
    try:
        with hub():
            rows = load_dataset(hub_set.path, hub_set.config, split="validation")
    except Exception as error:  # what the network and the library raise has no common base
        raise ValueError(
            f"{hub_set.path} cannot be read from the hub ({first_line(error)}): give a folder of *.jsonl"
        ) from error
    items = []
    for number, row in enumerate(rows):
        contexts, choices, gold = hub_set.choices(row)
        continuations = tuple(f" {choice}" for choice in choices)
        items.append(Item(id=f"{name}-{number}", contexts=tuple(contexts), continuations=continuations, gold=gold))
    return items


def _piqa(row: Row) -> Choices:
    return [f"Goal: {row['goal']}\nAnswer:"] * 2, [row["sol1"], row["sol2"]], row["label"]


def _hellaswag(row: Row) -> Choices:
    text = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return [_without_marks(text)] * len(row["endings"]), [*map(_without_marks, row["endings"])], int(row["label"])


def _without_marks(text: str) -> str:
    """Text without the marks that WikiHow's pages left in HellaSwag, such as [header]."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: Row) -> Choices:
    choices = row["choices"]
    context = f"Question: {row['question']}\nAnswer:"
    return [context] * len(choices["text"]), choices["text"], choices["label"].index(row["answerKey"])


def _openbookqa(row: Row) -> Choices:
    return _arc({**row, "question": row["question_stem"], "answerKey": row["answerKey"].strip()})


def _sciq(row: Row) -> Choices:
    context = f"{row['support']}\nQuestion: {row['question']}\nAnswer:".lstrip()
    names = ("distractor1", "distractor2", "distractor3", "correct_answer")
    return [context] * len(names), [row[name] for name in names], len(names) - 1


def _winogrande(row: Row) -> Choices:
    """The choices fill the blank; what is scored is the text after it."""
    before, _, after = row["sentence"].partition("_")
    return [before + row["option1"], before + row["option2"]], [after.strip()] * 2, int(row["answer"]) - 1


HUB_SETS = {
    "piqa": HubSet(path="baber/piqa", config=None, choices=_piqa),
    "hellaswag": HubSet(path="Rowan/hellaswag", config=None, choices=_hellaswag),
    "arc_easy": HubSet(path="allenai/ai2_arc", config="ARC-Easy", choices=_arc),
    "openbookqa": HubSet(path="allenai/openbookqa", config="main", choices=_openbookqa),
    "sciq": HubSet(path="allenai/sciq", config=None, choices=_sciq),
    "winogrande": HubSet(path="allenai/winogrande", config="winogrande_xl", choices=_winogrande),
}
