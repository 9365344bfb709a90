"""Options of ``diagnostics --layers``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mixers.registry import MIXERS, find_mixer
from runners.bench.implementations import Setting
from runners.bench.options import LEAST_REPEATS, parse_options
from runners.cli import expand
from runners.mad.training.protocol import Protocol
from tasks.recall import InContextRecall


@dataclass(frozen=True, kw_only=True)
class LayersOptions:
    """Time the trainer's whole optimizer step of layers at their baseline settings, on in-context recall.

    Attributes:
        lengths: sequence lengths N.
        runs: numbers R of runs trained together.
        together_at: length at which every number of runs is timed; the other lengths follow, with the smallest number.
        batch_size: sequences of each run in a step.
        width: model width D.
        mlp_width: hidden width of the MLP.
        repeats: repeats of each figure, at least 5; the budget may leave out those after 5.
        limit: seconds; a layer is skipped if a step takes longer.
        budget: seconds; a layer is skipped if it is expected to end later.
        device: auto takes a GPU if there is one.
        out: folder of results.
    """

    layers: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help=f"all, or what to time, of {', '.join(MIXERS)}; or package.module:Class."),
    ]
    lengths: tuple[int, ...]
    runs: tuple[int, ...]
    together_at: int
    batch_size: int
    width: int = 128
    mlp_width: int = 512
    repeats: int = LEAST_REPEATS
    limit: float
    budget: float
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path = Path("results")

    @property
    def setting(self) -> Setting:
        return Setting(width=self.width, heads=0, mlp_width=self.mlp_width, batch_size=self.batch_size)


PRESETS = {
    "cuda": LayersOptions(
        layers=("all",), lengths=(128,), runs=(1, 6, 30), together_at=128, batch_size=128, limit=2.0, budget=450.0
    ),
    "cpu": LayersOptions(
        layers=("all",), lengths=(32,), runs=(1,), together_at=32, batch_size=4, limit=5.0, budget=300.0
    ),
}
"""Defaults by type of device."""


def parse(arguments: Sequence[str]) -> LayersOptions:
    """Read the command line, with the defaults of the device; ``all`` becomes the registered names.

    Raises:
        ValueError: an option does not fit; the message says what to do.
    """
    several = ("layers", "lengths", "runs")
    counts = ("lengths", "runs", "batch_size", "width", "mlp_width")
    options: LayersOptions
    options, _ = parse_options(LayersOptions, PRESETS, arguments, several, counts)

    options = replace(options, layers=tuple(expand(options.layers, MIXERS)))
    for name in options.layers:
        find_mixer(name)
    if len(set(options.runs)) > 1 and options.together_at not in options.lengths:
        raise ValueError(f"--together-at {options.together_at} is not among --lengths, so --runs would have no effect")

    # The batch must not exceed the training set.
    for length in options.lengths:
        Protocol(batch_size=options.batch_size).check(InContextRecall.Config(length=length).train_examples)
    return options
