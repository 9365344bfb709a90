"""Files in C4's format made of any texts: nothing is lost, nothing is in both splits, nothing is left of a failure."""

import gzip
import json
from pathlib import Path

import pytest

from runners.c4.corpus.convert import convert, divide, main
from runners.c4.corpus.sources import find_files
from runners.c4.corpus.tokenizer import end_of_text, load_tokenizer

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


def test_the_splits_make_up_the_texts_and_the_tokenizer_keeps_every_character(texts: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    file, tokens = convert([texts], made)
    training, validation = documents(made, "train"), documents(made, "validation")
    assert training[0] + validation[0] == BOOK
    assert 0.09 * len(BOOK) < len(validation[0]) <= 0.1 * len(BOOK)
    assert [training[1], validation[1]] == ["word " * 19, "word "]

    tokenizer = load_tokenizer(str(file))
    for split, parts in {"train": training, "validation": validation}.items():
        encoded = [tokenizer.encode(part).ids for part in parts]
        assert [tokenizer.decode(ids) for ids in encoded] == parts
        assert sum(map(len, encoded)) == tokens[split]
    assert tokenizer.decode(tokenizer.encode("日本 🙂").ids) == "日本 🙂"  # in no text
    assert tokenizer.id_to_token(end_of_text(tokenizer)) == "</s>"


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


def test_a_text_is_divided_at_white_space() -> None:
    assert divide("x" * 100) == ("x" * 100, "")
    assert divide("x" * 92 + " " + "y" * 7) == ("x" * 92 + " ", "y" * 7)
    assert divide("") == ("", "")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["missing.txt"], "error: no file or folder missing.txt"),
        (["texts/picture.png"], "error: texts/picture.png is no text in UTF-8 (invalid start byte at byte 0)"),
        (["empty"], "error: no *.txt, *.md, *.rst, *.html, *.htm, *.xhtml in the folder empty: name the files"),
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
    Path("short.txt").write_text("short")
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(["made", *names])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert sorted(Path().rglob("*")) == before


def test_the_command_names_the_next_one_and_overwrites_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["my texts", str(texts)])
    assert capsys.readouterr().out.splitlines()[1] == (
        "pretrain: python -m runners.c4 --preset tiny --data 'my texts' --tokenizer 'my texts/tokenizer/tokenizer.json'"
    )
    with pytest.raises(SystemExit):
        main(["my texts", str(texts)])
    assert capsys.readouterr().err == "error: my texts exists: name a new folder\n"
