"""Cells of the benchmark ``pretraining``, and the order in which they are measured."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runners.bench.implementations import Implementation
from runners.bench.pretraining.implementations import OURS
from runners.bench.pretraining.options import PretrainingOptions, model_config

Phase = Literal["forward", "forward+backward", "training", "decode"]
PHASES: tuple[Phase, ...] = ("forward", "forward+backward", "training", "decode")
"""A training step contains the passes before it."""
LAYER_PHASES = PHASES[:2]
"""Phases in which layers are timed, not models."""


@dataclass(frozen=True, kw_only=True)
class PretrainingCell:
    """One figure to measure.

    Attributes:
        micro_batch_size: sequences of one forward pass in training; unless given, all.
        recompute: whether training computes activations again in the backward pass.
    """

    phase: Phase
    width: int
    layers: int = 1
    batch_size: int
    length: int
    implementation: str
    micro_batch_size: int | None = None
    recompute: bool = False

    @property
    def group(self) -> Hashable:
        """Key that is equal for cells whose implementations are timed in turns.

        A model in training is a group of its own, because a GPU has no memory for two.
        """
        if self.phase == "training":
            return self
        if self.phase == "decode":
            return self.phase, self.batch_size, self.length
        return self.phase, self.batch_size, self.length, self.width, self.layers


def all_cells(
    options: PretrainingOptions,
    layers: Mapping[str, Implementation],
    decoders: Mapping[str, Implementation],
    cuda: bool,
) -> list[PretrainingCell]:
    """Return all cells in the order of measurement, the most wanted first, so that the budget drops the others.

    Last come training by the tiled method, which takes longest, and the comparisons of lengths and batches.

    Args:
        options: options of the run.
        layers: implementations of a layer, by name.
        decoders: implementations of a decoding step, by name.
        cuda: whether the device is a GPU.
    """
    timed = list(layer_cells(options, list(layers))) if "layers" in options.parts else []
    usual_batches = (options.batch_size, min(options.batches))
    wanted = [cell for cell in timed if cell.length == options.length and cell.batch_size in usual_batches]

    # Stacks run at full speed: on a GPU as graphs, and never by the tiled method.
    fast = [name for name, i in layers.items() if i.parallel or (i.graph == cuda and i.method != "tiled")]
    stacks = list(stack_cells(options, fast)) if "layers" in options.parts else []

    # Models in training.
    trained = list(training_cells(options, layers, cuda)) if "training" in options.parts else []
    slow_models = [cell for cell in trained if layers[cell.implementation].method == "tiled"]
    fast_models = [cell for cell in trained if cell not in slow_models]
    recomputed = [replace(cell, recompute=True) for cell in fast_models if cell.implementation == OURS]

    decoded = list(decode_cells(options, decoders)) if "decode" in options.parts else []
    return list(dict.fromkeys([*wanted, *fast_models, *recomputed, *stacks, *decoded, *slow_models, *timed]))


def layer_cells(options: PretrainingOptions, names: Sequence[str]) -> Iterator[PretrainingCell]:
    """Yield cells of one layer, the most wanted first: the comparison of widths, of lengths, of batches.

    A recurrent layer without a graph takes long. If its graph is timed, too, it is timed at the first width and
    ``options.length`` alone.
    """
    width, small, usual = options.widths[0], min(options.batches), options.batch_size

    # Widths.
    places = [(phase, width, batch, options.length) for batch in (usual, small) for phase in LAYER_PHASES]
    places += [(phase, other, usual, options.length) for other in options.widths[1:] for phase in LAYER_PHASES]

    # Lengths.
    for batch in (small, usual):
        lengths = [n for n in sorted(options.lengths) if batch == small or batch * n <= options.most_tokens]
        places += [(phase, width, batch, n) for n in lengths for phase in LAYER_PHASES]

    # Batches.
    places += [("forward", width, batch, options.length) for batch in sorted(options.batches)]

    for phase, at, batch, length in dict.fromkeys(places):
        for name in names:
            if f"{name}-graph" not in names or (at, length) == (width, options.length):
                yield PretrainingCell(phase=phase, width=at, batch_size=batch, length=length, implementation=name)


def stack_cells(options: PretrainingOptions, names: Sequence[str]) -> Iterator[PretrainingCell]:
    """Yield cells of layers on top of each other, which may work at the same time."""
    for batch in dict.fromkeys((options.batch_size, min(options.batches))):
        for phase in LAYER_PHASES:
            for name in names:
                yield PretrainingCell(
                    phase=phase,
                    width=options.widths[0],
                    layers=options.stack,
                    batch_size=batch,
                    length=options.length,
                    implementation=name,
                )


def training_cells(
    options: PretrainingOptions, implementations: Mapping[str, Implementation], cuda: bool
) -> Iterator[PretrainingCell]:
    """Yield cells of models in training, by the Transformer and by recurrent layers that run as graphs on a GPU."""
    for count in options.layers:
        for name, i in implementations.items():
            if i.form == "single" and (i.parallel or i.graph == cuda):
                yield _model_cell(options, "training", name, i, count, options.batch_size)


def decode_cells(
    options: PretrainingOptions, implementations: Mapping[str, Implementation]
) -> Iterator[PretrainingCell]:
    """Yield cells of models that decode. The Transformer has twice the number of layers."""
    for batch in options.decode_batches:
        for count in options.layers:
            for name, i in implementations.items():
                yield _model_cell(options, "decode", name, i, count * (1 + i.parallel), batch)


def _model_cell(
    options: PretrainingOptions, phase: Phase, name: str, implementation: Implementation, layers: int, batch: int
) -> PretrainingCell:
    return PretrainingCell(
        phase=phase,
        width=model_config(options, implementation, layers, batch).shape().width,
        layers=layers,
        batch_size=batch,
        length=options.length,
        implementation=name,
    )
