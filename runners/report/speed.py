"""The speed section: our benchmarks, the speeds of the authors' code, and every record in full."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.report.records import RENAMED, Records, number

ANCHORS = Path(__file__).parent / "data" / "anchors.toml"
PLACE = ("phase", "width", "layers", "batch_size", "length", "runs", "recompute", "micro_batch_size")
"""Settings of a benchmark's cell, with their names in the tables."""
FIGURES = ("median_ms", "min_ms", "max_ms", "tokens_per_second", "peak_gib", "error")
HEADINGS = {
    "batch_size": "batch",
    "median_ms": "ms",
    "min_ms": "min",
    "max_ms": "max",
    "tokens_per_second": "tokens/s",
    "peak_gib": "GiB",
    "micro_batch_size": "in parts of",
    "recompute": "recomputing",
}


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A row of the table of anchors: the authors' code and ours on the same measurement.

    Attributes:
        what: the measurement, with its unit.
        authors: RT and Transformer of the authors' code, on one H200.
        paper: the paper's figure, on one H100.
        limit: bound from FLOPs or bytes.
        ours: our RT with its range, and our Transformer.
        gain: speed of our RT divided by the speed of the authors' RT.
        file: record of our figures.
        date: date of that record.
        device: device of that record.
        is_speed: whether it measures a speed, not a set-up.
    """

    what: str
    authors: tuple[str, str]
    paper: str
    limit: str
    ours: tuple[str, str]
    gain: str
    file: str
    date: str
    device: str
    is_speed: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """A record in full."""

    file: str
    date: str
    device: str
    command: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def anchors(records: Records) -> list[Anchor]:
    """Return the table of anchors."""
    return [_anchor(row, records) for row in tomllib.loads(ANCHORS.read_text(encoding="utf-8"))["row"]]


def _anchor(row: Mapping[str, Any], records: Records) -> Anchor:
    file, field = row["file"], row["field"]
    ours, theirs = (records.figure(file, field, **row["keys"], implementation=row[name]) for name in ("ours", "theirs"))
    authors = row.get("authors", "–")
    gain = "–"
    if ours is not None and authors != "–":
        then = float(authors.replace(",", ""))
        gain = f"{ours / then if field == 'tokens_per_second' else then / ours:.1f}×"

    devices = dict(records.benchmarks())
    return Anchor(
        what=row["what"],
        authors=(authors, row.get("authors_transformer", "–")),
        paper=row.get("paper", "–"),
        limit=row.get("limit", "–"),
        ours=(number(ours), number(theirs)),
        gain=gain,
        file=file,
        date=file[:10],
        device=devices.get(file, {}).get("device", "record not there"),
        is_speed=field in ("median_ms", "tokens_per_second"),
    )


def tables(records: Records) -> list[Table]:
    """Return every record of a benchmark in full."""
    return [_table(file, content) for file, content in records.benchmarks()]


def _table(file: str, content: Mapping[str, Any]) -> Table:
    cells = content["cells"]
    place = [name for name in PLACE if any(cell.get(name) not in (None, False) for cell in cells)]
    figures = [name for name in FIGURES if any(cell.get(name) is not None for cell in cells)]
    rows = [
        [
            *("" if cell.get(name) in (None, False) else str(cell[name]) for name in place),
            RENAMED.get(cell["implementation"], cell["implementation"]),
            *(("" if cell.get(name) is None else _text(name, cell[name])) for name in figures),
            "" if cell["status"] == "timed" else cell["status"],
        ]
        for cell in cells
    ]
    headings = [HEADINGS.get(name, name) for name in (*place, "implementation", *figures, "")]
    return Table(
        file=file, date=file[:10], device=content["device"], command=content["command"], headings=headings, rows=rows
    )


def _text(name: str, value: float) -> str:
    return f"{value:.1e}" if name == "error" else number(value)
