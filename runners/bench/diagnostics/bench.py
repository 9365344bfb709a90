"""A run of the benchmark ``diagnostics``: its cells, their order, and how each is built."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from runners.bench.accuracy import Oracle
from runners.bench.bench import Bench
from runners.bench.cells import grouped
from runners.bench.diagnostics.options import IMPLEMENTATIONS, PHASES, PRESETS, DiagnosticsOptions, Phase
from runners.bench.implementations import Setting
from runners.bench.work import Work, random_layer_work, step_work
from tasks.recall import InContextRecall

TARGETS_MS = {("rt-fused", "step", 128, 1): 2.0, ("rt-fused", "step", 128, 30): 6.0}
"""Milliseconds to reach on one H200 in the default setting, by implementation, phase, length and runs."""


@dataclass(frozen=True, kw_only=True)
class DiagnosticsCell:
    """One figure to measure."""

    phase: Phase
    length: int
    runs: int
    implementation: str

    @property
    def group(self) -> tuple[int, int, Phase]:
        """Key that is equal for cells whose implementations are timed in turns."""
        return self.length, self.runs, self.phase


class DiagnosticsBench(Bench[DiagnosticsOptions, DiagnosticsCell]):
    """All cells of a run of the benchmark, and what was measured so far."""

    name = "diagnostics"

    def __init__(self, options: DiagnosticsOptions, device: torch.device, command: str) -> None:
        known = IMPLEMENTATIONS[device.type]
        implementations = {name: known[name] for name in known if name in options.implementations}
        super().__init__(options, implementations, device, command)
        self.cells = list(_cells(options, list(implementations)))
        self._task = InContextRecall(InContextRecall.Config(length=self.cells[0].length))
        self._oracle = Oracle(options.setting, autocast=self.clock.cuda)

    def groups(self) -> Iterable[Sequence[DiagnosticsCell]]:
        """Yield lengths with every number of runs first, so that the budget drops the other lengths."""
        return grouped(sorted(self.cells, key=lambda cell: cell.length not in self.options.together_at))

    def describe(self, cell: DiagnosticsCell) -> str:
        return f"N {cell.length}, R {cell.runs}, {cell.phase}"

    def setting(self, cell: DiagnosticsCell) -> Setting:
        return self.options.setting

    def oracle(self, cell: DiagnosticsCell) -> Oracle:
        return self._oracle

    def build(self, cell: DiagnosticsCell) -> Work:
        implementation = self.implementations[cell.implementation]
        setting, device = self.options.setting, self.clock.device

        if cell.phase != "step":
            backward = cell.phase == "forward+backward"
            return random_layer_work(implementation, setting, cell.length, cell.runs, backward, device)

        # Keep the task of the last length, because drawing its data takes time.
        if self._task.config.length != cell.length:
            self._task = InContextRecall(InContextRecall.Config(length=cell.length))
        return step_work(implementation, setting, self._task, cell.runs, device)

    def growth(self, other: DiagnosticsCell, cell: DiagnosticsCell) -> float | None:
        """Compare cells of one implementation.

        A phase contains those before it; shorter inputs and fewer runs take no longer. Only stepwise implementations
        are known to take time in proportion to N. A short pass of the others is bound by its launches, whose number
        does not depend on N.
        """
        contained = (
            other.implementation == cell.implementation
            and PHASES.index(other.phase) <= PHASES.index(cell.phase)
            and other.length <= cell.length
            and other.runs <= cell.runs
        )
        if not contained:
            return None
        return cell.length / other.length if self.implementations[cell.implementation].stepwise else 1.0

    def target(self, cell: DiagnosticsCell) -> float | None:
        """Return the milliseconds to reach; None if there is no target."""
        default = self.options.setting == PRESETS["cuda"].setting
        key = (cell.implementation, cell.phase, cell.length, cell.runs)
        return TARGETS_MS.get(key) if self.clock.cuda and default else None


def _cells(options: DiagnosticsOptions, names: Sequence[str]) -> Iterable[DiagnosticsCell]:
    """Yield the cells of the implementations ``names``, in the order of the record."""
    fewest = min(options.runs)
    for length in sorted(set(options.lengths)):
        for runs in sorted(set(options.runs)):
            if runs != fewest and length not in options.together_at:
                continue
            for phase in (phase for phase in PHASES if phase in options.phases):
                for name in names:
                    yield DiagnosticsCell(phase=phase, length=length, runs=runs, implementation=name)
