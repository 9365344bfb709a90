"""Progress bars, and times in words."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Column

Item = TypeVar("Item")

SECONDS_OF_SPEED = 300.0
"""Speed is a mean over this time, because a step or an evaluation on a CPU may take many seconds."""
SECONDS_TO_FIRST_LINE = 10.0
SECONDS_BETWEEN_LINES = 60.0
"""Times between lines of output where there is no terminal."""
NARROWEST = 60
"""Columns of the narrowest console, because tables of fewer lose their cells; some schedulers set ``COLUMNS`` to 0."""
WIDTH_OF_TEXT = 88
"""Characters that stand beside a bar."""


def open_console(**options: Any) -> Console:
    """Return a console, which is never narrower than ``NARROWEST``; options are those of ``rich.console.Console``.

    Without ipywidgets, a notebook shows plain lines.
    """
    console = Console(markup=False, **options)
    if console.is_jupyter and not find_spec("ipywidgets"):
        console = Console(markup=False, force_jupyter=False, force_terminal=False, **options)
    if console.width < NARROWEST:
        console.width = NARROWEST
    return console


class Bars(Progress):
    """Bars for a terminal or a notebook; a log shows none, nor the empty line with which ``Progress`` ends there."""

    def __init__(self, *columns: ProgressColumn, console: Console, **options: Any) -> None:
        super().__init__(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter), **options)

    def stop(self) -> None:
        """Stop showing the bars."""
        if not self.disable:
            super().stop()


def progress_bars(console: Console) -> Bars:
    """Bars with a description, a field ``figures`` below it, steps done, and time left."""
    return Bars(
        TextColumn("{task.description}\n{task.fields[figures]}", table_column=Column()),  # a column that may wrap
        BarColumn(bar_width=max(8, min(40, console.width - WIDTH_OF_TEXT))),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SECONDS_OF_SPEED,
        auto_refresh=not console.is_jupyter,  # a notebook's output must not be written from another thread
    )


def bar(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """Return the items, for which a bar on the standard error counts where that is a terminal; at its end it is erased.

    Args:
        items: what is worked on, one after another.
        what: what is done with them.
        total: number of items, if ``items`` has no length.
    """
    console = open_console(stderr=True)
    return track(items, what, total, console=console, transient=True) if console.is_terminal else items


def spell(seconds: float) -> str:
    """Return a time in the unit that suits it: 40 s, 4 min, 9.2 h, 12 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
