"""The command ``diagnostics``."""

from collections.abc import Sequence

from runners.bench.command import run_benchmark
from runners.bench.diagnostics.bench import DiagnosticsBench
from runners.bench.diagnostics.options import parse
from runners.bench.diagnostics.record import to_dict
from runners.bench.diagnostics.report import plot, print_tables


def diagnostics(arguments: Sequence[str]) -> None:
    """Check and time the implementations of the diagnostic layer; see ``run_benchmark``."""
    run_benchmark("diagnostics", arguments, parse, DiagnosticsBench, to_dict, plot, print_tables)
