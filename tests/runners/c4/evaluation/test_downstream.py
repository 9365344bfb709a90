"""Multiple-choice sets: scores of a model whose probabilities are a table, and files that are not as they should be."""

import gzip
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from scipy.stats import binomtest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from mixers.models import LanguageModel
from runners.c4.evaluation import items
from runners.c4.evaluation.downstream import evaluate_items, print_scores, wilson_interval
from runners.c4.evaluation.hub_sets import HUB_SETS
from runners.c4.evaluation.items import Item, read_items

LETTERS = "abcdefgh"
WORDS = {"<|endoftext|>": 0, **{f"Ġ{letter}": i for i, letter in enumerate(LETTERS, start=1)}, "é": 9}
CPU = torch.device("cpu")


class Bigrams(nn.Module):
    """Log-probability of a token from the one before it alone: a row of a table."""

    def __init__(self, logits_VV: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits_VV.log_softmax(dim=-1))
        self.readout = nn.Identity()

    def encode(self, tokens_BT: Tensor) -> Tensor:
        return self.table[tokens_BT]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One token for each letter and the space before it."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<|endoftext|>"))
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def bigrams(seed: int = 0) -> Bigrams:
    return Bigrams(3 * torch.randn(len(WORDS), len(WORDS), generator=torch.Generator().manual_seed(seed)))


def choice(context: str, *continuations: str, gold: int = 0) -> Item:
    return Item(id="x", contexts=(context,) * len(continuations), continuations=continuations, gold=gold)


def nats(model: Bigrams, text: str, known: int) -> float:
    """Cross-entropy of the letters of ``text`` after the first ``known``."""
    tokens = [WORDS[f"Ġ{letter}"] for letter in text.split()]
    pairs = list(pairwise(tokens))[known - 1 :]
    return -sum(model.table[before, after].item() for before, after in pairs)


def score(model: Bigrams, tokenizer: Tokenizer, items: list[Item], batch_size: int = 3) -> dict[str, Any]:
    return asdict(evaluate_items(cast(LanguageModel, model), tokenizer, items, batch_size, 64, CPU))


