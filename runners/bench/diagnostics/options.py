"""Options of the benchmark ``diagnostics``, and the implementations that it knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.bench.implementations import Implementation, Setting
from runners.bench.options import LEAST_REPEATS, check_names, parse_options
from runners.mad.training.protocol import Protocol
from tasks.recall import InContextRecall

Phase = Literal["forward", "forward+backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "forward+backward", "step")
"""Each phase contains the one before it."""

IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "cuda": {
        "rt-naive": Implementation(label="RT naive", layer=RecurrentTransformer, method="naive"),
        "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled"),
        "rt-tiled-graph": Implementation(
            label="RT tiled, graph", layer=RecurrentTransformer, method="tiled", graph=True
        ),
        "rt-fused": Implementation(label="RT fused, graph", layer=RecurrentTransformer, method="fused", graph=True),
        "transformer": Implementation(label="Transformer, graph", layer=Transformer, graph=True),
    },
    "cpu": {
        "rt-naive": Implementation(label="RT naive", layer=RecurrentTransformer, method="naive"),
        "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled"),
        "rt-native": Implementation(label="RT native", layer=RecurrentTransformer, method="native"),
        "transformer": Implementation(label="Transformer", layer=Transformer),
    },
}
"""Implementations that can be timed, by type of device."""

ON_CPU, ON_GPU = (", ".join(IMPLEMENTATIONS[kind]) for kind in ("cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class DiagnosticsOptions:
    """Time the implementations of the diagnostic layer, after a check against float64.

    With --layers, time layers by name instead: see "diagnostics --layers all --help".

    Attributes:
        phases: forward; forward+backward; step, the trainer's whole optimizer step.
        lengths: sequence lengths N.
        runs: numbers R of runs trained together.
        together_at: lengths at which every number of runs is timed; the other lengths follow, with the smallest number.
        batch_size: sequences of each run in a step.
        width: model width D.
        heads: attention heads.
        mlp_width: hidden width of the MLP.
        repeats: repeats of each figure, at least 5; the budget may leave out those after 5.
        limit: seconds; a cell is skipped if one eager pass takes longer.
        budget: seconds; once they are spent, only cells that take less than a second altogether are timed.
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
    "cuda": DiagnosticsOptions(
        implementations=tuple(IMPLEMENTATIONS["cuda"]),
        lengths=(32, 64, 128, 256, 512, 1024),
        runs=(1, 6, 30, 90),
        batch_size=128,
        budget=220.0,
    ),
    "cpu": DiagnosticsOptions(
        implementations=tuple(IMPLEMENTATIONS["cpu"]), lengths=(32, 64, 128, 256), runs=(1,), batch_size=8, budget=90.0
    ),
}
"""Defaults by type of device."""


def parse(arguments: Sequence[str]) -> DiagnosticsOptions:
    """Read the command line, with the defaults of the device.

    Raises:
        ValueError: an option does not fit; the message says what to do.
    """
    several = ("implementations", "phases", "lengths", "runs")
    counts = ("lengths", "runs", "batch_size", "width", "heads", "mlp_width")
    options: DiagnosticsOptions
    options, device = parse_options(DiagnosticsOptions, PRESETS, arguments, several, counts)

    known = IMPLEMENTATIONS[device.type]
    check_names(options.implementations, known)
    if len(set(options.runs)) > 1 and not set(options.together_at) & set(options.lengths):
        at = ", ".join(map(str, options.together_at))
        raise ValueError(f"--together-at {at}: none of these is among --lengths, so --runs would have no effect")

    # The batch must not exceed the training set, and the layers must exist in this shape.
    for length in options.lengths:
        Protocol(batch_size=options.batch_size).check(InContextRecall.Config(length=length).train_examples)
    for name in options.implementations:
        known[name].build(options.setting)
    return options
