"""A run of a benchmark: its cells, how each is built and what it is expected to take, and what was measured so far."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from runners.bench.accuracy import Check, Oracle
from runners.bench.cells import C, Figures
from runners.bench.clock import Clock
from runners.bench.implementations import Implementation, Setting
from runners.bench.options import LEAST_REPEATS, CommonOptions
from runners.bench.preparation import WARM_UPS
from runners.bench.work import Work

O = TypeVar("O", bound=CommonOptions)


class Bench(ABC, Generic[O, C]):
    """All cells of a run of a benchmark, and what was measured so far. The scheduler fills in what is measured.

    Args:
        options: options of the run.
        implementations: what is timed, by name.
        device: where it is timed.
        command: command line, for the record.

    Attributes:
        cells: all cells, in the order of the record.
        started: ``time.monotonic()`` at the start of the run.
        complete: whether all cells were measured or skipped.
        checks: outcome of each check, by implementation and setting.
        figures: what was measured, by cell.
        warm_ups: seconds of an eager pass, by cell.
    """

    name: str
    cells: list[C]
    cold: ClassVar[bool] = False
    """Whether a group is measured before its check, so that its first passes include the compilation of kernels."""

    def __init__(
        self, options: O, implementations: dict[str, Implementation], device: torch.device, command: str
    ) -> None:
        self.options = options
        self.implementations = implementations
        self.command = command
        self.clock = Clock(device)
        self.started = time.monotonic()
        self.complete = False
        self.checks: dict[tuple[str, Setting], Check] = {}
        self.figures: dict[C, Figures] = {}
        self.warm_ups: dict[C, float] = {}

    @abstractmethod
    def groups(self) -> Iterable[Sequence[C]]:
        """Yield the cells in groups that take turns, in the order of measurement.

        The next group is asked for after the groups before it were measured.
        """

    @abstractmethod
    def describe(self, cell: C) -> str:
        """Return a description of the cell in a few words."""

    @abstractmethod
    def setting(self, cell: C) -> Setting:
        """Return the shape of the layers for which the cell's implementation is checked."""

    @abstractmethod
    def oracle(self, cell: C) -> Oracle:
        """Return the oracle that the cell's implementation is checked against."""

    @abstractmethod
    def build(self, cell: C) -> Work:
        """Return the work to time."""

    @abstractmethod
    def growth(self, other: C, cell: C) -> float | None:
        """Return a lower bound of the time of ``cell`` over that of ``other``; None if there is none."""

    def is_captured(self, cell: C) -> bool:
        """Return whether a pass is captured as one CUDA graph."""
        return self.implementations[cell.implementation].graph

    def pass_limit(self, cell: C) -> float:
        """Return the seconds that an eager pass may take."""
        return self.options.limit

    def expected_pass(self, cell: C) -> float:
        """Return a lower bound of the seconds of an eager pass, from the cells that were warmed up; 0 if unknown."""
        grown = (seconds * (self.growth(other, cell) or 0.0) for other, seconds in self.warm_ups.items())
        return max(grown, default=0.0)

    def expected_total(self, cell: C) -> float:
        """Return the seconds that the cell is expected to take with the fewest repeats."""
        return self.expected_pass(cell) * (WARM_UPS + LEAST_REPEATS)

    def check_of(self, cell: C) -> Check:
        """Return the outcome of the check of the cell's implementation, empty before the check."""
        return self.checks.get((cell.implementation, self.setting(cell)), Check(error=None, problem=None))

    @property
    def cut(self) -> str | None:
        """What the budget has left out of the repeats, in a sentence; None if it was nothing."""
        repeats = [len(figures.seconds) for figures in self.figures.values() if figures.seconds]
        fewer = [number for number in repeats if number < self.options.repeats]
        if not fewer:
            return None
        counted = f"{len(fewer)} of {len(repeats)} figures"
        asked = f"{self.options.repeats:,} repeats, at least {min(fewer):,}"
        return f"--budget {self.options.budget:g} was spent: {counted} have fewer than {asked}: raise --budget"

    @property
    def failed(self) -> bool:
        """Whether an implementation was wrong or raised an error, lack of memory excepted."""
        return any(figures.is_error for figures in self.figures.values())
