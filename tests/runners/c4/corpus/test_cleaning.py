"""Corpora of documentation: prose of pages, English, each document and paragraph once, whole documents held out."""

import gzip
import json
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from runners.c4.corpus.cleaning import fault_of, is_prose, read_clean, read_text
from runners.c4.corpus.convert import clean_documents, convert, main
from runners.c4.corpus.duplicates import SIMILAR, shingles_of, similarity, without_near_duplicates, without_repeats
from runners.c4.corpus.html_text import text_of_html

PAGE = """<!DOCTYPE html><html><head><title>Title</title><style>p { color: red }</style>
<meta charset=utf-8><link rel=next href=a.html><body class="page">
<div class="sphinxsidebar"><ul><li>Sidebar<div>inner</div></ul></div>
<nav><a href=x>Home</a></nav>
<div role="main"><h1>Reading <em>a</em>
file</h1><p>First&nbsp;&amp; last.<p>Second <a href="b">link</a> in a sentence<br>goes on.
<ul><li><a href=1>One</a> <a href=2>Two</a></li><li>An item.</li></ul>
<pre>code = 1</pre><table><tr><td>cell<table><tr><td>inner</table></table>
<p>A <a name="target">target</a><script>if (1 < 2) { x() }</script></div>
<p>After the main part.<footer>Copyright</footer></html>"""


def test_the_prose_of_a_page_is_its_main_part_without_navigation_code_and_tables() -> None:
    assert text_of_html(PAGE).split("\n\n") == [
        "Reading a file",
        "First & last.",
        "Second link in a sentence goes on.",
        "An item.",
        "A target",
    ]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("", ""),
        ("no element", "no element"),
        ("<p>one</p><p></p><div>two</div>", "one\n\ntwo"),
        ("<a href=x>only a link</a>", ""),
        ("<p>cut <b>off", "cut off"),
        ("</p></div><p>closed twice</p></p>", "closed twice"),
        ("<p>a &lt; b &unknown; &#65;</p>", "a < b &unknown; A"),
        ("<div><pre>x<span>y</pre></div><p>after</p>", "after"),
        ("<p class=copyright>1999<p>after", "after"),
        ("<p>before<p class=copyright>1999<div>after</div>", "before\n\nafter"),
        ("<p class=copyright>1999<b><table><tr><td>cell</table>after", "after"),
        ("<p class=copyright>1999<script>1</script>here<pre>code</pre>after", "after"),
        ("<ul><li class=toc>here<li>after</ul>", "after"),
        ("<ul><li class=toc>here<ul><li>inner</ul>and here<li>after</ul>", "after"),
        ("<ul><li>before<ul><li class=toc>inner</ul>after</ul>", "before\n\nafter"),
        ("<ul><li class=toc>here</ul>after", "after"),
        ("<dl><dt class=toc>here<dd>meaning<dt>after</dl>", "meaning\n\nafter"),
        ("<div><span class=toc>here</div><p>after", "after"),
        ("<div class=sidebar><b>here</i><p>and</b> here</p> here</div>after", "after"),
        ("<div role=main>before<table><td></div>cell</table>after</div>outside", "before\n\nafter"),
        ("<div><nav>here</div>after", "after"),
        ("<p>one <br>line<br/>of <i>three</p></i>", "one line of three"),
    ],
)
def test_pages_that_are_short_or_broken(page: str, text: str) -> None:
    assert text_of_html(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("before<article>one</article>after", "one"),
        ("before<article>one<article>comment</article>more</article>after", "one\n\ncomment\n\nmore"),
        ("before<article>one</article>between<article>two</article>", "before\n\none\n\nbetween\n\ntwo"),
        ("before<article>one</article><article><a href=x>next</a></article>", "one"),
        ("<article>teaser</article><main><p>one</main>after", "one"),
        ("<main><article>one</article>between<article>two</article></main>after", "one\n\nbetween\n\ntwo"),
        ("<main>one</main>between<main>two</main>", "one\n\ntwo"),
        ("<main><p class=copyright>1999</main><p>after", "after"),
        ("before<nav><article>left out</article></nav>after", "before\n\nafter"),
    ],
)
def test_the_main_part_of_a_page_is_its_main_element_or_its_only_article(page: str, text: str) -> None:
    assert text_of_html(page) == text


