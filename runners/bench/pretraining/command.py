"""The command ``pretraining``."""

from collections.abc import Sequence

from runners.bench.command import run_benchmark
from runners.bench.pretraining.bench import PretrainingBench
from runners.bench.pretraining.options import parse
from runners.bench.pretraining.record import to_dict
from runners.bench.pretraining.report import plot, print_tables


def pretraining(arguments: Sequence[str]) -> None:
    """Check and time layers, training steps and decoding; see ``run_benchmark``."""
    run_benchmark("pretraining", arguments, parse, PretrainingBench, to_dict, plot, print_tables)
