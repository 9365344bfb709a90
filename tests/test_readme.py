"""The Python examples of README.md run, and print what README.md says."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from runners.c4.corpus.convert import main as convert

README = Path(__file__).parents[1] / "README.md"
FLOAT = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def apart(output: str) -> tuple[str, list[float]]:
    """The text with every number that has a decimal point replaced, and these numbers, which depend on the machine."""
    return FLOAT.sub("#", output), [float(found[0]) for found in FLOAT.finditer(output)]


def make_texts() -> None:
    """Run the ``convert`` command of README.md, with the documents of the repository, in the current folder."""
    [(folder, texts)] = re.findall(r"^python -m runners.c4 convert (\S+) (.*)$", README.read_text(), re.MULTILINE)
    convert([folder, *(str(README.parent / text) for text in texts.split())])


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
        pytest.importorskip("tokenizers", reason="needs the extra pretraining")
        make_texts()
    capsys.readouterr()

    # Blank lines in front, so that a traceback names the line of README.md.
    exec(compile("\n" * example.line + example.code, str(README), "exec"), {"__name__": "readme"})

    printed = capsys.readouterr().out
    if example.output is not None:
        (text, figures), (said, expected) = apart(printed), apart(example.output)
        assert text == said
        assert figures == pytest.approx(expected, rel=0.1, abs=0.1)