def random_items(count: int) -> list[Item]:
    generator = torch.Generator().manual_seed(1)

    def letters(most: int) -> str:
        number = int(torch.randint(1, most + 1, (), generator=generator))
        return "".join(f" {LETTERS[i]}" for i in torch.randint(len(LETTERS), (number,), generator=generator).tolist())

    return [choice(letters(5), *(letters(4) for _ in range(2 + i % 3)), gold=i % 2) for i in range(count)]


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_are_those_of_the_table(tokenizer: Tokenizer, batch_size: int) -> None:
    model, items = bigrams(), random_items(60)
    right = right_normalised = tokens = size = 0
    total = 0.0
    for item in items:
        known = len(item.contexts[0].split())
        costs = [nats(model, item.contexts[0] + rest, known) for rest in item.continuations]
        lengths = [len(rest) - 1 for rest in item.continuations]
        right += costs[item.gold] == min(costs)
        per_character = [cost / length for cost, length in zip(costs, lengths, strict=True)]
        right_normalised += per_character[item.gold] == min(per_character)
        total += costs[item.gold]
        tokens += len(item.continuations[item.gold].split())
        size += len(item.continuations[item.gold])
    assert right != right_normalised  # else the two could be mixed up
    scores = score(model, tokenizer, items, batch_size)
    assert scores["items"] == 60
    assert scores["accuracy"] == right / 60
    assert scores["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert scores["normalised_accuracy"] == right_normalised / 60
    assert scores["gold_nats"] == pytest.approx(total / 60, rel=1e-5)
    assert scores["gold_nats_per_token"] == pytest.approx(total / tokens, rel=1e-5)
    assert scores["gold_bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_each_choice_has_its_own_context(tokenizer: Tokenizer) -> None:
    """WinoGrande: the contexts differ, and the text after them is the same."""
    logits_VV = torch.zeros(len(WORDS), len(WORDS))
    logits_VV[WORDS["Ġb"], WORDS["Ġc"]] = 9.0
    for gold in (0, 1):
        contexts = (" a b", " a d") if gold == 0 else (" a d", " a b")
        item = Item(id="x", contexts=contexts, continuations=(" c", " c"), gold=gold)
        assert score(Bigrams(logits_VV), tokenizer, [item])["accuracy"] == 1.0


def test_length_is_counted_in_characters_without_the_first_space(tokenizer: Tokenizer) -> None:
    """Log-probabilities -1.0 and -2.9: a third of the length, or a half were the space counted."""
    logits_VV = torch.full((len(WORDS), len(WORDS)), -math.inf)
    first, second, third = (WORDS[f"Ġ{letter}"] for letter in "abc")
    logits_VV[first, second] = -1.0
    logits_VV[first, third] = -1.45
    logits_VV[third, third] = -1.45
    logits_VV[:, 0] = torch.log(1 - logits_VV.exp().sum(dim=1))  # the rest of each row
    items = [choice(" a", " b", " c c", gold=gold) for gold in (0, 1)]
    short, long = (score(Bigrams(logits_VV), tokenizer, [item]) for item in items)
    assert (short["accuracy"], long["accuracy"]) == (1.0, 0.0)
    assert (short["normalised_accuracy"], long["normalised_accuracy"]) == (0.0, 1.0)


def test_letters_with_accents_are_one_character_each(tokenizer: Tokenizer) -> None:
    """Log-probabilities -3 of three characters and -2.4 of as many; the first would win by its six bytes."""
    logits_VV = torch.full((len(WORDS), len(WORDS)), -math.inf)
    first, second, last = (WORDS[f"Ġ{letter}"] for letter in "abh")
    logits_VV[first, WORDS["<|endoftext|>"]] = -3.0  # what the tokenizer makes of the accents
    logits_VV[first, second] = logits_VV[second, second] = -1.2
    logits_VV[:, last] = torch.log(1 - logits_VV.exp().sum(dim=1))  # the rest of each row
    items = [choice(" a", " ééé", " b b", gold=gold) for gold in (0, 1)]
    shares = [score(Bigrams(logits_VV), tokenizer, [item])["normalised_accuracy"] for item in items]
    assert shares == [0.0, 1.0]


def test_bytes_are_those_of_utf_8(tokenizer: Tokenizer) -> None:
    """A letter with an accent is two bytes (and, to this tokenizer, an unknown token)."""
    scores = score(bigrams(), tokenizer, [choice(" a", " é", " b")])
    assert scores["gold_bits_per_byte"] == pytest.approx(scores["gold_nats"] / math.log(2) / 3)


@pytest.mark.parametrize("gold", [0, 1])
def test_a_model_that_gives_nan_is_never_right(tokenizer: Tokenizer, gold: int) -> None:
    model = Bigrams(torch.full((len(WORDS), len(WORDS)), math.nan))
    scores = score(model, tokenizer, [choice(" a", " b", " c", gold=gold)])
    assert scores["accuracy"] == scores["normalised_accuracy"] == 0.0
    assert math.isnan(scores["gold_nats"])


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 200), (200, 200), (50, 200), (7, 9)])
def test_intervals_are_wilsons(right: int, count: int) -> None:
    oracle = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right, count) == pytest.approx((oracle.low, oracle.high), abs=1e-12)


@pytest.mark.parametrize("columns", [40, 80])
def test_a_row_for_each_set_and_their_mean_fit_80_columns(capsys: pytest.CaptureFixture[str], columns: int) -> None:
    score = {
        "items": 10042,
        "accuracy": 0.25,
        "accuracy_interval": [0.1951, 0.3143],
        "normalised_accuracy": 0.265,
        "normalised_accuracy_interval": [0.2087, 0.3302],
        "chance": 0.25,
        "gold_nats_per_token": 11.2004,
        "gold_nats": 44.1,
        "gold_bits_per_byte": 3.0468,
    }
    print_scores(
        {"openbookqa": score, "winogrande": {**score, "accuracy": 0.75, "chance": 0.5}}, Console(width=columns)
    )
    rows = [line.split() for line in capsys.readouterr().out.replace("│", "").splitlines()]
    shown = ["0.265", "0.250", "11.200", "3.047"]
    assert ["openbookqa", "10042", "0.250", "(0.195–0.314)", *shown] in rows
    assert ["mean", "0.500", "0.265", "0.375", "11.200", "3.047"] in rows


