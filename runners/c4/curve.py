"""The curve of a run: one row for each optimizer step, in ``curve.csv``."""

import csv
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from runners.files import DamagedFileError, write_atomically


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer step.

    Attributes:
        step: number of steps done.
        tokens: target tokens read so far by all processes together.
        loss: mean cross-entropy of the step's batch, in nats a token.
        lr: learning rate of the step.
        grad_norm: norm of the gradient before clipping.
        tokens_per_second: speed of all processes together.
        mfu: the model's operations a second as a share of the GPUs' peak; None if the peak is not known.
        memory_gib: largest memory that this process has held on its GPU, in GiB.
        seconds: wall time of all training steps so far, also those before an interruption.
        validation_loss: validation cross-entropy in nats a token; None if it was not measured at this step.
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


def read_curve(folder: Path) -> list[Row]:
    """Read the rows of a run; a last line that a kill cut short is left out.

    Raises:
        DamagedFileError: another line is damaged.
    """
    path = folder / "curve.csv"
    if not path.exists():
        return []

    # A whole line ends with a newline.
    try:
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [_row(values) for values in csv.DictReader(lines)]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): delete it and run the same command again") from error


def _row(values: dict[str, str]) -> Row:
    """Convert the texts of a line."""
    numbers: dict[str, Any] = {name: None if value == "" else float(value) for name, value in values.items()}
    return Row(**{**numbers, "step": int(values["step"]), "tokens": int(values["tokens"])})


def write_curve(folder: Path, rows: list[Row]) -> None:
    """Write ``rows`` and replace an existing curve."""
    text = "".join(map(_line, [COLUMNS, *map(astuple, rows)]))
    write_atomically(folder / "curve.csv", lambda path: path.write_text(text))


def append_curve(folder: Path, row: Row) -> None:
    """Append one row."""
    with (folder / "curve.csv").open("a") as file:
        file.write(_line(astuple(row)))


def _line(values: Any) -> str:
    """Return a line of the file."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return buffer.getvalue()
