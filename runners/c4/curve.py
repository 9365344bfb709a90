"""The curve of a run: one row per optimizer step, in ``curve.csv``.

Rows are appended one by one, so each has its own checksum. The steps are consecutive, so a lost row is noticed.
"""

import csv
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from runners.files import CHECKSUM, checksum, damaged, write_atomically


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer step.

    Attributes:
        step: number of steps done.
        tokens: target tokens read so far by all processes together.
        loss: mean cross-entropy of the step's batch, in nats per token.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tokens_per_second: speed of all processes together.
        mfu: the model's operations per second as a share of the GPUs' peak; None if the peak is not known.
        memory_gib: largest GPU memory that this process has held, in GiB.
        seconds: wall time of all training steps so far, including those before an interruption.
        validation_loss: validation cross-entropy in nats per token; None if it was not measured at this step.
    """

    step: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float | None
    memory_gib: float
    seconds: float
    validation_loss: float | None = None


COLUMNS = [field.name for field in fields(Row)]


def read_curve(folder: Path, steps: int | None = None) -> list[Row]:
    """Read the rows of a run.

    Args:
        folder: folder of the run.
        steps: how many steps to read, from the first one. Unless given, all rows are read, except a last line that a
            kill has cut short.

    Raises:
        DamagedFileError: one of these rows is damaged or missing.
    """
    path = folder / "curve.csv"
    try:
        # A complete line ends with a newline.
        text = path.read_text() if path.exists() else ""
        header, *lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")] or [""]
        rows = _rows(header, lines[:steps])

        if [row.step for row in rows] != list(range(1, (len(rows) if steps is None else steps) + 1)):
            raise ValueError("rows are missing")
        return rows
    except (ValueError, TypeError) as error:
        raise damaged(path, error, f"delete the folder {folder} and run the same command again") from error


def _rows(header: str, lines: list[str]) -> list[Row]:
    """Convert the lines of a file; files of earlier versions have no checksums.

    Raises:
        ValueError: a line is damaged.
    """
    if header == _line([*COLUMNS, CHECKSUM]):
        lines = [_unseal(line) for line in lines]
    elif lines and header != _line(COLUMNS):
        raise ValueError("its first line does not name the columns")
    return [_row(values) for values in csv.reader(lines)]


def _row(values: list[str]) -> Row:
    """Convert the texts of a line."""
    texts = dict(zip(COLUMNS, values, strict=True))
    numbers: dict[str, Any] = {name: None if value == "" else float(value) for name, value in texts.items()}
    return Row(**{**numbers, "step": int(texts["step"]), "tokens": int(texts["tokens"])})


def write_curve(folder: Path, rows: list[Row]) -> None:
    """Write ``rows`` and replace an existing curve."""
    text = _line([*COLUMNS, CHECKSUM]) + "".join(map(_seal, rows))
    write_atomically(folder / "curve.csv", lambda path: path.write_text(text))


def append_curve(folder: Path, row: Row) -> None:
    """Append one row."""
    with (folder / "curve.csv").open("a") as file:
        file.write(_seal(row))


def _seal(row: Row) -> str:
    """Return the line of a row with its checksum."""
    text = _line(astuple(row)).rstrip("\n")
    return f"{text},{checksum(text.encode())}\n"


def _unseal(line: str) -> str:
    """Return a line without its checksum.

    Raises:
        ValueError: the checksum does not match.
    """
    text, _, found = line.rstrip("\n").rpartition(",")
    if found != checksum(text.encode()):
        raise ValueError(f"the checksum of {text!r} does not fit")
    return text


def _line(values: Any) -> str:
    """Return a line of the file."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return buffer.getvalue()
