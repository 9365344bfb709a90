"""Published records of benchmarks, pretraining and theory: look up single figures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from runners.files import read_json

RENAMED = {"rt-triton": "rt-fused", "rt-chunked": "rt-wavefront", "rt-chunked-graph": "rt-wavefront-graph"}
"""Today's names of implementations, by their earlier names."""
ABSENT = "not measured"


@dataclass(frozen=True)
class Records:
    """The published records below a folder."""

    folder: Path

    def cells(self, file: str) -> list[dict[str, Any]]:
        """Return the cells of a benchmark with today's names; an empty list if the record is missing."""
        content = _read(self.folder / file) or {}
        return [
            {**cell, "implementation": RENAMED.get(cell["implementation"], cell["implementation"])}
            for cell in content.get("cells", [])
        ]

    def figure(self, file: str, field: str, **keys: Any) -> float | None:
        """Return a figure of the timed cell with the values ``keys``; None if there is no such cell.

        Raises:
            ValueError: several cells have these values.
        """
        found = [
            cell
            for cell in self.cells(file)
            if cell["status"] == "timed" and all(cell.get(name, value) == value for name, value in keys.items())
        ]
        whole = [cell for cell in found if cell.get("micro_batch_size") is None] or found
        if len(whole) > 1:
            raise ValueError(f"{file} has {len(whole)} cells with {keys}: name more of their values")
        return whole[0].get(field) if whole else None

    def text(self, file: str, field: str, **keys: Any) -> str:
        """Return a figure with three digits, or ``ABSENT``."""
        return number(self.figure(file, field, **keys))

    def exponent(self, file: str, **keys: Any) -> str:
        """Return the exponent of latency as a power of the length, from the fit in the record."""
        content = _read(self.folder / file) or {}
        for fit in (*content.get("lengths", []), *content.get("exponents", [])):
            name = RENAMED.get(fit["implementation"], fit["implementation"])
            if all({**fit, "implementation": name}.get(key) == value for key, value in keys.items()):
                return f"N^{fit['exponent']:.2f}"
        return ABSENT

    def theory(self, file: str, check: str) -> str:
        """Return whether the checks of a theorem hold, and their largest error."""
        found = [row for row in _read(self.folder / file) or [] if row["check"].startswith(check)]
        if not found:
            return ABSENT
        held = sum(row["holds"] for row in found)
        return f"{held} of {len(found)} checks hold, largest error {max(row['error'] for row in found):.1e}"

    def pretrained(self, file: str, **keys: Any) -> list[dict[str, Any]]:
        """Return the pretraining runs with the values ``keys``."""
        runs: list[dict[str, Any]] = _read(self.folder / file) or []
        return [run for run in runs if all(run[name] == value for name, value in keys.items())]

    def loss(self, file: str, **keys: Any) -> str:
        """Return the mean validation loss over seeds at the best learning rate."""
        rates: dict[float, list[float]] = {}
        for run in self.pretrained(file, **keys):
            rates.setdefault(run["lr"], []).append(run["validation_loss"])
        if not rates:
            return ABSENT
        rate = min(rates, key=lambda lr: fmean(rates[lr]))
        losses = rates[rate]
        return f"{fmean(losses):.3f} (lr {rate:g}, {len(losses)} seed{'s' * (len(losses) > 1)})"

    def downstream(self, file: str, items: str, figure: str, **keys: Any) -> str:
        """Return the mean over seeds of a figure on a downstream set, at the learning rate with the lowest loss."""
        runs = self.pretrained(file, **keys)
        if not runs:
            return ABSENT
        best = min(runs, key=lambda run: run["validation_loss"])["lr"]
        return f"{fmean(run['downstream'][items][figure] for run in runs if run['lr'] == best):.3f}"

    def benchmarks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield path and content of every record of a benchmark, newest first."""
        for path in sorted(self.folder.glob("*/*.json"), key=lambda path: path.parent.name[:10], reverse=True):
            content = _read(path)
            if isinstance(content, dict) and "benchmark" in content:
                yield path.relative_to(self.folder).as_posix(), content


@cache
def _read(path: Path) -> Any:
    return read_json(path)


def number(value: float | None) -> str:
    """Return a figure with three digits, thousands with commas."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
