"""Files in C4's format made of any texts: nothing is lost, nothing is in both splits, nothing is left of a failure."""

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runners.c4.data import cleaning
from runners.c4.data.cleaning import SIMILAR, clean_documents, fault_of, is_prose, read_text, without_near_duplicates
from runners.c4.data.convert import convert, divide, find_texts, main
from runners.c4.data.sources import find_files
from runners.c4.data.tokenizer import end_of_text, file_beside, load_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

BOOK = "".join(f"Line {n}: naïve café, {n} × {n} = {n * n}.\n" for n in range(300))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of two texts and a file that is none."""
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "book.txt").write_text(BOOK, encoding="utf-8")
    (folder / "inner" / "note.md").write_text("word " * 20)
    (folder / "picture.png").write_bytes(b"\xff\xfe")
    return folder


def documents(folder: Path, split: str) -> list[str]:
    lines = gzip.decompress((folder / f"c4-{split}.json.gz").read_bytes()).splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_splits_make_up_the_texts_and_the_tokenizer_keeps_every_character(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "my texts"
    main([str(made), str(texts), "--vocabulary", "300"])
    tokens, following = capsys.readouterr().out.splitlines()
    assert following == f"pretrain: python -m runners.c4 --preset tiny --data '{made}'"
    training, validation = documents(made, "train"), documents(made, "validation")
    rest, end = sorted(validation, key=len)
    assert {*training} == {BOOK.removesuffix(end), "word " * 19}
    assert BOOK.endswith(end)
    assert 0.09 * len(BOOK) < len(end) <= 0.1 * len(BOOK)
    assert rest == "word "

    tokenizer = load_tokenizer(str(file_beside(made)))
    assert len(tokenizer.get_vocab()) == 300
    encoded = [[tokenizer.encode(part).ids for part in parts] for parts in (training, validation)]
    assert [[*map(tokenizer.decode, split)] for split in encoded] == [training, validation]
    train, held_out = (sum(map(len, split)) + len(split) for split in encoded)  # an end-of-text token after each
    assert tokens == f"{train:,} tokens for training, {held_out:,} for validation: {made}"
    assert tokenizer.decode(tokenizer.encode("日本 🙂").ids) == "日本 🙂"  # in no text
    assert tokenizer.id_to_token(end_of_text(tokenizer)) == "</s>"

    # Pretraining reads the folder and takes the tokenizer for no text.
    found = find_files([str(made)])
    assert {split: [Path(file).name for file in files] for split, files in found.items()} == {
        "validation": ["c4-validation.json.gz"],
        "train": ["c4-train.json.gz"],
    }


def test_documents_are_in_random_order_and_bytes_are_the_same_whatever_the_files_are_called(tmp_path: Path) -> None:
    """Short runs read the first of them."""
    made = []
    for order in (range(40), reversed(range(40))):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        for place, number in enumerate(order):
            (folder / f"{place:02}.txt").write_text(f"{number:02} " + "word " * 30)
        convert([folder], folder / "made")
        made.append({path.name: path.read_bytes() for path in (folder / "made").rglob("*.*")})
    assert made[0] == made[1]
    numbers = [int(text[:2]) for text in documents(tmp_path / "0" / "made", "train")]
    assert sorted(numbers) == list(range(40)) != numbers


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x" * 40 + " " + "y" * 59, ("x" * 40 + " " + "y" * 59, "")),
        ("文" * 100, ("文" * 90, "文" * 10)),
        ("x" * 92 + " " + "y" * 7, ("x" * 92 + " ", "y" * 7)),
        ("", ("", "")),
    ],
)
def test_a_text_is_divided_at_white_space(text: str, parts: tuple[str, str]) -> None:
    assert divide(text) == parts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["made", "missing.txt"], "error: no file missing.txt, nor a folder with *.txt, *.md,"),
        (["made", "empty"], "error: no file empty, nor a folder with *.txt, *.md,"),
        (
            ["made", "picture.png"],
            "error: picture.png is no text in UTF-8: save it so, name other texts, or leave it out",
        ),
        (
            ["made", "short.txt"],
            "error: the texts are none or too short: their last tenth, which is the validation data",
        ),
        (["made", "book.txt", "--clean"], "error: too few documents are left for two splits: name more texts"),
        (["made"], "error: the texts are none or too short"),
        (["inner", "book.txt"], "error: inner exists: name a new folder"),
        (["short.txt/made", "latin.txt"], "error: [Errno 17] File exists: 'short.txt'"),
        (
            ["made", "page.html"],
            "error: import of resiliparse.extract.html2text halted; None in sys.modules: pip install",
        ),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(
    words: list[str],
    message: str,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Callable[..., str],
) -> None:
    monkeypatch.chdir(texts)
    monkeypatch.setitem(sys.modules, "resiliparse.extract.html2text", None)
    Path("empty").mkdir()
    Path("short.txt").write_text("short")
    Path("page.html").write_text("<p>One sentence.")
    before = sorted(Path().rglob("*"))
    assert ended(main, words).startswith(message)
    assert sorted(Path().rglob("*")) == before


def test_texts_in_a_folder_have_any_case_are_not_hidden_and_are_read_once(texts: Path, tmp_path: Path) -> None:
    (texts / ".venv" / "inner").mkdir(parents=True)
    for name in ("A.TXT", "b.Markdown", "inner/c.HTM", "d.text", ".e.txt", ".venv/f.txt", ".venv/inner/g.md"):
        (texts / name).write_text("text")
    (texts / "z.txt").symlink_to(texts / "book.txt")
    (texts / "broken.txt").symlink_to(texts / "nowhere.txt")
    (link := tmp_path / "link").symlink_to(texts, target_is_directory=True)
    found = [str(file.relative_to(texts)) for file in find_texts([texts, link, texts / "book.txt"])]
    assert found == ["A.TXT", "b.Markdown", "book.txt", "inner/c.HTM", "inner/note.md"]
    hidden = [texts / ".e.txt", texts / ".venv" / "f.txt", texts / ".venv" / "inner" / "g.md"]
    assert [*find_texts([texts / ".e.txt", texts / ".venv"])] == hidden  # because they are named


def test_of_a_page_the_prose_of_its_main_part_is_read(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse", reason="needs the extra html")
    page = tmp_path / "PAGE.HTML"
    page.write_bytes(
        b"\xef\xbb\xbf<html><head><title>Title</title><style>p { color: red }</style></head><body><nav><a href=x>Home"
        b"</a></nav><main><h1>A file</h1><p>First &amp; last.<p>A <a href=b>link</a> in it.<pre>code = 1</pre>"
        b"<table><tr><td>cell</table><script>x()</script></main><footer>Copyright</footer></body></html>"
    )
    assert read_text(page) == "A file\n\nFirst & last.\n\nA link in it."


ENGLISH = "The layer reads the text of a page in the order of its words, and that is what it learns from. "
GERMAN = "Die Schicht liest den Text einer Seite in der Reihenfolge der Wörter, und daraus lernt sie dann auch. "
LIST = "alpha beta gamma delta epsilon " * 17  # 85 words


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ENGLISH * 3, ""),
        (LIST + "the " * 15, ""),
        (LIST + "beta " + "the " * 14, "not English prose"),
        (ENGLISH * 2, "too short"),
        (GERMAN * 5, "not English prose"),
        ("a b the c d e f to g h " * 9, "not English prose"),  # words of one letter
        ("", "too short"),
    ],
)
def test_what_is_kept_is_english_prose(text: str, fault: str) -> None:
    assert fault_of(text) == fault


@pytest.mark.parametrize(
    ("paragraph", "kept"),
    [
        ("A sentence, with a number: 12.", True),
        ("+----+----+\n| 12 | 34 |\n+----+----+", False),
        ("x = f(1, 2); y[3] += 4; print({x: y})", False),
        ("", False),
        (" \n ", False),
    ],
)
def test_tables_and_code_are_no_paragraphs(paragraph: str, kept: bool) -> None:
    assert is_prose(paragraph) == kept


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
    texts: list[str] = []
    for _ in range(8):
        text = words(dice, 120)
        texts += [" ".join(changed(dice, text, share)) for share in (0, 0.01, 0.05, 0.3)]
    dice.shuffle(texts)

    kept: list[int] = []
    for n, text in enumerate(texts):
        if all(slow_similarity(text, texts[other]) < SIMILAR for other in kept):
            kept.append(n)
    assert without_near_duplicates(texts) == [texts[n] for n in kept]
    assert 8 < len(kept) < 24
    assert without_near_duplicates(["", "", "One, two. Three", "one two three"]) == ["", "One, two. Three"]


def test_a_long_paragraph_stays_where_it_stands_first_and_a_heading_in_ten_documents() -> None:
    long = "this paragraph has more than seven words in it"
    texts = [f"See also\n\n{long.title()}!\n\nown {n}\n\n{long}" for n in range(12)]
    cleaned = cleaning.without_repeats(texts)
    assert cleaned[0] == f"See also\n\n{long.title()}!\n\nown 0"
    assert cleaned[9] == "See also\n\nown 9"
    assert cleaned[10] == "own 10"


def test_a_clean_corpus_holds_out_whole_documents_that_nothing_in_training_resembles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundred pages, near-duplicates of ten, ten that are short, and two that resemble without their prefaces."""
    dice = random.Random(2)

    def paragraph(count: int) -> str:
        return " ".join(word for own in words(dice, count) for word in (own, "the"))

    pages = {f"{n:03}": paragraph(80) for n in range(100)}
    pages |= {f"{n:03}-copy": f"{pages[f'{n:03}']} again" for n in range(0, 100, 10)}
    pages |= {f"{n:03}-index": "Too short." for n in range(0, 100, 10)}
    body = paragraph(50)
    for name in ("preface", "licence"):
        part = paragraph(60)
        pages |= {f"{name}-0": f"{part}\n\n{paragraph(60)}", f"{name}-1": f"{part}\n\n{body}\n\n| 1 | 2 |\n|---|---|"}
        body += " again"
    for name, text in pages.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")

    files = sorted(tmp_path.glob("*.txt"))
    found = clean_documents({file: file for file in files})
    line = "103 of 125 files kept; 11 a near-duplicate; 10 too short; 1 not in UTF-8\n"
    assert capsys.readouterr().out == line
    assert {split: len(texts) for split, texts in found.items()} == {"train": 101, "validation": 2}
    assert not any(slow_similarity(held, text) >= SIMILAR for held in found["validation"] for text in found["train"])
    assert not any("|" in text for texts in found.values() for text in texts)

    # What is held out, and the order of documents, do not depend on the order of files.
    manuals = {file: Path(file.stem[:-1]) for file in files if file.stem.isdigit()}
    first, again = clean_documents(manuals), clean_documents(dict(reversed(manuals.items())))
    assert first == again
    assert len(first["validation"]) == 2  # no manual of ten pages fits

    # Manuals of two pages are held out as a whole.
    held_out = clean_documents({file: Path(str(int(file.stem) // 2)) for file in manuals})["validation"]
    one, other = (int(name) for name, text in pages.items() if text in held_out)
    assert one // 2 == other // 2
