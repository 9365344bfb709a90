"""Tables, JSON form and chart of what a run of the benchmark ``pretraining`` measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from mixers.costs import short
from runners.bench.pretraining_cells import OURS, PHASES, QUADRATIC_TARGET, QUADRATIC_UP_TO, Cell, Phase, Target
from runners.bench.report import (
    LATENCY,
    SHORT,
    Points,
    described,
    draw_latencies,
    exponent_of,
    finish_axes,
    measured,
    print_filled,
)
from runners.device import device_name
from runners.files import write_atomically

if TYPE_CHECKING:  # for it imports this module
    from runners.bench.pretraining import PretrainingBench

FORMS: dict[str, tuple[str, Callable[[float], str]]] = {
    "median_ms": ("ms", "{:.4g}".format),
    "layer_ms": ("ms a\nlayer", "{:.4g}".format),
    "tokens_per_second": ("tok/s", lambda speed: short(round(speed))),
    "share_of_peak": ("of peak", "{:.1%}".format),
    "of_transformer": ("of\nTransf.", "{:.2f}".format),
    "peak_gib": ("peak\nGiB", "{:.3g}".format),
    "setup_seconds": ("set-up\ns", "{:.3g}".format),
    "cache_bytes": ("cache\nMiB", lambda size: f"{size / 2**20:.2f}"),
    "parameters": ("parameters", lambda number: short(round(number))),
    "error": ("error", "{:.1e}".format),
    "quadratic_share": ("quadratic share", "{:.2f}".format),
}
"""Heading and form of a figure in the tables."""
LAYER_FIGURES = ("layer_ms", "tokens_per_second", "share_of_peak", "peak_gib", "setup_seconds", "error")
TRAINING_FIGURES = ("tokens_per_second", "share_of_peak", "of_transformer", "peak_gib", "setup_seconds", "error")
DECODE_FIGURES = ("tokens_per_second", "cache_bytes", "parameters", "peak_gib", "error")


def to_dict(bench: "PretrainingBench") -> dict[str, Any]:
    """JSON-able form."""
    return {
        **described(bench),
        "peak_flops": bench.peak,
        "checks": [
            {"implementation": name, "width": setting.width, "layers": setting.layers, **asdict(outcome)}
            for (name, setting), outcome in bench.checks.items()
        ],
        "cells": [cell_to_dict(bench, cell) for cell in bench.cells if cell in bench.figures],
        "lengths": list(sweeps(bench)),
    }


def cell_to_dict(bench: "PretrainingBench", cell: Cell) -> dict[str, Any]:
    """A cell's part of ``to_dict``; it must have its figures.

    Set-up is all that comes before the first repeat but further warm-up: building, capture or compilation of the layer
    and, as measured in the check, of kernels that no earlier check has compiled. ``share_of_peak`` is the roofline's
    for a layer, in training the MFU.
    """
    figures, check, latency, ideal = (
        bench.figures[cell],
        bench.outcome(cell),
        bench.latency(cell),
        bench.ideal_seconds(cell),
    )
    tokens = cell.batch_size * (1 if cell.phase == "decode" else cell.length)
    compiled = bench.implementations[cell.implementation].form == "compiled"  # once more, for the shape of the cell
    setup = figures.setup_seconds
    shown = {
        **asdict(cell),
        **measured(figures),
        "layer_ms": None if latency is None or cell.phase not in PHASES[:2] else 1e3 * latency / cell.layers,
        "tokens_per_second": None if latency is None else tokens / latency,
        "share_of_peak": None if latency is None or ideal is None else ideal / latency,
        "of_transformer": _of_transformer(bench, cell),
        "setup_seconds": None if setup is None else setup + (0.0 if compiled else check.first_seconds or 0.0),
        "error": check.error,
        **figures.facts,
    }
    return {**shown, "targets": [_judged(target, shown) for target in bench.targets(cell)]}


def points(bench: "PretrainingBench", phase: Phase, batch: int, name: str) -> Points:
    """Lengths at the first width and the milliseconds of their repeats."""
    place = (phase, bench.options.widths[0], 1, batch, name)
    return [
        (cell.length, [1e3 * s for s in figures.seconds])
        for cell in sorted(bench.figures, key=lambda cell: cell.length)
        if (cell.phase, cell.width, cell.layers, cell.batch_size, cell.implementation) == place
        and (figures := bench.figures[cell]).seconds
    ]


def sweeps(bench: "PretrainingBench") -> Iterator[dict[str, Any]]:
    """Latency against N: its exponent, and at each N the quadratic share, the latency over that of a linear one."""
    for phase, batch in panels(bench):
        for name in bench.implementations:
            known = points(bench, phase, batch, name)
            if len(known) > 1:
                shortest, least = known[0][0], median(known[0][1])
                shares = {n: median(times) / (n / shortest * least) for n, times in known}
                asked = [share for n, share in shares.items() if n <= QUADRATIC_UP_TO]
                judged = _judged(QUADRATIC_TARGET, {QUADRATIC_TARGET.figure: max(asked, default=None)})
                yield {
                    "phase": phase,
                    "batch_size": batch,
                    "implementation": name,
                    "exponent": exponent_of(known),
                    "quadratic_share": shares,
                    "targets": [judged] if bench.clock.cuda and name == OURS else [],
                }


def panels(bench: "PretrainingBench") -> list[tuple[Phase, int]]:
    """Phases and batches in which several lengths were timed."""
    return [
        (phase, batch)
        for phase in PHASES[:2]
        for batch in sorted({min(bench.options.batches), bench.options.batch_size})
        if any(len(points(bench, phase, batch, name)) > 1 for name in bench.implementations)
    ]


def print_tables(bench: "PretrainingBench", console: Console) -> None:
    """A table each for layers, training and decoding, with one row a cell, and one of latency against N.

    The spread is the range of the repeats over their median.
    """
    parts = {
        "layers": (PHASES[:2], LAYER_FIGURES),
        "training": (("training",), TRAINING_FIGURES),
        "decoding": (("decode",), DECODE_FIGURES),
    }
    for title, (phases, names) in parts.items():
        cells = [cell for phase in phases for cell in bench.cells if cell.phase == phase and cell in bench.figures]
        if cells:
            _print_cells(bench, console, title, cells, names)
    if rows := list(sweeps(bench)):
        lengths = sorted({n for row in rows for n in row["quadratic_share"]})
        title = f"latency against N, D {bench.options.widths[0]}, and over linear from N {lengths[0]} on"
        headings = ("what", "B", "implementation", "exponent", *map(str, lengths), "")
        lines = []
        for row in rows:
            shares = row["quadratic_share"]
            lines.append((
                SHORT[row["phase"]],
                str(row["batch_size"]),
                bench.implementations[row["implementation"]].label,
                f"{row['exponent']:.2f}",
                *(f"{shares[n]:.2f}" if n in shares else "" for n in lengths),
                "".join(_note(target).strip() for target in row["targets"]),
            ))  # fmt: skip
        print_filled(headings, lines, console, title)


def plot(bench: "PretrainingBench", path: Path) -> None:
    """Latency against N on logarithmic axes, a panel for each phase and batch; exponents in the legends."""
    shown = panels(bench) or [("forward", bench.options.batch_size)]
    figure = Figure(figsize=(5.0 * len(shown), 5.5), layout="constrained")
    figure.suptitle(f"{device_name(bench.clock.device)}: one layer, D {bench.options.widths[0]}")
    for axes, (phase, batch) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set(title=f"{phase}, batch {batch}")
        curves = ((i.label, points(bench, phase, batch, name)) for name, i in bench.implementations.items())
        draw_latencies(axes, curves)
        finish_axes(axes, sorted(bench.options.lengths))
    figure.axes[0].set_ylabel(LATENCY)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _print_cells(
    bench: "PretrainingBench", console: Console, title: str, cells: Sequence[Cell], names: Sequence[str]
) -> None:
    headings = ("D", "B", "N", "what", "implementation", "ms", "spread", *(FORMS[name][0] for name in names), "")
    rows = []
    for i, cell in enumerate(cells):
        shown = cell_to_dict(bench, cell)
        notes = {target["figure"]: _note(target) for target in shown["targets"]}
        how = f"\nin parts of {cell.micro_batch_size}" if cell.micro_batch_size else ""
        how += "\nrecomputing" if cell.recompute else ""
        layers = f"{cell.layers} layers" if cell.layers > 1 or cell.phase not in PHASES[:2] else ""
        kind = " ".join(filter(None, (SHORT.get(cell.phase), layers))) + how
        place = (str(cell.width), str(cell.batch_size), str(cell.length), kind)
        again = i > 0 and (cells[i - 1].group, cells[i - 1].layers) == (cell.group, cell.layers)
        texts = {
            name: FORMS[name][1](shown[name]) + notes.get(name, "")
            for name in ("median_ms", *names)
            if shown.get(name) is not None
        }
        rows.append((
            *(("",) * 4 if again else place),
            bench.implementations[cell.implementation].label,
            texts.get("median_ms", ""),
            f"{(shown['max_ms'] - shown['min_ms']) / shown['median_ms']:.1%}" if texts.get("median_ms") else "",
            *(texts.get(name, "") for name in names),
            "" if texts.get("median_ms") else shown["status"],
        ))  # fmt: skip
    print_filled(headings, rows, console, title)


def _note(target: dict[str, Any]) -> str:
    """Line below a figure: its target, and whether it is met; nothing where that is not known."""
    if target["met"] is None:
        return ""
    sign, bound = ("≥", target["at_least"]) if "at_least" in target else ("≤", target["at_most"])
    return f"\n{sign} {FORMS[target['figure']][1](bound)} {'met' if target['met'] else 'missed'}"


def _judged(target: Target, shown: dict[str, Any]) -> dict[str, Any]:
    """A target, and whether it is met; None where its figure is not known."""
    value = shown.get(target.figure)
    reached = None if value is None else bool(value >= target.bound if target.at_least else value <= target.bound)
    return {
        "figure": target.figure,
        "at_least" if target.at_least else "at_most": target.bound,
        "met": reached,
    }


def _of_transformer(bench: "PretrainingBench", cell: Cell) -> float | None:
    """Speed of training over that of the Transformer with as many layers."""
    others = (
        latency
        for other in bench.figures
        if (other.phase, other.layers) == ("training", cell.layers)
        and bench.implementations[other.implementation].parallel
        and (latency := bench.latency(other)) is not None
    )
    latency, best = bench.latency(cell), min(others, default=None)
    return best / latency if cell.phase == "training" and latency is not None and best is not None else None
