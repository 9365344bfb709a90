"""What is shown of a training: bars, lines in a log, and runs of Weights & Biases; and times in words."""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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

from runners.tracking import Tracking, filled

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


class TrainingDisplay:
    """A bar on a terminal, lines in a log, and runs of Weights & Biases; a program adds its figures.

    ``contextlib.closing`` releases the terminal and closes what is open, also after an error.

    Args:
        console: where to print.
        tracking: options of Weights & Biases.
    """

    def __init__(self, console: Console, tracking: Tracking) -> None:
        self.console, self.tracking = console, tracking
        self.say = partial(console.print, soft_wrap=True)
        self._bars = Bars(
            TextColumn("{task.description}\n{task.fields[figures]}", table_column=Column()),  # a column that may wrap
            BarColumn(bar_width=max(8, min(40, console.width - WIDTH_OF_TEXT))),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=SECONDS_OF_SPEED,
            auto_refresh=not console.is_jupyter,  # a notebook's output must not be written from another thread
        )
        self._line_due = time.monotonic() + SECONDS_TO_FIRST_LINE
        self._logs: list[Any] = []

    def open_bar(self, description: str, total: int | None, done: int = 0) -> None:
        """Open a bar in place of the last one."""
        self.remove_bar()
        self._bars.start()
        self._bars.add_task(description, total=total, completed=done, figures="")

    def move_bar(self, step: int, figures: str, line: str, stays: bool = False) -> None:
        """Move the bar to a step, and show figures below it.

        Args:
            step: steps done.
            figures: what is shown below the bar.
            line: what is printed without a terminal, if a line is due.
            stays: whether the line is printed in any case.
        """
        self._bars.update(self._bars.tasks[-1].id, completed=step, figures=figures)
        if stays or (not self.console.is_terminal and time.monotonic() >= self._line_due):
            self.say(line)
            self._line_due = time.monotonic() + SECONDS_BETWEEN_LINES

    def remove_bar(self) -> None:
        """Remove the bar."""
        for task in self._bars.tasks:
            self._bars.remove_task(task.id)

    def open_log(self, **settings: Any) -> None:
        """Open a W&B run with the arguments of ``Tracking.open_run``, unless the mode is ``disabled``."""
        if self.tracking.wandb != "disabled":
            self._logs.append(self.tracking.open_run(**settings))

    def log(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log the figures of each open W&B run at a step."""
        for log, row in zip(self._logs, rows, strict=False):
            log.log(filled(row), step=step)

    def close_logs(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Close the open W&B runs with their summaries; one with a ``diverged_step`` is shown as failed."""
        for log, summary in zip(self._logs, map(filled, summaries), strict=False):
            log.summary.update(summary)
            log.finish(exit_code=int("diverged_step" in summary))
        self._logs = []

    def close(self) -> None:
        """Release the terminal, on which the bar stays, and close W&B runs that are still open."""
        self._bars.stop()
        self.remove_bar()
        for log in self._logs:
            log.finish()
        self._logs = []


def bar(items: Iterable[Item], what: str) -> Iterable[Item]:
    """Return the items, for which a bar on the standard error counts where that is a terminal; at its end it is erased.

    Args:
        items: what is worked on, one after another.
        what: what is done with them.
    """
    console = open_console(stderr=True)
    return track(items, what, console=console, transient=True) if console.is_terminal else items


def spell(seconds: float) -> str:
    """Return a time in the unit that suits it: 40 s, 4 min, 9.2 h, 12 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"
