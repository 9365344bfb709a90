"""The JSON form of a run of the benchmark ``pretraining``, with the figures that are derived from the times."""

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from runners.bench.pretraining.bench import PretrainingBench
from runners.bench.pretraining.cells import LAYER_PHASES, Phase, PretrainingCell
from runners.bench.pretraining.implementations import OURS
from runners.bench.pretraining.targets import QUADRATIC_TARGET, QUADRATIC_UP_TO
from runners.bench.record import figures_to_dict, run_to_dict
from runners.bench.scaling import Points, latency_exponent


def to_dict(bench: PretrainingBench) -> dict[str, Any]:
    """Return the JSON-able form of a run."""
    return {
        **run_to_dict(bench),
        "peak_flops": bench.peak,
        "checks": [
            {"implementation": name, "width": setting.width, "layers": setting.layers, **asdict(outcome)}
            for (name, setting), outcome in bench.checks.items()
        ],
        "cells": [cell_to_dict(bench, cell) for cell in bench.cells if cell in bench.figures],
        "lengths": list(sweeps(bench)),
    }


def cell_to_dict(bench: PretrainingBench, cell: PretrainingCell) -> dict[str, Any]:
    """Return the JSON-able form of a cell that has its figures.

    ``share_of_peak`` is the roofline's share for a layer, and the MFU in training.
    """
    figures = bench.figures[cell]
    latency = bench.latency(cell)
    ideal = bench.ideal_seconds(cell)
    tokens = cell.batch_size * (1 if cell.phase == "decode" else cell.length)

    derived = {
        **asdict(cell),
        **figures_to_dict(figures),
        "layer_ms": None if latency is None or cell.phase not in LAYER_PHASES else 1e3 * latency / cell.layers,
        "tokens_per_second": None if latency is None else tokens / latency,
        "share_of_peak": None if latency is None or ideal is None else ideal / latency,
        "of_transformer": bench.speed_of_transformer(cell),
        "setup_seconds": _setup_seconds(bench, cell),
        "error": bench.check_of(cell).error,
        **figures.facts,
    }
    return {**derived, "targets": [target.judge(derived) for target in bench.targets(cell)]}


def _setup_seconds(bench: PretrainingBench, cell: PretrainingCell) -> float | None:
    """Return all seconds before the first repeat except for further warm-up; None if the cell was not timed.

    These are building, the capture or compilation of the layer, and the compilation of its kernels. The check compiles
    the kernels that no earlier check has compiled, so its first pass counts. A layer under ``torch.compile`` is
    compiled once more for the shape of the cell, so there the first pass of the check does not count.
    """
    setup = bench.figures[cell].setup_seconds
    if setup is None or bench.implementations[cell.implementation].form == "compiled":
        return setup
    return setup + (bench.check_of(cell).first_seconds or 0.0)


def sweeps(bench: PretrainingBench) -> Iterator[dict[str, Any]]:
    """Yield the JSON-able form of latency against N, for each phase, batch and implementation with several lengths.

    It holds the exponent and, for each N, the quadratic share: the latency over that of a linear growth from the
    shortest length.
    """
    for phase, batch in panels(bench):
        for name in bench.implementations:
            known = points(bench, phase, batch, name)
            if len(known) < 2:
                continue

            # Latency over a linear growth from the shortest length.
            shortest, least = known[0][0], median(known[0][1])
            shares = {n: median(times) / (n / shortest * least) for n, times in known}

            # The target applies to the largest share up to a certain length.
            largest = max((share for n, share in shares.items() if n <= QUADRATIC_UP_TO), default=None)
            judged = QUADRATIC_TARGET.judge({QUADRATIC_TARGET.figure: largest})
            yield {
                "phase": phase,
                "batch_size": batch,
                "implementation": name,
                "exponent": latency_exponent(known),
                "quadratic_share": shares,
                "targets": [judged] if bench.clock.cuda and name == OURS else [],
            }


def panels(bench: PretrainingBench) -> list[tuple[Phase, int]]:
    """Return the phases and batches in which several lengths were timed."""
    return [
        (phase, batch)
        for phase in LAYER_PHASES
        for batch in sorted({min(bench.options.batches), bench.options.batch_size})
        if any(len(points(bench, phase, batch, name)) > 1 for name in bench.implementations)
    ]


def points(bench: PretrainingBench, phase: Phase, batch: int, name: str) -> Points:
    """Return the timed lengths of a layer at the first width, and the milliseconds of their repeats."""
    place = (phase, bench.options.widths[0], 1, batch, name)
    return [
        (cell.length, [1e3 * s for s in figures.seconds])
        for cell in sorted(bench.figures, key=lambda cell: cell.length)
        if (cell.phase, cell.width, cell.layers, cell.batch_size, cell.implementation) == place
        and (figures := bench.figures[cell]).seconds
    ]
