"""Table, JSON form and chart of what a run of ``runners.bench`` measured."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from runners.bench.timing import PHASES, Phase
from runners.checkpoint import write_atomically
from runners.environment import device_name, product_precision, versions

if TYPE_CHECKING:  # for it imports this module
    from runners.bench.diagnostics import Cell, DiagnosticsBench
    from runners.bench.turns import Bench, Figures

Points = list[tuple[int, list[float]]]
"""Lengths and the milliseconds of their repeats."""
LATENCY = "latency, ms (median, range)"


def points(bench: "DiagnosticsBench", phase: Phase, name: str) -> Points:
    """Lengths and the milliseconds of their repeats, for the fewest runs."""
    key = (phase, name, min(bench.options.runs))
    return [
        (cell.length, [1e3 * s for s in figures.seconds])
        for cell in bench.cells
        if (cell.phase, cell.implementation, cell.runs) == key
        and (figures := bench.figures.get(cell))
        and figures.seconds
    ]


def exponent(bench: "DiagnosticsBench", phase: Phase, name: str) -> float | None:
    """Exponent of the latency in N for the fewest runs; needs two lengths."""
    return exponent_of(points(bench, phase, name))


def exponent_of(known: Points) -> float | None:
    """Exponent of the median latency in N; needs two lengths."""
    return fit_exponent([p[0] for p in known], [median(p[1]) for p in known]) if len(known) > 1 else None


def to_dict(bench: "DiagnosticsBench") -> dict[str, Any]:
    """JSON-able form."""
    return {
        **described(bench),
        "checks": {
            name: {"error": outcome.error, "problem": outcome.problem} for (name, _), outcome in bench.checks.items()
        },
        "cells": [cell_to_dict(bench, cell) for cell in bench.cells if cell in bench.figures],
        "exponents": [
            {"phase": phase, "implementation": name, "exponent": exponent(bench, phase, name)}
            for phase in bench.options.phases
            for name in bench.implementations
        ],
    }


def described(bench: "Bench[Any, Any]") -> dict[str, Any]:
    """JSON-able form of what was run, where, and how far it came."""
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


def cell_to_dict(bench: "DiagnosticsBench", cell: "Cell") -> dict[str, Any]:
    """A cell's part of ``to_dict``; it must have its figures."""
    shown, target = measured(bench.figures[cell]), bench.target(cell)
    return {
        **asdict(cell),
        **shown,
        "error": bench.outcome(cell).error,
        "target_ms": target,
        "target_met": None if target is None or shown["median_ms"] is None else shown["median_ms"] <= target,
    }


def measured(figures: "Figures") -> dict[str, Any]:
    """JSON-able form of a cell's figures."""
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


def fit_exponent(lengths: Sequence[int], times: Sequence[float]) -> float:
    """Least-squares exponent p of ``time ~ length^p``."""
    return float(np.polyfit(np.log(lengths), np.log(times), 1)[0])


def print_table(bench: "DiagnosticsBench", console: Console) -> None:
    """One row a cell: median and range of the repeats in ms, peak memory, error against float64, target or reason."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("phase", "N", "R", "implementation", "ms", "min – max", "peak GiB", "error", ""):
        table.add_column(heading, justify="left" if heading in ("phase", "implementation", "") else "right")
    cells = sorted(bench.cells, key=lambda cell: PHASES.index(cell.phase))
    for _, group in groupby(cells, key=lambda cell: cell.group):
        for i, cell in enumerate(group):
            shown = cell_to_dict(bench, cell)
            timed = shown["median_ms"] is not None
            note = "" if timed else shown["status"]
            if shown["target_ms"] is not None:
                met = {True: "met", False: "missed", None: note}[shown["target_met"]]
                note = f"target {shown['target_ms']:g} ms: {met}"
            table.add_row(
                *((cell.phase, str(cell.length), str(cell.runs)) if i == 0 else ("", "", "")),
                bench.implementations[cell.implementation].label,
                f"{shown['median_ms']:.3f}" if timed else "",
                f"{shown['min_ms']:.3f} – {shown['max_ms']:.3f}" if timed else "",
                "" if shown["peak_gib"] is None else f"{shown['peak_gib']:.3g}",
                "" if shown["error"] is None else f"{shown['error']:.1e}",
                note,
            )
    console.print(table)


def plot(bench: "DiagnosticsBench", path: Path) -> None:
    """Latency against N on logarithmic axes, one panel a phase, for the fewest runs; exponents in the legends."""
    phases = [phase for phase in PHASES if phase in bench.options.phases]
    figure = Figure(figsize=(5.0 * len(phases), 4.5), layout="constrained")
    figure.suptitle(
        f"{device_name(bench.clock.device)}: one layer, batch {bench.options.batch_size}, R = {min(bench.options.runs)}"
    )
    lengths = sorted({cell.length for cell in bench.cells})
    for axes, phase in zip(figure.subplots(1, len(phases), squeeze=False)[0], phases, strict=True):
        axes.set(title=phase)
        curves = ((i.label, points(bench, phase, name)) for name, i in bench.implementations.items())
        draw_latencies(axes, curves, lengths)
    figure.axes[0].set_ylabel(LATENCY)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def draw_latencies(axes: Axes, curves: Iterable[tuple[str, Points]], lengths: Sequence[int]) -> None:
    """Latency against N on logarithmic axes, with its exponent in the legend; each curve keeps its color if empty."""
    axes.set(xlabel="sequence length N")
    for i, (label, known) in enumerate(curves):
        if known:
            at, times = zip(*known, strict=True)
            middle, low, high = (np.array([of(repeats) for repeats in times]) for of in (median, min, max))
            fitted = exponent_of(known)
            label += "" if fitted is None else f": $N^{{{fitted:.2f}}}$"
            axes.errorbar(at, middle, (middle - low, high - middle), fmt="o-", capsize=2, color=f"C{i}", label=label)
    if axes.has_data():
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=8)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
