"""Compare finished studies in a table and a chart: several layers, or one layer with several settings.

    python -m runners.compare
    python -m runners.compare results/studies/rt-parity-* results/studies/transformer-parity-*

Reference results of the same task and settings are shown beside the studies; ``--reference none`` leaves them out.
Nothing is trained: all figures are read from the ``summary.json`` that ``runners.mad`` writes for each study.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from runners.cli import check_out, cli, shown_as
from runners.ending import user_errors
from runners.files import write_table
from runners.mad.reference.rows import print_rankings, rankings, reference_folder, shown_together, terms_of
from runners.mad.results.charts import plot_comparison
from runners.mad.results.standings import in_order, print_comparison, told_apart
from runners.mad.results.summary import IncomparableError, Summary, incomparable, read_summary


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tabulate and draw finished studies.

    Attributes:
        studies: folders of studies, or their summary.json; all in the results folder unless given.
        out: folder of results.
        reference: reference rows beside yours: shipped, none, or a folder written by runners.mad.reference.
    """

    studies: Annotated[tyro.conf.Positional[tuple[Path, ...]], shown_as("[STUDY ...]")] = ()
    out: Path = Path("results")
    reference: str = "shipped"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors are one line and exit status 2."""
    console = Console(markup=False)
    say = partial(console.print, soft_wrap=True)

    with user_errors(ValueError, OSError):
        options = cli(Options, Options(), sys.argv[1:] if arguments is None else arguments)
        check_out(options.out)
        folder = reference_folder(options.reference)

        summaries = read_summaries(options.studies or comparable_studies(options.out / "studies", say))
        if not summaries:
            raise ValueError(
                f"{options.out / 'studies'} has no finished study: train with runners.mad, or name folders"
            )

        standings = told_apart(summaries)
        print_comparison(standings, console)
        found = [] if folder is None else rankings(summaries, standings, folder)
        print_rankings(found, console)

        # The chart's name is a hash of the studies, and of the rows beside them.
        named = [*(summary.study for summary in summaries), options.reference]
        digest = hashlib.sha256("".join(named).encode()).hexdigest()
        figure = options.out / "figures" / f"comparison-{digest[:8]}.png"
        own, rows = shown_together(standings, found)
        plot_comparison(own, rows, figure)
        table = write_table(figure.with_suffix(".csv"), [row for s in (*own, *rows) for row in s.rows()])

    say(f"chart: {figure}\ntable: {table}")


def comparable_studies(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the finished studies of a results folder; leave out incomparable ones, and print a line that names them.

    Raises:
        DamagedFileError: a summary is not JSON.
    """
    studies, left_out = [], []
    for file in sorted(folder.glob("*/summary.json")):
        try:
            _comparable(file)
            studies.append(file.parent)
        except IncomparableError:
            left_out.append(file.parent.name)

    if left_out:
        say(
            f"left out {len(left_out)} of {len(studies) + len(left_out)} studies, whose summaries are of an earlier "
            f"version or damaged: run their commands again, or delete the folders: {', '.join(left_out)}"
        )
    return studies


def read_summaries(paths: Sequence[Path]) -> list[Summary]:
    """Read the summaries of studies, each once, in order of tasks, layers and settings.

    Args:
        paths: folders of studies, or their files.

    Raises:
        ValueError: as ``read_summary``, or two different summaries of one study are given.
    """
    found: dict[str, Summary] = {}
    for path in paths:
        summary = _comparable(path)
        if found.setdefault(summary.study, summary) != summary:
            raise ValueError(f"{path} and another summary of {summary.study} differ: name one of them")
    return in_order(found.values())


def _comparable(path: Path) -> Summary:
    """Read a summary, and check the values that only a comparison reads: the task's settings, and the choice.

    Raises:
        IncomparableError: values that a comparison needs are missing or wrong.
        ValueError: there is no summary, or it is damaged.
    """
    summary = read_summary(path)
    try:
        told_apart(in_order([summary]))
        terms_of(summary)
    except (IndexError, KeyError, TypeError) as error:
        raise incomparable(path, "settings or figures are missing or wrong") from error
    return summary
