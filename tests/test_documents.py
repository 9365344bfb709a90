"""The Python examples of the documents run, and print what the documents say. Links lead to what they name."""

import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from runners.c4.data.convert import main as convert
from tests.runners.mad.commands import planned

ROOT = Path(__file__).parents[1]
WORDS = {
    "README": 700,
    "CONTRIBUTING": 900,
    "docs/your-layer": 900,
    "docs/results": 1000,
    "docs/protocol": 1500,
    "docs/cli": 1200,
    "docs/language-models": 1000,
    "docs/paper": 600,
    "docs/install": 500,
}
"""The pages, and how many words each may have. What has neither letter nor digit, such as a rule, is no word."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOTES = sorted((ROOT / "results" / "notes").glob("*.md"))
EXAMPLES = [ROOT / "docs" / f"{name}.md" for name in ("cli", "language-models", "protocol")]
FLOAT = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    page: Path
    line: int
    code: str
    output: str | None


def examples() -> list[Example]:
    """Python blocks of the pages, each with the block of output that follows it."""
    found = []
    for page in EXAMPLES:
        text = page.read_text(encoding="utf-8")
        for block, following in pairwise([*BLOCK.finditer(text), None]):
            if block is None or block[1] != "python":
                continue
            line = text.count("\n", 0, block.start(2))
            found.append(Example(page, line, block[2], following[2] if following and not following[1] else None))
    return found


def apart(output: str) -> tuple[str, list[float]]:
    """The text with every number that has a decimal point replaced, and these numbers, which depend on the machine."""
    return FLOAT.sub("#", output), [float(found[0]) for found in FLOAT.finditer(output)]


def test_there_are_examples_with_output() -> None:
    outputs = [example.output for example in examples()]
    assert len(outputs) >= 4
    assert None not in outputs


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One CPU thread, because more of them slow such small models down where processes compete for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("example", examples(), ids=lambda example: f"{example.page.stem}-{example.line}")
def test_an_example_prints_its_output(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "my_texts" in example.code:
        pytest.importorskip("datasets", reason="needs the extra pretraining")
        pytest.importorskip("tokenizers", reason="needs the extra pretraining")
        # The ``convert`` command of the page, with the project's documents.
        text = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
        [(folder, texts)] = re.findall(r"^python -m runners.c4 convert (\S+) (.*)$", text, re.MULTILINE)
        convert([folder, *(str(ROOT / name) for name in texts.split())])
    capsys.readouterr()

    # Blank lines in front, so that a traceback names the line of the page.
    exec(compile("\n" * example.line + example.code, str(example.page), "exec"), {"__name__": "example"})

    printed = capsys.readouterr().out
    if example.output is not None:
        (text, figures), (said, expected) = apart(printed), apart(example.output)
        assert text == said
        assert figures == pytest.approx(expected, rel=0.1, abs=0.1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_searches_in_a_page_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    for command in re.findall(
        r"^(?:\$ )?python -m runners\.mad (-[^#\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        if "mambapy" not in command:  # it may not be installed
            planned(shlex.split(command))


def anchors(page: Path) -> set[str]:
    """Addresses of a page's headings, as GitHub makes them: in small letters, spaces as hyphens, no other signs."""
    prose = re.sub(r"^```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"(?:\]\(|src=\")([^)#\"]*)(?:#([^)]*))?[)\"]", page.read_text(encoding="utf-8")):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {f"docs/{page.stem}" for page in (ROOT / "docs").glob("*.md")}
    assert pages == {page for page in WORDS if page.startswith("docs/") and f"({page}.md)" in readme}


def test_tables_of_other_papers_can_be_trained_and_stand_in_their_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "results" / "replications")
    replicate = import_module("replicate")
    page = Path(shutil.copy(replicate.PAGE, tmp_path))
    for table in replicate.TABLES:
        replicate.main([table, "--list"])
    monkeypatch.setattr(replicate, "PAGE", page)
    replicate.main(["page"])
    assert page.read_text() == (replicate.HERE / page.name).read_text()


@pytest.mark.parametrize("page", [*WORDS, "CHANGELOG"])
def test_a_page_is_short(page: str) -> None:
    """Of the changes, those of the newest version."""
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    text = text.split("\n## ")[1] if page == "CHANGELOG" else text
    assert len(re.findall(r"\S*\w\S*", text)) <= WORDS.get(page, 300)


def test_code_in_a_page_is_that_of_its_file() -> None:
    text = (ROOT / "docs" / "your-layer.md").read_text(encoding="utf-8")
    [(name, code)] = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert code == (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8")