RECORD = {"id": "s-0", "contexts": ["Q: a?", "Q: a?"], "continuations": [" yes", " no"], "gold": 1}
ITEM = Item(id="s-0", contexts=("Q: a?", "Q: a?"), continuations=(" yes", " no"), gold=1)


def test_plain_and_packed_files_are_read_by_set(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps({**RECORD, "id": 7, "gold": 0}))
    with gzip.open(tmp_path / "two.jsonl.gz", "wt") as file:
        file.write(json.dumps(RECORD) + "\n")
    (tmp_path / "notes.txt").write_text("not a set")
    sets = read_items(str(tmp_path))
    assert sets["two"] == [ITEM]
    assert sets["one"] == [ITEM, Item(id="7", contexts=ITEM.contexts, continuations=ITEM.continuations, gold=0)]
    assert list(sets) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "not a JSON object"),
        (json.dumps({k: v for k, v in RECORD.items() if k != "gold"}), "no gold"),
        (json.dumps({**RECORD, "gold": 2}), "gold 2 must be a number from 0 to 1"),
        (json.dumps({**RECORD, "gold": -1}), "gold -1"),
        (json.dumps({**RECORD, "gold": True}), "gold True"),
        (json.dumps({**RECORD, "gold": "1"}), "gold '1'"),
        (json.dumps({**RECORD, "contexts": ["Q"]}), "1 contexts and 2 continuations"),
        (json.dumps({**RECORD, "contexts": ["Q"], "continuations": [" a"], "gold": 0}), "one of each"),
        (json.dumps({**RECORD, "contexts": "QQ"}), "contexts must be a list"),
        (json.dumps({**RECORD, "continuations": [" a", " "]}), "none of them blank"),
        (json.dumps({**RECORD, "continuations": [" a", 3]}), "list of texts"),
        ("", "Expecting"),
        ("[" * 100_000, "too many brackets"),
        (json.dumps({**RECORD, "continuations": [" a", " \ud800"]}), "surrogates not allowed"),
    ],
)
def test_a_malformed_line_is_named_in_one_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text("\n".join([json.dumps(RECORD), line, json.dumps(RECORD)]))
    with pytest.raises(ValueError, match=reason) as raised:
        read_items(tmp_path)
    assert str(raised.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(raised.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [cut, flip, lambda path: path.write_bytes(b"no gzip"), lambda path: path.write_bytes(b"")]
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = tmp_path / "sciq.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({**RECORD, "id": str(hash(i))}) + "\n" for i in range(500))
    damage(path)
    with pytest.raises(ValueError, match=r"sciq\.jsonl\.gz") as raised:
        read_items(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_folder_without_sets_and_a_set_twice_are_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"no \*\.jsonl or \*\.jsonl\.gz in .*: give a folder"):
            read_items(folder)
    (tmp_path / "piqa.jsonl").write_text(json.dumps(RECORD))
    with gzip.open(tmp_path / "piqa.jsonl.gz", "wt") as file:
        file.write(json.dumps(RECORD))
    with pytest.raises(ValueError, match="another file of the set piqa"):
        read_items(tmp_path)


LABELS = {"text": ["wet", "dry", "hot"], "label": ["A", "B", "C"]}
HUB_ROWS: dict[str, dict[str, Any]] = {
    "baber/piqa": {"goal": "Open a jar", "sol1": "Twist it.", "sol2": "Sing.", "label": 0},
    "Rowan/hellaswag": {
        "activity_label": "Home",
        "ctx_a": "[header] How to bake [title] Mix flour. [step] Stir  well.",
        "ctx_b": "the baker",
        "endings": ["waits.", "[substeps] Runs.", "[title] sleeps", "eats [ad] it."],
        "label": "3",
    },
    "allenai/ai2_arc": {"question": "What is rain?", "choices": LABELS, "answerKey": "B"},
    "allenai/openbookqa": {"question_stem": "Rain is", "choices": LABELS, "answerKey": " A"},
    "allenai/sciq": {
        "question": "What is rain?",
        "support": "Rain is wet.",
        "distractor1": "dry",
        "distractor2": "hot",
        "distractor3": "red",
        "correct_answer": "wet",
    },
    "allenai/winogrande": {
        "sentence": "The cup left the bag as _ was too big.",
        "option1": "the cup",
        "option2": "the bag",
        "answer": "2",
    },
}
FRAMED = "Question: What is rain?\nAnswer:"
FROM_HUB = {
    "piqa": (["Goal: Open a jar\nAnswer:"] * 2, [" Twist it.", " Sing."], 0),
    "hellaswag": (
        ["Home: How to bake. Mix flour. Stir well. The baker"] * 4,
        [" waits.", "  Runs.", "  sleeps", " eats it."],
        3,
    ),
    "arc_easy": ([FRAMED] * 3, [" wet", " dry", " hot"], 1),
    "openbookqa": (["Question: Rain is\nAnswer:"] * 3, [" wet", " dry", " hot"], 0),
    "sciq": ([f"Rain is wet.\n{FRAMED}"] * 4, [" dry", " hot", " red", " wet"], 3),
    "winogrande": (["The cup left the bag as the cup", "The cup left the bag as the bag"], [" was too big."] * 2, 1),
}


def hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    module = ModuleType("datasets")
    monkeypatch.setattr(module, "load_dataset", load, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("unreachable")
def test_rows_of_the_hub_become_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load(path: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked[path] = (config, split)
        return [HUB_ROWS[path], HUB_ROWS[path]]

    hub(monkeypatch, load)
    sets = read_items("hub")
    assert asked["allenai/ai2_arc"] == ("ARC-Easy", "validation")
    assert asked["allenai/winogrande"] == ("winogrande_xl", "validation")
    assert list(sets) == list(FROM_HUB) == list(HUB_SETS)
    for name, (contexts, continuations, gold) in FROM_HUB.items():
        first, second = sets[name]
        assert asdict(first) == {
            "id": f"{name}-0",
            "contexts": tuple(contexts),
            "continuations": tuple(continuations),
            "gold": gold,
        }
        assert second.id == f"{name}-1"


def test_a_question_without_supporting_text_stands_alone() -> None:
    contexts, _, _ = HUB_SETS["sciq"].choices({**HUB_ROWS["allenai/sciq"], "support": ""})
    assert set(contexts) == {FRAMED}


@pytest.mark.usefixtures("unreachable")
def test_no_network_and_no_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nand more")

    hub(monkeypatch, load)
    with pytest.raises(ValueError, match=r"baber/piqa cannot be read from the hub .*: give a folder") as raised:
        read_items("hub")
    assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[pretraining\]'"):
        read_items("hub")


def test_without_a_network_the_hub_is_asked_once_and_a_set_in_the_cache_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unreachable: list[object]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(items, "HUB_SETS", {"piqa": HUB_SETS["piqa"]})
    with pytest.raises(ValueError, match=r"baber/piqa cannot be read from the hub \(.*Name or service not known\)"):
        read_items("hub")
    assert len(unreachable) == 1
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(HUB_ROWS["baber/piqa"]) + "\n")
    datasets.load_dataset("json", data_files={"validation": str(rows)}, cache_dir=str(tmp_path / "json"))
    (arrow,) = (tmp_path / "json").rglob("*.arrow")
    cached = tmp_path / "datasets" / "baber___piqa" / "default" / "0.0.0" / ("0" * 40)
    shutil.copytree(arrow.parent, cached)
    (cached / arrow.name).rename(cached / "piqa-validation.arrow")
    unreachable.clear()
    ((question,),) = read_items("hub").values()
    assert question.continuations == tuple(FROM_HUB["piqa"][1])
    assert len(unreachable) == 1
