"""Targets of the benchmark ``pretraining``: what our implementation should reach on one H200."""

from runners.bench.pretraining.cells import PretrainingCell
from runners.bench.pretraining.implementations import OURS
from runners.bench.pretraining.options import VOCABULARY, PretrainingOptions
from runners.bench.targets import Target
from runners.c4.config import HEAD_WIDTH

LAYER_TARGETS_MS = {
    ("forward", 1024, 32): 9.0,
    ("forward", 1024, 512): 27.0,
    ("forward+backward", 1024, 512): 60.0,
    ("forward+backward", 1408, 512): 105.0,
    ("forward+backward", 2048, 512): 200.0,
}
"""Milliseconds of a layer at N 512 by phase, width and batch."""
STACK_TARGETS_MS = {("forward", 1024, 32): 4.0, ("forward", 1024, 512): 18.0}
"""Milliseconds of each layer in a stack of twelve at N 512."""
TRAINING_TARGETS = {12: 160e3, 6: 170e3}
"""Tokens a second of the 300M models by layers."""
MODEL_TARGETS = (
    Target("of_transformer", 0.7, at_least=True),
    Target("setup_seconds", 30.0),
    Target("peak_gib", 139.0),
)
RECOMPUTED_TARGETS = {12: Target("peak_gib", 48.0)}
"""Memory of the 300M models by layers if activations are computed again."""
QUADRATIC_TARGET = Target("quadratic_share", 1.3)
QUADRATIC_UP_TO = 2048
"""Largest length N to which ``QUADRATIC_TARGET`` applies."""


def targets(options: PretrainingOptions, cell: PretrainingCell) -> list[Target]:
    """Return the targets of a cell that is timed on a GPU."""
    if cell.implementation != OURS or options.head_width != HEAD_WIDTH:
        return []
    return _model_targets(options, cell) if cell.phase == "training" else _layer_targets(cell)


def _model_targets(options: PretrainingOptions, cell: PretrainingCell) -> list[Target]:
    """Return the targets of a model in training, which is one of the paper's 300M models."""
    of_paper = (options.size, options.model_width, options.batch_size, options.length, options.vocabulary)
    if of_paper != ("300m", None, 512, 512, VOCABULARY):
        return []

    if cell.recompute:
        return [RECOMPUTED_TARGETS[cell.layers]] if cell.layers in RECOMPUTED_TARGETS else []
    speed = TRAINING_TARGETS.get(cell.layers)
    return [Target("tokens_per_second", speed, at_least=True), *MODEL_TARGETS] if speed else []


def _layer_targets(cell: PretrainingCell) -> list[Target]:
    """Return the targets of a layer or of a stack of layers."""
    bounds = {1: LAYER_TARGETS_MS, 12: STACK_TARGETS_MS}.get(cell.layers, {}) if cell.length == 512 else {}
    bound = bounds.get((cell.phase, cell.width, cell.batch_size))
    return [] if bound is None else [Target("layer_ms", bound)]
