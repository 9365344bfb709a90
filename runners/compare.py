"""Compare finished studies in a table and a chart: several layers, or one layer with several settings.

    python -m runners.compare
    python -m runners.compare results/studies/rt-parity-* results/studies/transformer-parity-*

Reference results of the same task and settings are shown beside the studies; ``--reference none`` leaves them out.
Nothing is trained: all figures are read from the records that ``runners.mad`` writes.
"""

from runners.interrupt import end_at_once

if __name__ == "__main__":
    end_at_once()  # the imports below take seconds

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from runners import options, records
from runners.ending import run_command, user_errors
from runners.mad.charts import plot_comparison
from runners.mad.ranking import beside, print_results
from runners.mad.rows import load
from runners.progress import open_console
from runners.style import chart_file


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Tabulate and draw finished studies.

    Attributes:
        studies: folders of studies; all in the results folder unless given.
        out: folder of results.
        reference: reference rows beside yours: shipped, none, or a folder written by runners.mad.reference.
        verbose: print all rows with their costs.
    """

    studies: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Path = Path("results")
    reference: str = "shipped"
    verbose: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors are one line and exit status 2."""
    console = open_console()
    with user_errors(ValueError, OSError):
        given = options.parse(CompareOptions, sys.argv[1:] if arguments is None else arguments)
        own = records.load(*(given.studies or [given.out / "studies"]))
        own = own[own["task"] != records.LANGUAGE_MODEL]
        if own.empty:
            raise ValueError("no finished run is there: train with runners.mad, whose older versions wrote other files")
        reference = load(given.reference, own["task"].unique())

        found, reasons = beside(own, reference)
        print_results(found, reasons, console, given.verbose)

        figure = chart_file(given.out, "comparison", [*sorted(own["study"].unique()), given.reference])
        plot_comparison(found, own, figure)
    console.print(f"chart: {figure}; rows with costs: the .csv beside it, or --verbose", soft_wrap=True)


if __name__ == "__main__":
    run_command(main, "interrupted")
