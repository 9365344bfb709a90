"""Make C4-format files and a tokenizer of your own texts, so that pretraining needs no network.

    python -m runners.c4 convert my_texts book.txt notes/
    python -m runners.c4 --preset tiny --data my_texts --tokenizer my_texts/tokenizer/tokenizer.json

The first nine tenths of each text are training data, the rest is validation data. The tokenizer is a byte-level BPE
that is trained on the training data: it encodes any text without loss.
"""

import gzip
import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from runners.c4.corpus.sources import Split
from runners.c4.corpus.tokenizer import END_OF_TEXT
from runners.cli import cli, user_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS = ("*.txt", "*.md", "*.rst")
"""Files that are read from a folder, and from the folders in it."""
VALIDATION = 10
"""Part of the text that is validation data: one character of ten."""
VOCABULARY = 4096
"""Tokens of the tokenizer; a small text makes fewer."""
FOLDER_OF_TOKENIZER = "tokenizer"
"""The tokenizer has a folder of its own, because every JSON file beside the texts would be read as text."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make C4-format files and a tokenizer of text files.

    Attributes:
        folder: folder to write, which must not exist.
        texts: text files in UTF-8, and folders of .txt, .md and .rst files.
    """

    folder: tyro.conf.Positional[Path]
    texts: tyro.conf.Positional[tuple[Path, ...]]


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        default = Options(folder=tyro.MISSING, texts=tyro.MISSING)
        options = cli(Options, default, arguments, "convert")
        tokenizer, tokens = convert(options.texts, options.folder)

    training = ["python", "-m", "runners.c4", "--preset", "tiny"]
    data = ["--data", str(options.folder), "--tokenizer", str(tokenizer)]
    print(f"{tokens['train']:,} tokens for training, {tokens['validation']:,} for validation: {options.folder}")
    print(f"pretrain: {shlex.join([*training, *data])}")


def convert(texts: Sequence[Path], folder: Path) -> tuple[Path, dict[Split, int]]:
    """Write C4-format files of both splits and a tokenizer; the folder is complete or absent.

    Args:
        texts: text files, and folders of them.
        folder: a folder that does not exist.

    Returns:
        File of the tokenizer, and the tokens of each split.

    Raises:
        ValueError: the folder exists; there is no text; a text is not UTF-8 or too short to be divided.
        OSError: a file cannot be read or written.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder")

    # One document a text and split.
    documents: dict[Split, list[str]] = {"train": [], "validation": []}
    for file in find_texts(texts):
        for split, part in zip(documents, divide(read_text(file)), strict=True):
            documents[split] += [part] if part.strip() else []
    if not documents["validation"]:
        raise ValueError("the texts are too short: their last tenth, which is the validation data, is empty")
    tokenizer = train_tokenizer(documents["train"])

    # The files, in a temporary folder that is renamed.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        (made / FOLDER_OF_TOKENIZER).mkdir(parents=True)
        for split, parts in documents.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in parts)
            (made / f"c4-{split}.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        tokenizer.save(str(made / FOLDER_OF_TOKENIZER / "tokenizer.json"))
        made.rename(folder)

    tokens = {split: sum(len(tokenizer.encode(text)) for text in parts) for split, parts in documents.items()}
    return folder / FOLDER_OF_TOKENIZER / "tokenizer.json", tokens


def find_texts(names: Sequence[Path]) -> list[Path]:
    """Return the files among ``names`` and those in the folders among them, each once.

    Raises:
        ValueError: there is no such file or folder, or no text in a folder.
    """
    found: list[Path] = []
    for name in names:
        if not name.exists():
            raise ValueError(f"no file or folder {name}")
        files = [name] if name.is_file() else sorted({file for pattern in TEXTS for file in name.rglob(pattern)})
        if not files:
            raise ValueError(f"no {', '.join(TEXTS)} in the folder {name}: name the files")
        found += files
    if not found:
        raise ValueError("no texts: name text files, or folders of them")
    return list(dict.fromkeys(found))


def read_text(file: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start})") from error


def divide(text: str) -> tuple[str, str]:
    """Return the first nine tenths of a text, up to the next white space, and the rest."""
    space = re.compile(r"\s").search(text, len(text) - len(text) // VALIDATION)
    start = space.end() if space else len(text)
    return text[:start], text[start:]


def train_tokenizer(texts: Sequence[str]) -> "Tokenizer":
    """Return a byte-level BPE of the texts with an end-of-text token.

    Raises:
        ValueError: the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError("tokenising needs the package tokenizers: pip install '.[pretraining]'") from error

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
