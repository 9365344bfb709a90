"""Tables and chart of a run of the benchmark ``pretraining``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from runners.bench.charts import LATENCY, draw_latencies, finish_axes, share_range
from runners.bench.pretraining.bench import PretrainingBench
from runners.bench.pretraining.cells import LAYER_PHASES, PretrainingCell
from runners.bench.pretraining.record import cell_to_dict, panels, points, sweeps
from runners.bench.tables import SHORT, print_table
from runners.device import device_name
from runners.drawing import styles
from runners.files import write_atomically
from runners.tables import abbreviated

FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "median_ms": ("ms", "{:.4g}".format),
    "layer_ms": ("ms a\nlayer", "{:.4g}".format),
    "tokens_per_second": ("tok/s", lambda speed: abbreviated(round(speed))),
    "share_of_peak": ("of peak", "{:.1%}".format),
    "of_transformer": ("of\nTransf.", "{:.2f}".format),
    "peak_gib": ("peak\nGiB", "{:.3g}".format),
    "setup_seconds": ("set-up\ns", "{:.3g}".format),
    "cache_bytes": ("cache\nMiB", lambda size: f"{size / 2**20:.2f}"),
    "parameters": ("parameters", lambda number: abbreviated(round(number))),
    "error": ("error", "{:.1e}".format),
    "quadratic_share": ("quadratic share", "{:.2f}".format),
}
"""Heading and format of a figure in the tables."""
LAYER_FIGURES = ("layer_ms", "tokens_per_second", "share_of_peak", "peak_gib", "setup_seconds", "error")
TRAINING_FIGURES = ("tokens_per_second", "share_of_peak", "of_transformer", "peak_gib", "setup_seconds", "error")
DECODE_FIGURES = ("tokens_per_second", "cache_bytes", "parameters", "peak_gib", "error")
TABLES = {
    "layers": (LAYER_PHASES, LAYER_FIGURES),
    "training": (("training",), TRAINING_FIGURES),
    "decoding": (("decode",), DECODE_FIGURES),
}
"""Phases and figures of each table of cells."""


def print_tables(bench: PretrainingBench, console: Console) -> None:
    """Print a table each for layers, training and decoding, and one of latency against N."""
    for title, (phases, names) in TABLES.items():
        cells = [cell for phase in phases for cell in bench.cells if cell.phase == phase and cell in bench.figures]
        if cells:
            _print_cells(bench, console, title, cells, names)

    if found := list(sweeps(bench)):
        _print_sweeps(bench, console, found)


def _print_cells(
    bench: PretrainingBench, console: Console, title: str, cells: Sequence[PretrainingCell], names: Sequence[str]
) -> None:
    """Print a table with one row for each cell and the figures ``names``.

    The spread is the range of the repeats over their median.
    """
    headings = ("D", "B", "N", "what", "implementation", "ms", "spread", *(FORMATS[name][0] for name in names), "")
    rows = []
    for i, cell in enumerate(cells):
        shown = cell_to_dict(bench, cell)
        timed = shown["median_ms"] is not None
        texts = _figure_texts(shown, ("median_ms", *names))

        # The place stands in the first row of its cells alone.
        same_place = i > 0 and (cells[i - 1].group, cells[i - 1].layers) == (cell.group, cell.layers)
        place = (str(cell.width), str(cell.batch_size), str(cell.length), _kind(cell))

        rows.append((
            *(("",) * 4 if same_place else place),
            bench.implementations[cell.implementation].label,
            texts["median_ms"],
            f"{(shown['max_ms'] - shown['min_ms']) / shown['median_ms']:.1%}" if timed else "",
            *(texts[name] for name in names),
            "" if timed else shown["status"],
        ))  # fmt: skip
    print_table(headings, rows, console, title)


def _figure_texts(shown: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return the texts of figures, with their targets, given the JSON-able form of a cell; "" for unknown figures."""
    notes = {target["figure"]: _note(target) for target in shown["targets"]}
    return {
        name: "" if shown.get(name) is None else FORMATS[name][1](shown[name]) + notes.get(name, "") for name in names
    }


def _kind(cell: PretrainingCell) -> str:
    """Return the phase, the number of layers where it matters, and how the model is trained."""
    shows_layers = cell.layers > 1 or cell.phase not in LAYER_PHASES
    kind = " ".join(filter(None, (SHORT.get(cell.phase), f"{cell.layers} layers" if shows_layers else "")))
    if cell.micro_batch_size:
        kind += f"\nin parts of {cell.micro_batch_size}"
    if cell.recompute:
        kind += "\nrecomputing"
    return kind


def _print_sweeps(bench: PretrainingBench, console: Console, found: Sequence[dict[str, Any]]) -> None:
    """Print the table of latency against N, given the JSON-able forms that ``sweeps`` yields."""
    lengths = sorted({n for sweep in found for n in sweep["quadratic_share"]})
    title = f"latency against N, D {bench.options.widths[0]}, and over linear from N {lengths[0]} on"
    headings = ("what", "B", "implementation", "exponent", *map(str, lengths), "")

    rows = []
    for sweep in found:
        shares = sweep["quadratic_share"]
        rows.append((
            SHORT[sweep["phase"]],
            str(sweep["batch_size"]),
            bench.implementations[sweep["implementation"]].label,
            "" if sweep["exponent"] is None else f"{sweep['exponent']:.2f}",
            *(f"{shares[n]:.2f}" if n in shares else "" for n in lengths),
            "".join(_note(target).strip() for target in sweep["targets"]),
        ))  # fmt: skip
    print_table(headings, rows, console, title)


def _note(target: dict[str, Any]) -> str:
    """Return the line below a figure that says its target and whether it is met; "" if that is unknown."""
    if target["met"] is None:
        return ""
    sign, bound = ("≥", target["at_least"]) if "at_least" in target else ("≤", target["at_most"])
    return f"\n{sign} {FORMATS[target['figure']][1](bound)} {'met' if target['met'] else 'missed'}"


def plot(bench: PretrainingBench, path: Path) -> None:
    """Draw latency against N on logarithmic axes, in one panel for each phase and batch.

    The legends show the exponents.
    """
    look = styles(list(bench.implementations))
    shown = panels(bench) or [("forward", bench.options.batch_size)]
    figure = Figure(figsize=(5.0 * len(shown), 5.5), layout="constrained")
    figure.suptitle(f"{device_name(bench.clock.device)}: one layer, D {bench.options.widths[0]}")

    for axes, (phase, batch) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set(title=f"{phase}, batch {batch}")
        curves = (
            (implementation.label, look[name].color, points(bench, phase, batch, name))
            for name, implementation in bench.implementations.items()
        )
        draw_latencies(axes, curves)
        finish_axes(axes, sorted(bench.options.lengths))

    share_range(figure.axes)
    figure.axes[0].set_ylabel(LATENCY)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150))
