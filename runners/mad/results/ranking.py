"""The ranking of layers on a task: ranks, a table and one sentence.

Layers are ranked by mean test accuracy over tokens. Two layers differ if their 95% intervals are disjoint. A layer
whose grid points all diverged is last.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from runners.cost_cells import FOOTNOTE, HEADINGS, cells_of
from runners.mad.results.standings import Standing, by_layer
from runners.mad.results.tables import print_intervals, print_protocols
from runners.tables import Name, abbreviated, fits

LISTED = 4
"""Largest number of layers that a sentence names one by one."""
NEAREST = 3
"""Number of layers that it names of more."""
SEVERAL = 3
"""Number of tasks from which on layers have a mean rank."""
DIGITS = 12
"""Decimal digits of a mean that count. A sum of floats depends on its order, which would rank equal means apart."""
MARK = " (stale)"
"""End of the label of a stale reference row."""

Interval = tuple[float, float]
Key = TypeVar("Key")


def ranked(standings: Sequence[Standing]) -> list[tuple[int, Standing]]:
    """Sort standings from the best to the worst, each with its rank; equal means share the smaller rank."""
    ranks = places({number: -_mean(s) for number, s in enumerate(standings)}).values()
    return sorted(zip(ranks, standings, strict=True), key=lambda pair: pair[0])


def places(values: Mapping[Key, float]) -> dict[Key, int]:
    """Return the place of each value: the least is first, and equal values share the smaller place."""
    rounded = {key: round(value, DIGITS) for key, value in values.items()}
    return {key: 1 + sum(other < value for other in rounded.values()) for key, value in rounded.items()}


def interval(standing: Standing) -> Interval:
    """Return the 95% interval of the token accuracy: a point for a single seed, minus infinity for divergence."""
    estimate = standing.accuracy("token")
    if estimate is None:
        return -math.inf, -math.inf
    half_width = estimate.half_width or 0.0
    return estimate.mean - half_width, estimate.mean + half_width


def sentence(own: Standing, standings: Sequence[Standing]) -> str:
    """Return a sentence with the rank of a layer, and the layers from which it differs.

    Of more than ``LISTED`` layers it gives the number, and the names of the ``NEAREST`` in rank.

    Args:
        own: the layer, one of ``standings``.
        standings: all layers of the ranking.
    """
    order = ranked(standings)
    ((at, rank),) = ((place, rank) for place, (rank, s) in enumerate(order) if s is own)
    others = {place - at: s for place, (_, s) in enumerate(order) if s is not own}
    low, high = interval(own)

    # Layers that are worse, not different, and better, by their distance in rank.
    behind = {d: s.mixer for d, s in others.items() if interval(s)[1] < low}
    beside = {d: s.mixer for d, s in others.items() if interval(s)[1] >= low and interval(s)[0] <= high}
    before = {d: s.mixer for d, s in others.items() if interval(s)[0] > high}

    parts = [
        f"ahead of {_names(behind)} outside the intervals" if behind else "",
        f"within the intervals of {_names(beside)}" if beside else "",
        f"behind {_names(before)} outside the intervals" if before else "",
    ]
    level = sum(other == rank for other, _ in order) - 1
    others_level = f", level with {level} other{'s' * (level > 1)}," if level else ""
    place = f"{own.mixer} is {ordinal(rank)} of {len(standings)}{others_level} on {own.setting}"
    return f"{place}: {'; '.join(filter(None, parts))}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, …, ``11th``, …, ``21st``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 11 <= number % 100 <= 13 else ending}"


def print_ranks(found: Sequence[tuple[Sequence[Standing], Collection[Standing]]], console: Console) -> None:
    """Print the layers of each setting by rank, with accuracies and costs, then a sentence about each own layer.

    On a narrow console, the costs are in a separate table, once for all settings of a preset.

    Args:
        found: for each setting, all of its layers, and the user's own layers among them.
        console: where to print.
    """
    mine = [s for _, own in found for s in own]
    headings = ("", "sequence", "token")
    tables = []
    for standings, _ in found:
        rows = [(_label(s, mine), str(rank), *s.accuracies()) for rank, s in ranked(standings)]
        costs = [tuple(cells_of(s.costs, abbreviated)) for _, s in ranked(standings)]
        whole = [row + cells for row, cells in zip(rows, costs, strict=True)]
        tables.append((standings[0].setting, _table(headings, rows), _table((*headings, *HEADINGS), whole)))

    # With the costs, if every table has room for them.
    is_wide = all(fits(wide, console) for *_, wide in tables)
    for setting, narrow, wide in tables:
        title = f"{setting}: yours (→) among the reference rows, by token accuracy"
        console.print(title, style="table.title", soft_wrap=True)
        console.print(wide if is_wide else narrow)

    everything = [s for standings, _ in found for s in standings]
    for preset in () if is_wide else dict.fromkeys(s.preset for s in everything):
        own_first = sorted(by_layer(everything), key=lambda s: s not in mine)
        layers = {_label(s, mine): cells_of(s.costs, abbreviated) for s in own_first if s.preset == preset}
        console.print(f"costs ({preset})" if preset else "costs", style="table.title")
        console.print(_table(HEADINGS, [(label, *cells) for label, cells in layers.items()]))

    # Legend, then the sentences.
    print_intervals([s.seeds for s in everything], console)
    print_protocols([s.preset for s in everything], console)
    console.print(f"costs: {FOOTNOTE}")
    for standings, own in found:
        for s in own:
            console.print(sentence(s, standings), soft_wrap=True)
    _print_overall(found, console)


def _print_overall(found: Sequence[tuple[Sequence[Standing], Collection[Standing]]], console: Console) -> None:
    """Print the mean ranks of the layers that have all of several settings, if one of them is the user's own.

    They are ranked among themselves; arguments as for ``print_ranks``.
    """
    settings = [{s.mixer: s for s in map(_unmarked, standings)} for standings, _ in found]
    complete = [label for label in settings[0] if all(label in of_setting for of_setting in settings)]
    mine = [label for label in complete if any(s.mixer == label for _, own in found for s in own)]
    tasks = {s.task for of_setting in settings for s in of_setting.values()}
    if len(tasks) < SEVERAL or not mine or len(mine) == len(complete):
        return

    # Ranks in each setting, then places by their sums.
    orders = [ranked([of_setting[label] for label in complete]) for of_setting in settings]
    ranks = {label: [rank for order in orders for rank, s in order if s.mixer == label] for label in complete}
    place_of = places({label: sum(ranks[label]) for label in complete})
    means = {label: f"{fmean(ranks[label]):.1f}" for label in complete}

    order = sorted(complete, key=place_of.__getitem__)
    rows = [(f"{'→' if label in mine else ' '} {label}", str(place_of[label]), means[label]) for label in order]
    console.print(f"all {len(settings)} settings together, by mean rank", style="table.title", soft_wrap=True)
    console.print(_table(("", "mean rank"), rows))
    for label in mine:
        each = ", ".join(f"{order[0][1].setting} {rank}" for order, rank in zip(orders, ranks[label], strict=True))
        place = f"{ordinal(place_of[label])} of {len(complete)}, with a mean rank of {means[label]}"
        console.print(f"{label} is {place} over {len(settings)} settings: {each}", soft_wrap=True)


def _unmarked(standing: Standing) -> Standing:
    """Return a standing whose label does not say that it is stale."""
    return replace(standing, mixer=standing.mixer.removesuffix(MARK))


def _label(standing: Standing, own: Collection[Standing]) -> str:
    return ("→ " if standing in own else "  ") + standing.mixer


def _names(mixers: Mapping[int, str]) -> str:
    """Return the names of layers, or the number of many and the nearest; keys are distances in rank, ascending."""
    if len(mixers) <= LISTED:
        return ", ".join(mixers.values())
    nearest = sorted(sorted(mixers, key=abs)[:NEAREST])
    return f"{len(mixers)} layers (nearest: {', '.join(mixers[d] for d in nearest)})"


def _mean(standing: Standing) -> float:
    estimate = standing.accuracy("token")
    return -math.inf if estimate is None else estimate.mean


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table of layers' names and their cells; a title would be broken at the table's width."""
    table = Table()
    table.add_column("mixer", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Name(row[0]), *row[1:])
    return table
