"""The JSON form of a run of the benchmark ``diagnostics``."""

from dataclasses import asdict
from typing import Any

from runners.bench.diagnostics.bench import DiagnosticsBench, DiagnosticsCell
from runners.bench.diagnostics.options import Phase
from runners.bench.record import figures_to_dict, run_to_dict
from runners.bench.scaling import Points, latency_exponent


def to_dict(bench: DiagnosticsBench) -> dict[str, Any]:
    """Return the JSON-able form of a run."""
    fewest = min(bench.options.runs)
    return {
        **run_to_dict(bench),
        "checks": {
            name: {"error": outcome.error, "problem": outcome.problem} for (name, _), outcome in bench.checks.items()
        },
        "cells": [cell_to_dict(bench, cell) for cell in bench.cells if cell in bench.figures],
        "exponents": [
            {
                "phase": phase,
                "implementation": name,
                "exponent": latency_exponent(points(bench, phase, name, fewest)),
            }
            for phase in bench.options.phases
            for name in bench.implementations
        ],
    }


def cell_to_dict(bench: DiagnosticsBench, cell: DiagnosticsCell) -> dict[str, Any]:
    """Return the JSON-able form of a cell that has its figures."""
    figures, target = figures_to_dict(bench.figures[cell]), bench.target(cell)
    return {
        **asdict(cell),
        **figures,
        "error": bench.check_of(cell).error,
        "target_ms": target,
        "target_met": None if target is None or figures["median_ms"] is None else figures["median_ms"] <= target,
    }


def points(bench: DiagnosticsBench, phase: Phase, name: str, runs: int) -> Points:
    """Return the timed lengths of an implementation and the milliseconds of their repeats."""
    key = (phase, name, runs)
    return [
        (cell.length, [1e3 * s for s in figures.seconds])
        for cell in bench.cells
        if (cell.phase, cell.implementation, cell.runs) == key
        and (figures := bench.figures.get(cell))
        and figures.seconds
    ]
