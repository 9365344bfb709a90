"""A run of the benchmark ``pretraining``: how its cells are built, and what they are expected to take."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from statistics import median

import torch

from runners.bench.accuracy import Oracle
from runners.bench.bench import Bench
from runners.bench.cells import OUT_OF_MEMORY, grouped
from runners.bench.implementations import Implementation, Setting
from runners.bench.pretraining.cells import LAYER_PHASES, PHASES, PretrainingCell, all_cells
from runners.bench.pretraining.implementations import DECODERS, LAYERS, layer_settings
from runners.bench.pretraining.options import PretrainingOptions, model_config
from runners.bench.pretraining.targets import targets
from runners.bench.pretraining.work import CachedDecodeWork, DecodeWork, TrainingWork
from runners.bench.targets import Target
from runners.bench.work import Work, random_layer_work
from runners.c4.config import Config
from runners.c4.cost import flops_per_token
from runners.c4.gpu_peak import peak_flops

MLP_FACTOR = 4
"""Hidden width of the MLP over the model width."""
USUAL_SHARE = 0.3
"""Share of the GPU's peak at which work is expected to run before anything like it was timed."""


class PretrainingBench(Bench[PretrainingOptions, PretrainingCell]):
    """All cells of a run of the benchmark, and what was measured so far.

    Attributes:
        peak: operations per second at the device's peak; None if unknown.
    """

    name = "pretraining"

    def __init__(self, options: PretrainingOptions, device: torch.device, command: str) -> None:
        cuda = device.type == "cuda"
        layers = {name: LAYERS[name] for name in LAYERS if name in options.implementations}
        decoders = {name: i for name, i in DECODERS.items() if cuda or not i.graph}
        super().__init__(options, layers | decoders, device, command)
        self.peak = peak_flops(device)
        self.cells = all_cells(options, layers, decoders, cuda)
        self._oracles: dict[tuple[Setting, bool], Oracle] = {}

    def groups(self) -> Iterable[Sequence[PretrainingCell]]:
        """Yield the cells in groups.

        After a training step that ran out of memory comes one with half the sequences in each forward pass.
        """
        for cells in grouped(list(self.cells)):
            yield cells

            first = cells[0]
            if first.phase == "training" and self.figures[first].status == OUT_OF_MEMORY and first.batch_size > 1:
                half = replace(first, micro_batch_size=first.batch_size // 2)
                self.cells.insert(self.cells.index(first) + 1, half)
                yield [half]

    def describe(self, cell: PretrainingCell) -> str:
        layers = f"{cell.layers} layers, " if cell.layers > 1 else ""
        return f"{layers}D {cell.width}, B {cell.batch_size}, N {cell.length}, {cell.phase}"

    def setting(self, cell: PretrainingCell) -> Setting:
        """Return the shape for the check: one layer, or two if a stack or a model in training is timed."""
        return Setting(
            width=cell.width,
            heads=cell.width // self.options.head_width,
            mlp_width=MLP_FACTOR * cell.width,
            batch_size=self.options.batch_size,
            layers=1 if cell.phase == "decode" else min(cell.layers, 2),
        )

    def oracle(self, cell: PretrainingCell) -> Oracle:
        key = self.setting(cell), self.clock.cuda and cell.phase != "decode"
        if key not in self._oracles:
            self._oracles[key] = Oracle(*key, runs=1, wide=True)
        return self._oracles[key]

    def is_captured(self, cell: PretrainingCell) -> bool:
        """Return whether a pass is captured as one CUDA graph. Models in training capture their layers themselves."""
        return super().is_captured(cell) and cell.phase != "training"

    def pass_limit(self, cell: PretrainingCell) -> float:
        return inf if cell.phase == "training" else super().pass_limit(cell) * cell.layers

    def build(self, cell: PretrainingCell) -> Work:
        implementation, device = self.implementations[cell.implementation], self.clock.device

        # A layer or a stack of layers.
        if cell.phase in LAYER_PHASES:
            setting = replace(self.setting(cell), batch_size=cell.batch_size, layers=cell.layers)
            backward = cell.phase == "forward+backward"
            return random_layer_work(implementation, setting, cell.length, 1, backward, device)

        # A whole model.
        config = model_config(self.options, implementation, cell.layers, cell.batch_size)
        if cell.phase == "decode":
            work = CachedDecodeWork if implementation.form == "static-cache" else DecodeWork
            return work(config, self.options.vocabulary, cell.length, device)

        config = replace(config, micro_batch_size=cell.micro_batch_size, recompute=cell.recompute)
        return TrainingWork(config, layer_settings(implementation), self.options.vocabulary, device)

    def growth(self, other: PretrainingCell, cell: PretrainingCell) -> float | None:
        """Compare cells of one implementation.

        A training step contains the passes of its layers. A smaller dimension saves time in proportion, the width in
        proportion to its square. A larger dimension may cost nothing, with two exceptions: stepwise implementations
        take longer in proportion to the length, and all methods but the wavefront in proportion to the number
        of layers. Layers of the wavefront method may work at the same time.
        """
        if other.implementation != cell.implementation or PHASES.index(other.phase) > PHASES.index(cell.phase):
            return None

        implementation = self.implementations[cell.implementation]
        by_length = cell.length / other.length
        if not implementation.stepwise:
            by_length = min(1.0, by_length)
        by_width = min(1.0, cell.width / other.width) ** 2
        by_layers = cell.layers / other.layers
        if implementation.method == "wavefront":
            by_layers = min(1.0, by_layers)
        return by_length * by_width * by_layers * min(1.0, cell.batch_size / other.batch_size)

    def expected_pass(self, cell: PretrainingCell) -> float:
        """Return the larger of the lower bound and of the seconds at a usual share of the GPU's peak."""
        ideal = self.ideal_seconds(cell)
        return max(super().expected_pass(cell), 0.0 if ideal is None else ideal / USUAL_SHARE)

    def expected_total(self, cell: PretrainingCell) -> float:
        """Return the expected seconds with the longest set-up of the same kind, which dominates after a compilation."""
        setups = (
            figures.setup_seconds or 0.0
            for other, figures in self.figures.items()
            if (other.implementation, other.phase) == (cell.implementation, cell.phase)
        )
        return super().expected_total(cell) + max(setups, default=0.0)

    def operations(self, cell: PretrainingCell) -> int | None:
        """Return the floating point operations of a pass; None for decoding, which they do not bound.

        A token takes 28 D^2 + 2 N D operations in a recurrent layer and 24 D^2 + 2 N D in the Transformer, which
        computes one key-value pair per position, not two. With the backward pass there are three times as many.
        """
        if cell.phase == "decode":
            return None
        implementation = self.implementations[cell.implementation]
        tokens = cell.batch_size * cell.length

        if cell.phase == "training":
            config = model_config(self.options, implementation, cell.layers, cell.batch_size)
            return tokens * _flops_per_token(config, implementation, self.options.vocabulary)

        forward = (24 if implementation.parallel else 28) * cell.width**2 + 2 * cell.length * cell.width
        return tokens * cell.layers * forward * (3 if cell.phase == "forward+backward" else 1)

    def ideal_seconds(self, cell: PretrainingCell) -> float | None:
        """Return the seconds of a pass at the GPU's peak; None if the operations or the peak are unknown."""
        operations = self.operations(cell)
        return None if self.peak is None or operations is None else operations / self.peak

    def targets(self, cell: PretrainingCell) -> list[Target]:
        """Return the targets of a cell; none on the CPU."""
        return targets(self.options, cell) if self.clock.cuda else []

    def latency(self, cell: PretrainingCell) -> float | None:
        """Return the median seconds of a pass; None if it was not timed."""
        figures = self.figures.get(cell)
        return median(figures.seconds) if figures and figures.seconds else None

    def speed_of_transformer(self, cell: PretrainingCell) -> float | None:
        """Return the training speed over that of the Transformer with the same number of layers; None if unknown."""
        others = (
            latency
            for other in self.figures
            if (other.phase, other.layers) == ("training", cell.layers)
            and self.implementations[other.implementation].parallel
            and (latency := self.latency(other)) is not None
        )
        latency, best = self.latency(cell), min(others, default=None)
        return best / latency if cell.phase == "training" and latency is not None and best is not None else None


@cache
def _flops_per_token(config: Config, implementation: Implementation, vocabulary: int) -> int:
    return flops_per_token(config, layer_settings(implementation), vocabulary)
