"""JSON-able forms that are common to the records of both benchmarks."""

import time
from dataclasses import asdict
from statistics import median
from typing import Any

from mixers.ops.numerics import product_precision
from runners.bench.bench import Bench
from runners.bench.cells import Figures
from runners.device import device_name
from runners.provenance import versions


def run_to_dict(bench: Bench[Any, Any]) -> dict[str, Any]:
    """Return what was run, where, and how far the run has come."""
    device = bench.clock.device
    return {
        "benchmark": bench.name,
        "command": bench.command,
        "complete": bench.complete,
        "elapsed_seconds": round(time.monotonic() - bench.started, 1),
        "device": device_name(device),
        "versions": versions(),
        "precision": product_precision(device),
        "options": {**asdict(bench.options), "out": str(bench.options.out)},
    }


def figures_to_dict(figures: Figures) -> dict[str, Any]:
    """Return the figures of a cell, in milliseconds and GiB."""
    milliseconds = [1e3 * s for s in figures.seconds]
    timed = bool(milliseconds)
    return {
        "status": figures.status,
        "median_ms": median(milliseconds) if timed else None,
        "min_ms": min(milliseconds) if timed else None,
        "max_ms": max(milliseconds) if timed else None,
        "repeats": len(milliseconds),
        "passes_per_repeat": figures.passes,
        "peak_gib": figures.peak_gib,
    }
