"""Finished studies beside one another, as a table and a chart: other layers, or one layer with other settings.

    python -m runners.compare
    python -m runners.compare results/studies/rt-parity-* results/studies/transformer-parity-*

Nothing is trained: all of it stands in the ``summary.json`` of each study, which ``runners.mad`` writes.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from runners.cli import check_out, cli, not_understood, user_errors
from runners.mad.results.charts import plot_comparison
from runners.mad.results.standings import in_order, print_comparison, told_apart
from runners.mad.results.summary import IncomparableError, Summary, read_summary, refusal


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tabulate and draw finished studies beside one another.

    Attributes:
        studies: folders of studies, or their summary.json; all in the results folder unless given.
        out: folder of results.
    """

    studies: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Path = Path("results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; what goes wrong is one line and exit status 2."""
    console = Console(markup=False)
    with user_errors(ValueError, OSError):
        options, unknown = cli(Options, Options(), sys.argv[1:] if arguments is None else arguments)
        if unknown:
            raise ValueError(not_understood(unknown[0]))
        check_out(options.out)
        say = partial(console.print, soft_wrap=True)
        summaries = read_summaries(options.studies or comparable_studies(options.out / "studies", say))
        if not summaries:
            raise ValueError(
                f"{options.out / 'studies'} has no finished study: train with runners.mad, or name folders"
            )
        standings = told_apart(summaries)
        print_comparison(standings, console)
        digest = hashlib.sha256("".join(summary.study for summary in summaries).encode()).hexdigest()
        figure = options.out / "figures" / f"comparison-{digest[:8]}.png"
        plot_comparison(standings, figure)
    say(f"chart: {figure}")


def comparable_studies(folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Finished studies of a results folder; those whose summaries cannot be compared are left out, and that is said.

    Raises:
        DamagedFileError: a summary is no JSON.
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
    """Summaries of studies, from their folders or files, each once, in order of tasks, layers and settings.

    Raises:
        ValueError: as ``read_summary``, or there are two of one study that are not the same.
    """
    found: dict[str, Summary] = {}
    for path in paths:
        summary = _comparable(path)
        if found.setdefault(summary.study, summary) != summary:
            raise ValueError(f"{path} and another summary of {summary.study} differ: name one of them")
    return in_order(found.values())


def _comparable(path: Path) -> Summary:
    """A summary with all settings that a comparison reads.

    Raises:
        IncomparableError: some are missing or not what they should be.
        ValueError: there is no summary, or it is damaged.
    """
    summary = read_summary(path)
    try:
        print_comparison(told_apart(in_order([summary])), Console(quiet=True))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise IncomparableError(refusal(path)) from error
    return summary
