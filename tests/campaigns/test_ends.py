"""Kills and signals: what is trained afterwards equals what is trained in peace."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from runners.records import read_all
from tests.campaigns.ledger import Ledger
from tests.campaigns.programs import Started, fault, fork, spawn
from tests.runners.c4.texts import write_texts

pytestmark = pytest.mark.campaign
GRID = [
    *("--mixer", "transformer", "--mixer.heads", "2", "--task", "in-context-recall", "--task.length", "16"),
    *("--task.train-examples", "32", "--task.eval-examples", "20", "--batch-size", "16", "--width", "16"),
    *("--mlp-width", "16", "--steps", "60", "--evaluations", "6", "--lr", "1e-3", "2e-3", "5e-3", "--together", "1"),
    *("--weight-decay", "0", "--device", "cpu", "--reference", "none", "--out", "out"),
]
"""Three runs, each trained alone, so that results do not depend on who trains which."""
RUN = [
    *("--preset", "tiny", "--mixer", "transformer", "--width", "16", "--mlp-width", "32", "--heads", "2"),
    *("--layers", "2", "--seq-len", "12", "--batch-size", "4", "--steps", "24", "--validation-tokens", "48"),
    *("--evaluations", "3", "--checkpoint-every", "3", "--data", "texts", "--device", "cpu", "--out", "out"),
    *("--tokenizer", "texts/tokenizer/tokenizer.json"),
]
TIMES = ("seconds", "steps_per_second", "together", "commit", "settings", "profile")
"""Fields of a record that may differ; of these ``profile`` is of the best seed alone, which is diagnosed later."""
ON_TWO = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "runners.c4"]
ATTEMPTS = 40
"""Starts after which a program must have come to its end."""

Start = Callable[[Path, str], Started]
"""Starts a program in a folder; what it prints goes to files of a name."""
FORKED = {
    "study": lambda folder, name: fork("mad", GRID, folder, name),
    "pretraining": lambda folder, name: fork("c4", RUN, folder, name),
}
FRESH = {
    "study": lambda folder, name: spawn(["python", "-m", "runners.mad", *GRID], folder, name),
    "pretraining": lambda folder, name: spawn(["python", "-m", "runners.c4", *RUN], folder, name),
    "pretraining on two": lambda folder, name: spawn([*ON_TWO, *RUN], folder, name),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data alone; what killed programs leave among temporary files goes with pytest's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "texts").mkdir()
    write_texts(tmp_path / "texts")
    return tmp_path


def found(out: Path) -> object:
    """The records in a results folder by the names of their folders, without times."""
    return {
        file.parent.name: {name: value for name, value in asdict(record).items() if name not in TIMES}
        for file, record in read_all(out)
    }


def in_peace(start: Start, folder: Path) -> tuple[object, float]:
    """Run a program to its end; return what it found, and how many seconds it took."""
    began = time.monotonic()
    end = start(folder, "peace").end()
    assert end is not None
    assert end.status == 0, end
    result = found(folder / "out")
    shutil.rmtree(folder / "out")
    return result, time.monotonic() - began


def finish(start: Start, folder: Path, expected: object) -> str | None:
    """Run a program after its processes were killed; return what is wrong with its results."""
    started = start(folder, "last")
    end = started.end()
    if end is None:
        started.kill()
        return "does not end after the kills"
    wrong = fault(end, [0])
    if wrong is None and found(folder / "out") != expected:
        wrong = "other results than in peace"
    leftover = [path.name for path in (folder / "out").rglob("checkpoint.safetensors")]
    shutil.rmtree(folder / "out", ignore_errors=True)
    return wrong or (f"left over: {leftover}" if leftover else None)


@pytest.mark.parametrize(
    ("way", "name", "workers"),
    [("forked", "study", 3), ("forked", "pretraining", 1), ("fresh", "study", 2), ("fresh", "pretraining on two", 1)],
)
def test_kills(way: str, name: str, workers: int, ledger: Ledger, folder: Path) -> None:
    start = {"forked": FORKED, "fresh": FRESH}[way][name]
    expected, seconds = in_peace(start, folder)

    while ledger.has_time():
        for attempt in range(ATTEMPTS):
            under_way = [start(folder, f"{attempt}-{worker}") for worker in range(workers)]
            time.sleep(ledger.dice.uniform(0.0, 1.2) * seconds)
            ledger.ends["kills"] += sum(started.end(0.0) is None for started in under_way)
            for started in under_way:
                kill(started, ledger.dice)
            if ledger.dice.random() < 0.3:
                break
        ledger.add(f"{way} {name}", finish(start, folder, expected), "whole results")


def kill(started: Started, dice: random.Random) -> None:
    """Kill a program, or one of its processes first, whose death must end the others."""
    family = started.family()
    if len(family) > 1 and dice.random() < 0.5:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(family[1:]), signal.SIGKILL)
        started.end(60.0)
    started.kill()


@pytest.mark.parametrize("name", ["study", "pretraining"])
def test_signals(name: str, ledger: Ledger, folder: Path) -> None:
    """From the first millisecond on; those before the program's first line belong to Python."""
    start = FRESH[name]
    expected, seconds = in_peace(start, folder)

    while ledger.has_time():
        started, number = start(folder, "signalled"), ledger.dice.choice([signal.SIGINT, signal.SIGTERM])
        time.sleep(ledger.dice.choice([1.0, 1.0, 0.1]) * ledger.dice.uniform(0.0, 1.1) * seconds)
        heard = started.catches(signal.SIGTERM)
        started.send(number)
        end = started.end(60.0)
        trial = f"{name}, {number.name}"

        if end is None:
            started.kill()
            ledger.add(trial, "does not end")
        elif not heard:
            ledger.ends["before the first line"] += 1
        else:
            wrong = fault(end, [0, 128 + number])
            lines = [line for line in end.err.splitlines() if line]
            if end.status and len(lines) != 1:
                wrong = wrong or f"{len(lines)} lines: {end.err[:300]!r}"
            ledger.add(trial, wrong, "finished before" if end.status == 0 else "one line")
        if ledger.dice.random() < 0.2:
            ledger.add(f"{name} afterwards", finish(start, folder, expected), "whole results")
