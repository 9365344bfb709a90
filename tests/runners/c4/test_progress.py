"""What pretraining prints into a log file, and what it says of the text that it is given."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runners import progress as subject
from runners.c4.checkpoints import StepRow
from runners.c4.config import Config
from runners.c4.data.corpus import FEW_VALIDATION_TOKENS, Corpus, Manifest, Part, Shard
from runners.c4.progress import Progress, with_bits

DESCRIPTION: dict[str, Any] = {
    "config": {"steps": 100, "batch_size": 8, "seq_len": 32},
    "corpus": {"bytes_per_token": 4.0},
}


def row(step: int, loss: float, **more: Any) -> StepRow:
    """A step of 1000 tokens that took two seconds."""
    figures = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 500.0, "mfu": None, "memory_gib": 0.0}
    return StepRow(step=step, tokens=1000 * step, loss=loss, seconds=2.0 * step, **(figures | more))


def printed(rows: list[StepRow]) -> list[str]:
    text = io.StringIO()
    progress = Progress(Console(file=text, width=200, force_terminal=False), Config())
    progress.began("run", DESCRIPTION, None)
    for each in rows:
        progress.stepped(each)
    progress.close()
    return [line for line in text.getvalue().splitlines() if line.startswith("step ")]


def test_a_log_has_lines_by_time_with_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed([row(1, 4.0), row(2, 3.0)]) == []  # ten seconds have not passed
    evaluated = row(3, 2.0, validation_loss=2.0 * math.log(2))
    assert printed([row(1, 4.0), row(2, 3.0), evaluated]) == []
    monkeypatch.setattr(subject, "SECONDS_TO_FIRST_LINE", 0.0)
    assert printed([row(1, 4.0), row(2, 3.0)]) == [
        "step      1: training loss 4.000, lr 0.001, 500 tokens/s, 3 min left"
    ]
    monkeypatch.setattr(subject, "SECONDS_BETWEEN_LINES", 0.0)
    assert printed([evaluated, row(4, 2.0)])[1] == (
        "step      4: training loss 2.000, validation 1.386 nats per token = 0.500 bits per byte at step 3, lr 0.001, "
        "500 tokens/s, 3 min left"
    )


def test_the_training_loss_and_the_speed_are_means_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "SECONDS_TO_FIRST_LINE", 0.0)
    monkeypatch.setattr(subject, "SECONDS_BETWEEN_LINES", 0.0)
    rows = [row(step, 9.0, tokens_per_second=1.0) for step in range(1, 3)]
    rows += [row(step, 2.0 + step % 2) for step in range(3, 53)]
    last = printed(rows)[-1]
    assert last == "step     52: training loss 2.500, lr 0.001, 500 tokens/s, 96 s left"


def test_bits_a_byte_are_left_out_where_the_bytes_are_unknown() -> None:
    assert with_bits(1.0, None) == "1.000 nats per token"


def corpus(train: int, validation: int, asked: int, complete: bool = True) -> Corpus:
    """A corpus of so many tokens, of which a run asks for ``asked`` to train and for all to validate."""

    def part(tokens: int) -> Part:
        shard = Shard(name="", tokens=tokens, tokens_sha256="", documents_sha256="")
        return Part(shards=(shard,), complete=complete)

    splits = {"train": part(train), "validation": part(validation)}
    manifest = Manifest(tokenizer="", vocab_size=9, end_of_text=0, sources={}, splits=splits)  # type: ignore[arg-type]
    return Corpus(folder=Path(), manifest=manifest, asked={"train": asked, "validation": validation})


def test_unread_text_and_a_tiny_validation_split_are_said() -> None:
    enough = FEW_VALIDATION_TOKENS + 1
    assert corpus(1_000_001, enough, asked=1_000_001).warnings(64) == []
    assert corpus(1_600_000, enough, asked=51_201).warnings(64) == [
        "training reads the first 51,200 of 1,600,000 tokens of the text: more --steps read more"
    ]
    (line,) = corpus(1_600_000, enough, asked=51_201, complete=False).warnings(64)
    assert "of more than 1,600,000 tokens" in line
    (line,) = corpus(1_000_001, 2049, asked=1_000_001).warnings(64)
    assert line.startswith(
        "validation reads 2,048 tokens, which makes its loss uncertain: give more --validation-tokens"
    )
