"""The benchmark ``diagnostics``: its options, what it measures and in which order, and what it leaves out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from runners.bench.accuracy import Oracle
from runners.bench.report import plot, print_table, to_dict
from runners.bench.timing import IMPLEMENTATIONS, PHASES, Phase, Setting, Work, layer_work, step_work
from runners.bench.turns import LEAST_REPEATS, Bench, check_names, grouped, parse_options, run_benchmark
from runners.mad.training.protocol import Protocol
from tasks.recall import InContextRecall

ON_CPU, ON_GPU = (", ".join(IMPLEMENTATIONS[kind]) for kind in ("cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the implementations of the diagnostic layer, checked against float64 first.

    Attributes:
        phases: forward; forward+backward; step, the trainer's whole optimizer step.
        lengths: sequence lengths N.
        runs: numbers R of runs trained together.
        together_at: those of the lengths at which every number of runs is timed; the others follow, with the smallest.
        batch_size: sequences a run and step.
        width: model width D.
        heads: attention heads.
        mlp_width: hidden width of the MLP.
        repeats: repeats of each figure, at least 5.
        limit: seconds; what takes longer for one eager pass is skipped.
        budget: seconds after which only what takes less than a second altogether is still timed.
        device: auto takes a GPU if there is one.
        out: folder of results.
    """

    implementations: Annotated[tuple[str, ...], tyro.conf.arg(help=f"what to time, of {ON_CPU}; on a GPU of {ON_GPU}.")]
    phases: tuple[Phase, ...] = PHASES
    lengths: tuple[int, ...]
    runs: tuple[int, ...]
    together_at: tuple[int, ...] = (128,)
    batch_size: int
    width: int = 128
    heads: int = 16
    mlp_width: int = 512
    repeats: int = LEAST_REPEATS
    limit: float = 2.0
    budget: float
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")

    @property
    def setting(self) -> Setting:
        return Setting(width=self.width, heads=self.heads, mlp_width=self.mlp_width, batch_size=self.batch_size)


PRESETS = {
    "cuda": Options(
        implementations=tuple(IMPLEMENTATIONS["cuda"]),
        lengths=(32, 64, 128, 256, 512, 1024),
        runs=(1, 6, 30, 90),
        batch_size=128,
        budget=220.0,
    ),
    "cpu": Options(
        implementations=tuple(IMPLEMENTATIONS["cpu"]), lengths=(32, 64, 128, 256), runs=(1,), batch_size=8, budget=90.0
    ),
}
"""Defaults by type of device."""

TARGETS_MS = {("rt-fused", "step", 128, 1): 2.0, ("rt-fused", "step", 128, 30): 6.0}
"""Milliseconds to reach on one H200, by implementation, phase, length and runs, in the default setting."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure to measure."""

    phase: Phase
    length: int
    runs: int
    implementation: str

    @property
    def group(self) -> tuple[int, int, Phase]:
        """What its implementations, timed in turns, have in common."""
        return self.length, self.runs, self.phase


def diagnostics(arguments: Sequence[str]) -> None:
    """Check, time, and write the table, the JSON file and the chart."""
    run_benchmark("diagnostics", arguments, parse, DiagnosticsBench, to_dict, plot, print_table)


def parse(arguments: Sequence[str]) -> Options:
    """Options of the command line, with the defaults of the device.

    Raises:
        ValueError: something does not fit; the message says what to do.
    """
    several = ("implementations", "phases", "lengths", "runs")
    counts = ("lengths", "runs", "batch_size", "width", "heads", "mlp_width")
    options: Options
    options, device = parse_options(Options, PRESETS, arguments, several, counts)
    known = IMPLEMENTATIONS[device.type]
    check_names(options.implementations, known)
    if len(set(options.runs)) > 1 and not set(options.together_at) & set(options.lengths):
        at = ", ".join(map(str, options.together_at))
        raise ValueError(f"--together-at {at}: none of these is among --lengths, so --runs would have no effect")
    for length in options.lengths:
        Protocol(batch_size=options.batch_size).check(InContextRecall.Config(length=length).train_examples)
    for name in options.implementations:
        known[name].build(options.setting)
    return options


class DiagnosticsBench(Bench[Options, Cell]):
    """All cells of a run of the benchmark and what was measured so far."""

    name = "diagnostics"

    def __init__(self, options: Options, device: torch.device, command: str) -> None:
        known = IMPLEMENTATIONS[device.type]
        implementations = {name: known[name] for name in known if name in options.implementations}
        super().__init__(options, implementations, device, command)
        fewest = min(options.runs)
        self.cells = [
            Cell(phase=phase, length=length, runs=runs, implementation=name)
            for length in sorted(set(options.lengths))
            for runs in sorted(set(options.runs))
            if runs == fewest or length in options.together_at
            for phase in PHASES
            if phase in options.phases
            for name in self.implementations
        ]
        self.task = InContextRecall(InContextRecall.Config(length=self.cells[0].length))
        self._oracle = Oracle(options.setting, autocast=self.clock.cuda)

    def describe(self, cell: Cell) -> str:
        return f"N {cell.length}, R {cell.runs}, {cell.phase}"

    def setting(self, cell: Cell) -> Setting:
        return self.options.setting

    def oracle(self, cell: Cell) -> Oracle:
        return self._oracle

    def groups(self) -> Iterable[Sequence[Cell]]:
        """Lengths with every number of runs come first, so that the budget drops the others."""
        return grouped(sorted(self.cells, key=lambda cell: cell.length not in self.options.together_at))

    def build(self, cell: Cell) -> Work:
        implementation = self.implementations[cell.implementation]
        setting, device = self.options.setting, self.clock.device
        if cell.phase != "step":
            backward = cell.phase == "forward+backward"
            return layer_work(implementation, setting, cell.length, cell.runs, backward, device)
        if self.task.config.length != cell.length:
            self.task = InContextRecall(InContextRecall.Config(length=cell.length))
        return step_work(implementation, setting, self.task, cell.runs, device)

    def growth(self, other: Cell, cell: Cell) -> float | None:
        """Only stepwise ones are known to grow with N: a short pass of the others is all launches, as many at every N.

        A phase contains those before it; shorter inputs and fewer runs take no longer.
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

    def target(self, cell: Cell) -> float | None:
        """Milliseconds to reach; None where there is no target."""
        default = self.options.setting == PRESETS["cuda"].setting
        key = (cell.implementation, cell.phase, cell.length, cell.runs)
        return TARGETS_MS.get(key) if self.clock.cuda and default else None
