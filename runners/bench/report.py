"""Table, JSON form and chart of what a run of ``runners.bench`` measured."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import cycle, groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table

from mixers.ops.numerics import product_precision
from runners.bench.timing import PHASES, Phase
from runners.device import device_name
from runners.files import write_atomically
from runners.provenance import versions

if TYPE_CHECKING:  # for it imports this module
    from runners.bench.diagnostics import Cell, DiagnosticsBench
    from runners.bench.turns import Bench, Figures

Points = list[tuple[int, list[float]]]
"""Lengths and the milliseconds of their repeats."""
LATENCY = "latency, ms (median, range)"
SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd"}
"""Phases in tables."""
WORDS = ("phase", "what", "implementation", "min – max", "")
"""Headings of columns that begin on the left; the others are of numbers."""
MARKS, LINES = "os^DvPX*<>phd", ("-", "--", "-.", ":")
"""Those of a chart, for one number of runs after another: where there is a single length, the mark stands alone."""


def points(bench: "DiagnosticsBench", phase: Phase, name: str, runs: int) -> Points:
    """Lengths and the milliseconds of their repeats."""
    key = (phase, name, runs)
    return [
        (cell.length, [1e3 * s for s in figures.seconds])
        for cell in bench.cells
        if (cell.phase, cell.implementation, cell.runs) == key
        and (figures := bench.figures.get(cell))
        and figures.seconds
    ]


def exponent(bench: "DiagnosticsBench", phase: Phase, name: str) -> float | None:
    """Exponent of the latency in N for the fewest runs; needs two lengths."""
    return exponent_of(points(bench, phase, name, min(bench.options.runs)))


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
    """One row a cell: error against float64, peak memory, median and range of the repeats in ms, target or reason."""
    rows = []
    cells = sorted(bench.cells, key=lambda cell: PHASES.index(cell.phase))
    for _, group in groupby(cells, key=lambda cell: cell.group):
        for i, cell in enumerate(group):
            shown = cell_to_dict(bench, cell)
            timed = shown["median_ms"] is not None
            note = f"{shown['min_ms']:.3f} – {shown['max_ms']:.3f}" if timed else shown["status"]
            if shown["target_met"] is not None:
                note += f"\ntarget {shown['target_ms']:g} ms: {'met' if shown['target_met'] else 'missed'}"
            rows.append((
                *((SHORT.get(cell.phase, cell.phase), str(cell.length), str(cell.runs)) if i == 0 else ("", "", "")),
                bench.implementations[cell.implementation].label,
                "" if shown["error"] is None else f"{shown['error']:.1e}",
                "" if shown["peak_gib"] is None else f"{shown['peak_gib']:.3g}",
                f"{shown['median_ms']:.3f}" if timed else "",
                note,
            ))  # fmt: skip
    print_filled(("phase", "N", "R", "implementation", "error", "GiB", "ms", "min – max"), rows, console)


def print_filled(
    headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console, title: str | None = None
) -> None:
    """A table without the columns that are empty throughout, in its full width where the console is too narrow for it.

    Only the last column may be broken further than its cells are.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    for i in kept:
        side: JustifyMethod = "left" if headings[i] in WORDS else "right"
        lines = "\n".join([headings[i], *(row[i] for row in rows)]).splitlines()
        widest = max(map(len, lines)) if i < len(headings) - 1 else None
        table.add_column(headings[i], justify=side, no_wrap=widest is not None, min_width=widest)
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    if needed.minimum > console.width:
        table.width = needed.maximum
    console.print(table, crop=False)


def plot(bench: "DiagnosticsBench", path: Path) -> None:
    """Latency against N on logarithmic axes, one panel a phase; exponents in the legends, those of the fewest runs."""
    runs = sorted(set(bench.options.runs))
    phases = [phase for phase in PHASES if phase in bench.options.phases]
    figure = Figure(figsize=(5.0 * len(phases), 5.5), layout="constrained")
    title = f"{device_name(bench.clock.device)}: one layer, batch {bench.options.batch_size}"
    figure.suptitle(title if len(runs) > 1 else f"{title}, R = {runs[0]}")
    lengths = sorted({cell.length for cell in bench.cells})
    for axes, phase in zip(figure.subplots(1, len(phases), squeeze=False)[0], phases, strict=True):
        axes.set(title=phase)
        for number, mark, line in zip(runs, cycle(MARKS), cycle(LINES)):
            form = mark + line
            curves = [
                (i.label if number == runs[0] else "", points(bench, phase, name, number))
                for name, i in bench.implementations.items()
            ]
            draw_latencies(axes, curves, form)
            if len(runs) > 1 and any(known for _, known in curves):  # logarithmic axes of nothing cannot be drawn
                axes.errorbar([], [], fmt=form, color="black", label=f"R = {number}")
        finish_axes(axes, lengths)
    figure.axes[0].set_ylabel(LATENCY)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def draw_latencies(axes: Axes, curves: Iterable[tuple[str, Points]], form: str = "o-") -> None:
    """Latency against N, with its exponent in the label if there is one; each curve keeps its color if empty."""
    for i, (label, known) in enumerate(curves):
        if known:
            at, times = zip(*known, strict=True)
            middle, low, high = (np.array([of(repeats) for repeats in times]) for of in (median, min, max))
            fitted = exponent_of(known)
            label += f": $N^{{{fitted:.2f}}}$" if label and fitted is not None else ""
            axes.errorbar(at, middle, (middle - low, high - middle), fmt=form, capsize=2, color=f"C{i}", label=label)


def finish_axes(axes: Axes, lengths: Sequence[int]) -> None:
    """Logarithmic axes, and a legend below them."""
    axes.set(xlabel="sequence length N")
    if axes.has_data():
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
