"""The table of a study on the console."""

import math
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from runners.mad.results.choice import PAPER_LRS
from runners.mad.results.summary import METRICS, TEST_METRICS, Point, Summary, means_beyond_training
from runners.tables import fits

COLUMNS = (
    *zip(("val seq", "val token", "val loss"), METRICS[:3], strict=True),
    *zip(("test seq", "test token"), TEST_METRICS[:2], strict=True),
    ("steps/s", "steps_per_second"),
)
"""Headings of a study's table, and the figures below them."""
ABOVE = 4
"""Standard errors of the test split above which an accuracy is above the ceiling."""
MANY = 4
"""Number of grid points from which on the share of those near the best says something."""
PROTOCOLS = {"quick": "quick: small settings, not the published protocol"}
"""Remarks of tables on presets whose figures could be mistaken for those of the published protocol."""


def print_summary(summary: Summary, console: Console) -> None:
    """Print one row per grid point, test figures of the chosen point, ceiling and chance.

    On a narrow console, test figures and speed are in a second table.
    """
    name, finite = summary.heading, [point for point in summary.points if point.estimates is not None]
    console.print(name, style="table.title", soft_wrap=True)  # a table would break it at its own width
    if fits(_points(summary, finite, COLUMNS), console):
        console.print(_points(summary, summary.points, COLUMNS))
    else:
        console.print(_points(summary, summary.points, COLUMNS[:3]))
        if finite:
            console.print("test of the chosen point, and speed", style="table.title")
            console.print(_points(summary, finite, COLUMNS[3:]))
    print_intervals([summary.seeds], console)
    print_protocols([summary.config.preset], console)

    print_choice(summary, console)
    if summary.remark:
        console.print(f"{summary.config.mixer}: {summary.remark}")
    ceiling, chance = summary.ceiling, summary.chance
    console.print(
        f"sequence / token accuracy: ceiling {ceiling.sequence:.4f} / {ceiling.token:.4f}, "
        f"chance {chance.sequence:.2g} / {chance.token:.4f}"
    )
    if is_above_ceiling(summary):
        console.print(
            "the test accuracy is above the ceiling: the task states it too low, or the layer sees the answers",
            soft_wrap=True,
        )


def is_above_ceiling(summary: Summary) -> bool:
    """Return whether a mean test accuracy is above the task's ceiling by more than the sampling of the test split."""
    estimates = (summary.chosen_point and summary.chosen_point.estimates) or {}
    examples = summary.config.task_config["eval_examples"]
    for metric in ("sequence", "token"):
        ceiling, found = getattr(summary.ceiling, metric), estimates.get(f"test_{metric}_accuracy")
        error = math.sqrt(ceiling * (1 - ceiling) / examples)
        if found is not None and found.mean > ceiling + ABOVE * error + 1e-9:
            return True
    return False


def print_choice(summary: Summary, console: Console) -> None:
    """Print which point was chosen, whether it is at the edge of the grid, and what other grids would choose."""
    if (chosen := summary.chosen_point) is None:
        console.print("chosen: none, every point diverged")
        return
    console.print(f"chosen on validation: lr {chosen.lr:g}, weight decay {chosen.weight_decay:g}")
    if summary.edge is not None:
        console.print(edge_advice(summary), soft_wrap=True)
    if summary.near_best is not None and len(summary.points) >= MANY:
        console.print(f"{summary.near_best:.0%} of the grid points reach 0.9 of the best validation token accuracy")

    for grid, index in summary.other_choices.items():
        point = summary.points[index]
        found = [(point.estimates or {}).get(name) for name in TEST_METRICS[:2]]
        test = " / ".join(estimate.text() for estimate in found if estimate is not None)
        console.print(f"grid {grid!r} would choose lr {point.lr:g}, weight decay {point.weight_decay:g}: test {test}")
    for name, means in means_beyond_training(chosen.extrapolation).items():
        console.print(f"sequence / token accuracy on {name!r}: {' / '.join(y.text() for y in means.values())}")


def explain_divergence(summary: Summary) -> str:
    """Return when the first run of a study without a result diverged, and what to do."""
    first = min(step for point in summary.points for step in point.diverged.values())
    if all(step == 1 for point in summary.points for step in point.diverged.values()):
        cause = "its loss or gradient is not finite before any training: correct the layer"
    else:
        lrs = sorted({point.lr for point in summary.points})
        lower = f"--lr {' '.join(f'{lr / 10:g}' for lr in lrs)}"
        cause = f"the first after {first} steps: try learning rates 10 times smaller ({lower}), or correct the layer"
    return f"{summary.heading}: every run diverged, {cause}"


def edge_advice(summary: Summary) -> str:
    """Return advice for a chosen learning rate that is the smallest or largest of the grid.

    A command takes ``--grid wide`` only without learning rates of its own, or of its preset.
    """
    assert summary.chosen_point is not None
    chosen, lrs = summary.chosen_point.lr, sorted({point.lr for point in summary.points})
    wider = summary.edge == "largest" and tuple(lrs) == PAPER_LRS
    beyond = [factor * chosen for factor in ((0.2, 0.5) if summary.edge == "smallest" else (2, 5))]
    more = " ".join(f"{lr:g}" for lr in sorted([*lrs, *beyond]))
    return (
        f"lr {chosen:g} is the {summary.edge} of the grid, so a better one may lie beyond it: "
        f"try {'--grid wide, or ' * wider}--lr {more}, which trains the new ones alone"
    )


def print_intervals(seeds: Collection[int], console: Console) -> None:
    """Print what ± means, if there are means over several seeds."""
    if several := [count for count in seeds if count > 1]:
        console.print(f"±: half the 95% t-interval of the mean over {span(several)} seeds, not clipped to [0, 1]")


def print_protocols(presets: Collection[str | None], console: Console) -> None:
    """Print which presets are not the published protocol."""
    for preset in dict.fromkeys(presets):
        if preset in PROTOCOLS:
            console.print(PROTOCOLS[preset])


def span(counts: Collection[int]) -> str:
    """``3``, or ``2 to 3``."""
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _points(summary: Summary, points: Sequence[Point], columns: Sequence[tuple[str, str]]) -> Table:
    """Return a table with one row per point."""
    table = Table()
    for heading in ("", "lr", "wd", *(heading for heading, _ in columns)):
        table.add_column(heading, justify="right")

    for point in points:
        names = ("→" if point is summary.chosen_point else "", f"{point.lr:g}", f"{point.weight_decay:g}")
        if point.estimates is None:
            steps = ", ".join(f"seed {seed} at step {step}" for seed, step in point.diverged.items())
            table.add_row(*names, f"diverged: {steps}")
            continue

        found = [(name, point.estimates.get(name)) for _, name in columns]
        cells = [
            "" if estimate is None else f"{estimate.mean:.1f}" if name == "steps_per_second" else estimate.text()
            for name, estimate in found
        ]
        table.add_row(*names, *cells)
    return table
