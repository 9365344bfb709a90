"""Make C4-format files and a tokenizer from your own texts, so that pretraining needs no network.

    python -m runners.c4 convert my_texts book.txt notes/
    python -m runners.c4 --preset tiny --data my_texts
    python -m runners.c4 convert my_corpus manuals/ --clean --vocabulary 8000

From HTML files only the prose is read, from other files all of the text. The first nine tenths of each text are
training data, and the last tenth is validation data, both in random order, so that a run reads texts of all folders
first. With ``--clean``, each file is one document. Text that is not English prose and text that repeats an earlier
document are left out, and whole documents become validation data. The tokenizer is a byte-level BPE that is trained on
the training data; it encodes any text without loss.
"""

import gzip
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from runners.c4.corpus.cleaning import HTML, Page, fault_of, read_clean, read_text
from runners.c4.corpus.duplicates import without_near_duplicates, without_repeats
from runners.c4.corpus.packing import BATCH_DOCUMENTS, digest_of
from runners.c4.corpus.sources import Split, find_files
from runners.c4.corpus.tokenizer import END_OF_TEXT, file_beside
from runners.cli import check_out, cli, shown_as
from runners.ending import user_errors
from runners.processes import mapped
from runners.progress import bar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENDINGS = (".txt", ".md", ".markdown", ".rst", *HTML)
"""Endings, in small or capital letters, of the files that are read from a folder and its subfolders."""
NAMED = 5
"""Number of files that an error names."""
VALIDATION = 10
"""One tenth of the characters of each text is validation data."""
HELD_OUT = 40
"""With ``--clean``, one of forty documents is validation data."""
VOCABULARY = 4096
"""Default size of the tokenizer's vocabulary; a small text yields fewer tokens."""
LEAST_VOCABULARY = 257
"""Tokens for every byte, and end-of-text."""
LARGEST_VOCABULARY = 1_000_000
"""More than any published tokenizer has; the library reserves memory for all of them at the start."""
MANY = 500
"""Number of files from which several processes read faster than one."""
CHUNK = 50
"""Number of files that such a process takes at a time."""
KINDS = 4
"""Largest number of kinds of files that are named among those left out."""
Documents = dict[Split, list[str]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make C4-format files and a tokenizer from text files.

    Attributes:
        folder: folder to write, which must not exist.
        texts: text files in UTF-8, and folders of .txt, .md, .markdown, .rst and .html files; hidden files and folders
            in a folder are skipped.
        clean: keep only English prose, each document and paragraph once, and hold out whole documents for validation.
        vocabulary: largest number of tokens of the tokenizer.
    """

    folder: Annotated[tyro.conf.Positional[Path], shown_as("FOLDER")]
    texts: Annotated[tyro.conf.Positional[tuple[Path, ...]], shown_as("TEXT ...")]
    clean: bool = False
    vocabulary: int = VOCABULARY


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        default = Options(folder=tyro.MISSING, texts=tyro.MISSING)
        options = cli(Options, default, arguments, "convert")
        tokens = convert(options.texts, options.folder, options.clean, options.vocabulary)

    print(read_files(options.texts))
    print(f"{tokens['train']:,} tokens for training, {tokens['validation']:,} for validation: {options.folder}")
    print(f"pretrain: python -m runners.c4 --preset tiny --data {shlex.quote(str(options.folder))}")


def convert(texts: Sequence[Path], folder: Path, clean: bool = False, vocabulary: int = VOCABULARY) -> dict[Split, int]:
    """Write C4-format files of both splits and a tokenizer; after an error or Ctrl-C the folder does not exist.

    Args:
        texts: text files, and folders of them; hidden files and folders in a folder are skipped.
        folder: folder to write, which must not exist.
        clean: make a corpus of documents with ``clean_documents``, which prints how many files it leaves out.
        vocabulary: largest number of tokens of the tokenizer.

    Returns:
        Number of tokens of each split.

    Raises:
        ValueError: the folder exists or cannot be written; there is no text; a text is not UTF-8 or too short to be
            divided; too few documents are left.
        OSError: a file cannot be read or written, or the system ended a process that read.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: name a new folder")
    check_out(folder, "FOLDER")
    if vocabulary < LEAST_VOCABULARY:
        raise ValueError(f"--vocabulary {vocabulary} must be at least {LEAST_VOCABULARY}: every byte, and end-of-text")
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"--vocabulary {vocabulary} must be at most {LARGEST_VOCABULARY}")
    files = find_texts(texts)
    documents = clean_documents(files) if clean else divided_texts(files)
    tokenizer = train_tokenizer(documents["train"], vocabulary)

    # Write the files into a temporary folder, then rename it.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made = Path(temporary) / folder.name
        file_beside(made).parent.mkdir(parents=True)
        for split, parts in documents.items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in parts)
            (made / f"c4-{split}.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        # Its own ``save`` raises plain Exception if the disk is full.
        file_beside(made).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        tokens = {split: count_tokens(tokenizer, parts) for split, parts in documents.items()}
        made.rename(folder)

    return tokens


def divided_texts(files: Sequence[Path]) -> Documents:
    """Return the first nine tenths of each text as training data, and the last tenths as validation data.

    Both are in an order that depends on the texts alone, as a shuffled corpus is: short runs read the first of them.

    Raises:
        ValueError: texts are not UTF-8, or the last tenths are empty.
    """
    documents: Documents = {"train": [], "validation": []}
    faults = []
    for file in files:
        try:
            parts = divide(read_text(file))
        except ValueError as error:
            faults.append(str(error))
            continue
        for split, part in zip(documents, parts, strict=True):
            documents[split] += [part] if part.strip() else []

    if faults:
        more = [f"{len(faults) - NAMED:,} more files"] if len(faults) > NAMED else []
        raise ValueError(
            f"{'; '.join([*faults[:NAMED], *more])}: save as UTF-8, name other texts, or leave these out by --clean"
        )
    if not documents["validation"]:
        raise ValueError("the texts are too short: their last tenth, which is the validation data, is empty")
    return {split: sorted(parts, key=digest_of) for split, parts in documents.items()}


def clean_documents(files: Sequence[Path]) -> Documents:
    """Return the English prose of files, each document and paragraph once; whole documents are validation data.

    Print how many files were left out, and why. No validation document is a near-duplicate of a training document,
    because all near-duplicates are removed. The choice of the validation documents depends only on the texts.

    Raises:
        ValueError: fewer than two documents are left.
    """
    pages = read_pages(files)
    left_out = Counter(page.reason for page in pages if page.reason)
    texts = [page.text for page in pages if not page.reason]

    # Remove near-duplicates first, so that their paragraphs do not count as repeated, and once more at the end, because
    # documents may resemble each other only without repeated paragraphs.
    unique = without_near_duplicates(texts)
    shortened = [text for text in without_repeats(unique) if not fault_of(text)]
    documents = without_near_duplicates(shortened)
    left_out["too little without repeated paragraphs"] = len(unique) - len(shortened)
    left_out["a near-duplicate"] = len(texts) - len(unique) + len(shortened) - len(documents)

    kept = f"{len(documents):,} of {len(files):,} files kept"
    print("; ".join([kept, *(f"{count:,} {reason}" for reason, count in left_out.most_common() if count)]))
    if len(documents) < 2:
        raise ValueError("too few documents are left for two splits: name more texts, or leave --clean out")

    ranked = sorted(documents, key=digest_of)
    validation = ranked[: max(1, len(ranked) // HELD_OUT)]
    held_out = set(validation)
    return {"train": [text for text in documents if text not in held_out], "validation": validation}


def read_pages(files: Sequence[Path]) -> list[Page]:
    """Return the prose of each file; many files are read by one process per core.

    Raises:
        OSError: a file cannot be read, or the system ended a process that read.
    """
    if len(files) < MANY:
        return list(map(read_clean, files))
    try:
        with mapped(read_clean, files, chunk=CHUNK) as pages:
            return list(bar(pages, "reading texts", len(files)))
    except BrokenProcessPool as error:
        reason = "a process that read texts was ended, perhaps for lack of memory: free some, or name fewer texts"
        raise ChildProcessError(reason) from error


def count_tokens(tokenizer: "Tokenizer", texts: Sequence[str]) -> int:
    """Return the total number of tokens of texts, each with an end-of-text token, as in the tokenised corpus."""
    tokenizer.encode_special_tokens = True  # a text that spells end-of-text does not end there
    waiting, tokens = iter(texts), len(texts)
    while batch := list(islice(waiting, BATCH_DOCUMENTS)):
        tokens += sum(map(len, tokenizer.encode_batch_fast(batch)))
    return tokens


def find_texts(names: Sequence[Path]) -> list[Path]:
    """Return the files among ``names`` and those in the folders among them.

    A file that is found under several names, also through symbolic links, is returned once, under the first.

    Raises:
        ValueError: there is no such file or folder, or no text in a folder.
    """
    found: list[Path] = []
    for name in names:
        if not name.exists():
            raise ValueError(f"no file or folder {name}")
        files = [name] if name.is_file() else texts_in(name)
        if not files:
            advice = "name the files"
            with suppress(ValueError):
                find_files([str(name)])
                advice = "its files are named as those of C4, which need no conversion: give the folder to --data"
            raise ValueError(f"no {', '.join(f'*{ending}' for ending in ENDINGS)} in the folder {name}: {advice}")
        found += files
    if not found:
        raise ValueError("no texts: name text files, or folders of them")

    first: dict[Path, Path] = {}
    for file in found:
        first.setdefault(file.resolve(), file)
    return list(first.values())


def texts_in(folder: Path) -> list[Path]:
    """Return the texts in a folder and its subfolders, sorted, without hidden files and those in hidden folders."""
    return sorted(filter(is_text, visible_in(folder)))


def is_text(file: Path) -> bool:
    """Return whether a file has an ending of texts."""
    return file.suffix.lower() in ENDINGS


def visible_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, without hidden files and those in hidden folders."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = (Path(parent, name) for name in names if not name.startswith("."))
        yield from (file for file in visible if file.is_file())


def read_files(names: Sequence[Path]) -> str:
    """Return how many files are read, and which kinds of files in the folders are not."""
    count = len(find_texts(names))
    others = [file for name in names if name.is_dir() for file in visible_in(name) if not is_text(file)]
    kinds = ", ".join(sorted({file.suffix.lower() or "without an ending" for file in others})[:KINDS])
    left_out = f", {len(others)} of other kinds left out ({kinds})" if others else ""
    return f"{count} file{'s' * (count > 1)} read{left_out}"


def divide(text: str) -> tuple[str, str]:
    """Return the first nine tenths of a text, up to the next white space, and the rest.

    A text without any white space, such as one in Chinese, is cut at nine tenths.
    """
    tenths, space = len(text) - len(text) // VALIDATION, re.compile(r"\s")
    found = space.search(text, tenths)
    start = tenths if space.search(text) is None else found.end() if found else len(text)
    return text[:start], text[start:]


def train_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> "Tokenizer":
    """Return a byte-level BPE trained on texts, with at most ``vocabulary`` tokens including end-of-text.

    Raises:
        ValueError: the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError("tokenising needs the package tokenizers: pip install -e '.[pretraining]'") from error

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty() and sys.stdout.isatty(),  # it writes empty lines to the standard output
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
