"""Tables that both benchmarks print."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table

SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd"}
"""Short names of phases."""
WORDS = ("phase", "what", "implementation", "layer", "min – max", "targets", "ran", "")
"""Headings of left-aligned columns. The other columns hold numbers and are right-aligned."""


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console, title: str | None = None
) -> None:
    """Print a table without its empty columns.

    Only cells of the last column may be wrapped. If the console is too narrow for the others, the table is printed in
    its full width.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]

    # Columns. The width of all but the last is that of their widest line.
    for i in kept:
        side: JustifyMethod = "left" if headings[i] in WORDS else "right"
        lines = "\n".join([headings[i], *(row[i] for row in rows)]).splitlines()
        widest = max(map(len, lines)) if i < len(headings) - 1 else None
        table.add_column(headings[i], justify=side, no_wrap=widest is not None, min_width=widest)
    for row in rows:
        table.add_row(*(row[i] for i in kept))

    # Width.
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    if needed.minimum > console.width:
        table.width = needed.maximum
    console.print(table, crop=False)