def lines_run(page: str) -> int:
    """Number of lines of Python that run while the prose of a page is extracted."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        text_of_html(page)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "part",
    [
        "<b>one</i>",  # no element that the end tag names is open
        "<div><p>one</p></p>",
        "<div><p>one",  # each paragraph is ended by the next element
        "<div><b>one</p>",
        "<unknown>one</other>",
        "<b><div>one</b>",  # the element that the end tag names is open, but outside a block
        "<article>one",
    ],
)
def test_the_work_for_a_page_of_unclosed_elements_grows_no_faster_than_its_length(part: str) -> None:
    assert lines_run(part * 400) <= 2 * lines_run(part * 200)


ENGLISH = "The layer reads the text of a page in the order of its words, and that is what it learns from. "
GERMAN = "Die Schicht liest den Text einer Seite in der Reihenfolge der Wörter, und daraus lernt sie dann auch. "
NAMES = "alpha_beta gamma delta_epsilon zeta eta theta iota kappa lambda_mu nu xi omicron pi rho sigma tau "
TERSE = (
    "Each worker reads one shard, verifies its checksum and sends batches to the trainer. If a checksum differs, that "
    "worker stops and prints a message. Set the option shards to change how many files a worker opens. Larger values "
    "use more memory; smaller values need more system calls. Workers never share files, so no lock is needed. "
)
LIST = "alpha beta gamma delta epsilon " * 17  # 85 words


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ENGLISH * 3, ""),
        (TERSE, ""),
        (LIST + "the " * 15, ""),
        (LIST + "beta " + "the " * 14, "not English prose"),
        (ENGLISH * 2, "too short"),
        (GERMAN * 5, "not English prose"),
        (NAMES * 6, "not English prose"),
        ("a b the c d e f to g h " * 9, "not English prose"),  # words of one letter
        ("", "too short"),
    ],
)
def test_what_is_kept_is_english_prose(text: str, fault: str) -> None:
    assert fault_of(text) == fault


def test_tables_and_code_are_no_paragraphs(tmp_path: Path) -> None:
    assert is_prose("A sentence, with a number: 12.")
    assert not is_prose("+----+----+\n| 12 | 34 |\n+----+----+")
    assert not is_prose("x = f(1, 2); y[3] += 4; print({x: y})")
    assert not is_prose("")
    assert not is_prose(" \n ")
    (tmp_path / "page.md").write_text(f"{ENGLISH * 3}\n \n| 1 | 2 |\n|---|---|\n\nThe end.", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert read_clean(tmp_path / "page.md").text == f"{ENGLISH * 3}\n\nThe end."
    assert read_clean(tmp_path / "latin.txt").reason == "not in UTF-8"


def words(dice: random.Random, count: int) -> list[str]:
    return ["".join(dice.choices("bcdfglmnprst", k=6)) for _ in range(count)]


def changed(dice: random.Random, text: list[str], share: float) -> list[str]:
    """The text with a share of its words replaced."""
    return [words(dice, 1)[0] if dice.random() < share else word for word in text]


def slow_similarity(first: str, second: str) -> float:
    """Jaccard similarity of the runs of five words, by the definition."""
    sets = [{tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)} for text in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_are_those_of_a_slow_solver() -> None:
    dice = random.Random(0)
    documents: list[str] = []
    for _ in range(15):
        text = words(dice, 120)
        versions = [text, *(changed(dice, text, share) for share in (0.01, 0.05, 0.3))]
        documents += [" ".join(version) for version in versions]
    dice.shuffle(documents)

    kept: list[int] = []
    for n, document in enumerate(documents):
        if all(slow_similarity(document, documents[other]) < SIMILAR for other in kept):
            kept.append(n)
    assert without_near_duplicates(documents) == [documents[n] for n in kept]
    assert 15 < len(kept) < 45


def test_similarity_is_that_of_the_definition_and_ignores_case_and_punctuation() -> None:
    dice = random.Random(1)
    first = words(dice, 300)
    second = " ".join(changed(dice, first, 0.05))
    expected = slow_similarity(" ".join(first), second)
    assert similarity(shingles_of(" ".join(first)), shingles_of(second)) == pytest.approx(expected, abs=1e-9)
    assert similarity(shingles_of("One, two. Three"), shingles_of("one two three")) == 1
    assert without_near_duplicates(["", "", "one", "two"]) == ["", "one", "two"]


def test_a_long_paragraph_stays_where_it_stands_first_and_a_heading_in_ten_documents() -> None:
    long = "this paragraph has more than seven words in it"
    documents = [f"See also\n\n{long.title()}!\n\nown {n}\n\n{long}" for n in range(12)]
    cleaned = list(without_repeats(documents))
    assert cleaned[0] == f"See also\n\n{long.title()}!\n\nown 0"
    assert cleaned[9] == "See also\n\nown 9"
    assert cleaned[10] == "own 10"


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    """A folder of 120 pages, of which some are near-duplicates, short or not English."""
    dice = random.Random(2)
    common = ["the", "of", "and", "to", "in", "a"]
    folder = tmp_path / "manual"
    (folder / "page.html").mkdir(parents=True)  # a folder that is named like a page
    for n in range(100):
        text = " ".join(word for pair in zip(words(dice, 80), dice.choices(common, k=80), strict=True) for word in pair)
        page = (
            f"<html><body><nav><a href=x>Home</a></nav><main><h1>{words(dice, 1)[0]}</h1><p>{text}</main></body></html>"
        )
        (folder / f"{n:03}.html").write_text(page)
        if n % 10 == 0:
            (folder / f"{n:03}-copy.html").write_text(page.replace("</h1>", " again</h1>"))
            (folder / f"{n:03}-index.html").write_text("<p>Too short.")
    return folder


def read(folder: Path, split: str) -> list[str]:
    lines = gzip.decompress((folder / f"c4-{split}.json.gz").read_bytes()).splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_a_clean_corpus_holds_out_whole_documents_that_nothing_in_training_resembles(
    manual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra pretraining")
    main([str(tmp_path / "made"), str(manual), "--clean", "--vocabulary", "300"])
    assert capsys.readouterr().out.startswith("100 of 120 files kept; 10 too short; 10 a near-duplicate\n")
    train, validation = (read(tmp_path / "made", split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (98, 2)
    assert not any(slow_similarity(held, text) >= SIMILAR for held in validation for text in train)
    assert all("<" not in text and "Home" not in text for text in train + validation)
    tokenizer = json.loads((tmp_path / "made" / "tokenizer" / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 300


def test_which_documents_are_held_out_depends_on_the_texts_alone(manual: Path) -> None:
    files = [file for file in sorted(manual.iterdir()) if file.is_file() and "copy" not in file.name]
    first, again = clean_documents(files), clean_documents(files[::-1])
    assert first["validation"] == again["validation"]
    assert first["train"] == again["train"][::-1]


def test_documents_that_resemble_each_other_without_repeated_paragraphs_are_kept_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(3)

    def paragraph(count: int) -> list[str]:
        return [word for own in words(dice, count) for word in (own, "the")]

    preface, licence, body = paragraph(60), paragraph(60), paragraph(50)
    pages = [
        [preface, paragraph(60)],
        [licence, paragraph(60)],
        [preface, body],
        [licence, changed(dice, body, 0.01)],
    ]
    for n, parts in enumerate(pages):
        (tmp_path / f"{n}.txt").write_text("\n\n".join(map(" ".join, parts)))
    documents = clean_documents(sorted(tmp_path.iterdir()))
    assert sorted(map(len, documents.values())) == [1, 2]
    assert capsys.readouterr().out == "3 of 4 files kept; 1 a near-duplicate\n"


def test_without_clean_all_of_a_page_s_prose_is_kept(manual: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra pretraining")
    convert([manual / "000-index.html", manual / "001.html"], tmp_path / "made")
    assert read(tmp_path / "made", "train")[0] == "Too short."
    assert read(tmp_path / "made", "train")[1].count("\n\n") == 1


def test_a_named_page_is_read_as_html_whatever_its_ending_s_case_and_its_byte_order_mark(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.HTML"
    page.write_bytes(b"\xef\xbb\xbf<html><body><nav>Home</nav><p>One sentence.</p></body></html>")
    assert read_text(page) == "One sentence."
    plain = tmp_path / "plain.txt"
    plain.write_bytes(b"\xef\xbb\xbfOne sentence.")
    assert read_text(plain) == "One sentence."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocabulary", "256"], "error: --vocabulary 256 must be at least 257: every byte, and end-of-text\n"),
        (["--vocabulary", "9999999999"], "error: --vocabulary 9999999999 must be at most 1000000\n"),
        (["--clean"], "error: too few documents are left for two splits: name more texts, or leave --clean out\n"),
    ],
)
def test_a_corpus_that_cannot_be_made_is_one_line_and_leaves_nothing(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(ENGLISH * 9)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "made"), str(tmp_path / "text.txt"), *options])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
