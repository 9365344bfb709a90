"""Progress bars, and times in words."""

from collections.abc import Container, Iterable
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

from runners.guidance import in_python

Item = TypeVar("Item")

SECONDS_OF_SPEED = 300.0
"""Speed is a mean over this time, because a step or an evaluation on a CPU may take many seconds."""
SECONDS_TO_FIRST_LINE = 10.0
SECONDS_BETWEEN_LINES = 60.0
"""Times between lines of output where there is no terminal."""
WIDTH_OF_TEXT = 88
"""Characters that stand beside a bar."""


class CallConsole(Console):
    """The console of a Python function: lines that name options of the command name the function's arguments."""

    def __init__(self, arguments: Container[str], **options: Any) -> None:
        super().__init__(markup=False, **options)
        self._arguments = arguments

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as ``Console.print``, with the options in texts as arguments."""
        super().print(*(in_python(part, self._arguments) for part in objects), **options)


def console_of_call(arguments: Container[str], quiet: bool) -> Console:
    """Return the console of a function with these arguments; without ipywidgets, a notebook shows plain lines."""
    console = CallConsole(arguments, quiet=quiet)
    if console.is_jupyter and not find_spec("ipywidgets"):
        return CallConsole(arguments, quiet=quiet, force_jupyter=False, force_terminal=False)
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
    if not shows_bars():
        return items
    return track(items, what, total, console=Console(stderr=True), transient=True)


def shows_bars() -> bool:
    """Return whether ``bar`` shows something: the standard error is a terminal, or FORCE_COLOR says so."""
    return Console(stderr=True).is_terminal


def spell(seconds: float) -> str:
    """Return a time in the unit that suits it: 40 s, 4 min, 9.2 h, 12 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
