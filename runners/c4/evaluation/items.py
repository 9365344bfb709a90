"""Multiple-choice questions: read from files or from the Hugging Face hub.

From the hub, the validation split of each set is read, because the answers to the test splits of PIQA, HellaSwag and
WinoGrande are not public.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runners.c4.corpus.sources import first_line, hub
from runners.c4.evaluation.hub_sets import HUB_SETS, HubSet

HUB = "hub"


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question: a context and a continuation for each choice. In most sets, all choices share one of the two.

    Attributes:
        id: name of the question.
        contexts: for each choice, the text given to the model.
        continuations: for each choice, the text whose probability is the score, with the space before its first word.
        gold: index of the right choice.
    """

    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int


def read_items(source: str | Path) -> dict[str, list[Item]]:
    """Read questions by set.

    Args:
        source: ``hub`` for the Hugging Face hub, or a folder with one ``<set>.jsonl`` or ``<set>.jsonl.gz`` per set. A
            line of a file is ``{"id": ..., "contexts": [...], "continuations": [...], "gold": 0}``, with one context
            and one continuation per choice.

    Raises:
        ValueError: there are no such files, a file is damaged, a line is not a question, or the hub cannot be reached.
    """
    if str(source) == HUB:
        return {name: _read_hub(name, hub_set) for name, hub_set in HUB_SETS.items()}

    # A file for each set.
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
    """Yield the questions in a file."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                yield _parse(line)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        where = f"{path}, line {number}" if isinstance(error, ValueError) else f"{path}, after line {number}"
        raise ValueError(f"{where}: {error}; correct or replace the file") from error

    if not number:
        raise ValueError(f"{path} is empty: replace or remove it")


def _parse(line: bytes) -> Item:
    """Return the question in a line of a file.

    Raises:
        ValueError: the line is not a question.
    """
    try:
        values = json.loads(line)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if missing := {"id", "contexts", "continuations", "gold"} - values.keys():
        raise ValueError(f"no {', '.join(sorted(missing))}")
    contexts, continuations, gold = values["contexts"], values["continuations"], values["gold"]

    # Types and lengths.
    for name, texts in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{name} must be a list of texts, none of them blank")
        "".join(texts).encode()  # JSON can spell lone surrogates, which tokenizers refuse
    if len(contexts) != len(continuations) or len(contexts) < 2:
        raise ValueError(
            f"{len(contexts)} contexts and {len(continuations)} continuations: one of each for every choice"
        )
    if type(gold) is not int or not 0 <= gold < len(contexts):
        raise ValueError(f"gold {gold!r} must be a number from 0 to {len(contexts) - 1}")

    return Item(id=str(values["id"]), contexts=tuple(contexts), continuations=tuple(continuations), gold=gold)


def _read_hub(name: str, hub_set: HubSet) -> list[Item]:
    """Read the questions of a set on the hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("the hub needs the package datasets: pip install -e '.[pretraining]'") from error

    try:
        with hub():
            rows = load_dataset(hub_set.path, hub_set.config, split="validation")
    except Exception as error:  # errors of the network and of the library have no common base
        raise ValueError(
            f"{hub_set.path} cannot be read from the hub ({first_line(error)}): give a folder of *.jsonl"
        ) from error

    # The rows as questions.
    items = []
    for number, row in enumerate(rows):
        contexts, choices, gold = hub_set.choices(row)
        continuations = tuple(f" {choice}" for choice in choices)
        items.append(Item(id=f"{name}-{number}", contexts=tuple(contexts), continuations=continuations, gold=gold))
    return items
