"""Flipped bytes and truncations of every file that is read back: no reader uses them in silence."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.campaigns.findings import found
from tests.campaigns.ledger import Ledger
from tests.campaigns.programs import End, fault, fork, spawn
from tests.campaigns.small import DIAGNOSTICS, LONGER, PRETRAINING, words

pytestmark = pytest.mark.campaign
PYTHON = """
import sys
import runners.mad as mad
sys.excepthook = lambda kind, error, traceback: print(f"error: {error}", file=sys.stderr)
result = mad.study("transformer", "in-context-recall", lr=[1e-3, 5e-3], weight_decay=[0.0], batch_size=16, width=16,
    mlp_width=16, steps=4, evaluations=2, device="cpu", out="studied", quiet=True,
    mixer_options={"heads": 2}, task_options={"length": 16, "train_examples": 32, "eval_examples": 20})
print(result.test, result.curves().to_string(), [float(p.sum()) for p in result.model.parameters()])
"""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A command that reads files back.

    Attributes:
        files: patterns of the files, below the folder in which the command runs.
        read: runs the command in a folder.
        result: what it has found, which damage must not change in silence.
    """

    files: tuple[str, ...]
    read: Callable[[Path], End | None]
    result: Callable[[Path, End], object] = lambda folder, end: end.out


def program(name: str, *arguments: str) -> Callable[[Path], End | None]:
    return lambda folder: fork(name, arguments, folder).end()


READERS = {
    "study again": Reader(
        files=("studied/optuna.journal", "studied/studies/*/*/*", "studied/studies/*/*.json"),
        read=program("mad", *words(DIAGNOSTICS, out="studied")),
    ),
    "study in Python": Reader(
        files=("studied/optuna.journal", "studied/studies/*/*/*"),
        read=lambda folder: spawn(["python", "-c", PYTHON], folder).end(),
    ),
    "study resumed": Reader(
        files=("stopped/optuna.journal", "stopped/studies/*/*/*"),
        read=program("mad", *words(DIAGNOSTICS, out="stopped", steps=LONGER, evaluations="40")),
        result=lambda folder, end: found(folder / "stopped"),
    ),
    "compare": Reader(
        files=("studied/studies/*/*/record.json",),
        read=program("compare", "--out", "studied", "--reference", "none"),
    ),
    "pretraining again": Reader(
        files=("pretrained/c4/*/*.*", "pretrained/corpora/*/*"),
        read=program("c4", *words(PRETRAINING, out="pretrained")),
        result=lambda folder, end: found(folder / "pretrained" / "c4"),
    ),
    "pretraining resumed": Reader(
        files=("killed/c4/*/*.*", "killed/c4/*/checkpoints/*", "killed/corpora/*/*"),
        read=program("c4", *words(PRETRAINING, out="killed")),
        result=lambda folder, end: found(folder / "killed" / "c4"),
    ),
    "generate": Reader(
        files=("pretrained/c4/*/checkpoints/*", "pretrained/c4/*/tokenizer.json"),
        read=program("c4", "generate", "run", "--prompt", "kan", "--temperature", "0", "--device", "cpu"),
    ),
}


def damage(path: Path, dice: random.Random) -> str:
    """Flip a bit of a file, or cut it, or empty it; return what was done."""
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    match dice.choice(["flip", "flip", "flip", "cut", "cut", "empty", "zeros"]):
        case "flip":
            bit = dice.randrange(8)
            content[at] ^= 1 << bit
            done = f"bit {bit} of byte {at} of {len(content)} flipped"
        case "cut":
            del content[at:]
            done = f"cut after byte {at}"
        case "zeros":
            content[at : at + 4096] = bytes(len(content[at : at + 4096]))
            done = f"zeros from byte {at}"
        case _:
            content.clear()
            done = "emptied"
    path.write_bytes(content)
    return done


def judged(end: End | None, path: Path, expected: object, result: Callable[[End], object]) -> tuple[str | None, str]:
    """Return what is wrong with what a reader did with a damaged file, and how it ended."""
    if end is None:
        return "does not end", ""
    if (wrong := fault(end, [0, 1, 2])) is not None:
        return wrong, ""

    named = path.name in end.out + end.err
    if end.status:
        return (None if named else f"ends without the name of the file: {end.last}"), "refused"
    if result(end) == expected:
        return None, "whole results"
    return (None if named else f"other results in silence: {end.last}"), "said, and done without"


@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, ledger: Ledger, tmp_path: Path, results: Path) -> None:
    reader, folder = READERS[name], tmp_path / "folder"
    shutil.copytree(results, folder, symlinks=True)
    end = reader.read(folder)
    assert end is not None
    assert end.status == 0, end
    expected = reader.result(folder, end)

    while ledger.has_time():
        shutil.rmtree(folder)
        shutil.copytree(results, folder, symlinks=True)
        paths = sorted(path for pattern in reader.files for path in folder.glob(pattern) if path.is_file())
        path = ledger.dice.choice([path for path in paths if path.stat().st_size])
        done = damage(path, ledger.dice)
        end = reader.read(folder)
        wrong, how = judged(end, path, expected, partial(reader.result, folder))
        ledger.add(f"{path.relative_to(folder)} {done}", wrong, how)
