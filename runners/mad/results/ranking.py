"""The ranking of layers on a task: ranks, a table and one sentence.

Layers are ranked by mean test accuracy over tokens. Two layers differ if their 95% intervals are disjoint. A layer
whose grid points all diverged is last.
"""

import math
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from mixers.costs import FOOTNOTE, HEADINGS, short
from runners.mad.results.standings import Standing
from runners.mad.results.tables import fits, print_intervals, print_protocols

Interval = tuple[float, float]


def ranked(standings: Sequence[Standing]) -> list[tuple[int, Standing]]:
    """Sort standings from the best to the worst, each with its rank; equal means share the smaller rank."""
    means = [_mean(s) for s in standings]
    ranks = [1 + sum(other > mean for other in means) for mean in means]
    return sorted(zip(ranks, standings, strict=True), key=lambda pair: pair[0])


def interval(standing: Standing) -> Interval:
    """Return the 95% interval of the token accuracy: a point for a single seed, minus infinity for divergence."""
    estimate = standing.accuracy("token")
    if estimate is None:
        return -math.inf, -math.inf
    half_width = estimate.half_width or 0.0
    return estimate.mean - half_width, estimate.mean + half_width


def sentence(own: Standing, standings: Sequence[Standing]) -> str:
    """Return a sentence with the rank of a layer, and the layers from which it differs.

    Args:
        own: the layer, one of ``standings``.
        standings: all layers of the ranking.
    """
    order = ranked(standings)
    (rank,) = (rank for rank, s in order if s is own)
    others = [s for _, s in order if s is not own]
    low, high = interval(own)

    # Layers that are worse, not different, and better.
    behind = [s.mixer for s in others if interval(s)[1] < low]
    beside = [s.mixer for s in others if interval(s)[1] >= low and interval(s)[0] <= high]
    before = [s.mixer for s in others if interval(s)[0] > high]

    parts = [
        f"ahead of {', '.join(behind)} outside the intervals" if behind else "",
        f"within the intervals of {', '.join(beside)}" if beside else "",
        f"behind {', '.join(before)} outside the intervals" if before else "",
    ]
    place = f"{own.mixer} is {ordinal(rank)} of {len(standings)} on {own.setting}"
    return f"{place}: {'; '.join(filter(None, parts))}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, …, ``11th``, …, ``21st``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 11 <= number % 100 <= 13 else ending}"


def print_ranking(standings: Sequence[Standing], own: Collection[Standing], console: Console) -> None:
    """Print the layers of one setting by rank, with accuracies and costs, then a sentence about each own layer.

    On a narrow console, the costs are in a separate table.
    """
    setting = standings[0].setting
    rows = [(("→ " if s in own else "  ") + s.mixer, rank, s) for rank, s in ranked(standings)]
    accuracies = [(label, str(rank), *s.accuracies()) for label, rank, s in rows]
    costs = [tuple(s.costs.cells(short)) for _, _, s in rows]

    title, headings = f"{setting}: yours (→) among the reference rows, by token accuracy", ("", "sequence", "token")
    table = _table(title, (*headings, *HEADINGS), [a + c for a, c in zip(accuracies, costs, strict=True)])
    if fits(table, console):
        console.print(table)
    else:
        console.print(
            _table(title, headings, accuracies),
            _table("costs", HEADINGS, [(a[0], *c) for a, c in zip(accuracies, costs, strict=True)]),
        )

    print_intervals([s.seeds for s in standings], console)
    print_protocols([s.preset for s in standings], console)
    console.print(f"costs: {FOOTNOTE}")
    for s in standings:
        if s in own:
            console.print(sentence(s, standings), soft_wrap=True)


def _mean(standing: Standing) -> float:
    estimate = standing.accuracy("token")
    return -math.inf if estimate is None else estimate.mean


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table of layers' names and their cells."""
    table = Table(title=title, title_justify="left")
    table.add_column("mixer", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
