"""What benchmarks have in common: cells timed in turns, errors that stay in their cell, a budget, and the command."""

import argparse
import contextlib
import gc
import math
import os
import re
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runners.bench.accuracy import Check, Oracle, check
from runners.bench.timing import WARM_UPS, Clock, Implementation, Ready, Setting, TooSlowError, Work, prepare
from runners.cli import cli, not_understood, user_errors
from runners.device import device_name, find_devices
from runners.files import write_json

LEAST_REPEATS = 5
CHEAP_SECONDS = 1.0
OUT_OF_MEMORY = "skipped: out of memory"
OUT_OF_MEMORY_SAID = re.compile("out of memory|can't allocate memory")


class Limits(Protocol):
    """Options of every benchmark."""

    @property
    def repeats(self) -> int:
        """Repeats of each figure."""

    @property
    def limit(self) -> float:
        """Seconds; what takes longer for one eager pass is skipped."""

    @property
    def budget(self) -> float:
        """Seconds after which only what takes less than a second altogether is still timed."""

    @property
    def device(self) -> str:
        """Device to choose."""

    @property
    def out(self) -> Path:
        """Folder of results."""


class Place(Protocol):
    """One figure to measure."""

    @property
    def implementation(self) -> str:
        """Name of what is timed."""

    @property
    def group(self) -> Hashable:
        """What its implementations, timed in turns, have in common."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured for a cell: mean seconds of a pass in each repeat, or the reason why there are none."""

    status: str = "timed"
    seconds: list[float] = field(default_factory=list)
    passes: int | None = None
    peak_gib: float | None = None
    setup_seconds: float | None = None
    facts: dict[str, int] = field(default_factory=dict)


O = TypeVar("O", bound=Limits)
C = TypeVar("C", bound=Place)


