"""The command ``diagnostics``, which has options of its own with ``--layers``."""

from collections.abc import Sequence

from runners.bench.command import run_benchmark
from runners.bench.diagnostics.bench import DiagnosticsBench
from runners.bench.diagnostics.layers import options as of_layers
from runners.bench.diagnostics.layers import record as record_of_layers
from runners.bench.diagnostics.layers import report as report_of_layers
from runners.bench.diagnostics.layers.bench import LayersBench
from runners.bench.diagnostics.options import parse
from runners.bench.diagnostics.record import to_dict
from runners.bench.diagnostics.report import plot, print_tables


def diagnostics(arguments: Sequence[str]) -> None:
    """Check and time the implementations of the diagnostic layer, or layers given by name; see ``run_benchmark``."""
    name = "diagnostics"
    if any(word.partition("=")[0] == "--layers" for word in arguments):
        parts = record_of_layers.to_dict, report_of_layers.plot, report_of_layers.print_tables
        run_benchmark(name, arguments, of_layers.parse, LayersBench, *parts)
    else:
        run_benchmark(name, arguments, parse, DiagnosticsBench, to_dict, plot, print_tables)
