"""Time implementations of RT, and the Transformer, in the shape of the diagnostic models.

    python -m runners.bench diagnostics
    python -m runners.bench diagnostics --lengths 128 --runs 1 30 --phases step
    python -m runners.bench diagnostics --implementations rt-fused transformer

The implementations take turns at each length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Literal

import tyro

from mixers.base import Shape
from runners.bench.layers import optimizer_step
from runners.bench.measure import (
    CHECK_RUNS,
    Case,
    Common,
    Implementation,
    Pass,
    Record,
    check,
    options_and_device,
    random_pass,
)
from runners.ending import user_errors
from tasks.recall import InContextRecall

IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "cuda": {
        "rt-naive": Implementation(mixer="rt", method="naive"),
        "rt-tiled": Implementation(mixer="rt", method="tiled"),
        "rt-tiled-graph": Implementation(mixer="rt", method="tiled", graph=True),
        "rt-fused": Implementation(mixer="rt", method="fused", graph=True),
        "transformer": Implementation(mixer="transformer", graph=True),
    },
    "cpu": {
        "rt-naive": Implementation(mixer="rt", method="naive"),
        "rt-tiled": Implementation(mixer="rt", method="tiled"),
        "rt-native": Implementation(mixer="rt", method="native"),
        "transformer": Implementation(mixer="transformer"),
    },
}
"""What can be timed, by type of device."""
ON_CPU, ON_GPU = (", ".join(IMPLEMENTATIONS[kind]) for kind in ("cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Time implementations of RT, and the Transformer, in the shape of the diagnostic models.

    Attributes:
        phases: forward; forward+backward; step, the trainer's whole optimizer step on in-context recall.
        lengths: sequence lengths N.
        runs: numbers R of runs computed together.
        batch_size: sequences of each run.
        width: model width D.
        heads: attention heads.
        mlp_width: hidden width of the MLP.
    """

    implementations: Annotated[tuple[str, ...], tyro.conf.arg(help=f"what to time, of {ON_CPU}; on a GPU of {ON_GPU}.")]
    phases: tuple[Literal["forward", "forward+backward", "step"], ...] = ("forward", "forward+backward")
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    runs: tuple[int, ...] = (1,)
    batch_size: int = 128
    width: int = 128
    heads: int = 16
    mlp_width: int = 512


PRESETS = {
    "cuda": Options(implementations=tuple(IMPLEMENTATIONS["cuda"])),
    "cpu": Options(implementations=tuple(IMPLEMENTATIONS["cpu"]), lengths=(32, 64, 128, 256), batch_size=8),
}
"""Defaults by type of device."""


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    with user_errors(ValueError):
        options, device = options_and_device(Options, PRESETS, arguments)
        known = IMPLEMENTATIONS[device.type]
        if lacking := [name for name in options.implementations if name not in known]:
            raise ValueError(f"no implementation {lacking[0]!r} on this device: choose from {', '.join(known)}")
        chosen = {name: known[name] for name in options.implementations}
        shape = Shape(width=options.width, mlp_width=options.mlp_width)
        tasks = {n: InContextRecall(InContextRecall.Config(length=n)) for n in options.lengths}

        for implementation in chosen.values():
            implementation.build(shape, options.heads, device, plain=True)

    def build(implementation: Implementation, phase: str, length: int, runs: int) -> Pass:
        given, batch = (implementation, shape, options.heads, runs, device), options.batch_size
        if phase == "step":
            return optimizer_step(*given, tasks[length], batch)
        return random_pass(*given, batch=batch, length=length, backward=phase == "forward+backward")

    record = Record("diagnostics", options, device, arguments)
    for runs, length, phase in product(options.runs, options.lengths, options.phases):
        place = {"phase": phase, "batch_size": options.batch_size, "length": length, "runs": runs}
        record.measure([
            Case(
                place={**place, "implementation": name},
                build=partial(build, implementation, phase, length, runs),
                check=partial(check, implementation, shape, options.heads, CHECK_RUNS, device),
            )
            for name, implementation in chosen.items()
        ])  # fmt: skip
    record.finish()
