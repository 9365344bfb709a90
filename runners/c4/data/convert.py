"""Make C4-format files and a tokenizer from your own texts, so that pretraining needs no network.

    python -m runners.c4 convert my_texts book.txt notes/
    python -m runners.c4 --preset tiny --data my_texts
    python -m runners.c4 convert my_corpus manuals/ --clean --vocabulary 8000

The first nine tenths of each text are training data, and the last tenth is validation data, both in random order, so
that a run reads texts of all folders first. With ``--clean``, each file is one document. Text that is not English prose
and text that repeats an earlier document are left out, and whole manuals become validation data: folders that lie
directly in a named folder, as long as they are small enough, or else single documents. HTML files need the extra
``html``, and only their prose is read. The tokenizer is a byte-level BPE that is trained on the training data; it
encodes any text without loss.
"""

import gzip
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from runners.c4.data.cleaning import HTML, clean_documents, read_text
from runners.c4.data.prepare import BATCH_DOCUMENTS, digest_of
from runners.c4.data.sources import Split
from runners.c4.data.tokenizer import END_OF_TEXT, Tokenizer, file_beside
from runners.ending import user_errors
from runners.files import new_folder
from runners.options import parse

ENDINGS = (".txt", ".md", ".markdown", ".rst", *HTML)
"""Endings, in small or capital letters, of the files that are read from a folder and its subfolders."""
VALIDATION = 10
"""One tenth of the characters of each text is validation data."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make C4-format files and a tokenizer from text files.

    Attributes:
        folder: folder to write, which must not exist.
        texts: text files in UTF-8, and folders of .txt, .md, .markdown, .rst and .html files; hidden files and folders
            in a folder are skipped.
        clean: keep only English prose, each document and paragraph once, and hold out whole manuals for validation.
        vocabulary: largest number of tokens of the tokenizer; a small text yields fewer.
    """

    folder: Positional[Path]
    texts: Positional[tuple[Path, ...]]
    clean: bool = False
    vocabulary: int = 4096


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)
        try:
            tokens = convert(options.texts, options.folder, options.clean, options.vocabulary)
        except ImportError as error:
            raise ValueError(f"{error}: pip install -e '.[pretraining,html]'") from error
    print(f"{tokens['train']:,} tokens for training, {tokens['validation']:,} for validation: {options.folder}")
    print(f"pretrain: python -m runners.c4 --preset tiny --data {shlex.quote(str(options.folder))}")


def convert(
    texts: Sequence[Path], folder: Path, clean: bool = False, vocabulary: int = Options.vocabulary
) -> dict[Split, int]:
    """Write C4-format files of both splits and a tokenizer; after an error or Ctrl-C the folder does not exist.

    Args:
        texts: text files, and folders of them; hidden files and folders in a folder are skipped.
        folder: folder to write, which must not exist.
        clean: make a corpus of documents with ``clean_documents``, which prints how many files it leaves out.
        vocabulary: largest number of tokens of the tokenizer.

    Returns:
        Number of tokens of each split, with an end-of-text token after each text.

    Raises:
        ValueError: the folder exists; there is no text; a text is not UTF-8 or too short to be divided; too few
            documents are left.
        OSError: a file cannot be read or written.
        ImportError: the package tokenizers is missing, or a text is HTML and resiliparse is missing.
    """
    with new_folder(folder) as made:
        files = find_texts(texts)
        documents = clean_documents(files) if clean else divided_texts(files)
        tokenizer = train_tokenizer(documents["train"], vocabulary)

        file_beside(made).parent.mkdir(parents=True)
        # Its own ``save`` raises plain Exception if the disk is full.
        file_beside(made).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        tokens: dict[Split, int] = {}
        for split, parts in documents.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in parts)
            (made / f"c4-{split}.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
            batches = (parts[start : start + BATCH_DOCUMENTS] for start in range(0, len(parts), BATCH_DOCUMENTS))
            tokens[split] = len(parts) + sum(len(e) for batch in batches for e in tokenizer.encode_batch_fast(batch))
    return tokens


def find_texts(names: Sequence[Path]) -> dict[Path, Path]:
    """Return the files among ``names`` and the texts in the folders among them, without hidden ones, and their manuals.

    A file that is found under several names, also through symbolic links, is returned once, under the first. A folder
    that lies directly in a folder among ``names`` is the manual of all files below it. Other files are their own.

    Raises:
        ValueError: there is no such file or folder, or no text in a folder.
    """
    first: dict[Path, tuple[Path, Path]] = {}
    for name in names:
        files = [name] if name.is_file() else []
        for parent, folders, inside in os.walk(name):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            visible = [Path(parent, file) for file in inside if not file.startswith(".")]
            files += [file for file in visible if file.suffix.lower() in ENDINGS and file.is_file()]
        if not files:
            raise ValueError(f"no file {name}, nor a folder with {', '.join(f'*{ending}' for ending in ENDINGS)}")
        for file in sorted(files):
            first.setdefault(file.resolve(), (file, name.joinpath(*file.relative_to(name).parts[:1])))
    return dict(first.values())


def divided_texts(files: Iterable[Path]) -> dict[Split, list[str]]:
    """Return the first nine tenths of each text as training data, and the last tenths as validation data.

    Both are in an order that depends on the texts alone, as a shuffled corpus is: short runs read the first of them.

    Raises:
        ValueError: a text is not UTF-8, or the last tenths are empty.
    """
    documents: dict[Split, list[str]] = {"train": [], "validation": []}
    for file in files:
        if (text := read_text(file)) is None:
            raise ValueError(f"{file} is no text in UTF-8: save it so, name other texts, or leave it out by --clean")
        for parts, part in zip(documents.values(), divide(text), strict=True):
            parts += [part] if part.strip() else []
    if not documents["validation"]:
        raise ValueError("the texts are none or too short: their last tenth, which is the validation data, is empty")
    return {split: sorted(parts, key=digest_of) for split, parts in documents.items()}


def divide(text: str) -> tuple[str, str]:
    """Return the first nine tenths of a text, up to the next white space, and the rest.

    A text without any white space, such as one in Chinese, is cut at nine tenths.
    """
    tenths, space = len(text) - len(text) // VALIDATION, re.compile(r"\s")
    found = space.search(text, tenths)
    start = tenths if space.search(text) is None else found.end() if found else len(text)
    return text[:start], text[start:]


def train_tokenizer(texts: Sequence[str], vocabulary: int = Options.vocabulary) -> Tokenizer:
    """Return a byte-level BPE trained on texts, with at most ``vocabulary`` tokens including end-of-text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # a text that spells end-of-text does not end there
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty() and sys.stdout.isatty(),  # it writes empty lines to the standard output
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
