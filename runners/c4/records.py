"""The JSON files in the folder of a run, read with a check of the entries that the programs use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.files import read_json, validated


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Settings in ``run.json`` that the programs use without ``Config``."""

    mixer: str
    seed: int
    steps: int
    data: list[str]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Entries of ``run.json`` that the programs use."""

    config: _Settings
    mixer_options: dict[str, Any]
    corpus: dict[str, Any]
    code: str


@dataclass(frozen=True, kw_only=True)
class _Rehearsal:
    """Entries of ``rehearsal.json`` that the programs use."""

    trajectory: list[float] | None
    unrehearsed_code: str
    codes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Result:
    """Entries of ``result.json`` that the programs use."""

    corpus: dict[str, Any]
    step: int
    loss: float
    validation_loss: float
    tokens_per_second: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Diverged:
    """Entries of ``diverged.json`` that the programs use."""

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class _Downstream:
    """Entries of ``downstream.json`` that the programs use."""

    items: str
    scores: dict[str, Any]


REHEARSAL = "rehearsal.json"
"""Name of the file with the losses of a run's rehearsal, and the hashes of code that trains as it does."""
KINDS: dict[str, type] = {
    "run.json": _Run,
    REHEARSAL: _Rehearsal,
    "result.json": _Result,
    "diverged.json": _Diverged,
    "downstream.json": _Downstream,
}
"""The entries that the programs use, by the name of the file."""


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of a run; None if there is no file.

    Args:
        path: the file, which has a name in ``KINDS``.

    Raises:
        DamagedFileError: it is damaged, or it is another program's.
    """
    if not path.exists():
        return None

    content: dict[str, Any] = read_json(path)
    validated(path, KINDS[path.name], content)
    return content
