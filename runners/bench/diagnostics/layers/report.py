"""Table and chart of a run of ``diagnostics --layers``."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console

from runners.bench.diagnostics.layers.bench import LayersBench
from runners.bench.diagnostics.layers.record import cell_to_dict
from runners.bench.tables import print_table
from runners.device import device_name
from runners.files import write_atomically

UNITS = {"median_ms": "ms", "peak_gib": "GiB", "first_step_seconds": "s to the first step"}
FOOTNOTE = (
    "ms of an optimizer step: median (range of the repeats). first step: model made, step compiled, captured and taken "
    "once, the slowest of the row; code that an earlier row compiled is not compiled again. error: the largest of the "
    "layer's output and gradients, relative to the plain form in float64."
)
Row = list[dict[str, Any]]
"""The JSON-able forms of a layer's cells at one length, by number of runs."""


def rows(bench: LayersBench) -> dict[int, list[Row]]:
    """Return the rows of layers by length, as far as they were measured or skipped."""
    known = [cell for cell in bench.cells if cell in bench.figures]
    found: dict[int, list[Row]] = {}
    for (_, length), cells in groupby(known, key=lambda cell: cell.group):
        found.setdefault(length, []).append([cell_to_dict(bench, cell) for cell in cells])
    return found


def print_tables(bench: LayersBench, console: Console) -> None:
    """Print a table for each length, with one row for each layer."""
    for length, layers in rows(bench).items():
        runs = [shown["runs"] for shown in layers[0]]
        times = [f"ms, R {number}" for number in runs]
        headings = ("layer", *times, f"GiB, R {runs[-1]}", "first step, s", "error", "targets", "ran")
        print_table(headings, [_texts(row) for row in layers], console, f"N {length}, batch {bench.options.batch_size}")

    filled = [name for name, holds in bench.caches.items() if holds]
    caches = f"with code of earlier processes ({', '.join(filled)})" if filled else "empty"
    console.print(f"{FOOTNOTE} Caches of compiled code at the start: {caches}.")


def _texts(row: Row) -> list[str]:
    """Return the cells of a layer's row in the table."""
    *_, most = row
    firsts = [shown["first_step_seconds"] for shown in row if shown["first_step_seconds"] is not None]
    return [
        most["implementation"],
        *map(_time, row),
        "" if most["peak_gib"] is None else f"{most['peak_gib']:.3g}",
        f"{max(firsts):.1f}" if firsts else "",
        "" if most["error"] is None else f"{most['error']:.1e}",
        _targets(row),
        _what_ran(row),
    ]


def _time(shown: dict[str, Any]) -> str:
    if shown["median_ms"] is None:
        return ""
    return f"{shown['median_ms']:.2f} ({shown['min_ms']:.2f}–{shown['max_ms']:.2f})"


def _targets(row: Row) -> str:
    """Return which targets are missed; ``met`` if none is."""
    judged = [(shown["runs"], target) for shown in row for target in shown["targets"] if target["met"] is not None]
    missed = [
        f"{target['at_most']:.3g} {UNITS[target['figure']]} at R {runs}" for runs, target in judged if not target["met"]
    ]
    if missed:
        return "missed: " + "\n".join(missed)
    return "met" if judged else ""


def _what_ran(row: Row) -> str:
    """Return the kernels of the step and whether it was compiled; for what was not timed, the reason."""
    parts: dict[str, list[str]] = {}
    for shown in row:
        if shown["status"] == "timed":
            compiled = "compiled" if shown["compiled"] else "not compiled"
            text = f"{compiled}; " + ", ".join(shown["methods"] or ["no kernels"])
        else:
            text = shown["status"]
        parts.setdefault(text, []).append(f"R {shown['runs']}")

    if len(parts) == 1:
        return next(iter(parts))
    return "\n".join(f"{', '.join(runs)}: {text}" for text, runs in parts.items())


def plot(bench: LayersBench, path: Path) -> None:
    """Draw the milliseconds of a step on a logarithmic axis, one panel for each length, the fastest layer on top.

    A dashed line is a target. Layers without a figure stand at the end.
    """
    by_length = rows(bench)
    height = 1.8 + 0.25 * len(bench.implementations)
    figure = Figure(figsize=(6.5 * len(by_length), height), layout="constrained")
    options = bench.options
    figure.suptitle(f"{device_name(bench.clock.device)}: whole optimizer step, batch {options.batch_size}")

    panels = figure.subplots(1, len(by_length), squeeze=False, sharex=True)[0]
    for axes, (length, layers) in zip(panels, by_length.items(), strict=True):
        _draw(axes, sorted(layers, key=_slowness))
        axes.set(title=f"N = {length}", xlabel="ms (median, range)")

    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _slowness(row: Row) -> tuple[float, ...]:
    """Return the times of a layer, those of the most runs first; infinite where it has none."""
    return tuple(np.inf if shown["median_ms"] is None else shown["median_ms"] for shown in reversed(row))


def _draw(axes: Axes, layers: list[Row]) -> None:
    """Draw the times of sorted layers, one series for each number of runs."""
    for number, series in enumerate(zip(*layers, strict=True)):
        timed = [(place, shown) for place, shown in enumerate(series) if shown["median_ms"] is not None]
        if not timed:
            continue
        places = [place for place, _ in timed]
        middle, low, high = (np.array([s[f"{of}_ms"] for _, s in timed]) for of in ("median", "min", "max"))
        spread, color = (middle - low, high - middle), f"C{number}"
        label = f"R = {series[0]['runs']}"
        axes.errorbar(middle, places, xerr=spread, fmt="o", color=color, capsize=2, label=label)

        targets = {t["at_most"] for _, shown in timed for t in shown["targets"] if t["figure"] == "median_ms"}
        for bound in targets:
            axes.axvline(bound, color=color, linestyle="--", linewidth=1, label=f"target, {label}")

    # Why a layer has no times.
    for place, row in enumerate(layers):
        if all(shown["median_ms"] is None for shown in row):
            where: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7, "color": "0.4"}
            axes.text(0.02, place, row[0]["status"], backgroundcolor="white", **where)

    axes.set_yticks(range(len(layers)), [row[0]["implementation"] for row in layers])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.grid(axis="y", alpha=0.3)
    if axes.has_data():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
