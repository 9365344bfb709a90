"""The benchmark ``pretraining``: layers at the width of language models, whole training steps, and decoding."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from statistics import median

import torch

from runners.bench.accuracy import Oracle
from runners.bench.models import DecodeWork, TrainingWork
from runners.bench.pretraining_cells import (
    DECODERS,
    LAYER_TARGETS_MS,
    LAYERS,
    MLP_FACTOR,
    MODEL_TARGETS,
    OURS,
    PHASES,
    RECOMPUTED_TARGETS,
    STACK_TARGETS_MS,
    TRAINING_TARGETS,
    VOCABULARY,
    Cell,
    Options,
    Phase,
    Target,
    layer_cells,
    model_of,
    parse,
    stack_cells,
)
from runners.bench.pretraining_report import plot, print_tables, to_dict
from runners.bench.timing import Implementation, Setting, Work, layer_work
from runners.bench.turns import OUT_OF_MEMORY, Bench, grouped, run_benchmark
from runners.c4.config import HEAD_WIDTH, Config
from runners.c4.cost import flops_per_token
from runners.c4.train import peak_flops

USUAL_SHARE = 0.3
"""Of the peak; what is not known yet is expected to take as long as at this share."""


def pretraining(arguments: Sequence[str]) -> None:
    """Check, time, and write the tables, the JSON file and the chart."""
    run_benchmark("pretraining", arguments, parse, PretrainingBench, to_dict, plot, print_tables)


class PretrainingBench(Bench[Options, Cell]):
    """All cells of a run of the benchmark and what was measured so far."""

    name = "pretraining"

    def __init__(self, options: Options, device: torch.device, command: str) -> None:
        cuda = device.type == "cuda"
        chosen = {name: LAYERS[name] for name in LAYERS if name in options.implementations}
        decoders = {name: i for name, i in DECODERS.items() if cuda or not i.graph}
        super().__init__(options, chosen | decoders, device, command)
        self.peak = peak_flops(device)
        layers = list(layer_cells(options, list(chosen))) if "layers" in options.parts else []
        fast = [n for n, i in chosen.items() if i.parallel or (i.graph == cuda and i.method != "tiled")]
        stacks = list(stack_cells(options, fast)) if "layers" in options.parts else []
        trained = [n for n, i in chosen.items() if i.form == "single" and (i.parallel or i.graph == cuda)]
        models = [
            self._model_cell("training", name, count, options.batch_size)
            for count in options.layers
            for name in trained
            if "training" in options.parts
        ]
        decoded = [
            self._model_cell("decode", name, count * (1 + i.parallel), batch)
            for batch in options.decode_batches
            for count in options.layers
            for name, i in decoders.items()
            if "decode" in options.parts
        ]
        # Training by the tiled method, which takes longest, and what depends on the length and the batch alone come
        # last, so that the budget drops them.
        wanted = [cell for cell in layers if cell.length == options.length and cell.batch_size in self._usual]
        slow = [cell for cell in models if chosen[cell.implementation].method == "tiled"]
        fast_models = [cell for cell in models if cell not in slow]
        again = [replace(cell, recompute=True) for cell in fast_models if cell.implementation == OURS]
        self.cells = list(dict.fromkeys([*wanted, *fast_models, *again, *stacks, *decoded, *slow, *layers]))
        self._oracles: dict[tuple[Setting, bool], Oracle] = {}

    def groups(self) -> Iterable[Sequence[Cell]]:
        """Trained in parts of half the sequences where there is too little memory for all at once."""
        for cells in grouped(list(self.cells)):
            yield cells
            (first, *_) = cells
            if first.phase == "training" and self.figures[first].status == OUT_OF_MEMORY and first.batch_size > 1:
                half = replace(first, micro_batch_size=first.batch_size // 2)
                self.cells.insert(self.cells.index(first) + 1, half)
                yield [half]

    def describe(self, cell: Cell) -> str:
        layers = f"{cell.layers} layers, " if cell.layers > 1 else ""
        return f"{layers}D {cell.width}, B {cell.batch_size}, N {cell.length}, {cell.phase}"

    def setting(self, cell: Cell) -> Setting:
        """That of the check: of the layer, or of two where a stack or a model in training is timed."""
        return Setting(
            width=cell.width,
            heads=cell.width // self.options.head_width,
            mlp_width=MLP_FACTOR * cell.width,
            batch_size=self.options.batch_size,
            layers=1 if cell.phase == "decode" else min(cell.layers, 2),
        )

    def oracle(self, cell: Cell) -> Oracle:
        key = self.setting(cell), self.clock.cuda and cell.phase != "decode"
        if key not in self._oracles:
            self._oracles[key] = Oracle(*key, runs=1, wide=True)
        return self._oracles[key]

    def captured(self, cell: Cell) -> bool:
        """Models in training capture their layers by themselves."""
        return super().captured(cell) and cell.phase != "training"

    def limit(self, cell: Cell) -> float:
        return inf if cell.phase == "training" else super().limit(cell) * cell.layers

    def build(self, cell: Cell) -> Work:
        implementation, device = self.implementations[cell.implementation], self.clock.device
        if cell.phase in ("forward", "forward+backward"):
            setting = replace(self.setting(cell), batch_size=cell.batch_size, layers=cell.layers)
            return layer_work(implementation, setting, cell.length, 1, cell.phase == "forward+backward", device)
        config = model_of(self.options, implementation, cell.layers, cell.batch_size)
        if cell.phase == "decode":
            return DecodeWork(config, self.options.vocabulary, cell.length, device)
        config = replace(config, micro_batch_size=cell.micro_batch_size, recompute=cell.recompute)
        return TrainingWork(config, _settings(implementation), self.options.vocabulary, device)

    def growth(self, other: Cell, cell: Cell) -> float | None:
        """A training step contains the passes of its layers; at its smallest, time is in proportion to what is smaller.

        What goes from position to position also takes longer in proportion to their number, and more layers take
        longer in proportion unless they work at the same time.
        """
        if other.implementation != cell.implementation or PHASES.index(other.phase) > PHASES.index(cell.phase):
            return None
        by_length = cell.length / other.length
        if not self.implementations[cell.implementation].stepwise:
            by_length = min(1.0, by_length)
        by_width = min(1.0, cell.width / other.width) ** 2
        by_layers = cell.layers / other.layers
        if self.implementations[cell.implementation].method == "wavefront":
            by_layers = min(1.0, by_layers)
        return by_length * by_width * by_layers * min(1.0, cell.batch_size / other.batch_size)

    def expected(self, cell: Cell) -> float:
        """Before anything like it was timed, seconds at a usual share of the peak."""
        ideal = self.ideal_seconds(cell)
        return max(super().expected(cell), 0.0 if ideal is None else ideal / USUAL_SHARE)

    def cost(self, cell: Cell) -> float:
        """With the longest set-up of the same kind, which takes most of the time where something is compiled."""
        setups = (
            figures.setup_seconds or 0.0
            for other, figures in self.figures.items()
            if (other.implementation, other.phase) == (cell.implementation, cell.phase)
        )
        return super().cost(cell) + max(setups, default=0.0)

    def operations(self, cell: Cell) -> int | None:
        """Floating point operations of a pass; None for decoding, which they do not bound.

        A token of a layer takes 28 D^2 + 2 N D, the Transformer 24 D^2 for it has one pair a position, and three times
        as many with the backward.
        """
        if cell.phase == "decode":
            return None
        implementation, tokens = self.implementations[cell.implementation], cell.batch_size * cell.length
        if cell.phase == "training":
            config = model_of(self.options, implementation, cell.layers, cell.batch_size)
            return tokens * _flops_per_token(config, implementation, self.options.vocabulary)
        forward = (24 if implementation.parallel else 28) * cell.width**2 + 2 * cell.length * cell.width
        return tokens * cell.layers * forward * (3 if cell.phase == "forward+backward" else 1)

    def ideal_seconds(self, cell: Cell) -> float | None:
        """Seconds of a pass at the GPU's peak; None where either is unknown."""
        operations = self.operations(cell)
        return None if self.peak is None or operations is None else operations / self.peak

    def targets(self, cell: Cell) -> list[Target]:
        """What our implementation should reach on one H200."""
        o = self.options
        if not self.clock.cuda or cell.implementation != OURS or o.head_width != HEAD_WIDTH:
            return []
        if cell.phase == "training":
            paper = o.model_width is None and (o.batch_size, o.length, o.vocabulary) == (512, 512, VOCABULARY)
            speed = TRAINING_TARGETS.get(cell.layers)
            if cell.recompute:
                return [RECOMPUTED_TARGETS[cell.layers]] if paper and cell.layers in RECOMPUTED_TARGETS else []
            return [Target("tokens_per_second", speed, at_least=True), *MODEL_TARGETS] if paper and speed else []
        bounds = {1: LAYER_TARGETS_MS, 12: STACK_TARGETS_MS}.get(cell.layers, {}) if cell.length == 512 else {}
        bound = bounds.get((cell.phase, cell.width, cell.batch_size))
        return [] if bound is None else [Target("layer_ms", bound)]

    def latency(self, cell: Cell) -> float | None:
        """Median seconds of a pass; None where there is none."""
        figures = self.figures.get(cell)
        return median(figures.seconds) if figures and figures.seconds else None

    @property
    def _usual(self) -> tuple[int, int]:
        return self.options.batch_size, min(self.options.batches)

    def _model_cell(self, phase: Phase, name: str, layers: int, batch: int) -> Cell:
        width = model_of(self.options, self.implementations[name], layers, batch).shape().width
        return Cell(
            phase=phase,
            width=width,
            layers=layers,
            batch_size=batch,
            length=self.options.length,
            implementation=name,
        )


def _settings(implementation: Implementation) -> dict[str, str]:
    return {} if implementation.method is None else {"implementation": implementation.method}


@cache
def _flops_per_token(config: Config, implementation: Implementation, vocabulary: int) -> int:
    return flops_per_token(config, _settings(implementation), vocabulary)
