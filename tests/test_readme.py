"""The Python examples of README.md run, and print what README.md says."""

import gzip
import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "se") for b in ("n", "r", "s", "")]


class Example(NamedTuple):
    line: int
    code: str
    output: str | None


def examples() -> list[Example]:
    """Python blocks of README.md, each with the block of output that follows it."""
    text = README.read_text(encoding="utf-8")
    found = []
    for block, following in pairwise([*BLOCK.finditer(text), None]):
        if block is None or block[1] != "python":
            continue
        line = text.count("\n", 0, block.start(2))
        found.append(Example(line, block[2], following[2] if following and not following[1] else None))
    return found


def without_floats(output: str) -> str:
    """The text with every number that has a decimal point replaced, because it depends on the machine."""
    return re.sub(r"-?\d+\.\d+(e[+-]?\d+)?", "#", output)


def write_texts() -> None:
    """A folder ``my_texts`` of C4-format files and the ``tokenizer.json`` of their words, in the current folder."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")
    dice = random.Random(0)
    documents = [" ".join(dice.choices(WORDS, k=40)) for _ in range(150)]

    folder = Path("my_texts")
    folder.mkdir()
    for name, part in {"train": documents[:100], "validation": documents[100:]}.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(lines.encode()))

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "</s>"])
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save("tokenizer.json")


def test_there_are_examples_with_output() -> None:
    outputs = [example.output for example in examples()]
    assert len(outputs) >= 3
    assert None not in outputs


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One CPU thread, because more of them slow such small models down where processes compete for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("example", examples(), ids=lambda example: f"line-{example.line}")
def test_an_example_prints_its_output(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "my_texts" in example.code:
        pytest.importorskip("datasets", reason="needs the extra pretraining")
        write_texts()
    capsys.readouterr()

    # Blank lines in front, so that a traceback names the line of README.md.
    exec(compile("\n" * example.line + example.code, str(README), "exec"), {"__name__": "readme"})

    printed = capsys.readouterr().out
    assert example.output is None or without_floats(printed) == without_floats(example.output)
