"""The scheduler of the benchmarks: it checks implementations, times cells in turns, and stays within the budget."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic

import torch

from runners.bench.accuracy import Check, check_implementation
from runners.bench.bench import Bench, O
from runners.bench.cells import OUT_OF_MEMORY, C, Figures
from runners.bench.options import LEAST_REPEATS
from runners.bench.preparation import Prepared, TooSlowError, prepare
from runners.memory import lacks_memory

CHEAP_SECONDS = 1.0
"""Cells that take no longer than this altogether are timed after the budget is spent, too."""


class Scheduler(Generic[O, C]):
    """Measures the cells of a benchmark.

    Order:

    1. The benchmark yields its cells group by group. A group holds the implementations to compare at one place of the
       grid. The benchmark yields a group after those before it were measured, so it can react to their outcome.
    2. Each implementation of the group is checked against the float64 oracle, once for each setting. A benchmark that
       times first passes (``Bench.cold``) checks after the measurement, and withdraws the figures of what is wrong.
    3. Each cell of the group is either skipped (see *Budget*) or built, warmed up and, if its implementation asks for
       it, captured as a CUDA graph. From here on all cells of the group are in memory together.
    4. The cells take turns: in each of ``repeats`` rounds every cell is timed once, over the passes that fill
       ``SECONDS_A_REPEAT``. A drift of the device's clock rate then affects all implementations alike.
    5. A cell gets its figures if the last pass gave finite numbers. The memory is freed, and the record is saved.

    Errors: An error becomes the status of its cell and does not stop the others.

    1. An implementation that fails its check gets no figure: "wrong: ..." or "failed: ...". One without a kernel for
       the shape is skipped.
    2. A cell whose warm-up is too slow is skipped. Its seconds still count for what larger cells are expected to take.
    3. A cell that runs out of memory is measured once more, alone, after all others of its group were measured and
       freed. If it runs out of memory again, it is skipped.
    4. Any other error gives "failed: ...".

    Budget: Before a cell is built, two estimates from the cells measured so far decide whether it is skipped.

    1. It is skipped if an eager pass is expected to take longer than the limit.
    2. It is skipped if it is expected to take more than ``CHEAP_SECONDS`` altogether and to end after the budget. The
       budget starts with the run and includes the checks. Without an estimate it is skipped once the budget is spent
       and something was timed. The check of an implementation whose first cell is skipped so is left out.

    A group that is timed gets ``LEAST_REPEATS`` rounds, and more of those asked for until its share of what is left of
    the budget is spent. The share is its part of the cells that are left.

    Args:
        bench: the cells; receives what is measured.
        announce: is called with a description of each step.
        save: saves the record; is called after each group and at the end.
    """

    def __init__(self, bench: Bench[O, C], announce: Callable[[str], None], save: Callable[[], None]) -> None:
        self.bench = bench
        self.announce = announce
        self.save = save

    def run(self) -> None:
        """Measure all groups."""
        gc.freeze()  # Collections in timed passes skip the objects that exist already.
        try:
            for cells in self.bench.groups():
                if self.bench.cold:
                    self._measure(cells)  # 3 and 4
                    timed = [cell for cell in cells if self.bench.figures[cell].seconds]
                    self._check(timed)  # 2
                    self._withdraw(timed)
                else:
                    self._check(cells)  # 2
                    self._measure(cells)  # 3 and 4
                self.save()  # 5
        finally:
            gc.unfreeze()  # Libraries complain of objects that are never collected.

        self.bench.complete = True
        self.save()

    def _check(self, cells: Sequence[C]) -> None:
        """Check the implementations of a group that were not checked for their setting before."""
        bench = self.bench
        for cell in cells:
            implementation, setting = bench.implementations[cell.implementation], bench.setting(cell)
            key = cell.implementation, setting
            if key in bench.checks or self._is_over_budget(cell):
                continue
            if not implementation.has_kernel(setting, bench.clock.device):
                bench.checks[key] = Check(error=None, problem="skipped: no kernel for this shape")
                continue

            self.announce(f"checking {implementation.label}")
            try:
                bench.checks[key] = check_implementation(implementation, bench.oracle(cell), bench.clock)
            except Exception as error:
                bench.checks[key] = Check(error=None, problem=_describe(error))
            self._free()

    def _withdraw(self, cells: Sequence[C]) -> None:
        """Replace the figures of implementations that failed their check by the reason."""
        for cell in cells:
            if problem := self._problem(cell):
                self.bench.figures[cell] = Figures(status=problem)

    def _problem(self, cell: C) -> str | None:
        """Return the status of a cell whose implementation failed its check; None for the others."""
        problem = self.bench.check_of(cell).problem
        return problem if problem is None or problem.startswith(("failed", "skipped")) else f"wrong: {problem}"

    def _measure(self, cells: Sequence[C]) -> None:
        """Measure a group in turns, then alone those cells that lacked memory beside the others."""
        self._take_turns(cells)
        self._free()  # After ``_take_turns`` has returned, nothing refers to the work of the group.

        figures = self.bench.figures
        if len(cells) > 1:
            for cell in [cell for cell in cells if figures[cell].status == OUT_OF_MEMORY]:
                del figures[cell]
                self._measure([cell])

    def _take_turns(self, cells: Sequence[C]) -> None:
        """Prepare the cells of a group, time each once a round, and record the figures."""
        # 3. Skip or prepare.
        prepared = self._prepare(cells)
        seconds: dict[C, list[float]] = {cell: [] for cell in prepared}

        # 4. Rounds.
        until = self._end_of_share(len(prepared))
        for number in range(self.bench.options.repeats):
            if number >= LEAST_REPEATS and time.monotonic() > until:
                break
            for cell, (work, _, passes, _, _) in prepared.items():
                if cell not in self.bench.figures:
                    with self._errors_of(cell):
                        seconds[cell].append(self.bench.clock.seconds(work.run, passes))

        # 5. Figures.
        for cell, ready in prepared.items():
            if cell not in self.bench.figures:
                with self._errors_of(cell):
                    self.bench.figures[cell] = _figures(ready, seconds[cell])

    def _prepare(self, cells: Sequence[C]) -> dict[C, Prepared]:
        """Return the prepared work of the cells that are neither skipped nor end in an error."""
        bench = self.bench
        prepared: dict[C, Prepared] = {}
        for cell in cells:
            self.announce(f"{bench.describe(cell)}: {bench.implementations[cell.implementation].label}")
            reason = None
            with self._errors_of(cell):
                reason = self._reason_to_skip(cell)
                if reason:
                    bench.figures[cell] = Figures(status=reason)
                else:
                    build = partial(bench.build, cell)
                    prepared[cell] = prepare(build, bench.is_captured(cell), bench.clock, bench.pass_limit(cell))
                    bench.warm_ups[cell] = prepared[cell].warm_up

            # Memory of a failed cell can be freed only here, after its error, which refers to it, is gone.
            if cell in bench.figures and not reason:
                self._free()
        return prepared

    @contextlib.contextmanager
    def _errors_of(self, cell: C) -> Iterator[None]:
        """Turn an error into the status of the cell."""
        try:
            yield
        except TooSlowError as slow:
            self.bench.warm_ups[cell] = slow.seconds
            self.bench.figures[cell] = Figures(status=self._too_slow(cell))
        except Exception as error:
            status = OUT_OF_MEMORY if lacks_memory(error) else _describe(error)
            self.bench.figures[cell] = Figures(status=status)

    def _reason_to_skip(self, cell: C) -> str | None:
        """Return the status of a cell that is not to be built; None if it is to be built."""
        bench = self.bench

        # The check.
        if problem := self._problem(cell):
            return problem

        # The limit of a pass.
        if bench.expected_pass(cell) > bench.pass_limit(cell):
            return self._too_slow(cell)

        # The budget of the run.
        if not self._is_over_budget(cell):
            return None
        budget = f"budget of {bench.options.budget:g} s"
        return f"skipped: {budget} spent" if self._left <= 0.0 else f"skipped: needs more than is left of the {budget}"

    @property
    def _left(self) -> float:
        """Seconds that are left of the budget of the run."""
        return self.bench.started + self.bench.options.budget - time.monotonic()

    def _is_over_budget(self, cell: C) -> bool:
        """Return whether the budget of the run does not allow a cell."""
        bench, left, total = self.bench, self._left, self.bench.expected_total(cell)
        if total == 0.0:
            return left < 0.0 and any(figures.seconds for figures in bench.figures.values())
        return total > max(CHEAP_SECONDS, left)

    def _end_of_share(self, cells: int) -> float:
        """Return the clock time at which the share of the budget ends that this number of cells has."""
        bench, now = self.bench, time.monotonic()
        left = max(len(bench.cells) - len(bench.figures), cells, 1)
        return now + (bench.started + bench.options.budget - now) * cells / left

    def _too_slow(self, cell: C) -> str:
        return f"skipped: over {self.bench.pass_limit(cell):g} s"

    def _free(self) -> None:
        """Free the memory that nothing refers to any more."""
        gc.collect()
        if self.bench.clock.cuda:
            # After an error of the device every call raises; the error was reported where it arose.
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def _figures(ready: Prepared, seconds: list[float]) -> Figures:
    """Return the figures of timed work."""
    if not ready.work.is_finite():
        return Figures(status="wrong: not finite")
    return Figures(
        seconds=seconds,
        passes=ready.passes,
        peak_gib=ready.peak_gib,
        setup_seconds=ready.setup_seconds,
        facts=dict(ready.work.facts),
    )


def _describe(error: Exception) -> str:
    """Return the status of a cell that raised an error, on one line."""
    return " ".join(f"failed: {type(error).__name__}: {error}".split())[:160]
