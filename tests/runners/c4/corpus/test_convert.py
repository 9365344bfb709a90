"""Files in C4's format made of any texts: nothing is lost, nothing is in both splits, nothing is left of a failure."""

import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from runners.c4.corpus.cleaning import Page, read_clean
from runners.c4.corpus.convert import convert, divide, find_texts, main
from runners.c4.corpus.sources import find_files
from runners.c4.corpus.tokenizer import end_of_text, file_beside, load_tokenizer
from tests.runners.c4.runs import largest_file

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


def read_or_die(file: Path) -> Page:
    """Read a file, or end as a process that takes too much memory does."""
    if file.name == "note.md":
        os.kill(os.getpid(), signal.SIGKILL)
    return read_clean(file)


def documents(folder: Path, split: str) -> list[str]:
    lines = gzip.decompress((folder / f"c4-{split}.json.gz").read_bytes()).splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_splits_make_up_the_texts_and_the_tokenizer_keeps_every_character(texts: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    tokens = convert([texts], made)
    training, validation = documents(made, "train"), documents(made, "validation")
    rest = min(validation, key=len)
    (end,) = (text for text in validation if text != rest)
    assert {*training} == {BOOK.removesuffix(end), "word " * 19}
    assert BOOK.endswith(end)
    assert 0.09 * len(BOOK) < len(end) <= 0.1 * len(BOOK)
    assert rest == "word "

    tokenizer = load_tokenizer(str(file_beside(made)))
    for split, parts in {"train": training, "validation": validation}.items():
        encoded = [tokenizer.encode(part).ids for part in parts]
        assert [tokenizer.decode(ids) for ids in encoded] == parts
        assert sum(map(len, encoded)) + len(parts) == tokens[split]  # an end-of-text token after each
    assert tokenizer.decode(tokenizer.encode("日本 🙂").ids) == "日本 🙂"  # in no text
    assert tokenizer.id_to_token(end_of_text(tokenizer)) == "</s>"


def test_a_full_disk_is_one_line_and_leaves_nothing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packed texts fit, and the tokenizer does not."""
    with largest_file(8192), pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "made"), str(texts)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "File too large" in line
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert main([str(tmp_path / "made"), str(texts)]) is None
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "made").rglob("*.*")}
    assert max(size for name, size in sizes.items() if name.endswith(".gz")) < 8192 < sizes["tokenizer.json"]


def test_a_process_that_the_system_ends_is_one_line_and_leaves_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runners.c4.corpus.convert.MANY", 2)
    monkeypatch.setattr("runners.c4.corpus.convert.read_clean", read_or_die)
    monkeypatch.setattr("runners.c4.corpus.convert.CHUNK", 1)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "made"), str(texts), "--clean"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a process that read texts was ended, perhaps for lack of memory")
    assert not (tmp_path / "made").exists()


def test_pretraining_reads_the_folder_and_takes_the_tokenizer_for_no_text(texts: Path, tmp_path: Path) -> None:
    convert([texts], tmp_path / "made")
    found = find_files([str(tmp_path / "made")])
    assert {split: [Path(file).name for file in files] for split, files in found.items()} == {
        "validation": ["c4-validation.json.gz"],
        "train": ["c4-train.json.gz"],
    }


def test_the_same_texts_give_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        convert([texts / "book.txt", texts, texts / "book.txt"], tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("first", "second")
    )
    assert first == second
    assert len(first) == 3


def test_documents_are_in_random_order_whatever_the_files_are_called(tmp_path: Path) -> None:
    """Short runs read the first of them."""
    made = []
    for order in (range(40), reversed(range(40))):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        for place, number in enumerate(order):
            (folder / f"{place:02}.txt").write_text(f"{number:02} " + "word " * 30)
        convert([folder], folder / "made")
        made.append([int(text[:2]) for text in documents(folder / "made", "train")])
    assert made[0] == made[1]
    assert sorted(made[0]) == list(range(40)) != made[0]


def test_a_text_is_divided_at_white_space() -> None:
    assert divide("x" * 40 + " " + "y" * 59) == ("x" * 40 + " " + "y" * 59, "")
    assert divide("文" * 100) == ("文" * 90, "文" * 10)
    assert divide("x" * 92 + " " + "y" * 7) == ("x" * 92 + " ", "y" * 7)
    assert divide("") == ("", "")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["missing.txt"], "error: no file or folder missing.txt"),
        (
            ["texts/picture.png"],
            "error: texts/picture.png is no text in UTF-8 (invalid start byte at byte 0): save as UTF-8, "
            "name other texts, or leave these out by --clean",
        ),
        (
            ["empty"],
            "error: no *.txt, *.md, *.markdown, *.rst, *.html, *.htm, *.xhtml in the folder empty: name the files",
        ),
        (
            ["c4"],
            "error: no *.txt, *.md, *.markdown, *.rst, *.html, *.htm, *.xhtml in the folder c4: its files are named as "
            "those of C4, which need no conversion: give the folder to --data",
        ),
        (
            ["package"],
            "error: no *.txt, *.md, *.markdown, *.rst, *.html, *.htm, *.xhtml in the folder package: name the files",
        ),
        (["short.txt"], "error: the texts are too short: their last tenth, which is the validation data, is empty"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(
    names: list[str],
    message: str,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(texts.parent)
    Path("empty").mkdir()
    for name in ("c4/c4-train.json.gz", "c4/c4-validation.json.gz", "package/package.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("short.txt").write_text("short")
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(["made", *names])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("count", "rest"), [(2, ""), (5, ""), (7, "; 2 more files")])
def test_all_texts_that_are_not_utf_8_are_one_error(
    count: int, rest: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts)
    for n in range(count):
        Path(f"{n}.txt").write_bytes(b"caf\xe9")
    faults = [f"{n}.txt is no text in UTF-8 (unexpected end of data at byte 3)" for n in range(min(count, 5))]
    with pytest.raises(ValueError, match="UTF-8") as error:
        convert([Path()], tmp_path / "made")
    advice = "save as UTF-8, name other texts, or leave these out by --clean"
    assert str(error.value) == f"{'; '.join(faults)}{rest}: {advice}"


def test_texts_in_a_folder_have_any_case_and_are_not_hidden(texts: Path) -> None:
    (texts / ".venv" / "inner").mkdir(parents=True)
    for name in ("A.TXT", "b.Markdown", "inner/c.HTM", "d.text", ".e.txt", ".venv/f.txt", ".venv/inner/g.md"):
        (texts / name).write_text("text")
    found = [str(file.relative_to(texts)) for file in find_texts([texts])]
    assert found == ["A.TXT", "b.Markdown", "book.txt", "inner/c.HTM", "inner/note.md"]
    hidden = [texts / ".e.txt", texts / ".venv" / "f.txt", texts / ".venv" / "inner" / "g.md"]
    assert find_texts([texts / ".e.txt", texts / ".venv"]) == hidden  # because they are named


def test_a_text_that_links_lead_to_is_read_once_under_its_first_name(texts: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(texts, target_is_directory=True)
    (texts / "z.txt").symlink_to(texts / "book.txt")
    expected = [Path("book.txt"), Path("inner", "note.md")]
    assert find_texts([texts, link]) == [texts / name for name in expected]
    assert find_texts([link, texts / "book.txt", texts]) == [link / name for name in expected]
    assert find_texts([texts / "inner" / ".." / "book.txt", link]) == [
        texts / "inner" / ".." / "book.txt",
        link / "inner" / "note.md",
    ]


def test_a_folder_that_cannot_be_written_is_refused_before_the_texts_are_read(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    (texts / "latin.txt").write_bytes(b"caf\xe9")  # an error as soon as it is read
    with pytest.raises(SystemExit) as stop:
        main([str(file / "made"), str(texts)])
    assert stop.value.code == 2
    reason = f"nothing can be written into {file} (Not a directory)"
    assert capsys.readouterr().err == f"error: FOLDER {file / 'made'}: {reason}: name another folder\n"


def test_the_command_names_the_next_one_and_overwrites_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["my texts", str(texts)])
    read, _, following = capsys.readouterr().out.splitlines()
    assert read == "2 files read, 1 of other kinds left out (.png)"
    assert following == "pretrain: python -m runners.c4 --preset tiny --data 'my texts'"
    with pytest.raises(SystemExit):
        main(["my texts", str(texts)])
    assert capsys.readouterr().err == "error: my texts exists: name a new folder\n"
