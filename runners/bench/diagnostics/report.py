"""Table and chart of a run of the benchmark ``diagnostics``."""

from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from runners.bench.charts import LATENCY, draw_latencies, finish_axes, share_range
from runners.bench.diagnostics.bench import DiagnosticsBench
from runners.bench.diagnostics.options import PHASES
from runners.bench.diagnostics.record import cell_to_dict, points
from runners.bench.tables import SHORT, print_table
from runners.device import device_name
from runners.drawing import styles
from runners.files import write_atomically

MARKS, LINES = "os^DvPX*<>phd", ("-", "--", "-.", ":")
"""Marks and lines of a chart, one for each number of runs. Where there is a single length, the mark stands alone."""


def print_tables(bench: DiagnosticsBench, console: Console) -> None:
    """Print one row for each cell.

    The row shows the error against float64, the peak memory, the median and range of the repeats in ms, and the target
    or the reason why nothing was timed.
    """
    rows = []
    cells = sorted(bench.cells, key=lambda cell: PHASES.index(cell.phase))
    for _, group in groupby(cells, key=lambda cell: cell.group):
        for i, cell in enumerate(group):
            place = (SHORT.get(cell.phase, cell.phase), str(cell.length), str(cell.runs))
            label = bench.implementations[cell.implementation].label
            rows.append((*(place if i == 0 else ("", "", "")), label, *_texts(cell_to_dict(bench, cell))))

    print_table(("phase", "N", "R", "implementation", "error", "GiB", "ms", "min – max"), rows, console)


def _texts(shown: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return error, memory, median and note of a cell, given its JSON-able form."""
    timed = shown["median_ms"] is not None
    note = f"{shown['min_ms']:.3f} – {shown['max_ms']:.3f}" if timed else shown["status"]
    if shown["target_met"] is not None:
        note += f"\ntarget {shown['target_ms']:g} ms: {'met' if shown['target_met'] else 'missed'}"
    return (
        "" if shown["error"] is None else f"{shown['error']:.1e}",
        "" if shown["peak_gib"] is None else f"{shown['peak_gib']:.3g}",
        f"{shown['median_ms']:.3f}" if timed else "",
        note,
    )


def plot(bench: DiagnosticsBench, path: Path) -> None:
    """Draw latency against N on logarithmic axes, in one panel for each phase of which something was timed.

    The legends show the exponents for the fewest runs.
    """
    runs = sorted(set(bench.options.runs))
    timed = {cell.phase for cell, figures in bench.figures.items() if figures.seconds}
    phases = [phase for phase in PHASES if phase in timed] or list(bench.options.phases[:1])
    lengths = sorted({cell.length for cell in bench.cells})
    look = styles(list(bench.implementations))

    figure = Figure(figsize=(5.0 * len(phases), 5.5), layout="constrained")
    title = f"{device_name(bench.clock.device)}: one layer, batch {bench.options.batch_size}"
    figure.suptitle(title if len(runs) > 1 else f"{title}, R = {runs[0]}")

    for axes, phase in zip(figure.subplots(1, len(phases), squeeze=False)[0], phases, strict=True):
        axes.set(title=phase)
        for number, mark, line in zip(runs, cycle(MARKS), cycle(LINES)):
            style = mark + line
            curves = [
                (
                    implementation.label if number == runs[0] else "",
                    look[name].color,
                    points(bench, phase, name, number),
                )
                for name, implementation in bench.implementations.items()
            ]
            draw_latencies(axes, curves, style)

            # Legend of the marks.
            if len(runs) > 1 and any(known for *_, known in curves):
                axes.errorbar([], [], fmt=style, color="black", label=f"R = {number}")
        finish_axes(axes, lengths)

    share_range(figure.axes)
    figure.axes[0].set_ylabel(LATENCY)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
