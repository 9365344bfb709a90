"""Progress bars that both training programs show."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

SECONDS_OF_SPEED = 300.0
"""Speed is a mean over this time, because a step or an evaluation on a CPU may take many seconds."""
WIDTH_OF_TEXT = 88
"""Characters that stand beside a bar."""


def progress_bars(console: Console) -> Progress:
    """Bars with a description, a field ``figures`` below it, steps done, and time left."""
    return Progress(
        TextColumn("{task.description}\n{task.fields[figures]}", table_column=Column()),  # a column that may wrap
        BarColumn(bar_width=max(8, min(40, console.width - WIDTH_OF_TEXT))),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SECONDS_OF_SPEED,
        auto_refresh=not console.is_jupyter,  # a notebook's output must not be written from another thread
    )
