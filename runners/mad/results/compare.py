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
from typing import Any

import tyro
from rich.console import Console

from runners.cli import check_out, cli, not_understood, run_command, user_errors
from runners.files import read_json
from runners.mad.results.charts import plot_comparison
from runners.mad.results.standings import in_order, print_comparison, told_apart


class IncomparableError(ValueError):
    """A file is no summary of a study, or one of an earlier version."""


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
        digest = hashlib.sha256("".join(summary["study"] for summary in summaries).encode()).hexdigest()
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
            read_summary(file)
            studies.append(file.parent)
        except IncomparableError:
            left_out.append(file.parent.name)
    if left_out:
        say(
            f"left out {len(left_out)} of {len(studies) + len(left_out)} studies, whose summaries are of an earlier "
            f"version or damaged: run their commands again, or delete the folders: {', '.join(left_out)}"
        )
    return studies


def read_summaries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Summaries of studies, from their folders or files, each once, in order of tasks, layers and settings.

    Raises:
        ValueError: as ``read_summary``, or there are two of one study that are not the same.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        summary = read_summary(path)
        if found.setdefault(summary["study"], summary) != summary:
            raise ValueError(f"{path} and another summary of {summary['study']} differ: name one of them")
    return in_order(found.values())


def read_summary(path: Path) -> dict[str, Any]:
    """Summary of a study, from its folder or file.

    Raises:
        IncomparableError: no table can be made of it.
        ValueError: there is none, or it is damaged.
    """
    file = path / "summary.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is not there: name folders of studies that are finished")
    if file.name != "summary.json":
        raise ValueError(f"{file} is no summary.json: name folders of studies that are finished")
    summary: dict[str, Any] = read_json(file)
    try:
        print_comparison(told_apart(in_order([summary])), Console(quiet=True))  # reads all that a comparison needs
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise IncomparableError(
            f"{file} is none of a study, or of an earlier version: run its command again, or name the others"
        ) from error
    return summary


if __name__ == "__main__":
    run_command(main, "interrupted")
