"""A run of ``diagnostics --layers``: its cells, their order, and how each is built."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mixers.registry import find_mixer
from runners.bench.bench import Bench
from runners.bench.cells import grouped
from runners.bench.diagnostics.layers.options import PRESETS, LayersOptions
from runners.bench.diagnostics.layers.oracle import LayerOracle
from runners.bench.diagnostics.layers.work import filled_caches, first_step
from runners.bench.implementations import Implementation, Setting
from runners.bench.targets import Target
from runners.bench.work import Work
from tasks.recall import InContextRecall

STEP_TARGETS = {
    (128, 6): [Target("median_ms", 4.0)],
    (128, 30): [Target("median_ms", 12.0), Target("peak_gib", 12.0)],
}
"""What a layer should reach on one H200 in the default setting, by length and runs."""
FIRST_STEP = Target("first_step_seconds", 30.0)
PACE = "rt"
"""The layer that no other one should be slower than, at lengths without a target in milliseconds."""
PACE_BEYOND = 128


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    """The step of one layer to measure."""

    implementation: str
    length: int
    runs: int

    @property
    def group(self) -> tuple[str, int]:
        """Key that is equal for the numbers of runs of a layer, which take turns."""
        return self.implementation, self.length


class LayersBench(Bench[LayersOptions, LayerCell]):
    """All cells of a run of the benchmark, and what was measured so far.

    A layer's numbers of runs take turns, then its memory is freed: all layers together would not fit.
    """

    name = "diagnostics-layers"
    cold = True

    def __init__(self, options: LayersOptions, device: torch.device, command: str) -> None:
        implementations = {name: Implementation(label=name, layer=find_mixer(name)) for name in options.layers}
        super().__init__(options, implementations, device, command)
        self.caches = filled_caches()
        self.cells = list(_cells(options))
        self._tasks = {n: InContextRecall(InContextRecall.Config(length=n)) for n in options.lengths}

    def groups(self) -> Iterable[Sequence[LayerCell]]:
        return grouped(self.cells)

    def describe(self, cell: LayerCell) -> str:
        return f"N {cell.length}, R {cell.runs}"

    def setting(self, cell: LayerCell) -> Setting:
        return self.options.setting

    def oracle(self, cell: LayerCell) -> LayerOracle:
        layer = self.implementations[cell.implementation].layer
        return LayerOracle(layer, self.options.setting, autocast=self.clock.cuda)

    def build(self, cell: LayerCell) -> Work:
        implementation, task = self.implementations[cell.implementation], self._tasks[cell.length]
        return first_step(implementation, self.options.setting, task, cell.runs, self.clock.device)

    def growth(self, other: LayerCell, cell: LayerCell) -> float | None:
        """Compare cells of one layer: shorter inputs and fewer runs take no longer."""
        contained = (
            other.implementation == cell.implementation and other.length <= cell.length and other.runs <= cell.runs
        )
        return 1.0 if contained else None

    def expected_total(self, cell: LayerCell) -> float:
        """Return the seconds that the cells before took on average: compilation and checks take most of the time."""
        timed = sum(bool(figures.seconds) for figures in self.figures.values())
        spent = time.monotonic() - self.started
        return super().expected_total(cell) + (spent / timed if timed else 0.0)

    def targets(self, cell: LayerCell) -> list[Target]:
        """Return the targets of a cell; none unless it is timed on a GPU in the default setting."""
        if not self.clock.cuda or self.options.setting != PRESETS["cuda"].setting:
            return []
        return [*STEP_TARGETS.get((cell.length, cell.runs), ()), *self._pace(cell), FIRST_STEP]

    def _pace(self, cell: LayerCell) -> list[Target]:
        """Return the target to be no slower than the Recurrent Transformer, if that was timed."""
        pacemaker = self.figures.get(LayerCell(implementation=PACE, length=cell.length, runs=cell.runs))
        if cell.length <= PACE_BEYOND or cell.implementation == PACE or not (pacemaker and pacemaker.seconds):
            return []
        return [Target("median_ms", 1e3 * median(pacemaker.seconds))]


def _cells(options: LayersOptions) -> Iterable[LayerCell]:
    """Yield the cells, those of the length with every number of runs first, so that the budget drops the others."""
    for length in sorted(set(options.lengths), key=lambda n: (n != options.together_at, n)):
        runs = sorted(set(options.runs)) if length == options.together_at else [min(options.runs)]
        for name in options.layers:
            for number in runs:
                yield LayerCell(implementation=name, length=length, runs=number)