class Bench(ABC, Generic[O, C]):
    """All cells of a run of a benchmark and what was measured so far."""

    name: str
    cells: list[C]

    def __init__(
        self, options: O, implementations: dict[str, Implementation], device: torch.device, command: str
    ) -> None:
        self.options, self.implementations, self.command = options, implementations, command
        self.clock = Clock(device)
        self.started = time.monotonic()
        self.complete = False
        self.checks: dict[tuple[str, Setting], Check] = {}
        self.figures: dict[C, Figures] = {}
        self.warm_ups: dict[C, float] = {}

    @abstractmethod
    def describe(self, cell: C) -> str:
        """A cell in a few words."""

    @abstractmethod
    def setting(self, cell: C) -> Setting:
        """Shape of the cell's layers, for which its implementation is checked."""

    @abstractmethod
    def oracle(self, cell: C) -> Oracle:
        """What the cell's implementation is checked against."""

    @abstractmethod
    def build(self, cell: C) -> Work:
        """What to time."""

    @abstractmethod
    def groups(self) -> Iterable[Sequence[C]]:
        """Cells that take turns, in the order of measurement; each is asked for when those before are measured."""

    @abstractmethod
    def growth(self, other: C, cell: C) -> float | None:
        """By how much at least ``cell`` takes longer than ``other``; None where neither contains the other."""

    def captured(self, cell: C) -> bool:
        """Whether a pass is captured as one CUDA graph."""
        return self.implementations[cell.implementation].graph

    def limit(self, cell: C) -> float:
        """Seconds that an eager pass may take."""
        return self.options.limit

    @property
    def failed(self) -> bool:
        """Whether an implementation was wrong or raised an error other than for lack of memory."""
        return any(figures.status.startswith(("wrong", "failed")) for figures in self.figures.values())

    def outcome(self, cell: C) -> Check:
        """The check of a cell's implementation."""
        return self.checks[cell.implementation, self.setting(cell)]

    def expected(self, cell: C) -> float:
        """Least seconds of an eager pass, by those of the smaller cells that it contains."""
        grown = (seconds * (self.growth(other, cell) or 0.0) for other, seconds in self.warm_ups.items())
        return max(grown, default=0.0)

    def cost(self, cell: C) -> float:
        """Seconds that a cell is expected to take altogether."""
        return self.expected(cell) * (WARM_UPS + self.options.repeats)

    def run(self, advance: Callable[[str], None], save: Callable[[], None]) -> None:
        """Measure group by group, each implementation once it is checked; ``save`` is called after each group."""
        gc.freeze()  # what is there already: collections between and inside timed passes need not look at it
        for cells in self.groups():
            self._check(cells, advance)
            self._measure(cells, advance)
            save()
        self.complete = True
        gc.unfreeze()
        save()

    def _check(self, cells: Sequence[C], advance: Callable[[str], None]) -> None:
        for cell in cells:
            implementation, key = self.implementations[cell.implementation], (cell.implementation, self.setting(cell))
            if key in self.checks:
                continue
            if not implementation.has_kernel(key[1], self.clock.device):
                self.checks[key] = Check(error=None, problem="skipped: no kernel for this shape")
            else:
                advance(f"checking {implementation.label}")
                try:
                    self.checks[key] = check(implementation, self.oracle(cell), self.clock)
                except Exception as problem:
                    self.checks[key] = Check(error=None, problem=_describe(problem))
                self._free()

    def _measure(self, cells: Sequence[C], advance: Callable[[str], None]) -> None:
        """Measure together, then alone those for which there was too little memory beside the others."""
        short = self._take_turns(cells, advance)
        self._free()
        for cell in short if len(cells) > 1 else ():
            del self.figures[cell]
            self._measure([cell], advance)

    def _take_turns(self, cells: Sequence[C], advance: Callable[[str], None]) -> list[C]:
        """Prepare all cells and time each once a round; returns those that ran out of memory."""
        short: list[C] = []
        ready: dict[C, Ready] = {}
        for cell in cells:
            reason = None
            advance(f"{self.describe(cell)}: {self.implementations[cell.implementation].label}")
            with self._errors_of(cell, short):
                if reason := self._reason_to_skip(cell):
                    self.figures[cell] = Figures(status=reason)
                else:
                    ready[cell] = prepare(partial(self.build, cell), self.captured(cell), self.clock, self.limit(cell))
                    self.warm_ups[cell] = ready[cell].warm_up
            if cell in self.figures and not reason:
                self._free()  # what an error left behind, and not before the error itself is gone
        seconds: dict[C, list[float]] = {cell: [] for cell in ready}
        for _ in range(self.options.repeats):
            for cell in ready:
                if cell not in self.figures:
                    with self._errors_of(cell, short):
                        seconds[cell].append(self.clock.seconds(ready[cell].work.run, ready[cell].passes))
        for cell, (work, _, passes, peak_gib, setup) in ready.items():
            if cell not in self.figures:
                with self._errors_of(cell, short):
                    self.figures[cell] = (
                        Figures(
                            seconds=seconds[cell],
                            passes=passes,
                            peak_gib=peak_gib,
                            setup_seconds=setup,
                            facts=dict(work.facts),
                        )
                        if work.finite()
                        else Figures(status="wrong: not finite")
                    )
        return short

    @contextlib.contextmanager
    def _errors_of(self, cell: C, short: list[C]) -> Iterator[None]:
        """Note an error as the outcome of a cell: one implementation must not keep the others from being timed."""
        try:
            yield
        except TooSlowError as slow:
            self.warm_ups[cell] = slow.seconds
            self.figures[cell] = Figures(status=self._too_slow(cell))
        except Exception as problem:
            out_of_memory = _is_out_of_memory(problem)
            self.figures[cell] = Figures(status=OUT_OF_MEMORY if out_of_memory else _describe(problem))
            if out_of_memory:
                short.append(cell)

    def _too_slow(self, cell: C) -> str:
        return f"skipped: over {self.limit(cell):g} s"

    def _reason_to_skip(self, cell: C) -> str | None:
        problem = self.outcome(cell).problem
        if problem:
            return problem if problem.startswith(("failed", "skipped")) else f"wrong: {problem}"
        expected = self.expected(cell)
        if expected > self.limit(cell):
            return self._too_slow(cell)
        cost = self.cost(cell)
        if cost > CHEAP_SECONDS and time.monotonic() - self.started + cost > self.options.budget:
            return f"skipped: budget of {self.options.budget:g} s spent"
        return None

    def _free(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if self.clock.cuda:
            with contextlib.suppress(RuntimeError):  # after an error of the device, which is reported where it arose
                torch.cuda.empty_cache()


def grouped(cells: Iterable[C]) -> Iterator[list[C]]:
    """Neighbours of the same group together."""
    return (list(together) for _, together in groupby(cells, key=lambda cell: cell.group))


B = TypeVar("B", bound=Bench[Any, Any])


def run_benchmark(
    name: str,
    arguments: Sequence[str],
    parse: Callable[[Sequence[str]], Any],
    bench_class: Callable[[Any, torch.device, str], B],
    to_dict: Callable[[B], dict[str, Any]],
    plot: Callable[[B, Path], None],
    show: Callable[[B, Console], None],
) -> None:
    """Check, time, and write the tables, the JSON file and the chart; exit status 1 where something was wrong."""
    with user_errors(ValueError, OSError):
        options = parse(arguments)
        device = find_devices(options.device)[0]
        folder = options.out / "bench"
        folder.mkdir(parents=True, exist_ok=True)
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    console = Console(markup=False, width=width)
    path = folder / f"{name}-{_slug(device_name(device))}.json"
    bench = bench_class(options, device, shlex.join(["python", "-m", "runners.bench", name, *arguments]))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with user_errors(OSError), Progress(*columns, console=console, auto_refresh=False) as bar:  # no thread of its own
        shown = bar.add_task("")

        def advance(description: str) -> None:
            bar.update(
                shown,
                description=description,
                completed=len(bench.figures),
                total=len(bench.cells),
                refresh=True,
            )

        bench.run(advance, lambda: write_json(path, to_dict(bench)))
        advance("done")
        plot(bench, path.with_suffix(".png"))
    show(bench, console)
    console.print(f"stored in {path}, chart: {path.with_suffix('.png')}", soft_wrap=True)
    if bench.failed:
        raise SystemExit(1)


def parse_options(
    options_class: type,
    presets: Mapping[str, Any],
    arguments: Sequence[str],
    several: Sequence[str],
    counts: Sequence[str],
) -> tuple[Any, torch.device]:
    """Options of the command line, with the defaults of the device, and the device.

    Args:
        options_class: a dataclass that has ``Limits``.
        presets: defaults by type of device.
        arguments: the command line.
        several: options that need at least one value.
        counts: options whose values must be at least 1.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--device", nargs="?", default="auto")
    device = find_devices(peek.parse_known_args(arguments)[0].device or "auto")[0]
    options, unknown = cli(options_class, presets[device.type], arguments)
    if unknown:
        raise ValueError(not_understood(unknown[0]))
    for name in several:
        if not getattr(options, name):
            raise ValueError(f"--{_option(name)} is missing: give at least one value")
    for name in counts:
        values = getattr(options, name)
        if bad := [v for v in (values if isinstance(values, tuple) else (values,)) if v is not None and v < 1]:
            raise ValueError(f"--{_option(name)} {bad[0]} must be at least 1")
    if options.repeats < LEAST_REPEATS:
        raise ValueError(f"--repeats {options.repeats} must be at least {LEAST_REPEATS}")
    for name in ("limit", "budget"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"--{name} {getattr(options, name)} must be a number of seconds above 0")
    return options, device


def check_names(chosen: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError unless all chosen implementations are known."""
    if lacking := [name for name in chosen if name not in known]:
        raise ValueError(f"no implementation {lacking[0]!r} on this device: choose from {', '.join(known)}")


def _option(name: str) -> str:
    return name.replace("_", "-")


def _describe(problem: Exception) -> str:
    return " ".join(f"failed: {type(problem).__name__}: {problem}".split())[:160]


def _is_out_of_memory(problem: BaseException | None) -> bool:
    """Also where the end of a capture that memory had cut short raised an error of its own."""
    while problem is not None:
        if isinstance(problem, torch.OutOfMemoryError) or OUT_OF_MEMORY_SAID.search(str(problem)):
            return True
        problem = problem.__context__
    return False


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")
