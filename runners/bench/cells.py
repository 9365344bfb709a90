"""Cells of a benchmark, which are the figures to measure, and what is measured for a cell."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, TypeVar

OUT_OF_MEMORY = "skipped: out of memory"
"""Status of a cell for which there was too little memory."""


class Cell(Protocol):
    """One figure to measure: an implementation at one place in the grid of a benchmark."""

    @property
    def implementation(self) -> str:
        """Name of the implementation."""

    @property
    def group(self) -> Hashable:
        """Key that is equal for cells whose implementations are timed in turns."""


C = TypeVar("C", bound=Cell)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured for a cell.

    Attributes:
        status: "timed", or the reason why there is no time: "skipped: ...", "wrong: ..." or "failed: ...".
        seconds: mean seconds of a pass, for each repeat.
        passes: passes in one repeat.
        peak_gib: peak memory of a pass with its inputs and all that it keeps; None on the CPU.
        setup_seconds: seconds of building, of the first pass, and of the capture.
        facts: what else is stored, by name.
    """

    status: str = "timed"
    seconds: list[float] = field(default_factory=list)
    passes: int | None = None
    peak_gib: float | None = None
    setup_seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_error(self) -> bool:
        """Whether the implementation was wrong or raised an error, lack of memory excepted."""
        return self.status.startswith(("wrong", "failed"))


def grouped(cells: Iterable[C]) -> Iterator[list[C]]:
    """Yield lists of neighbours that belong to the same group."""
    return (list(together) for _, together in groupby(cells, key=lambda cell: cell.group))
